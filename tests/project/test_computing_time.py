"""Limits of computing are the same on a busy machine and on one with many cores (oom_magic/computing_time.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from oom_magic.computing_time import computing_seconds


@pytest.mark.parametrize(
    ("wall", "processors", "counted"),
    [
        pytest.param(1, 1, 1, id="idle machine"),
        pytest.param(4, 1, 1, id="others compute meanwhile"),
        pytest.param(1, 16, 1, id="threads compute, or wait, on all cores"),
        pytest.param(60, 0, 0, id="waiting for the user"),
    ],
)
def test_what_is_counted(monkeypatch: pytest.MonkeyPatch, wall: float, processors: float, counted: float) -> None:
    now = SimpleNamespace(monotonic=lambda: 100.0, process_time=lambda: 10.0)
    monkeypatch.setattr("oom_magic.computing_time.time", now)
    before = computing_seconds()
    now.monotonic, now.process_time = lambda: 100.0 + wall, lambda: 10.0 + processors
    assert computing_seconds() - before == counted
    assert computing_seconds() - before == counted
