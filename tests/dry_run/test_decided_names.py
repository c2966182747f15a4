"""Code that decided for the CPU on a machine without a GPU, and work on the CPU, in dry runs."""

from __future__ import annotations

import gc
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import oom_magic as om
from oom_magic.predict.instrumentation.decided.decided_names import DecidedNames
from oom_magic.units import MIB

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is decided for the CPU")

TRAIN = """
def train(rows=8):
    model = nn.Linear(1024, 1024).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(rows, 1024).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
WAYS = {
    "text": "device = 'cuda' if torch.cuda.is_available() else 'cpu'",
    "device": "device = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
    "count": "device = f'cuda:{torch.cuda.device_count() - 1}' if torch.cuda.device_count() else 'cpu'",
    "branches": "if torch.cuda.is_available():\n    device = 'cuda'\nelse:\n    device = 'cpu'",
    "steps": "use_cuda: bool = torch.cuda.is_available()\ndevice = torch.device('cuda' if use_cuda else 'cpu')",
    "function": "def choose():\n    return 'cuda' if torch.cuda.is_available() else 'cpu'\n\ndevice = choose()",
    "renamed": "import torch as t\nd = 'cuda' if t.cuda.is_available() else 'cpu'\ndevice = d",
}


def module(source: str) -> tuple[types.ModuleType, list[str]]:
    """A module of the user's, and its source."""
    made = types.ModuleType("notebook")
    text = f"import torch\nfrom torch import nn\n{source}"
    exec(compile(text, "<ipython-input-1>", "exec"), vars(made))
    vars(made)["In"] = [text]
    return made, [text]


@pytest.mark.parametrize("way", WAYS)
def test_what_was_decided_for_want_of_a_gpu_is_decided_anew(way: str) -> None:
    notebook, _ = module(WAYS[way] + TRAIN)
    report = om.dry_run(notebook.train)
    assert report.breakdown["parameter"] > 4 * MIB and report.breakdown["optimizer_state"] > 8 * MIB
    (assumption,) = report.assumptions
    assert (
        "`device`" in assumption.text
        and "because there is no GPU here" in assumption.text
        and "'cuda" in assumption.text
    )
    assert str(notebook.device) == "cpu"


def test_a_name_that_another_thread_reads_stays_and_is_named() -> None:
    watch = (
        "\nseen, ends = set(), False\ndef there():\n    return torch.ones(2, device=device)\n"
        "def watch():\n    while not ends:\n        seen.add(str(there().device))\n"
    )
    notebook, _ = module(WAYS["text"] + TRAIN + watch)
    thread = threading.Thread(target=notebook.watch)
    thread.start()
    try:
        report = om.dry_run(notebook.train)
    finally:
        notebook.ends = True
        thread.join()
    assert notebook.seen == {"cpu"} and not report.peak_allocated_bytes
    assert "`device` stays as set without a GPU" in " ".join(one.text for one in report.assumptions)


def test_models_tensors_and_optimizers_placed_by_the_name_are_placed_anew() -> None:
    source = WAYS["text"] + (
        "\nmodel = nn.Linear(1024, 1024)\nmodel.to(device)\nbatch = torch.zeros(64, 1024, device=device)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\nmodel(batch).sum().backward()\noptimizer.step()\n"
        "def step():\n    model(batch).sum().backward()\n    optimizer.step()\n"
    )
    notebook, _ = module(source)
    before = {name: tensor.clone() for name, tensor in notebook.model.state_dict().items()}
    report = om.dry_run(notebook.step)
    assert report.breakdown["parameter"] > 4 * MIB and report.breakdown["optimizer_state"] > 8 * MIB
    assert {tensor.device.type for tensor in (notebook.batch, *notebook.model.parameters())} == {"cpu"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in notebook.model.state_dict().items())
    (state, _) = notebook.optimizer.state.values()
    assert state["exp_avg"].device.type == "cpu"


def test_tensors_that_stay_real_and_optimizers_in_lists_are_placed_anew_too() -> None:
    notebook, _ = module(
        WAYS["text"] + "\nmodel = nn.Linear(3, 3).to(device)\noptimizers = [torch.optim.AdamW(model.parameters())]\n"
        "rows = torch.eye(3, device=device).to_sparse()\nwatched = torch.ones(3, 3, device=device, requires_grad=True) * 2\n"
        "model(torch.ones(3, 3)).sum().backward()\noptimizers[0].step()\nwatched.retain_grad()\n"
        "def train():\n    model(rows @ watched).sum().backward()\n    optimizers[0].step()\n"
    )
    assert om.dry_run(notebook.train).breakdown["parameter"]
    assert notebook.rows.to_dense().equal(torch.eye(3)) and notebook.watched.sum() == 18
    vars(notebook).clear()
    gc.collect()  # other tests would be told of what is watched


def test_a_name_that_says_cpu_for_another_reason_is_told_with_what_the_gpu_takes() -> None:
    notebook, _ = module("device = torch.device('cpu')" + TRAIN)
    report = om.dry_run(notebook.train)
    assert report.peak_allocated_bytes == 0
    gpu = om.dry_run(module("device = 'cuda'" + TRAIN)[0].train)
    (assumption,) = report.assumptions
    assert "`device` was set to 'cpu' before the dry run" in assumption.text
    assert f"with 'cuda' the run would take {gpu.peak_allocated_bytes / MIB:.2f} MiB" in assumption.text


@pytest.mark.parametrize(
    ("made", "field"),
    [
        (
            "class Config:\n    def __init__(self):\n        self.device = torch.device('cpu')\n\ncfg = Config()\n",
            "cfg.device",
        ),
        ("cfg = dict(device='cpu')\n", "cfg['device']"),
    ],
)
def test_a_field_that_keeps_the_run_on_the_cpu_is_named(made: str, field: str) -> None:
    notebook, _ = module(made + TRAIN.replace("to(device)", f"to({field})"))
    (assumption,) = om.dry_run(notebook.train).assumptions
    assert assumption.text.startswith(f"nothing was put on the GPU: `{field}` was set to 'cpu'")


def test_what_places_models_and_was_made_without_a_gpu_is_named() -> None:
    class Fabric:  # Lightning's
        def __init__(self) -> None:
            self._root = torch.device("cpu")

        @property
        def device(self) -> torch.device:
            return self._root

        def setup(self, model: nn.Module) -> nn.Module:
            return model.to(self.device)

    for code in ("fabric.setup(net)(torch.ones(2, 8))", "fabric.setup(net)(torch.ones(2, 8, device=fabric.device))"):
        other = "unused = 'cpu'\n"  # a name with another purpose
        notebook, _ = module(f"{other}net = nn.Linear(8, 8)\ndef train():\n    print(unused)\n    {code}\n")
        vars(notebook)["fabric"] = Fabric()
        (assumption,) = om.dry_run(notebook.train).assumptions
        assert assumption.text.startswith("nothing was put on the GPU: `fabric.device` was set to 'cpu'")


def test_a_class_that_asked_for_the_gpu_is_told_and_followed_there() -> None:
    config = "class Config:\n    device = 'cuda' if torch.cuda.is_available() else 'cpu'\n\ncfg = Config()\n"
    notebook, _ = module(config + TRAIN.replace("to(device)", "to(cfg.device)"))
    report = om.dry_run(notebook.train)
    assert report.peak_allocated_bytes == om.dry_run(module("device = 'cuda'" + TRAIN)[0].train).peak_allocated_bytes
    (assumption,) = report.assumptions
    assert assumption.text.startswith("`Config` is on the CPU because there is no GPU here")
    assert notebook.Config.device == "cpu"


def test_a_name_that_was_given_another_value_since_is_left_alone() -> None:
    for later in ("device = 'cpu'", "for device in ['cpu']:\n    pass"):
        notebook, sources = module(WAYS["text"] + TRAIN)
        exec(later, vars(notebook))
        assert not DecidedNames.of(vars(notebook), [*sources, later]).values


def test_statements_with_effects_are_not_evaluated_again() -> None:
    notebook, _ = module("log = []\ndevice = log.append(torch.cuda.is_available()) or 'cpu'" + TRAIN)
    om.dry_run(notebook.train)
    assert notebook.log == [False]


def test_cells_follow_names_of_plain_cells_and_say_so(shell: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("oom_magic.notebook.magics.has_gpu", lambda: False)
    shell.run_cell(f"import torch\nfrom torch import nn\n{WAYS['text']}{TRAIN}")  # not in the history either
    shell.run_cell("%%gpumem --no-plot -o report\ntrain()", store_history=True)
    said = capsys.readouterr().out
    assert said.startswith("This machine has no GPU, so earlier cells set device = 'cpu'")
    assert shell.user_ns["report"].breakdown["parameter"] > 4 * MIB and shell.user_ns["device"] == "cpu"
    monkeypatch.setenv("OOM_MAGIC_LANG", "zh")
    shell.run_cell("device = 'cpu'")  # now by the user
    shell.run_cell("%%gpumem --no-plot -o report\ntrain()", store_history=True)
    assert "没有任何内容放到 GPU 上：device = 'cpu'" in capsys.readouterr().out
    assert not shell.user_ns["report"].breakdown["parameter"]


# -- work on the CPU ------------------------------------------------------------


def minimal() -> None:
    net = nn.Linear(1024, 1024)
    net(torch.randn(64, 1024)).sum().backward()


def trained(foreach: bool | None = None) -> None:
    net = nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=foreach)
    for _ in range(2):
        functional.cross_entropy(net(torch.randn(8, 1024)), torch.randint(0, 10, (8,))).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert net[0].weight.device.type == "cpu"


def foreach() -> None:
    trained(True)


def recurrent() -> None:
    nn.LSTM(512, 512, 2, batch_first=True)(torch.randn(4, 16, 512))[0].sum().backward()


def convolutions() -> None:
    layers = (nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 512, 3), nn.AdaptiveAvgPool2d(1))
    nn.Sequential(*layers)(torch.randn(2, 3, 16, 16)).sum().backward()


def embedded() -> None:
    ids = torch.randint(0, 5000, (4, 32))
    states = nn.TransformerEncoderLayer(256, 4, batch_first=True)(nn.Embedding(5000, 256)(ids))
    functional.cross_entropy(nn.Linear(256, 5000)(states).flatten(0, 1), ids.flatten()).backward()


def half_on_each() -> None:
    here, there = nn.Linear(1024, 1024), nn.Linear(1024, 1024).cuda()
    there(here(torch.randn(4, 1024)).cuda()).sum().backward()
    assert here.weight.grad.device.type == here.bias.grad.device.type == "cpu" and there.weight.grad.is_cuda  # type: ignore[union-attr]


def written_in_place() -> None:
    bias = torch.zeros(1024, requires_grad=True)
    hidden = bias * 2
    hidden += torch.randn(1024, 1024, requires_grad=True).sum(0)
    hidden.sum().backward()
    assert bias.grad is not None and bias.grad.shape == bias.shape


def small() -> None:
    """All of it real: values decide."""
    weight = torch.zeros(3, requires_grad=True)
    loss = (weight - 1).square().sum()
    loss.backward()
    assert loss.item() == 3.0 and weight.grad.tolist() == [-2.0] * 3  # type: ignore[union-attr]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "work",
    [minimal, trained, foreach, recurrent, convolutions, embedded, half_on_each, written_in_place, small],
    ids=lambda work: work.__name__,
)
def test_work_on_the_cpu_simply_works(work: Callable[[], None]) -> None:
    report = om.dry_run(work)
    assert (report.peak_allocated_bytes > 0) == (work is half_on_each)
