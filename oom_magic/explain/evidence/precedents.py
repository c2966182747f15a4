"""Similar public reports: how often each cause was the one that their threads established.

``precedents.toml`` counts it for each sign of a text, from the reports in tests/data, whose sources stand there;
tests/data/record_precedents.py writes it.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from oom_magic.explain.evidence.causes import Cause
from oom_magic.explain.evidence.clues.traceback import Clues
from oom_magic.explain.messages.failure import Failure

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Signs overlap ("training", "batch", "epoch"), so each counts for less than an independent one. Of the 948 reports of
# tests/data with a cause, each judged by all others, 0.7 names the right one for 70.8 %, 1.0 for 69.1, 0.5 for 68.8 %.
_INDEPENDENCE = 0.7
# Pseudo-counts, distributed as in all reports: a sign in few reports is weak evidence. Between 1 and 4 the share of
# right causes differs by 0.1 points.
_BENEFIT_OF_DOUBT = 2.0


@dataclass(frozen=True)
class Precedents:
    """Reports with an established cause: how many of each cause, and of those that show a sign."""

    by_cause: Mapping[Cause, int]
    by_sign: Mapping[str, Mapping[Cause, int]]

    @property
    def num_reports(self) -> int:
        """How many reports were counted."""
        return sum(self.by_cause.values())

    def shares(self, signs: Iterable[str]) -> dict[Cause, float]:
        """The share of each cause among reports that show these signs, the most frequent first; they sum to 1.

        Bayes' rule, with signs taken as nearly independent; unknown signs change nothing.
        """
        known = [self.by_sign[sign] for sign in signs if sign in self.by_sign]
        odds = {cause: count * self._likelihood(cause, known) for cause, count in self.by_cause.items()}
        total = sum(odds.values())
        return {cause: odd / total for cause, odd in sorted(odds.items(), key=lambda item: -item[1])}

    def _likelihood(self, cause: Cause, known: Iterable[Mapping[Cause, int]]) -> float:
        """How much more often reports of a cause show the signs than all reports do."""
        count, total = self.by_cause[cause], 0.0
        for counts in known:
            overall = sum(counts.values()) / self.num_reports
            shown = counts.get(cause, 0) + _BENEFIT_OF_DOUBT * overall
            total += _INDEPENDENCE * math.log(shown / (count + _BENEFIT_OF_DOUBT) / overall)
        return math.exp(total)


def signs_of(failure: Failure | None, clues: Clues) -> frozenset[str]:
    """The counted features of a text: the message and its device, the phase, the program, the author's words."""
    return frozenset(
        (
            f"message {failure.format if failure is not None else 'none'}",
            f"memory {(failure.backend if failure is not None else None) or 'any'}",
            f"phase {clues.phase or 'none'}",
            f"program {clues.program.program.key if clues.program is not None else 'none'}",
            *(f"told {key}" for key in clues.run.told),
        )
    )


@cache
def precedents() -> Precedents:
    """The counts of precedents.toml."""
    table = tomllib.loads(Path(__file__).with_name("precedents.toml").read_text(encoding="utf-8"))
    return Precedents(_by_cause(table["causes"]), {sign: _by_cause(counts) for sign, counts in table["signs"].items()})


def _by_cause(counts: Mapping[str, int]) -> Counter[Cause]:
    return Counter({Cause(name): count for name, count in counts.items()})
