"""Whether a dry run puts back what its code changes in the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oom_magic.predict.session import DrySession

Changes = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]  # by name: what is read, and what changes it


def check_put_back(changes: Changes, names: dict[str, Any]) -> None:
    """Everything is changed in one dry run, and read as before after it."""
    before = {name: read() for name, (read, _) in changes.items()}
    changed: dict[str, Any] = {}

    def run() -> None:
        for _, change in changes.values():
            change()
        changed.update((name, read()) for name, (read, _) in changes.items())

    DrySession(has_bar=False, is_lasting=False).run(run, [names])
    assert [name for name, value in changed.items() if value == before[name]] == []
    assert {name: read() for name, (read, _) in changes.items()} == before
