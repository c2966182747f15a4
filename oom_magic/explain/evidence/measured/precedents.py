"""How often each cause was the established one among public reports like a text.

``precedents.json`` counts it for each sign of a text and for each word, from the reports in tests/data, whose sources
stand there; tests/data/record_precedents.py writes it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from oom_magic.explain.evidence.causes import Cause
from oom_magic.explain.evidence.clues.traceback import Clues
from oom_magic.explain.messages.failure import Failure
from oom_magic.explain.messages.normalization import clean

# Words of one text go together, so their evidence grows with the root of their number. Rules as they were before each
# of the rounds 7 to 27, with the reports before it as precedents, named the right cause of 79.3 % of 463 reports alone
# and of 85.5 % with these two numbers; with half or a quarter of either it is 83 to 86 %.
_DEPENDENCE = 2.0
_BENEFIT_OF_DOUBT = 20.0  # pseudo-counts, distributed as in all reports: a feature of few reports is weak evidence
_LONGEST_READ = 6_000
_WORD = re.compile(r"[a-z_]{2,30}")
_HAN = re.compile(r"[\u4e00-\u9fff]{2,}")


@dataclass(frozen=True)
class Precedents:
    """Reports with an established cause: how many of each cause, and of those that show a feature (a sign, a word)."""

    by_cause: Mapping[Cause, int]
    by_feature: Mapping[str, Mapping[Cause, int]]

    @property
    def num_reports(self) -> int:
        """How many reports were counted."""
        return sum(self.by_cause.values())

    def shares(self, features: Iterable[str]) -> dict[Cause, float]:
        """The share of each cause among reports like one with these features, the most frequent first; they sum to 1.

        Bayes' rule; unknown features change nothing.
        """
        rows = [self.by_feature[feature] for feature in sorted(features) if feature in self.by_feature]
        num_reports = self.num_reports
        known = [(counts, sum(counts.values()) / num_reports) for counts in rows]
        odds = {cause: count * self._likelihood(cause, known) for cause, count in self.by_cause.items()}
        total = sum(odds.values())
        return {cause: odd / total for cause, odd in sorted(odds.items(), key=lambda item: -item[1])}

    def _likelihood(self, cause: Cause, known: list[tuple[Mapping[Cause, int], float]]) -> float:
        """How much more often reports of a cause show the features than all reports (their share of all) do."""
        count, total = self.by_cause[cause], 0.0
        for counts, overall in known:
            shown = counts.get(cause, 0) + _BENEFIT_OF_DOUBT * overall
            total += math.log(shown / (count + _BENEFIT_OF_DOUBT) / overall)
        return math.exp(total * _DEPENDENCE / math.sqrt(max(1, len(known))))


def features_of(text: str, failure: Failure | None, clues: Clues) -> frozenset[str]:
    """The counted features of a text: its signs and its words."""
    return frozenset((*_signs_of(failure, clues), *_words_of(text)))


def _signs_of(failure: Failure | None, clues: Clues) -> Iterator[str]:
    """The message and its device, the phase, the program, the author's statements."""
    yield f"message {failure.format if failure is not None else 'none'}"
    yield f"memory {(failure.backend if failure is not None else None) or 'any'}"
    yield f"phase {clues.phase or 'none'}"
    yield f"program {clues.program.program.key if clues.program is not None else 'none'}"
    yield from (f"told {key}" for key in clues.run.told)


def _words_of(text: str) -> Iterator[str]:
    """The words of a text's beginning; of Chinese, which separates none, each two characters."""
    read = clean(text)[:_LONGEST_READ].lower()
    yield from _WORD.findall(read)
    for run in _HAN.findall(read):
        yield from (run[at : at + 2] for at in range(len(run) - 1))


@cache
def precedents() -> Precedents:
    """The counts of precedents.json."""
    table = json.loads(Path(__file__).with_name("precedents.json").read_text(encoding="utf-8"))
    causes = [Cause(name) for name in table["causes"]]
    rows = {feature: Counter(dict(zip(causes, counts, strict=False))) for feature, counts in table["features"].items()}
    return Precedents(Counter(dict(zip(causes, table["reports"], strict=True))), rows)
