"""How often answers at first sight were false: by the change they told, and by what spoke for the cause they named.

``contradicted.json`` counts answers to public reports that the code had never seen (rounds 113 to 155). Causes told as
likely were false in 1 of 85 answers where a number, a line of code or a message spoke for them, in 0 of 72 where only
words did for RAM in a text that speaks of no GPU; in 5 of 17 where such a text speaks of a GPU, and in 6 of 60 where
only words did for the device.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from oom_magic.explain.evidence.causes import HOST_CAUSES, Cause, Evidence
from oom_magic.explain.evidence.grounds import RESTS_ON

Counts = Mapping[str, tuple[int, int]]
# Few answers say little: each begins as if this many had been as wrong as all of them were.
_AS_MANY = 5
_FEWEST = 3
_MOST_OF_A_CHANGE = 0.09
_MOST_OF_A_CAUSE = 0.05
# What frames and logs are read as, what is read off a name, and what is true of any run: nothing seen or computed.
_READ = ("told_", "phase_", "stage_", "meaning_told")
_OF_ANY = {
    "program_seen", "training_told", "inference_told", "computing_told", "precedents", "own_tensors_fill", "no_message",
    "large_request", "late_steps", "late_epochs", "largest_batch_late", "small_card", "input_named", "weights_named",
    "weights_fill_one_card", "adam_fills_card",
}  # fmt: skip


@dataclass(frozen=True)
class _Tables:
    """[false, told] by change that was told plainly, and by what spoke for a cause told as likely."""

    changes: Counts
    causes: Counts


@cache
def _tables() -> _Tables:
    table = json.loads(Path(__file__).with_name("contradicted.json").read_text(encoding="utf-8"))
    return _Tables(_counts(table["changes"]), _counts(table["causes"]))


def _counts(table: Mapping[str, Sequence[int]]) -> Counts:
    return {key: (wrong, of) for key, (wrong, of) in table.items()}


@cache
def is_proven(change: str) -> bool:
    """Whether enough answers told a change plainly, and seldom were false by it."""
    changes = _tables().changes
    return changes.get(change, (0, 0))[1] >= _FEWEST and _share(change, changes) <= _MOST_OF_A_CHANGE


@cache
def is_doubtful(change: str) -> bool:
    """Whether enough answers told a change plainly, and too many were false by it."""
    changes = _tables().changes
    return changes.get(change, (0, 0))[1] >= _FEWEST and _share(change, changes) > _MOST_OF_A_CHANGE


def is_sure_of(cause: Cause, evidence: Collection[Evidence], *, names_gpu: bool) -> bool:
    """Whether a cause may be told as likely: what is of its kind was seldom false where such evidence spoke for it."""
    kind = kind_of_grounds(cause, [one.key for one in evidence], names_gpu=names_gpu)
    return _share(kind, _tables().causes) <= _MOST_OF_A_CAUSE


def kind_of_grounds(cause: Cause, keys: Collection[str], *, names_gpu: bool) -> str:
    """Whose memory a cause is of, and whether anything but words speaks for it; RAM in a text without a GPU alone."""
    whose = "host" if cause in HOST_CAUSES else "device"
    if any(map(is_seen, keys)):
        return f"{whose}, seen"
    return "host, words beside a GPU" if whose == "host" and names_gpu else f"{whose}, words"


def is_seen(key: str) -> bool:
    """Whether evidence is a number, a line of code or a message, rather than words, frames and what any run has."""
    return key not in RESTS_ON and not key.startswith(_READ) and key not in _OF_ANY


def _share(key: str, table: Counts) -> float:
    usual = sum(wrong for wrong, _ in table.values()) / sum(of for _, of in table.values())
    wrong, of = table.get(key, (0, 0))
    return (wrong + usual * _AS_MANY) / (of + _AS_MANY)
