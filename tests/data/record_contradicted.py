"""Counts how often answers were false, by change and by what spoke for the cause: ``python record_contradicted.py``.

``first_answers.jsonl`` holds what the code before each of the rounds 113 to 155 of ``blind_reports.jsonl`` said of that
round's texts, which it had never seen: the cause, its confidence and the grounds for it, whether the text speaks of a
GPU, how the first change was told ("plain", "if_so" behind a check, or only the "check"), and what of the answer was
contradicted. Each contradiction was sorted once more by what it is:

"fact"          a number, phase, library, setting, tensor or message that is not so, or whose memory it is
"cause"         a cause told as likely or certain
"change"        a change told without a condition that does not apply, was tried in vain or would not help
"possible"      a cause told as possible, with its check
"behind_check"  a change told behind the check for its cause
"check"         a check that cannot be made there
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from oom_magic.explain.evidence.causes import Cause
from oom_magic.explain.evidence.measured import contradicted

_HERE = Path(__file__).parent
TABLE = Path(contradicted.__file__).with_name("contradicted.json")
FALSE = frozenset({"fact", "cause", "change"})
_ABOUT = (
    "Answers to public reports that the code had never seen. 'changes': of those whose first change was told plainly,"
    " [false by that change, told]. 'causes': of causes told as likely, [false, told] by whose memory they are of and"
    " what spoke for them. Written by tests/data/record_contradicted.py."
)


def counted() -> str:
    """The tables as JSON, a row a line."""
    reports = map(json.loads, (_HERE / "blind_reports.jsonl").read_text(encoding="utf-8").splitlines())
    established = {report["id"]: report["causes"] for report in reports}
    changes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    causes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for line in (_HERE / "first_answers.jsonl").read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)
        found, cause = answer["contradicted"], Cause(answer["cause"])
        if answer["told"] == "plain" and answer["change"]:
            _count(changes[answer["change"]], "change" in found)
        if answer["confidence"] == "likely":
            kind = contradicted.kind_of_grounds(cause, answer["grounds"], names_gpu=answer["of_gpu"])
            known = established[answer["id"]]
            _count(causes[kind], "cause" in found or (bool(known) and cause.value not in known))
    return (
        f'{{"about": {json.dumps(_ABOUT)},\n"changes": {{\n{_lines(dict(sorted(changes.items())))}\n}},\n'
        f'"causes": {{\n{_lines(dict(sorted(causes.items())))}\n}}}}\n'
    )


def _count(row: list[int], is_false: bool) -> None:
    row[0] += is_false
    row[1] += 1


def _lines(table: dict[str, list[int]]) -> str:
    return ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in table.items())


if __name__ == "__main__":
    TABLE.write_text(counted(), encoding="utf-8")
