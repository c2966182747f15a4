"""A notebook full of state in a real kernel: after each use, and after Jupyter's interrupt of each, it is as before."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel")
_PATIENCE_SECONDS = 120

_NOTEBOOK = r"""
%load_ext oom_magic
import copy, hashlib, io, json, mmap, os, random, sys, threading, time
import matplotlib
matplotlib.use("agg")
import numpy as np, torch
from matplotlib import pyplot
from torch import nn
import oom_magic as om

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(50, 16), nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.tokens.weight
    def forward(self, rows):
        return self.head(self.norm(self.tokens(rows).mean(1)))

torch.manual_seed(0), random.seed(0), np.random.seed(0)
net = Net()
average = torch.optim.swa_utils.AveragedModel(net)
optimizer = torch.optim.AdamW(net.parameters())
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
scaler = torch.amp.GradScaler("cuda", enabled=False)
rows = torch.randint(0, 50, (64, 8))
loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
half_way = iter(loader)
history, seen = [], {"best": 9.0}
net.register_forward_hook(lambda *_: seen.update(best=0.0))

def train(batches, place):
    net.to(place), average.to(place)
    optimizer.load_state_dict(optimizer.state_dict())  # goes where the weights are
    for batch in batches:
        batch = batch.to(place)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(batch), batch[:, 0])
        loss.backward()
        optimizer.step(), schedule.step(), average.update_parameters(net)
        history.append(loss.item())

train([next(half_way)], "cpu")
table = open("rows.csv", "w")
table.write("before")
log = os.open("log", os.O_RDWR | os.O_CREAT)
os.write(log, b"before")
map_file = open("map", "w+b")
map_file.write(b"12345678"), map_file.flush()
mapped = mmap.mmap(map_file.fileno(), 8)
generator, array = np.random.default_rng(0), np.arange(9.0)
pyplot.rcParams["font.size"] = 13.0

def mess():
    table.write("inside"), table.flush(), os.write(log, b"inside")
    mapped[:2] = b"xx"
    generator.random(), random.random(), np.random.rand(), torch.rand(2)
    array[:] = -1
    pyplot.rcParams["font.size"] = 30.0
    os.environ["MESS"], sys.argv[:] = "1", ["mess"]
    open("made", "w").write("x")

def use(batch_size=8, rounds=1):
    for _ in range(rounds):
        mess()
        train(rows.repeat(batch_size, 1).split(batch_size), "cuda")
        train(half_way if is_alone else loader, "cuda")

class Other(threading.Thread):
    def run(self):
        self.count, self.ends = 0, False
        own = nn.Linear(4, 4)
        own_optimizer = torch.optim.SGD(own.parameters(), 0.1)
        while not self.ends:
            own_optimizer.zero_grad()
            own(torch.ones(2, 4)).square().sum().backward()
            own_optimizer.step()
            assert own.weight.device.type == "cpu" and torch.isfinite(own.weight.detach()).all()
            self.count += 1
            time.sleep(0.01)

other, is_alone = Other(daemon=True), False
other.start()

def state():
    def digest(value):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return hashlib.sha256(buffer.getvalue()).hexdigest()
    def drawn(loader):
        return [tuple(one.state_dict()) if hasattr(one, "state_dict") else one._num_yielded for one in loader]
    table.flush()
    return json.dumps({
        "net": digest(net.state_dict()), "average": digest(average.state_dict()),
        "gradients": digest([one.grad for one in net.parameters()]),
        "optimizer": digest(optimizer.state_dict()), "schedule": digest(schedule.state_dict()),
        "is shared": net.head.weight is net.tokens.weight, "places": sorted({str(p.device) for p in net.parameters()}),
        "half way": half_way._num_yielded,
        "random": [digest(torch.get_rng_state()), str(random.getstate()), str(np.random.get_state()),
                   str(generator.bit_generator.state)],
        "files": {name: open(name, "rb").read().decode() for name in sorted(os.listdir(".")) if name[0] != "."},
        "places in files": [table.tell(), os.lseek(log, 0, os.SEEK_CUR), map_file.tell(), mapped.tell()],
        "mapped": mapped[:].decode(), "array": array.tolist(), "history": history, "seen": seen,
        "settings": [pyplot.rcParams["font.size"], sys.argv, torch.is_grad_enabled(), torch.get_num_threads()],
        "modes": [one.training for one in net.modules()],
    } | {f"variable {name}": value for name, value in os.environ.items()
    })
"""
_ENDLESS = "%%gpumem --gpu 'RTX 3060' --steps all --no-plot\nuse(8, 10**6)"
_FAILING = "%%gpumem --gpu 'RTX 3060' --no-plot\nbatch_size = 8\nmess()\nnet.cuda()\n" + (
    "for _ in range(100):\n    held = net(torch.zeros(batch_size * 3 * 10**5, 99, dtype=torch.long, device='cuda'))"
    "\n    held.square().sum().backward()"
)


class Notebook:
    """A kernel, and what it shows."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(folder))

    def run(self, code: str, interrupt_after: float | None = None) -> str:
        """What is printed, displayed and raised, as text."""
        shown: list[str] = []
        self.raised: list[str] = []

        def keep(message: dict[str, Any]) -> None:
            content = message["content"]
            in_words = content.get("data", {}).get("text/plain", "")
            self.raised += content.get("traceback", [])
            shown.extend([content.get("text", ""), in_words, *content.get("traceback", [])])

        timer = threading.Timer(interrupt_after or 0, self.manager.interrupt_kernel)
        if interrupt_after is not None:
            timer.start()
        self.client.execute_interactive(code, timeout=_PATIENCE_SECONDS, output_hook=keep, allow_stdin=False)
        timer.cancel()
        return "".join(shown)

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    made = Notebook(tmp_path)
    made.run("%colors NoColor")
    yield made
    made.close()


@pytest.mark.slow
def test_a_notebook_full_of_state_is_as_before_after_each_use_and_interrupt(notebook: Notebook) -> None:
    assert "Error" not in notebook.run(_NOTEBOOK)

    def state() -> dict[str, Any]:
        printed = notebook.run("print(state())")
        found: dict[str, Any] = json.loads(printed)
        return found

    before = state()

    def use(code: str, said: str, interrupt_after: float | None = None) -> None:
        shown = notebook.run(code, interrupt_after)
        assert said in shown, shown
        if interrupt_after is not None:
            assert len("".join(notebook.raised).splitlines()) <= 1, notebook.raised
        now = state()
        assert {
            name: (before.get(name), now.get(name)) for name in {*before, *now} if now.get(name) != before.get(name)
        } == {}

    for is_alone in (False, True):
        if is_alone:
            notebook.run("other.ends = is_alone = True; other.join()")
        use("%%gpumem --gpu 'RTX 3060' --no-plot\nuse()", "peak allocated")
        use(_ENDLESS, "nterrupted", 3)
        use(_FAILING, "CUDA out of memory")
        use("%oom_explain", "hat to change")
        use("%oom_explain", "nterrupted", 2)
        use("om.sliders(use, batch_size=(8, 512), gpu='RTX 3060')", "")
        use("panel = om.sliders(lambda batch_size: use(batch_size, 10**4), batch_size=(8, 512))", "", 3)
        if not is_alone:
            assert notebook.run("n = other.count; time.sleep(0.5); print(other.count > n)").strip() == "True"
