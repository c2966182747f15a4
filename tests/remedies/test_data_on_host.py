"""Data that wait on the card for their batch stay in RAM: the user's own code moves each batch in its turn."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch

from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.remedies.evaluation import RemedyEvaluator
from oom_magic.explain.remedies.own_code.waiting.data_on_host import data_kept_on_host
from oom_magic.explain.remedies.remedy import Situation, ranked
from oom_magic.predict.setups.gpus import find_gpu
from tests.support.failing_cells import CARD

EARLIER = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
device = torch.device("cuda")
X, y = torch.zeros(64, 8), torch.zeros(64, 1)
net = nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), 0.1)
class Rows(Dataset):
    def __init__(self):
        self.x = X.to(device)
        self.names = ["a"]
    def __len__(self): return 64
    def __getitem__(self, at): return self.x[at]
class Fitted:
    def fit(self, net, rows, targets, batch_size=8):
        for at in range(0, len(rows), batch_size):
            net(rows[at:at + batch_size]).sum().backward()
def train(net, loader):
    for step, batch in enumerate(loader):
        inputs, targets = batch
        (net(inputs) - targets).sum().backward()
def epoch(net, loader):
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        (net(inputs) - targets).sum().backward()
"""
LOOP = "for xb, yb in loader:\n    (net(xb) - yb).sum().backward()"
BY_INDEX = "for at in range(0, len(X), 8):\n    (net(X[at:at + 8]) - y[at:at + 8]).sum().backward()"


def names(on_device: bool = False) -> dict[str, Any]:
    file, found = "<ipython-input-1-data>", {"__name__": "__main__"}
    source = EARLIER
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    exec(compile(source, file, "exec"), found)
    return found


def code(cell: str, is_on_device: Callable[[Any], bool] = lambda _: False) -> str:
    tree = ast.parse(cell)
    kept = data_kept_on_host(tree, names(), is_on_device)
    return "" if kept is None else kept.code(tree)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (f"X, y = X.to(device), y.to(device)\nloader = DataLoader(TensorDataset(X, y), batch_size=8)\n{LOOP}",
         ["xb, yb = (xb.to(device), yb.to(device))", "# instead of X, y = (X.to(device), y.to(device)) ... for xb"]),
        (f"X = torch.zeros(64, 8, device='cuda')\ny = y.cuda()\n{BY_INDEX}",
         ["X = torch.zeros(64, 8)", "net(X[at:at + 8].to('cuda')) - y[at:at + 8].to('cuda')"]),
        (f"loader = [(X[i:i + 8].cuda(), y[i:i + 8].cuda()) for i in range(0, 64, 8)]\n{LOOP}",
         ["loader = [(X[i:i + 8], y[i:i + 8]) for i", "xb, yb = (xb.cuda(), yb.cuda())"]),
        (f"loader = []\nfor i in range(0, 64, 8):\n    loader.append((X[i:i + 8].cuda(), y[i:i + 8].cuda()))\n{LOOP}",
         ["loader.append((X[i:i + 8], y[i:i + 8]))", "xb, yb = (xb.cuda(), yb.cuda())"]),
        ("rows = Rows()\nfor batch in DataLoader(rows, batch_size=8):\n    net(batch).sum().backward()",
         ["rows.x = rows.x.cpu()"]),
        ("X = X.cuda()\nfor part in X.split(8):\n    net(part).sum().backward()",
         ["part = part.cuda()"]),
        ("X = X.cuda()\nfor i in range(8):\n    chosen = torch.randperm(64, device=device)[:8]\n    net(X[chosen]).sum().backward()",
         ["net(X[chosen.cpu()].cuda())"]),
        ("X, y = X.cuda(), y.cuda()\nFitted().fit(net, X, y)",
         ["# in Fitted.fit:\ndef fit(", "net(rows[at:at + batch_size].cuda())"]),
        ("X, y = X.to(device), y.to(device)\nloader = DataLoader(TensorDataset(X, y))\ntrain(net, loader)",
         ["def train(net, loader)", "inputs, targets = batch\n        inputs, targets = (inputs.to(device)"]),
        ("X, y = X.to(device), y.to(device)\nloader = DataLoader(TensorDataset(X, y))\nepoch(net, loader)",
         ["loader = DataLoader(TensorDataset(X, y))\n# instead of X, y"]),
    ],
)  # fmt: skip
def test_each_batch_is_moved_where_the_data_were(cell: str, expected: list[str]) -> None:
    shown = code(cell)
    assert all(one in shown for one in expected), shown
    ast.parse("\n".join(one for one in shown.splitlines() if not one.startswith("%")))


@pytest.mark.parametrize(
    "cell",
    [
        "X = X.cuda()\nfor i in range(9):\n    net(X).sum().backward()",  # as a whole
        f"net = net.to(device)\nloader = DataLoader(TensorDataset(X, y))\n{LOOP}",  # the data are in RAM
        "for xb, yb in DataLoader(TensorDataset(X, y)):\n    xb, yb = xb.to(device), yb.to(device)\n    net(xb)",
        "scores = X.cuda() @ X.cuda().T",
    ],
)
def test_what_is_no_data_that_wait_stays(cell: str) -> None:
    assert code(cell) == ""


def test_what_earlier_cells_moved_is_taken_back_under_each_of_its_names() -> None:
    seen = names()
    seen["loader"] = seen["DataLoader"](seen["TensorDataset"](seen["X"], seen["y"]), batch_size=8)
    tree = ast.parse(LOOP)
    kept = data_kept_on_host(tree, seen, lambda _: True)
    assert kept is not None and {id(seen["X"]), id(seen["y"])} == kept.gone
    assert kept.code(tree).startswith(
        "X, y = (X.cpu(), y.cpu())\nloader.dataset.tensors = (X, y)\nfor xb, yb in loader:"
    )


def test_the_data_are_the_first_thing_to_change() -> None:
    """They take most of what the run needs, which a smaller batch leaves as it is."""
    cell = """
rows = torch.zeros(4096, 16384).cuda()
net = torch.nn.Linear(16384, 64).cuda()
for at in range(0, len(rows), 512):
    net(rows[at:at + 512]).sum().backward()
"""
    tree, seen = ast.parse(cell), {"torch": torch}
    rehearsal = CellRehearsal(lambda code, known: exec(compile(code, "<cell>", "exec"), known), tree, seen)
    evaluator = RemedyEvaluator(rehearsal, Situation(240 * 2**20, find_gpu("RTX 3060"), total_bytes=400 * 2**20))
    first = ranked(list(evaluator.remedies()))[0]
    assert first.key == "batches_moved" and first.fits and "rows[at:at + 512].cuda()" in first.code
    assert first.peak_allocated_bytes is not None and first.peak_allocated_bytes < 64 * 2**20
    assert "rows = torch.zeros(4096, 16384)\n" in first.code
    assert ast.unparse(tree) == ast.unparse(ast.parse(cell))  # as it was


def test_data_that_an_earlier_dry_cell_made_begin_in_ram(shell: Any) -> None:
    """The failed cell has put others under their name, and those that are gone were taken to have been on the card."""
    made = "import torch\nrows = torch.zeros(8192, 16384)"
    used = "rows = rows.cuda()\nnet = torch.nn.Linear(16384, 1024).cuda()\n"
    loop = "for at in range(0, len(rows), 2048):\n    net(rows[at:at + 2048]).sum().backward()"
    for cell in (made, used + loop):
        shell.run_cell(f"{CARD}{cell}")
    first = shell.run_cell("%oom_explain").result.remedies[0]
    assert first.key == "batches_moved" and first.fits
    assert first.peak_allocated_bytes < 8192 * 16384 * 4  # what the data alone would take
