"""Counts how often an answer was right at first sight: ``python record_calibration.py`` writes the package's table.

``first_sight.jsonl`` holds what the code before each of the rounds 79 to 126 of ``blind_reports.jsonl`` said of that
round's texts, which it had never seen: the cause, its confidence, and the keys of the evidence for it. It is recorded
for each commit that added rounds: ``git archive COMMIT~1 oom_magic``, and there ``explain(text, fast=True, lang="en")``.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

from oom_magic.explain.evidence.measured import calibration

_HERE = Path(__file__).parent
TABLE = Path(calibration.__file__).with_name("calibration.json")
_SURE = ("likely", "certain")
_MOST_RIVALS = 4
_FEWEST = 3  # fewer answers by a ground say nothing of it
# Evidence that speaks of runs in general.
_NO_GROUNDS = {"no_message", "precedents", "training_told", "computing_told", "inference_told", "program_seen"}
_ABOUT = (
    "Answers to public reports that the code had never seen. 'rivals': where a cause was named as open or possible and"
    " was not it, which ones were established instead, the most frequent first. 'grounds': of answers told as likely or"
    " certain, [right, of] by the cause and the evidence for it. Written by tests/data/record_calibration.py."
)


def counted() -> str:
    """The table as JSON, a cause a line."""
    reports = map(json.loads, (_HERE / "blind_reports.jsonl").read_text(encoding="utf-8").splitlines())
    established = {report["id"]: report["causes"] for report in reports}
    rivals: dict[str, Counter[str]] = defaultdict(Counter)
    grounds: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for line in (_HERE / "first_sight.jsonl").read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)
        cause, causes = answer["cause"], established[answer["id"]]
        if causes and answer["confidence"] in _SURE:
            for key in set(answer["grounds"]) - _NO_GROUNDS:
                grounds[cause][key][0] += cause in causes
                grounds[cause][key][1] += 1
        elif causes and cause not in causes:
            rivals[cause].update(causes[:2])
    return _written(rivals, grounds)


def _written(rivals: dict[str, Counter[str]], grounds: dict[str, dict[str, list[int]]]) -> str:
    others = {cause: [one for one, _ in counts.most_common(_MOST_RIVALS)] for cause, counts in sorted(rivals.items())}
    known = {
        cause: {key: counts for key, counts in sorted(keys.items()) if counts[1] >= _FEWEST}
        for cause, keys in sorted(grounds.items())
    }
    return (
        f'{{"about": {json.dumps(_ABOUT)},\n"rivals": {{\n{_lines(others)}\n}},\n"grounds": {{\n{_lines(known)}\n}}}}\n'
    )


def _lines(table: dict[str, object]) -> str:
    return ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in table.items() if row)


if __name__ == "__main__":
    TABLE.write_text(counted(), encoding="utf-8")
