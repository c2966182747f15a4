"""What a text sets already: no line is proposed that stands in it with the same value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from oom_magic.explain.evidence.clues.author_words import TIP
from oom_magic.explain.remedies.remedy import Remedy

# A variable or an argument with a value of its own, and a switch.
_SETTING = re.compile(
    r"(?<![\w.-])(?P<name>\w{3,60})[\"']?\]? ?[=:] ?[\"']?"
    r"(?P<value>-?\d[\d.]*|true|false|none|\w+:\w+|q\d_\d)(?![\w.]*\w)"
    r"|(?<![\w-])--(?P<switch>[a-z][\w-]{2,60})(?![\w-]|[= ][\w./'\"])",
    re.I | re.A,
)
_COMMENT = re.compile(r"[ \t]#[^\n]*")
# What a message proposes, and what the author says has helped.
_PROPOSED = re.compile(rf"\b(?:Use|[Tt]ry setting|please set)\s+[A-Z_\d]{{6,60}}=\S+(?: {TIP})?")
_TO_FILL_IN = re.compile(r"\b(?:MORE|LESS|HALF|TWICE)\b")
_HELPED = re.compile(r"\b(?:fix|solv|help|work)\w*|解决|可以了", re.I)
_LONGEST_READ = 40_000


def not_standing(remedies: Iterable[Remedy], text: str) -> tuple[Remedy, ...]:
    """The remedies, without those whose lines only set what the text sets so already, in vain."""
    standing = frozenset(_settings(_PROPOSED.sub("", text[:_LONGEST_READ]), is_code=False))
    return tuple(one for one in remedies if not _stands(one, standing))


def _stands(remedy: Remedy, standing: frozenset[str]) -> bool:
    own = frozenset(_settings(remedy.code, is_code=True))
    return bool(own) and not _TO_FILL_IN.search(remedy.code) and own <= standing


def _settings(text: str, *, is_code: bool) -> Iterator[str]:
    """The settings in a text, spelled alike: ``name=value``, or a switch's name."""
    for line in (_COMMENT.sub("", text) if is_code else text).split("\n"):
        if not is_code and _HELPED.search(line):
            continue
        for match in _SETTING.finditer(line):
            name = (match["name"] or match["switch"]).replace("-", "_").lower()
            yield f"{name}={match['value'].lower()}" if match["name"] else name
