"""``%oom_explain`` after a cell that ran out on a CUDA device, real or stub, without ``%%gpumem``."""

from __future__ import annotations

import pytest

from oom_magic.explain.evidence.causes import Cause

pytestmark = pytest.mark.gpu

FAILING = """
import torch
net = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096)] * 512).cuda()
loss = net(torch.zeros(2**16, 4096, device="cuda")).sum()
"""


def test_what_the_failed_call_holds_is_no_leak(shell, monkeypatch) -> None:
    import torch

    monkeypatch.setenv("OOM_MAGIC_LANG", "en")
    error = shell.run_cell(FAILING, store_history=True).error_in_exec
    assert isinstance(error, torch.OutOfMemoryError)
    message, traceback = str(error), error.__traceback__
    before = torch.cuda.memory_stats()
    diagnosis = shell.run_cell("%oom_explain --fast").result
    assert diagnosis.cause == Cause.ACTIVATIONS
    assert {one.kind for one in diagnosis.holders} >= {"own_frames", "name"}
    assert sum(row.num_bytes for row in diagnosis.budget.rows) == diagnosis.budget.capacity_bytes
    assert (str(error), error.__traceback__) == (message, traceback)  # %debug still works
    assert torch.cuda.memory_stats() == before


def test_what_earlier_failures_hold_is_named_and_the_cause(shell, monkeypatch) -> None:
    monkeypatch.setenv("OOM_MAGIC_LANG", "en")
    shell.run_cell("%oom_free\nimport torch\nmost = torch.cuda.mem_get_info()[0] * 6 // 10", store_history=True)
    taken = "torch.empty(most, dtype=torch.uint8, device='cuda')"
    shell.run_cell(f"def work():\n    held = {taken}\n    return {taken}\nwork()", store_history=True)
    shell.run_cell(taken, store_history=True)
    diagnosis = shell.run_cell("%oom_explain --fast", store_history=True).result
    assert [one.num_bytes for one in diagnosis.holders if one.kind == "frames"] == [shell.user_ns["most"]]
    assert diagnosis.cause == Cause.LEAK_OR_RETAINED_REFERENCE
    assert diagnosis.evidence[0].values == {"held_bytes": shell.user_ns["most"]}
    assert "oom_magic" not in "".join(one.name for one in diagnosis.holders)
