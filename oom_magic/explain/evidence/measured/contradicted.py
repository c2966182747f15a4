"""How often answers were contradicted at first sight, by the change and by the ground for the cause that they named.

``contradicted.json`` counts answers to public reports that the code had never seen (rounds 113 to 135), of which the
text, its thread or documentation contradicts a sentence. Of 320 whose first change was told without a condition 79
were (25 %), of 359 that began with a check 47 (13 %). A cause on the device that was told as likely: 20 of 74
(27 %); weights told as possible: 7 of 15; what was left open: 34 of 270 (13 %).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from oom_magic.explain.evidence.causes import HOST_CAUSES, Cause, Evidence

Counts = Mapping[str, tuple[int, int]]
# Few answers say little: each begins as if this many had been as wrong as all of them were.
_AS_MANY = 5
_MOST_OF_A_CHANGE = 0.16
_MOST_OF_A_CAUSE = 0.2
# What an author's words, frames and logs are read as, and what is true of any run: nothing that is seen or computed.
_READ = ("told_", "phase_", "stage_", "meaning_told")
_OF_ANY = {
    "program_seen", "training_told", "inference_told", "computing_told", "precedents", "own_tensors_fill", "no_message",
    "large_request", "late_steps", "late_epochs", "largest_batch_late", "small_card", "input_named",
}  # fmt: skip


@dataclass(frozen=True)
class _Tables:
    """[contradicted, told] by change, and by cause and ground of those told as likely."""

    changes: Counts
    grounds: Mapping[str, Counts]


@cache
def _tables() -> _Tables:
    table = json.loads(Path(__file__).with_name("contradicted.json").read_text(encoding="utf-8"))
    grounds = {cause: _counts(known) for cause, known in table["grounds"].items()}
    return _Tables(_counts(table["changes"]), grounds)


def _counts(table: Mapping[str, Sequence[int]]) -> Counts:
    return {key: (wrong, of) for key, (wrong, of) in table.items()}


@cache
def is_proven(change: str) -> bool:
    """Whether answers that told a change plainly were seldom contradicted."""
    changes = _tables().changes
    return _share(changes.get(change, (0, 0)), _usual(changes)) <= _MOST_OF_A_CHANGE


def is_sure_of(cause: Cause, evidence: Collection[Evidence]) -> bool:
    """Whether a cause may be told as likely: something is seen or computed, or such words were seldom contradicted."""
    if cause in HOST_CAUSES or any(is_seen(one) for one in evidence):
        return True
    grounds = _tables().grounds
    known = grounds.get(cause.value, {})
    usual = _usual({key: counts for table in grounds.values() for key, counts in table.items()})
    return any(_share(known[one.key], usual) <= _MOST_OF_A_CAUSE for one in evidence if one.key in known)


def is_seen(item: Evidence) -> bool:
    """Whether evidence is a number, a line of code or a message, rather than words, frames and what any run has."""
    return "quote" not in item.values and not item.key.startswith(_READ) and item.key not in _OF_ANY


def _usual(table: Counts) -> float:
    return sum(wrong for wrong, _ in table.values()) / sum(of for _, of in table.values())


def _share(counts: tuple[int, int], usual: float) -> float:
    wrong, of = counts
    return (wrong + usual * _AS_MANY) / (of + _AS_MANY)
