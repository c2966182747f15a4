"""Counts how often answers were contradicted, by change and ground: ``python record_contradicted.py`` writes the table.

``first_answers.jsonl`` holds what the code before each of the rounds 113 to 135 of ``blind_reports.jsonl`` said of that
round's texts, which it had never seen: the cause, its confidence and the grounds for it, how its first change was told
("plain", "if_so" behind a check, or only the "check"), and whether a sentence of the answer was contradicted.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from oom_magic.explain.evidence.causes import HOST_CAUSES, Cause
from oom_magic.explain.evidence.measured import contradicted

TABLE = Path(contradicted.__file__).with_name("contradicted.json")
_ABOUT = (
    "Answers to public reports that the code had never seen. 'changes': of those whose first change was told plainly,"
    " [contradicted, told] by that change. 'grounds': of causes on"
    " the device that were told as likely, the same by cause and evidence. Written by tests/data/record_contradicted.py."
)


def counted() -> str:
    """The tables as JSON, a row a line."""
    changes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    grounds: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for line in Path(__file__).with_name("first_answers.jsonl").read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)
        rows = [changes[answer["change"]]] if answer["told"] == "plain" and answer["change"] else []
        if answer["confidence"] == "likely" and Cause(answer["cause"]) not in HOST_CAUSES:
            rows += [grounds[answer["cause"]][key] for key in sorted(set(answer["grounds"]))]
        for row in rows:
            row[0] += answer["contradicted"]
            row[1] += 1
    found = {cause: dict(sorted(rows.items())) for cause, rows in sorted(grounds.items())}
    return (
        f'{{"about": {json.dumps(_ABOUT)},\n"changes": {{\n{_lines(dict(sorted(changes.items())))}\n}},\n'
        f'"grounds": {{\n{_lines(found)}\n}}}}\n'
    )


def _lines(table: dict[str, object]) -> str:
    return ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in table.items())


if __name__ == "__main__":
    TABLE.write_text(counted(), encoding="utf-8")
