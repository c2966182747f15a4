"""The language of what users read (English or Chinese), and translation by gettext.

English sentences are in the code: as arguments of ``_`` and ``ngettext``, or in tables annotated ``Sentences``. Their
translations are in ``locale/<language>/LC_MESSAGES/oom_magic.po``, kept by ``python tests/project/translations.py``.
"""

from __future__ import annotations

import gettext
import json
import locale
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from oom_magic.units import format_bytes

Language = Literal["en", "zh"]
ENVIRONMENT_VARIABLE = "OOM_MAGIC_LANG"
CATALOGUES: Mapping[Language, Path] = {"zh": Path(__file__).parent / "locale/zh_CN/LC_MESSAGES/oom_magic.po"}
_chosen: list[Language] = []  # a stack: the last one is in effect


class Plural(NamedTuple):
    """A sentence for one and for several; ``number`` is the name of the value that decides."""

    one: str
    many: str
    number: str = "count"


Sentences = Mapping[str, str | Plural]  # the annotation by which tests/project/translations.py finds a table


def _(sentence: str, /, **values: object) -> str:
    """The sentence in the current language, its fields filled in; values named ``*_bytes`` are formatted as sizes."""
    return render(sentence, choose_language(), values)


def translated(sentence: str | Plural, /, **values: object) -> str:
    """A sentence of a ``Sentences`` table in the current language, its fields filled in."""
    return render(sentence, choose_language(), values)


def ngettext(one: str, many: str, count: int, /, **values: object) -> str:
    """The sentence for this ``count``, which is one of the fields."""
    return render(Plural(one, many), choose_language(), {**values, "count": count})


def render(sentence: str | Plural, lang: Language, values: Mapping[str, object]) -> str:
    """The sentence in a language, its fields filled in; English where there is no translation."""
    if isinstance(sentence, Plural):
        count: Any = values[sentence.number]
        text = _translations(lang).ngettext(sentence.one, sentence.many, count)
    else:
        text = _translations(lang).gettext(sentence)
    return text.format_map(_formatted(values))


def choose_language(lang: str | None = None) -> Language:
    """The argument, else what ``set_language`` set, else ``OOM_MAGIC_LANG``, else the locale, else English.

    Raises ValueError for an argument that names neither English nor Chinese.
    """
    if lang is not None:
        known = _recognised(lang)
        if known is None:
            raise ValueError(_("oom_magic does not speak {lang!r}; use 'en' or 'zh'.", lang=lang))
        return known
    if _chosen:
        return _chosen[-1]
    names = (os.environ.get(name) for name in (ENVIRONMENT_VARIABLE, "LC_ALL", "LC_MESSAGES", "LANG"))
    for name in (*names, locale.getlocale()[0]):
        if name and (known := _recognised(name)):
            return known
    return "en"


def load_language() -> None:
    """Read the translations now: files are not read later, within a dry run."""
    _translations(choose_language())


def set_language(lang: str | None) -> None:
    """Set the default language; None: that of the environment."""
    _chosen[:] = [] if lang is None else [choose_language(lang)]


@contextmanager
def using_language(lang: Language) -> Iterator[None]:
    """Use this language inside the block."""
    _chosen.append(lang)
    try:
        yield
    finally:
        _chosen.pop()


def _recognised(name: str) -> Language | None:
    """The language of a tag or locale name such as ``zh_CN.UTF-8`` or ``Chinese (Simplified)_China``."""
    lowered = name.strip().lower()
    if lowered.startswith(("zh", "chinese", "中文", "简体")):
        return "zh"
    return "en" if lowered.startswith("en") else None


def _formatted(values: Mapping[str, object]) -> dict[str, object]:
    return {
        name: format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else value
        for name, value in values.items()
    }


@cache
def _translations(lang: Language) -> gettext.NullTranslations:
    if lang not in CATALOGUES:
        return gettext.NullTranslations()
    with CATALOGUES[lang].open("rb") as file:
        return _PoTranslations(file)


_ENTRY = re.compile(r"^msgid .*?(?=^\s*$|\Z)", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(r'^(msgid|msgid_plural|msgstr(?:\[\d+\])?)((?:\s*"(?:[^"\\]|\\.)*"\s*?$)+)', re.MULTILINE)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


class _PoTranslations(gettext.NullTranslations):
    """A catalogue read as translators write it (``.po``), with nothing to compile or to be out of date.

    ``_parse`` is what gettext's manual names for other formats. A language with several plurals needs its header's
    rule here; Chinese has one.
    """

    def _parse(self, fp: Any) -> None:
        self._texts: dict[str, str] = {}
        for fields in _entries(fp.read().decode("utf-8")):
            text = fields.get("msgstr") or fields.get("msgstr[0]")
            if text and fields["msgid"]:
                self._texts[fields["msgid"]] = text

    def gettext(self, message: str) -> str:
        """The translation of a sentence; the sentence itself where there is none."""
        return self._texts.get(message, message)

    def ngettext(self, msgid1: str, msgid2: str, n: int) -> str:
        """The same, in the plural that ``n`` needs."""
        return self._texts.get(msgid1) or super().ngettext(msgid1, msgid2, n)


def _entries(text: str) -> Iterator[dict[str, str]]:
    """The fields of each entry of a ``.po`` file."""
    for entry in _ENTRY.finditer(text):
        yield {
            name: "".join(json.loads(piece) for piece in _QUOTED.findall(quoted))
            for name, quoted in _FIELD.findall(entry.group())
        }
