"""Counts the established causes of the reports in this folder: ``python record_precedents.py`` writes the package's table.

Of a report for which several causes count as right the first is counted, the one that its thread says. Reports that
are not about memory say nothing of its causes.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

from oom_magic.explain.evidence.clues.traceback import find_clues
from oom_magic.explain.evidence.judging import main_failure
from oom_magic.explain.evidence.measured import precedents
from oom_magic.explain.messages.reading import read

_FILES = ("reports.jsonl", "later_reports.jsonl", "blind_reports.jsonl")
TABLE = Path(precedents.__file__).with_name("precedents.json")
_NO_CAUSES = ("not_oom", "unknown")
# A feature of fewer reports says more of them than of others, one of most reports says nothing.
_FEWEST = 5
_MOST_SHARE = 0.6
_ABOUT = (
    "How often each cause was the established one among the public reports of tests/data, and among those with a"
    " feature: a sign (the kind of message, whose memory it is about, the phase, the program, what the author tells:"
    " keys of author_words) or a word. Counts are in the order of the causes, without the zeros at their end."
    " Written by tests/data/record_precedents.py."
)


def counted() -> str:
    """The table as JSON, a feature a line."""
    causes: Counter[str] = Counter()
    features: dict[str, Counter[str]] = defaultdict(Counter)
    for name in _FILES:
        for line in (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines():
            report = json.loads(line)
            if report["causes"] and report["causes"][0] not in _NO_CAUSES:
                causes[report["causes"][0]] += 1
                for feature in _features(report["text"]):
                    features[feature][report["causes"][0]] += 1
    order = [cause for cause, _ in causes.most_common()]
    kept = sorted(one for one in features if _FEWEST <= features[one].total() <= _MOST_SHARE * causes.total())
    lines = ",\n".join(f"{json.dumps(one, ensure_ascii=False)}: {_row(features[one], order)}" for one in kept)
    head = f'"about": {json.dumps(_ABOUT)},\n"causes": {json.dumps(order)},\n"reports": {_row(causes, order)}'
    return f'{{{head},\n"features": {{\n{lines}\n}}}}\n'


def _features(text: str) -> frozenset[str]:
    failure = main_failure(read(text))
    start, kind = (None, None) if failure is None else (failure.start, failure.format)
    return precedents.features_of(text, failure, find_clues(text, start, kind))


def _row(counts: Counter[str], order: list[str]) -> str:
    row = [counts[cause] for cause in order]
    while row[-1] == 0:
        row.pop()
    return f"[{', '.join(map(str, row))}]"


if __name__ == "__main__":
    TABLE.write_text(counted(), encoding="utf-8")
