"""Every piece of code that is shown for a notebook, pasted by a program, takes what was promised; no GPU is needed."""

from __future__ import annotations

import ast
import json
import linecache
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.remedies.code import code_for
from oom_magic.explain.remedies.own_code.gradients_off import evaluations_without_gradients
from oom_magic.explain.remedies.own_code.models import own_names
from oom_magic.explain.syntax import read_before_bound
from tests.gpu.pasting import pasted
from tests.support.folders import TESTS

HERE = TESTS / "gpu"
SCALAR = 512  # bytes of its block: a name that holds the loss, or the divided one, may be alive at the peak or not


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain loop", "function with defaults"])
def test_code_that_is_pasted_takes_what_was_promised(name: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(HERE / "pasting.py"), name]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900, check=False)
    found = json.loads((done.stdout.splitlines() or ["[]"])[-1])
    assert found, done.stderr[-2000:]
    assert [one for one in found if not _is_kept(one["promised"], one["peak"])] == []


def _is_kept(promised: list[int | None], peak: int) -> bool:
    return any(one is not None and abs(peak - one) <= SCALAR for one in promised)


@pytest.mark.parametrize(
    ("code", "first", "last"),
    [
        ("net, opt = ready.prepare(net, opt, 2)", "rows = load()\nnet, opt = make()", "net, opt = ready.prepare(net, opt, 2)"),
        ("rows = rows.half()", "rows = load()\nrows = rows.half()\nnet, opt = make()", "net, opt = ready.prepare(net, opt)"),
    ],
)  # fmt: skip
def test_what_changes_a_name_stands_behind_what_makes_it_or_for_the_same_call(code: str, first: str, last: str) -> None:
    assert pasted(["rows = load()\nnet, opt = make()", "net, opt = ready.prepare(net, opt)"], code) == [first, last]


RAYS = """%%gpumem --dry-run --no-plot --memory 1400MiB
net.cuda()
optimizer = torch.optim.SGD(net.parameters())
for _ in range(3):
    rays = torch.rand(N_RAYS, 64, device="cuda")
    net(rays[:, None].expand(-1, 128, -1).reshape(-1, 64)).view(N_RAYS, 128, -1).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_what_stands_first_in_shapes_is_a_batch_whatever_it_is_called(shell: Any) -> None:
    """Many rows of the model's input are one of the user's samples, such as the points on a ray."""
    shell.run_cell(
        "import torch\nfrom torch import nn\nN_RAYS = 4096\nnet = nn.Sequential(nn.Linear(64, 256), nn.ReLU())"
    )
    shell.run_cell(RAYS)
    smaller = shell.run_cell("%oom_explain").result.remedies[0]
    assert (smaller.key, smaller.fits, smaller.values["before"]) == ("smaller_batch", True, 4096)
    shell.run_cell("%oom_free\n" + smaller.code.partition("\n")[0])
    shell.run_cell(RAYS.replace("--no-plot", "--no-plot -o report"))
    peak = shell.user_ns["report"].peak_allocated_bytes
    assert shell.user_ns["N_RAYS"] < 4096 and peak == smaller.peak_allocated_bytes


TRAINED_AND_EVALUATED = """
for epoch in range(2):
    net.train()
    for x in loader:
        net(x).sum().backward()
    for x in parts:
        total += net(x)
    total.backward()
    {told}
    for x in {data}:
        scores.append(net(x))
"""


@pytest.mark.parametrize(
    ("told", "data", "is_told"), [("net.eval()", "rows", True), ("pass", "val_rows", True), ("pass", "values", False)]
)
def test_an_evaluation_beside_a_training_goes_under_no_grad(told: str, data: str, is_told: bool) -> None:
    code = evaluations_without_gradients(ast.parse(TRAINED_AND_EVALUATED.format(told=told, data=data)), {"net"})
    expected = f"for x in {data}:\n    with torch.no_grad():\n        scores.append(net(x))"
    assert code == (expected if is_told else "")


@pytest.mark.parametrize(
    ("told", "behind", "is_told"),
    [("net.eval()", "print(best)", True), ("pass", "print(best)", False), ("net.eval()", "best.backward()", False)],
)
def test_a_call_behind_eval_goes_under_no_grad(told: str, behind: str, is_told: bool) -> None:
    trained = "net.train()\n    net(rows).sum().backward()"
    cell = f"for epoch in range(2):\n    {trained}\n    {told}\n    best = net(rows).argmax(1)\n    {behind}"
    code = evaluations_without_gradients(ast.parse(cell), {"net"})
    assert code == ("with torch.no_grad():\n    best = net(rows).argmax(1)" if is_told else "")


FUNCTIONS = """\
def forward(x, model): return model(x)
def epoch(net, opt, loader):
    for images, labels in loader:
        opt.zero_grad()
        loss = {}
        loss.backward()
        opt.step()
"""


@pytest.mark.parametrize("call", ["forward(images, net)", "net.encode(images)", "forward(images, model=net)"])
@pytest.mark.parametrize(
    "cell", ["epoch(net, opt, loader)", "Fitter().epoch(net, opt, loader)", FUNCTIONS[FUNCTIONS.index("    for") :]]
)
def test_a_model_that_a_function_of_the_users_calls_goes_under_autocast(cell, call):
    class Encoder(torch.nn.Linear):
        def encode(self, x):
            return self(x)

    name, source = "<ipython-input-7-abc>", FUNCTIONS.format(call)
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names = {"net": Encoder(4, 2), "opt": None, "loader": []}
    exec(compile(source, name, "exec"), names)
    names["Fitter"] = type("Fitter", (), {"epoch": names["epoch"]})
    rehearsal = CellRehearsal(exec, ast.parse(textwrap.dedent(cell.format(call))), names)
    code = rehearsal.own_code("mixed_precision", {"dtype": "bf16"})
    block = (
        f"    opt.zero_grad()\n    with torch.autocast('cuda', dtype=torch.bfloat16):\n        loss = {call}\n    loss."
    )
    assert block in code and code.startswith("# in epoch:\n") is ("epoch(" in cell)


def test_checkpointing_is_switched_on_where_the_model_has_its_switch() -> None:
    class Switching(torch.nn.Linear):
        supports_gradient_checkpointing = True

        def gradient_checkpointing_enable(self, **options): ...

    net, tree = torch.nn.ModuleDict({"head": torch.nn.Linear(4, 2), "bert": Switching(4, 4)}), ast.parse("net(x)")
    for model, code in ((net, "net.bert."), (net["bert"], "net."), (torch.nn.DataParallel(net), "net.module.bert.")):
        names = own_names(tree, {"net": model})
        assert code_for("checkpointing", "plain", names)[0].startswith(f"{code}gradient_checkpointing_enable(")
    Switching.activation_checkpointing_enable = Switching.gradient_checkpointing_enable  # since transformers 5.23
    for style in ("plain", "trainer"):
        assert "activation_checkpointing_kwargs" in code_for("checkpointing", style, own_names(tree, {"net": net}))[0]


def test_names_that_code_reads_before_it_binds_them_are_told():
    code = "model = model.half()\nfor block in blocks:\n    out = block(data)\n    loss = out.sum()\nprint(loss, block)"
    assert read_before_bound(ast.parse(code)) == {"model", "blocks", "data", "print"}
