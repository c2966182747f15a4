"""A trainer's callback on a CUDA device, real or stub: the step table of what was measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from oom_magic.notebook.callbacks import _StepTable

pytestmark = pytest.mark.gpu


def train(steps: int) -> None:
    model = nn.Linear(512, 512).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(64, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_step_table_is_that_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    table = _StepTable()
    table.begin()
    train(3)
    table.end()
    assert table.report is not None and len(table.report.steps) == 3
    shown = capsys.readouterr().out
    assert "measured on" in shown and "peak reserved" in shown


def test_a_training_that_failed_is_no_longer_recorded() -> None:
    table = _StepTable()
    table.begin()
    train(1)
    table.begin()
    train(2)
    table.end()
    assert table.report is not None and len(table.report.steps) == 2
    assert not torch._C._cuda_isHistoryEnabled()
