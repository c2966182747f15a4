"""Counts the established causes of the reports in this folder: ``python record_precedents.py`` writes the package's table.

Of a report for which several causes count as right the first is counted, the one that its thread says.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

from oom_magic.explain.evidence import precedents
from oom_magic.explain.evidence.clues.traceback import find_clues
from oom_magic.explain.evidence.judging import main_failure
from oom_magic.explain.messages.reading import read

_FILES = ("reports.jsonl", "later_reports.jsonl", "blind_reports.jsonl")
TABLE = Path(precedents.__file__).with_name("precedents.toml")
# A sign of fewer reports says more of them than of others.
_FEWEST = 4
_HEAD = """# How often each cause was the established one among the public reports of tests/data, and among those with a sign:
# the kind of message, whose memory it is about, the phase, the program, what the author tells (keys of author_words).
# Written by tests/data/record_precedents.py.
"""


def counted() -> str:
    """The table as TOML."""
    causes: Counter[str] = Counter()
    signs: dict[str, Counter[str]] = defaultdict(Counter)
    for name in _FILES:
        for line in (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines():
            report = json.loads(line)
            if report["causes"]:
                causes[report["causes"][0]] += 1
                for sign in _signs(report["text"]):
                    signs[sign][report["causes"][0]] += 1
    rows = [f'"{sign}" = {_row(signs[sign])}' for sign in sorted(signs) if signs[sign].total() >= _FEWEST]
    return "\n".join([_HEAD, f"causes = {_row(causes)}\n", "[signs]", *rows, ""])


def _signs(text: str) -> frozenset[str]:
    failure = main_failure(read(text))
    start, kind = (None, None) if failure is None else (failure.start, failure.format)
    return precedents.signs_of(failure, find_clues(text, start, kind))


def _row(counts: Counter[str]) -> str:
    return f"{{ {', '.join(f'{cause} = {count}' for cause, count in counts.most_common())} }}"


if __name__ == "__main__":
    TABLE.write_text(counted(), encoding="utf-8")
