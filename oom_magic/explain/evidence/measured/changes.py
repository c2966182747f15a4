"""How often answers with a change told plainly were contradicted at first sight, by the change.

``changes.json`` counts answers to public reports that the code had never seen (rounds 113 to 135): of 320 whose first
change was told without a condition 79 said something that the text, its thread or documentation contradicts (25 %); of
359 that began with a check 47 (13 %).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

# Few answers say little: each change begins as if this many had been as wrong as all of them were.
_AS_MANY = 5
_MOST = 0.16


@cache
def counts() -> dict[str, tuple[int, int]]:
    """[contradicted, told] by change."""
    table = json.loads(Path(__file__).with_name("changes.json").read_text(encoding="utf-8"))
    return {key: (wrong, of) for key, (wrong, of) in table["changes"].items()}


@cache
def is_proven(key: str) -> bool:
    """Whether answers that told a change plainly were seldom contradicted."""
    table = counts()
    usual = sum(wrong for wrong, _ in table.values()) / sum(of for _, of in table.values())
    wrong, of = table.get(key, (0, 0))
    return (wrong + usual * _AS_MANY) / (of + _AS_MANY) <= _MOST
