"""Whether a dry run puts back what its code changes in the process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from oom_magic.memory.report import MemoryReport
from oom_magic.predict.dry_run import namespaces_of
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


def observed(function: Callable[..., Any], *args: Any, **options: Any) -> MemoryReport:
    """``om.dry_run`` that leaves what the function's closure and its arguments hold as the run made it: how a test
    looks into a run."""
    call = functools.partial(function, *args)
    return DrySession(has_bar=False, is_lasting=False, **options).run(call, namespaces_of(function))
