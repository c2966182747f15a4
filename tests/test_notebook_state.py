"""What belongs to a notebook's kernel is after a dry cell what it was: its names, its shell, its loop, its logs."""

from __future__ import annotations

import hashlib
from typing import Any

CARD = "%%gpumem --dry-run --no-plot\n"


def test_a_dry_cell_takes_nothing_from_the_users_iterators(shell: Any) -> None:
    shell.user_ns.update(words=iter("abc"), digest=hashlib.sha256(), seen=[])
    for _ in range(2):
        assert shell.run_cell(CARD + "seen.append(next(words))\ndigest.update(b'x')\nassert next(words) == 'b'").success
    assert next(shell.user_ns["words"]) == "a" and shell.user_ns["seen"] == []
    assert shell.user_ns["digest"].digest() == hashlib.sha256().digest()
