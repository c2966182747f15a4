"""Counts how often answers that told a change plainly were contradicted: ``python record_changes.py`` writes the table.

``first_changes.jsonl`` holds how the code before each of the rounds 113 to 135 of ``blind_reports.jsonl`` told its
first change ("plain", "if_so" behind a check, or only the "check"), and whether the whole answer was contradicted.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from oom_magic.explain.evidence.measured import changes

TABLE = Path(changes.__file__).with_name("changes.json")
_ABOUT = (
    "Answers to public reports that the code had never seen, whose first change was told plainly: [contradicted, told]"
    " by that change. Written by tests/data/record_changes.py."
)


def counted() -> str:
    """The table as JSON, a change a line."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for line in Path(__file__).with_name("first_changes.jsonl").read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)
        if answer["told"] == "plain" and answer["change"]:
            found[answer["change"]][0] += answer["contradicted"]
            found[answer["change"]][1] += 1
    rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(found.items()))
    return f'{{"about": {json.dumps(_ABOUT)},\n"changes": {{\n{rows}\n}}}}\n'


if __name__ == "__main__":
    TABLE.write_text(counted(), encoding="utf-8")
