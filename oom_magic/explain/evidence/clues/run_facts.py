"""What a text tells of a run beside its traceback: how far it came, what it was doing, what its author saw."""

from __future__ import annotations

import re
from dataclasses import dataclass

from oom_magic.explain.evidence.clues.author_words import said_in

_BAR = re.compile(r"(\d{1,3})%\|[^|\n]{0,200}\|\s{0,3}(\d{1,9})/(\d{1,9})")
_DONE = re.compile(
    r"(?:after|at|until|经过|训练到|跑到|第)\s?(?:about|around|approximately|executing|only)?\s?~?(\d[\d,]{0,8}\s?[kKwW万]?)\s?"
    r"(?:th |st |nd |rd )?(?:training |successful )?(?:steps?|iterations?|iters?|batches|步|次迭代|个?batch|iteration)",
    re.I,
)
_EPOCHS = re.compile(
    r"(?:after|at|until|to|in|during)\s(?:the\s)?(?:end of\s)?(?:about\s|~)?(?:epoch\s(\d{1,4})|(\d{1,4})(?:st|nd|rd"
    r"|th)?\sepochs?)"
    r"|第\s?(\d{1,4})\s?个?(?:epoch|轮)|\[?Epoch[: ]\s{0,3}(\d{1,4})[/\]: ]",
    re.I,
)
_LATE_STEPS = 50


@dataclass(frozen=True)
class RunFacts:
    """How far a run came (``num_steps`` done of ``total_steps``, ``num_epochs``) and what is told of it.

    ``told`` are keys of what the author says; all is None or empty where the text says nothing.
    """

    num_steps: int | None = None
    total_steps: int | None = None
    num_epochs: int | None = None
    told: frozenset[str] = frozenset()

    @property
    def is_start(self) -> bool:
        """Whether it failed within the first steps."""
        return self.num_steps is not None and self.num_steps <= 1 and not self.num_epochs

    @property
    def is_late(self) -> bool:
        """Whether many steps had gone well, so that what a step takes had fitted before."""
        return (self.num_steps or 0) >= _LATE_STEPS or (self.num_epochs or 0) >= 1


def run_facts(text: str, trace_start: int | None = None) -> RunFacts:
    """The facts in a cleaned text; ``trace_start`` is where the failure's message stands."""
    before = text[:trace_start] if trace_start is not None else text
    bars = list(_BAR.finditer(text))
    steps = total = None
    if bars:
        _, steps_text, total_text = (bars[-1]).groups()
        steps, total = int(steps_text), int(total_text)
    done = [_count(match.group(1)) for match in _DONE.finditer(text)]
    if done and not bars:
        steps = max(done)
    epochs = [int(next(one for one in match.groups() if one)) for match in _EPOCHS.finditer(text)]
    is_loading = bool(bars) and "Loading" in before[max(0, bars[-1].start() - 60) : bars[-1].start()]
    if is_loading or "shard" in text[max(0, bars[-1].start() - 40) : bars[-1].start()] if bars else False:
        steps = total = None
    return RunFacts(steps, total, max(epochs) if epochs else None, said_in(text))


def _count(text: str) -> int:
    """A count as people write it: 12,300, 15K, 3w (ten thousands)."""
    digits = text.replace(",", "").strip()
    unit = digits[-1].lower()
    factor = {"k": 1000, "w": 10_000, "万": 10_000}.get(unit, 1)
    number = digits[:-1] if factor > 1 else digits
    return int(number.strip() or 0) * factor
