"""Combinations of remedies that are worth a rehearsal: what each saves alone tells what they need together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TypeAlias

from oom_magic.explain.remedies.remedy import Remedy, Situation
from oom_magic.explain.remedies.specs import RemedySpec

_LIKELY = 1.05  # a combination expected to need up to this share of what it may need is tried

Evaluated: TypeAlias = tuple[RemedySpec, Remedy]


def likely_combinations(
    found: Sequence[Evaluated],
    needed_bytes: int,
    between_steps_bytes: int,
    situation: Situation,
    limit_bytes: int,
) -> list[tuple[Evaluated, ...]]:
    """Those of ``found`` that are expected to fit together, the cheapest first; before them what leaves the card safe.

    ``limit_bytes`` is what they may need, ``needed_bytes`` the need of the unchanged run, ``between_steps_bytes`` what
    of it is kept between steps.
    """
    step = max(needed_bytes - between_steps_bytes, 1)

    def expected(chosen: Sequence[Evaluated]) -> float:
        """Each change reduces a step's memory by its share, or the memory between steps."""
        share, between_steps = 1.0, needed_bytes - step
        for one, remedy in chosen:
            saving = remedy.saving_bytes or 0
            if one.acts_on_step:
                share *= max(0.0, 1 - saving / step)
            else:
                between_steps -= saving
        return between_steps + step * share

    def order(chosen: Sequence[Evaluated]) -> tuple[int, int]:
        limits = situation.safe_bytes, situation.usable_bytes
        return sum(expected(chosen) > limit for limit in limits), sum(one.cost for one, _ in chosen)

    pool = [(one, remedy) for one, remedy in found if one.combines and remedy.saving_bytes and not remedy.exceeds_ram]
    possible = [
        chosen
        for number in range(2, len(pool) + 1)
        for chosen in combinations(pool, number)
        if len({one.slot for one, _ in chosen}) == number and expected(chosen) <= limit_bytes * _LIKELY
    ]
    return sorted(possible, key=order)
