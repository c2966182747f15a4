"""After an out-of-memory error ``%oom_free`` takes torch's counter back to the level before the cell, to the byte."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from oom_magic.units import GIB, MIB

pytestmark = pytest.mark.gpu

TRAIN = """\
import torch
from torch import nn
kept = torch.zeros(2**18, device="cuda")

def steps(rows, loader=None, too_many=2**38):
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for batch in loader if loader is not None else [torch.randn(rows, 512)] * 3:
        loss = model(batch.to("cuda")).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
        if len(losses) == 2:
            large = torch.empty(2**28, device="cuda")
            torch.empty(too_many, device="cuda")

class Greedy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        large = torch.empty(2**28, device="cuda")
        return gradient + torch.empty(2**38, device="cuda")

def backward_fails(rows):
    model = nn.Linear(512, 2048, device="cuda")
    Greedy.apply(model(torch.randn(rows, 512, device="cuda"))).sum().backward()
"""
WARM = "model = nn.Linear(64, 64, device='cuda'); model(torch.zeros(8, 64, device='cuda')).sum().backward(); del model"
"""
Leaves the workspaces of cuBLAS, of this thread and of autograd's."""
CELLS = {
    "plain": "steps(64)",
    "gpumem": "%%gpumem --no-plot\nsteps(64)",
    "backward": "backward_fails(64)",
    "loader": "steps(8, torch.utils.data.DataLoader(torch.zeros(512, 512), batch_size=8))",
    "workers": "steps(8, torch.utils.data.DataLoader(torch.zeros(512, 512), batch_size=8, num_workers=1))",
    "from": "try:\n    steps(64)\nexcept torch.OutOfMemoryError as error:\n    raise RuntimeError('no') from error",
    "while handling": "try:\n    steps(64)\nexcept torch.OutOfMemoryError:\n    steps(32)",
    "generator": "def each():\n    yield from steps(64) or ()\nlist(each())",
    "thread": "from concurrent.futures import ThreadPoolExecutor\n"
    "future = ThreadPoolExecutor(1).submit(steps, 64)\nfuture.result()",
    "caught": "errors = []\ntry:\n    steps(64)\nexcept Exception as error:\n    errors.append(error)\nraise KeyError",
}

TRAINER = """\
from torch import nn
from transformers import Trainer, TrainingArguments

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(512, 512), 0

    def forward(self, x, labels=None):
        self.calls += 1
        large = torch.empty(2**28, device="cuda")
        if self.calls == 3:
            torch.empty(2**38, device="cuda")
        return {"loss": self.layer(x).pow(2).mean()}

def train():
    data = [{"x": torch.zeros(512), "labels": 0}] * 64
    options = TrainingArguments("out", max_steps=5, report_to=[], save_strategy="no", disable_tqdm=True)
    options._n_gpu = 1  # or Trainer spreads the batch over all devices
    Trainer(Model(), options, train_dataset=data).train()

train()
"""
REMAINS = """\
import functools
model = again = nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
loss = model(torch.ones(512, 1024, device="cuda", requires_grad=True)).exp().exp().sum()
model(torch.ones(512, 1024, device="cuda")).sum().backward()
optimizer.step()

@functools.lru_cache(maxsize=None)
def squares(size):
    return torch.zeros(size, device="cuda")

squares(2**20);

def pause():
    waiting = torch.zeros(2**21, device="cuda")
    yield 1
    print(waiting)

paused = pause()
next(paused);
"""


@pytest.fixture
def notebook(shell: InteractiveShell) -> Iterator[InteractiveShell]:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    assert run(shell, TRAIN).success
    yield shell
    run(shell, "%reset -f")
    gc.collect()


def run(shell: InteractiveShell, cell: str) -> Any:
    return shell.run_cell(cell, store_history=True)


def fail(shell: InteractiveShell, cell: str) -> None:
    assert not run(shell, cell).success


@pytest.mark.parametrize("cell", CELLS.values(), ids=list(CELLS))
def test_back_to_the_level_before_the_cell(notebook: InteractiveShell, cell: str) -> None:
    before = torch.cuda.memory_allocated()
    fail(notebook, cell)
    assert torch.cuda.memory_allocated() > before + GIB
    released = run(notebook, "%oom_free").result
    assert torch.cuda.memory_allocated() == before
    assert released.allocated_bytes == before
    assert released.freed_allocated_bytes > GIB
    assert [(one.name, one.num_bytes) for one in released.holders] == [("kept", MIB)]
    assert "steps" in released.freed[0].what or "backward" in released.freed[0].what
    assert sum(one.num_bytes for one in released.freed) <= released.freed_allocated_bytes


@pytest.mark.parametrize("cell", [CELLS["plain"], CELLS["gpumem"], CELLS["backward"]])
def test_workspaces_stay_if_they_were_there_before(notebook: InteractiveShell, cell: str) -> None:
    assert run(notebook, WARM).success
    before = torch.cuda.memory_allocated()
    fail(notebook, cell)
    run(notebook, "%oom_free")
    assert torch.cuda.memory_allocated() == before


def test_in_trainer(notebook: InteractiveShell) -> None:
    pytest.importorskip("transformers")
    before = torch.cuda.memory_allocated()
    fail(notebook, TRAINER)
    assert torch.cuda.memory_allocated() > before + GIB
    released = run(notebook, "%oom_free").result
    assert torch.cuda.memory_allocated() == before
    assert [one.name for one in released.holders] == ["kept"]


def test_before_and_after_debug(
    notebook: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.cuda.memory_allocated()
    fail(notebook, "steps(64)")
    monkeypatch.setattr("sys.stdin", io.StringIO("up\np large.shape\nquit\nquit\n"))
    run(notebook, "%debug")
    assert torch.cuda.memory_allocated() > before + GIB
    run(notebook, "%oom_free")
    assert torch.cuda.memory_allocated() == before
    capsys.readouterr()
    run(notebook, "%debug")
    assert "frames of the last error were released" in capsys.readouterr().out
    fail(notebook, "1 / 0")
    run(notebook, "%debug")
    assert "> <ipython-input" in capsys.readouterr().out


def test_only_told(notebook: InteractiveShell) -> None:
    fail(notebook, "steps(64)")
    held = torch.cuda.memory_allocated()
    told = run(notebook, "%oom_free --dry-run --names kept").result
    assert torch.cuda.memory_allocated() == held
    assert told.freed_allocated_bytes == 0
    assert [gone.what for gone in told.freed][1:] == ["kept"]
    done = run(notebook, "%oom_free --names kept").result
    assert done.freed == told.freed
    assert torch.cuda.memory_allocated() == 0 == done.allocated_bytes


def test_what_remains_is_named(notebook: InteractiveShell) -> None:
    assert run(notebook, REMAINS).success
    assert run(notebook, "model").success
    assert run(notebook, "torch.zeros(2**20, device='cuda')").success
    released = run(notebook, "%oom_free").result
    remaining = {(one.name, one.what): one for one in released.holders}
    weights = 4 * (1024 * 1024 + 1024)
    assert remaining["model", "module Linear"].num_bytes == weights
    assert remaining["model", "gradients"].num_bytes == weights
    assert {"again", "optimizer", "loss"} <= set(remaining["model", "module Linear"].also)
    assert 2 * weights <= remaining["optimizer", "optimizer AdamW, its state"].num_bytes <= 2 * weights + 8
    assert remaining["loss", "autograd graph"].num_bytes >= 512 * 1024 * 4
    assert remaining["squares", "functools cache"].num_bytes == 4 * MIB
    assert remaining["paused", "generator"].num_bytes == 8 * MIB
    shown = next(one for one in released.holders if one.name.startswith("Out["))
    assert shown.num_bytes == 4 * MIB
    assert released.unnamed_bytes < 20 * MIB
    sizes = [one.num_bytes for one in released.holders]
    assert sizes == sorted(sizes, reverse=True)
    cleared = run(notebook, "%oom_free --out").result
    assert not any(one.name.startswith("Out[") for one in cleared.holders)
    assert cleared.freed_allocated_bytes == 4 * MIB


def test_what_is_held_out_of_sight(notebook: InteractiveShell) -> None:
    holder = types.ModuleType("holder_module")
    sys.modules[holder.__name__] = holder
    holder.cache = [torch.zeros(3 * 2**20, device="cuda")]  # type: ignore[attr-defined]
    try:
        released = run(notebook, "%oom_free").result
        (hidden,) = [one for one in released.holders if not one.name]
        assert (hidden.what, hidden.num_bytes) == ("list", 12 * MIB)
    finally:
        del sys.modules[holder.__name__]


def test_looking_initializes_nothing() -> None:
    code = """\
import torch, oom_magic as om
assert "allocated no GPU memory" in str(om.release())
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
