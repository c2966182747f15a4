"""A trainer's callback on a CUDA device, real or stub: the step table of what was measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import oom_magic as om

pytestmark = pytest.mark.gpu
FIRST = SimpleNamespace(is_local_process_zero=True)  # the state of a process that prints


def train(steps: int) -> None:
    model = nn.Linear(512, 512).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(64, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_step_table_is_that_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    table = om.hf_callback()
    table.on_train_begin(None, FIRST, None)
    train(3)
    table.on_train_end(None, FIRST, None)
    assert table.report is not None and len(table.report.steps) == 3
    shown = capsys.readouterr().out
    assert "measured on" in shown and "peak reserved" in shown


def test_a_training_that_failed_is_no_longer_recorded() -> None:
    pytest.importorskip("transformers")
    table = om.hf_callback()
    table.on_train_begin(None, FIRST, None)
    train(1)
    table.on_train_begin(None, FIRST, None)
    train(2)
    table.on_train_end(None, FIRST, None)
    assert table.report is not None and len(table.report.steps) == 2
    assert not torch._C._cuda_isHistoryEnabled()
