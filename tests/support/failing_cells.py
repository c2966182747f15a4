"""Cells that run out of memory on a pretend card of 1 GiB, for tests of their explanation."""

from __future__ import annotations

import pytest

CARD = "%%gpumem --no-plot --gpu 'RTX 3060' --memory 1GiB\n"
MODEL = (
    CARD + "import torch\nhidden = 1024\nmodel = torch.nn.Sequential("
    "*(torch.nn.Linear(hidden, hidden) for _ in range(4))).cuda()\n"
)
FAILING = (
    CARD + "\nbatch_size = 16\ndata = torch.zeros(batch_size, 4096, hidden, device='cuda')\n"
    "optimizer = torch.optim.SGD(model.parameters())\nfor _ in range(2):\n"
    "    loss = model(data).square().mean()\n    loss.backward()\n    optimizer.step()\n"
)


@pytest.fixture
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oom_magic.notebook.magics.has_gpu", lambda: False)
    monkeypatch.setenv("OOM_MAGIC_LANG", "en")


def run(shell, cell: str):
    result = shell.run_cell(cell, store_history=True)
    return result.result


def fail(shell) -> None:
    """Run a dry cell that runs out of memory (in the test itself: pytest clears sys.last_value before it)."""
    run(shell, MODEL)
    assert type(shell.run_cell(FAILING, store_history=True).error_in_exec).__name__ == "OutOfMemoryError"
