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
