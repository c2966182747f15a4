"""Which cause a text's words and signs together speak for most, where nothing in it settles the cause.

``likeness.json`` weighs each of them, learned from the reports in tests/data, whose sources stand there;
tests/data/record_likeness.py writes it. ``precedents`` counts them one by one instead, and tempers what rules found.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from oom_magic.explain.evidence.causes import Cause

# Words of one text go together, so each counts the less the more there are. Of 696 reports of the rounds 127 to 149,
# each judged with those before it alone, words so weighed name the right cause of 576; counted one by one (Bayes' rule)
# they named that of 524, and the rules as they stood before each round that of 580. Where those rules had left the
# cause open, and only there, the words' likeliest cause instead of theirs makes it 594 (597 where its share is 0.4).
_SIGN = 0.5
_HUNDREDTHS = 100


@dataclass(frozen=True)
class Likeness:
    """What features (signs, words) of reports say of each cause; ``base`` is what any report says."""

    base: Mapping[Cause, int]
    by_feature: Mapping[str, Sequence[int]]

    def shares(self, features: Iterable[str]) -> dict[Cause, float]:
        """How likely each cause is for a report with these features, the likeliest first; they sum to 1.

        Unknown features change nothing.
        """
        sums = [base / _HUNDREDTHS for base in self.base.values()]
        for feature, size in sizes_of(feature for feature in features if feature in self.by_feature):
            row = self.by_feature[feature]
            sums = [total + size * weight / _HUNDREDTHS for total, weight in zip(sums, row, strict=True)]
        odds = {cause: math.exp(total) for cause, total in zip(self.base, sums, strict=True)}
        whole = sum(odds.values())
        return {cause: odd / whole for cause, odd in sorted(odds.items(), key=lambda item: -item[1])}


def sizes_of(features: Iterable[str]) -> Iterator[tuple[str, float]]:
    """The features, in one order everywhere, each with how much it counts beside the others."""
    known = sorted(features)
    of_word = 1 / math.sqrt(max(1, len(known)))
    return ((feature, _SIGN if " " in feature else of_word) for feature in known)


@cache
def likeness() -> Likeness:
    """The weights of likeness.json."""
    table = json.loads(Path(__file__).with_name("likeness.json").read_text(encoding="utf-8"))
    return Likeness(dict(zip(map(Cause, table["causes"]), table["base"], strict=True)), table["features"])
