"""How far a run came before it failed, and what its author says about it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from oom_magic.explain.evidence.clues.author_words import FAILS, said_in
from oom_magic.explain.evidence.clues.tried import barred_in, standing_in, switches_in, tried_in

_BAR = re.compile(r"(\d{1,3})%\|[^|\n]{0,200}\|\s{0,3}(\d{1,9})/(\d{1,9})")
_DONE = re.compile(
    r"(?:after|at|until|till|gets to|got to|reache[sd]|every|经过|训练到|跑到|第)"
    r"\s?(?:about|around|approximately|executing|only)?\s?~?(?:\d{1,6}\s?[-~–]\s?)?(\d[\d,，]{0,8}\s?[kKwW万]?)\s?"
    r"(?:th |st |nd |rd )?(?:training |successful )?(?:steps?|iterations?|iters?|batches|步|次迭代|个?batch|iteration)"
    r"(?![ _-]?size)",
    re.I,
)
_EPOCHS = re.compile(
    r"(?:after|at|until|to|in|during)\s(?:the\s)?(?:end of\s)?(?:about\s|~)?"
    r"(?:epoch\s(\d{1,4})|(?:\d{1,4}\s?(?:[-~–]|or|to)\s?)?(\d{1,4})(?:st|nd|rd"
    r"|th)?\s(?:training )?epochs?)"
    r"|第\s?(?:\d{1,4}\s?[-~–到至]\s?)?(\d{1,4}|[二三四五六七八九十])\s?个?(?:epoch|轮)"
    r"|\[?Epoch[: ]\s{0,3}(\d{1,4})[/\]: ]",
    re.I,
)
# What did not fail then, which says nothing of when it failed.
_WENT_ON = re.compile(
    r"(?:\bnot|n't|\bnever|\bno)\b[^.!?\n]{0,40}\b(?:occur|happen|appear|fail|crash|error|oom|issue|problem)\w*"
    r"[^.!?\n]{0,30}$",
    re.I,
)
_BEFORE = 100
_ABOUT = re.compile(r"every|or more|about|around|approximately|~|[kKwW万]|大[约概]|左右", re.I)  # the author rounds
_LOGGED = re.compile(r"^[^\n]{0,80}\bstep[:= ]{1,3}(\d{1,9})\b(?! ?/)[^\n]{0,160}(?:loss|reward)", re.I | re.M)
_CHINESE = "一二三四五六七八九十"
_LATE_STEPS = 50
_ROUND_STEPS = 500
_PARTS = ("evaluates",)  # of a run: told of what failed there
_REST = re.compile(r"[^.!?\n。！？]{0,80}")
_NEAR = 12  # characters before a count, where "about" stands


@dataclass(frozen=True)
class RunFacts:
    """How far a run came (``num_steps`` done, ``num_epochs``) and what the author says about it.

    ``is_exact``: whether the steps are counted, not rounded by the author.

    ``told`` are the keys of the author's statements, ``quotes`` the words of each; fields are None or empty where the
    text says nothing.
    """

    num_steps: int | None = None
    num_epochs: int | None = None
    told: frozenset[str] = frozenset()
    quotes: Mapping[str, str] = field(default_factory=dict)
    is_exact: bool = True

    @property
    def is_start(self) -> bool:
        """Whether it failed within the first steps."""
        return self.num_steps is not None and self.num_steps <= 1 and not self.num_epochs

    @property
    def is_late(self) -> bool:
        """Whether many steps succeeded, so that the memory of one step fits."""
        return (self.num_steps or 0) >= _LATE_STEPS or (self.num_epochs or 0) >= 1

    @property
    def is_round(self) -> bool:
        """Whether it failed after a round number of steps, at which programs evaluate or save."""
        return self.is_exact and bool(self.num_steps) and (self.num_steps or 0) % _ROUND_STEPS == 0


def run_facts(text: str) -> RunFacts:
    """The facts in a cleaned text."""
    bars = list(_BAR.finditer(text))
    steps = int(bars[-1].group(2)) if bars else None
    done = [(_count(match.group(1)), match) for match in _DONE.finditer(text)]
    is_exact = True
    if done and not bars:
        steps, said_so = max(done, key=lambda one: one[0])
        around = text[max(said_so.start() - _NEAR, 0) : said_so.end()]
        is_exact = not _ABOUT.search(around)
    logged = [int(match.group(1)) for match in _LOGGED.finditer(text)]
    if steps is None and len(logged) > 1:
        steps = logged[-1]
    came_to = (match for match in _EPOCHS.finditer(text) if not _WENT_ON.search(text[: match.start()][-_BEFORE:]))
    epochs = [_number(next(one for one in match.groups() if one)) for match in came_to]
    if len(bars) == 1 and steps == 0 and epochs and max(epochs) <= 1:
        epochs = []  # counted from one, none is done yet
    label = text[max(0, bars[-1].start() - 60) : bars[-1].start()] if bars else ""
    if "Loading" in label or "shard" in label[-40:]:
        steps = None
    said = barred_in(text) | switches_in(text) | standing_in(text) | tried_in(text) | said_in(text)
    said = {key: quote for key, quote in said.items() if key not in _PARTS or _tells_failure(quote, text)}
    return RunFacts(steps, max(epochs) if epochs else None, frozenset(said), said, is_exact)


def _tells_failure(quote: str, text: str) -> bool:
    """Whether the sentence that a quote begins tells of a failure, or it is a frame of one."""
    if quote.lstrip("… ").startswith("File "):
        return True
    start = quote.strip("… ")
    rest = _REST.match(text, text.find(start) + len(start)) if start in text else None
    return FAILS.search(quote + ("" if rest is None else rest.group())) is not None


def _number(text: str) -> int:
    """A number in digits, or a Chinese one up to ten."""
    return int(text) if text.isdecimal() else _CHINESE.index(text) + 1


def _count(text: str) -> int:
    """A written count: 12,300, 15K, 3w (ten thousands)."""
    digits = text.replace(",", "").replace("，", "").strip()
    unit = digits[-1].lower()
    factor = {"k": 1000, "w": 10_000, "万": 10_000}.get(unit, 1)
    number = digits[:-1] if factor > 1 else digits
    return int(number.strip() or 0) * factor
