"""Which language %oom_explain speaks, and its sentences in it."""

from __future__ import annotations

import locale
import os
from collections.abc import Mapping
from typing import Literal

from oom_magic.errors import InvalidSettingError
from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.sentences.catalogue import CATALOGUE
from oom_magic.explain.sentences.evidence import EVIDENCE
from oom_magic.explain.sentences.pages import PAGE_CATALOGUE
from oom_magic.explain.sentences.reasons import REASONS
from oom_magic.explain.sentences.setups import SETUPS
from oom_magic.units import format_bytes

Language = Literal["en", "zh"]
ENVIRONMENT_VARIABLE = "OOM_MAGIC_LANG"
_kept: list[Language] = []  # at most one
SENTENCES = {**CATALOGUE, **EVIDENCE, **PAGE_CATALOGUE, **REASONS, **SETUPS}


def choose_language(lang: str | None = None) -> Language:
    """The language asked for: the argument, then what was kept, then ``OOM_MAGIC_LANG``, then the locale; else English.

    Raises ValueError for an argument that names neither English nor Chinese.
    """
    if lang is not None:
        known = _recognised(lang)
        if known is None:
            raise ValueError(f"{lang!r} is not a language of oom_magic; use 'en' or 'zh'.")
        return known
    if _kept:
        return _kept[-1]
    names = (os.environ.get(name) for name in (ENVIRONMENT_VARIABLE, "LC_ALL", "LC_MESSAGES", "LANG"))
    for name in (*names, locale.getlocale()[0]):
        if name and (known := _recognised(name)):
            return known
    return "en"


def keep_language(lang: str | None) -> None:
    """Speak this language from now on, where none is asked for; None: that of the environment again."""
    _kept[:] = [] if lang is None else [choose_language(lang)]


def _recognised(name: str) -> Language | None:
    """The language of a tag or locale name such as ``zh_CN.UTF-8`` or ``Chinese (Simplified)_China``."""
    lowered = name.strip().lower()
    if lowered.startswith(("zh", "chinese", "中文", "简体")):
        return "zh"
    return "en" if lowered.startswith("en") else None


def translate(key: str, lang: Language = "en", /, **values: object) -> str:
    """The catalogue's sentence for ``key``; values named ``*_bytes`` are written as sizes."""
    english, chinese = SENTENCES[key]
    return (chinese if lang == "zh" else english).format_map(_written(values))


def render_evidence(item: Evidence, lang: Language) -> str:
    """A piece of evidence as a sentence; a value named ``x_key`` is said in the language, as ``x``."""
    keys = {name.removesuffix("_key"): str(key) for name, key in item.values.items() if name.endswith("_key")}
    said = {name: translate(key, lang, **item.values) for name, key in keys.items()}
    return translate(item.key, lang, **{**item.values, **said})


def translate_error(error: ValueError, lang: Language) -> str:
    """What the error says, in the language; an error of a library says it in its own."""
    if not isinstance(error, InvalidSettingError):
        return str(error)
    sentence = translate(f"refusal_{error.key}", lang, **error.values)
    offer = translate("refusal_did_you_mean", lang, names=error.offer) if error.offer else ""
    return f"{sentence} {offer}".rstrip()


def _written(values: Mapping[str, object]) -> dict[str, object]:
    return {
        name: format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else value
        for name, value in values.items()
    }
