"""What plain code derived from models and tensors that a decided name placed is on the GPU in a dry run, too."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

import oom_magic as om

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is decided for the CPU")

TOP = """
import copy, torch
from torch import nn
device = 'cuda' if torch.cuda.is_available() else 'cpu'
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
    def forward(self, x):
        return self.linear(x)
net = Net().to(device)
x = torch.randn(8, 64).to(device)
"""
ON_GPU = {  # made before the dry run; on the GPU in it
    "deepcopy": ("ema = copy.deepcopy(net).eval()", "ema.linear.weight"),
    "averaged": ("from torch.optim.swa_utils import AveragedModel\nema = AveragedModel(net)", "ema.module.linear.weight"),
    "clones": ("shadow = [p.detach().clone() for p in net.parameters()]", "shadow[1]"),
    "by name": ("shadow = {}\nfor n, p in net.named_parameters():\n    shadow[n] = p.data.clone()", "shadow['linear.bias']"),
    "state": ("best = {k: v.clone() for k, v in net.state_dict().items()}", "best['linear.bias']"),
    "steps": ("opt = torch.optim.SGD(net.parameters(), .1, momentum=.9)\nnet(x).sum().backward()\nopt.step()",
              "opt.state[net.linear.weight]['momentum_buffer']"),
    "range": ("ids = torch.arange(8, device=device)", "ids"),
    "like": ("y = torch.zeros_like(x)", "y"),
    "comparison": ("mask = (x > 0) & (x < 1)", "mask"),
    "result": ("features = net(x).detach()", "features"),
    "weighted loss": ("loss = nn.CrossEntropyLoss(weight=torch.ones(10, device=device))", "loss.weight"),
    "batch": ("batch = {'x': torch.ones(4)}\nbatch = {k: v.to(device) for k, v in batch.items()}", "batch['x']"),
    "loop": ("for xb, yb in [(torch.ones(4), torch.ones(4))]:\n    xb, yb = xb.to(device), yb.to(device)", "yb"),
    "buffer": ("memory = []\nfor _ in range(3):\n    memory.append(torch.zeros(4, device=device))", "memory[2]"),
    "attribute": ("net.scale = torch.ones(64, device=device)", "net.scale"),
    "function": ("def make(n, device=device):\n    made = torch.zeros(n).to(device)\n    return made\nz = make(3)", "z"),
    "own choice": ("def make():\n    where = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n"
                   "    return Net().to(where)\nother = make()", "other.linear.weight"),
    "branch": ("other = Net()\nif torch.cuda.is_available():\n    other = other.cuda()", "other.linear.weight"),
    "class": ("class Average:\n    def __init__(self, model):\n        self.shadow = {}\n        for n, p in "
              "model.named_parameters():\n            self.shadow[n] = p.clone().detach()\nema = Average(net)",
              "ema.shadow['linear.weight']"),
    "trainer": ("class Base:\n    def __init__(self, device):\n        self.device = device\n        "
                "self.net = Net().to(self.device)\nclass Trainer(Base):\n    def __init__(self, *, device):\n        "
                "super().__init__(device)\n        self.teacher = copy.deepcopy(self.net)\n"
                "trainer = Trainer(device=device)", "trainer.teacher.linear.weight"),
    "moved inside": ("def place(model):\n    model.to(device)\nother = Net()\nplace(other)", "other.linear.weight"),
    "default device": ("torch.set_default_device(device)\nother = Net()", "other.linear.weight"),
    "device of a model": ("z = torch.zeros(3, device=next(net.parameters()).device)", "z"),
}  # fmt: skip
ON_HOST = {
    "data": ("data = torch.randn(100, 64)", "data"),
    "copy for the host": ("best = {k: v.cpu() for k, v in net.state_dict().items()}", "best['linear.bias']"),
    "tensor on the host": ("kept = x.cpu()", "kept"),
    "explicit": ("kept = x.detach().to('cpu')", "kept"),
    "forgotten": ("target = Net()\ntarget.load_state_dict(net.state_dict())", "target.linear.weight"),
    "sizes of a model": ("other = nn.Linear(net.linear.in_features, x.shape[1])\nz = torch.zeros(len(x))", "other.weight"),
    "sizes in a function": ("def make(x):\n    return torch.zeros(x.shape[0])\nz = make(x)", "z"),
    "loader": ("data = torch.ones(9, 3)\nrows = torch.utils.data.DataLoader(data, pin_memory=torch.cuda.is_available())",
               "rows.dataset"),
}  # fmt: skip


def notebook_of(source: str) -> Any:
    made = types.ModuleType("notebook")
    exec(compile(source, "<ipython-input-1>", "exec", dont_inherit=True), vars(made))
    vars(made)["In"] = [source]
    return made


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", [*ON_GPU, *ON_HOST])
def test_what_was_made_from_placed_values_is_where_it_would_be(case: str) -> None:
    made, name = {**ON_GPU, **ON_HOST}[case]
    expected = "cuda" if case in ON_GPU else "cpu"
    step = f"\ndef step():\n    assert ({name}).device.type == '{expected}'\n    net(x) + 1\n"
    try:
        notebook = notebook_of(TOP + made + step)
        tensor = eval(name, vars(notebook))
        was = tensor.detach().clone()
        assert om.dry_run(notebook.step).peak_allocated_bytes
    finally:
        torch.set_default_device(None)  # type: ignore[arg-type]
        del torch._GLOBAL_DEVICE_CONTEXT.device_context  # type: ignore[attr-defined]  # PyTorch 2.6 asks None for its device
    assert tensor is eval(name, vars(notebook)) and tensor.device.type == "cpu" and tensor.equal(was)


def test_what_stayed_on_the_host_is_named_with_the_fix() -> None:
    notebook = notebook_of(TOP + "models = {'target': Net()}\ndef step():\n    models['target'](x)\n")
    with pytest.raises(
        RuntimeError, match=r"`models\['target'\].linear.bias` was created on the CPU before the dry run"
    ):
        om.dry_run(notebook.step)


def test_devices_in_fields_and_defaults_are_the_gpu_s_and_put_back() -> None:
    notebook = notebook_of(
        TOP
        + "class Config:\n    def __init__(self, device):\n        self.device = device\ncfg = Config(device)\n"
        + "options = {'device': torch.device(device), 'rows': 8}\n"
        + "from dataclasses import dataclass\nfrom functools import partial\n@dataclass\nclass Settings:\n"
        + "    device: str = device\nsettings = Settings()\nclass Fixed:\n    device = device\n"
        + "def ones(n, where):\n    return torch.ones(n, device=where)\nmade = partial(ones, where=device)\n"
        + "def train(rows, where=device, *, also=device):\n    return net(torch.ones(rows, 64, device=where)).to(also)\n"
        + "def step():\n    assert train(2).is_cuda and torch.ones(2, device=cfg.device).is_cuda\n"
        + "    assert torch.ones(options['rows'], device=options['device']).is_cuda\n"
        + "    assert settings.device == Settings().device == Fixed.device == 'cuda' and made(3).is_cuda\n"
    )
    before = notebook.settings
    om.dry_run(notebook.step)
    assert notebook.cfg.device == "cpu" and notebook.options["device"] == torch.device("cpu")
    assert before is notebook.settings and before.device == notebook.Settings().device == notebook.Fixed.device == "cpu"
    assert notebook.made.keywords == {"where": "cpu"}
    assert notebook.train.__defaults__ == ("cpu",) and notebook.train.__kwdefaults__ == {"also": "cpu"}


def test_what_shares_memory_shares_it_on_the_gpu() -> None:
    notebook = notebook_of(
        TOP + "state = net.state_dict()\nflat = x.view(-1)\n"
        "def step():\n    flat.zero_()\n    assert flat.data_ptr() == x.data_ptr()\n"
        "    assert state['linear.weight'].data_ptr() == net.linear.weight.data_ptr()\n    net(x)\n"
    )
    assert om.dry_run(notebook.step).breakdown["parameter"] == 64 * 64 * 4 + 512


def test_code_that_refers_to_itself_is_gone_through() -> None:
    notebook = notebook_of(
        TOP + "class Node:\n    def __init__(self):\n        self.net, self.me = Net().to(device), self\n"
        "    def again(self):\n        return self.again()\nnode = Node()\nnode.other = node\nif not net:\n    node.again()\n"
        "def step():\n    assert node.me.other.net.linear.weight.is_cuda\n"
    )
    om.dry_run(notebook.step)


FORMS = {  # of a device that was decided without a GPU, and where it is read
    "branches that print": ("if torch.cuda.is_available():\n    dev = 'cuda'\n    print('GPU')\nelse:\n    dev = 'cpu'\n"
                            "    print('no GPU')", "dev"),
    "parser": ("import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('-d', '--my-device', "
               "default=device)\nargs = parser.parse_args([])", "args.my_device"),
    "set on arguments": ("import argparse\nargs = argparse.Namespace(no_cuda=False)\nargs.cuda = not args.no_cuda and "
                         "torch.cuda.is_available()\nargs.device = torch.device('cuda' if args.cuda else 'cpu')",
                         "args.device"),
    "factory": ("import dataclasses\n@dataclasses.dataclass\nclass Config:\n    device: str = dataclasses.field("
                "default_factory=lambda: device)\ncfg = Config()", "cfg.device"),
    "after the fields": ("import dataclasses\n@dataclasses.dataclass\nclass Config:\n    device: str = ''\n"
                         "    def __post_init__(self):\n        self.device = self.device or device\ncfg = Config()",
                         "cfg.device"),
    "closure": ("def make(where):\n    def get():\n        return where\n    return get\nget = make(device)", "get()"),
    "a file's name": ("from file_with_device import where", "where"),
    "a file's attribute": ("import file_with_device", "file_with_device.where"),
    "all of a file": ("from file_with_device import *", "where"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_device_in_another_form_is_the_gpu_s(form: str, tmp_path: Any, monkeypatch: Any) -> None:
    code = "import torch\nwhere = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
    (tmp_path / "file_with_device.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "file_with_device", raising=False)
    made, device = FORMS[form]
    notebook = notebook_of(f"{TOP}{made}\ndef step():\n    assert torch.ones(2, device={device}).is_cuda\n")
    report = om.dry_run(notebook.step)
    assert any("GPU" in one.text for one in report.assumptions)
    assert torch.device(eval(device, vars(notebook))).type == "cpu"


VALUES = {  # that were decided without a GPU: what makes them, where they are read, and what they are with a GPU
    "a context": ("from contextlib import nullcontext\nctx = nullcontext() if device == 'cpu' else "
                  "torch.autocast(device, torch.bfloat16)", "ctx.fast_dtype", "torch.bfloat16"),
    "a scaler": ("scaler = torch.amp.GradScaler()", "scaler.is_enabled()", "True"),
    "fields of a class": ("class Config:\n    where = device\n    amp = where == 'cuda'\n"
                          "    dtype = torch.float16 if amp else torch.float32", "Config.dtype", "torch.float16"),
    "fields of a dataclass": ("from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Config:\n"
                              "    rows: int = 64 if torch.cuda.is_available() else 8\ncfg = Config()",
                              "cfg.rows + Config().rows", "128"),
    "an attribute": ("class Trainer:\n    def __init__(self, amp):\n        use = amp and torch.cuda.is_available()\n"
                     "        can = torch.cuda.is_available()\n        self.amp, self.can = use, can\n"
                     "        self.dtype = torch.float16 if can else torch.float32\ntrainer = Trainer(True)",
                     "trainer.dtype", "torch.float16"),
    "of a function": ("def pick():\n    return torch.float16 if torch.cuda.is_available() else torch.float32\n"
                      "class Trainer:\n    def __init__(self, dtype):\n        self.dtype = dtype\n"
                      "trainer = Trainer(pick())", "trainer.dtype", "torch.float16"),
    "a default": ("def f(rows=64 if torch.cuda.is_available() else 8):\n    return rows", "f()", "64"),
    "an optimizer's": ("opt = torch.optim.SGD(net.parameters(), 0.1, fused=torch.cuda.is_available())",
                       "opt.param_groups[0]['fused']", "True"),
    "a loader's": ("rows = torch.utils.data.DataLoader(range(64), batch_size=32 if torch.cuda.is_available() else 4)",
                   "len(next(iter(rows)))", "32"),
    "a loader's by a name": ("if torch.cuda.is_available():\n    size = 32\nelse:\n    size = 4\n"
                             "rows = torch.utils.data.DataLoader(range(64), size)", "len(next(iter(rows)))", "32"),
    "set since": ("class Config:\n    amp = torch.cuda.is_available()\nConfig.amp = False", "Config.amp", "False"),
    "with an effect": ("log = []\nclass Config:\n    amp = log.append(1) or torch.cuda.is_available()",
                       "Config.amp + len(log)", "1"),
    "a function with branches": ("def pick():\n    if torch.cuda.is_available():\n        return torch.device('cuda')\n"
                                 "    elif torch.backends.mps.is_available():\n        return torch.device('mps')\n"
                                 "    return torch.device('cpu')\nclass Config:\n    where = pick()", "Config.where.type", "'cuda'"),
    "set in a branch": ("class Trainer:\n    dtype = torch.float32\n    def __init__(self, where):\n"
                        "        if where == 'cuda':\n            self.dtype = torch.float16\ntrainer = Trainer(device)",
                        "trainer.dtype", "torch.float16"),
    "set in the other branch": ("class Config:\n    pass\ncfg = Config()\nif not torch.cuda.is_available():\n"
                                "    cfg.rows = 8\nelse:\n    cfg.rows = 64", "cfg.rows", "64"),
    "in a branch that one GPU does not take": ("class Config:\n    cards = 1\ncfg = Config()\n"
                                               "if torch.cuda.device_count() > 1:\n    cfg.cards = 2", "cfg.cards", "1"),
    "a context of an object's": ("class Trainer:\n    def __init__(self, where):\n        self.where = torch.device(where)\n"
                                 "        amp = self.where.type == 'cuda'\n        self.ctx = torch.autocast("
                                 "self.where.type, torch.bfloat16, enabled=amp)\ntrainer = Trainer(device)",
                                 "trainer.ctx.device + str(trainer.ctx._enabled)", "'cudaTrue'"),
    "a library's settings": ("from collections import UserDict\ncfg = UserDict({'amp': torch.cuda.is_available(), "
                             "'train': {'rows': 64 if torch.cuda.is_available() else 8}})",
                             "(cfg['amp'], cfg['train']['rows'])", "(True, 64)"),
    "keywords": ("class Trainer:\n    def __init__(self, where):\n        self.put = dict(device=where)\n"
                 "        self.rows = torch.ones(3, **self.put)\ntrainer = Trainer(device)",
                 "(trainer.rows.device.type, trainer.put['device'])", "('cuda', 'cuda')"),
    "keywords that a GPU fills": ("import inspect\ndef configure(model, where):\n"
                                  "    fused = 'fused' in inspect.signature(torch.optim.AdamW).parameters\n"
                                  "    use_fused = fused and where == 'cuda'\n"
                                  "    extra_args = dict(fused=True) if use_fused else dict()\n"
                                  "    made = torch.optim.AdamW(model.parameters(), lr=1e-3, **extra_args)\n"
                                  "    return made\nopt = configure(net, device)",
                                  "(opt.param_groups[0]['fused'], opt.defaults['fused'])", "(True, True)"),
    "keywords updated": ("settings = {'batch_size': 4}\nif device == 'cuda':\n    settings.update({'pin_memory': True})\n"
                         "    settings.update(timeout=3)\n"
                         "rows = torch.utils.data.DataLoader(range(64), **settings)",
                         "(rows.pin_memory, rows.timeout, len(settings))", "(True, 3, 3)"),
    "a class with branches": ("class Config:\n    if torch.cuda.is_available():\n        rows = 64\n"
                              "    elif torch.backends.mps.is_available():\n        rows = 16\n"
                              "    else:\n        rows = 8\ncfg = Config()", "cfg.rows", "64"),
    "a local name of both branches": ("class Trainer:\n    def __init__(self, where):\n        shown = 1\n"
                                      "        if where != 'cuda':\n            dtype, rows = torch.float32, 8\n"
                                      "            rows = 8\n            dtype = torch.float32\n"
                                      "        else:\n            dtype = torch.float16\n            rows = 32\n"
                                      "            shown = 2\n        self.told = {'rows': rows * 2, 'shown': shown}\n"
                                      "        self.dtype = dtype\ntrainer = Trainer(device)",
                                      "(trainer.dtype, trainer.told)", "(torch.float16, {'rows': 64, 'shown': 2})"),
    "both branches, set since": ("class Config:\n    if torch.cuda.is_available():\n        rows = 64\n    else:\n"
                                 "        rows = 8\nConfig.rows = 16", "Config.rows", "16"),
    "fields of attrs": ("import attrs\n@attrs.frozen\nclass Config:\n    where: str = device\n"
                        "    amp: bool = attrs.field(factory=lambda: torch.cuda.is_available())\n"
                        "    rows: int = attrs.field(default=64 if torch.cuda.is_available() else 8)\ncfg = Config()",
                        "(cfg, Config())", "(Config('cuda', True, 64), Config('cuda', True, 64))"),
    "a tuple with names": ("from typing import NamedTuple\nclass Config(NamedTuple):\n    where: str = device\n"
                           "    rows: int = 64 if torch.cuda.is_available() else 8\ncfg = Config()",
                           "tuple(cfg) + tuple(Config())", "('cuda', 64, 'cuda', 64)"),
    "slots": ("class Config:\n    __slots__ = ('where', 'rows')\n    def __init__(self, where=device):\n"
              "        self.where, self.rows = where, 64 if where == 'cuda' else 8\ncfg = Config()",
              "(cfg.where, cfg.rows)", "('cuda', 64)"),
    "environment": ("import os\nos.environ['DRY_DEVICE'] = device", "torch.device(os.environ['DRY_DEVICE']).type", "'cuda'"),
    "a member": ("import enum\nclass Dev(enum.Enum):\n    MAIN = device\n    HOST = 'cpu'",
                 "Dev.MAIN.value + Dev.HOST.value", "'cudacpu'"),
    "a text's member": ("import enum\nclass Dev(str, enum.Enum):\n    MAIN = device\n    HOST = 'cpu2'",
                        "torch.device(Dev.MAIN).type + Dev['MAIN'].value + Dev.HOST.value", "'cudacudacpu2'"),
    "a module's": ("class Kept(nn.Module):\n    def __init__(self, where):\n        super().__init__()\n"
                   "        self.where, self.linear = where, nn.Linear(3, 3)\nclass Outer(nn.Module):\n"
                   "    def __init__(self, where):\n        super().__init__()\n        self.inner = Kept(where)\n"
                   "from torch.optim.swa_utils import AveragedModel\nmodel = Outer(device).to(device)\n"
                   "other = copy.deepcopy(model)\nema = AveragedModel(model)",
                   "{one.device.type for m in (model, other, ema.module) for one in (m.inner.linear.weight, "
                   "torch.ones(1, device=m.inner.where))}", "{'cuda'}"),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", VALUES)
@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled")
def test_a_value_decided_for_want_of_a_gpu_is_what_it_is_with_one(form: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("DRY_DEVICE", "")
    made, read, expected = VALUES[form]
    notebook = notebook_of(
        f"{TOP}{made}\nseen = []\ndef step():\n    net(x)\n    assert {read} == {expected}, {read}\n"
    )

    def reads() -> str:
        try:
            return repr(eval(read, vars(notebook)))
        except AttributeError:  # of a context that does nothing
            return "absent"

    before = reads()
    assert om.dry_run(notebook.step).peak_allocated_bytes
    assert reads() == before


def test_defaults_of_pydantic_s_settings_are_what_they_are_with_a_gpu() -> None:
    pytest.importorskip("pydantic")
    notebook = notebook_of(
        TOP + "from pydantic import BaseModel\nclass Settings(BaseModel):\n    where: str = device\n"
        "    rows: int = 64 if torch.cuda.is_available() else 8\ncfg = Settings()\n"
        "def step():\n    net(x)\n    assert (cfg.where, cfg.rows) == ('cuda', 64) and Settings() == cfg\n"
    )
    om.dry_run(notebook.step)
    assert (notebook.cfg.where, notebook.cfg.rows) == ("cpu", 8) and notebook.Settings() == notebook.cfg


def test_what_accelerate_prepared_without_a_gpu_is_on_it(fresh_accelerate: Any) -> None:
    notebook = notebook_of(
        "import torch\nfrom torch import nn\nfrom accelerate import Accelerator\nclass Trainer:\n"
        "    def __init__(self):\n        self.acc = Accelerator(mixed_precision='bf16')\n"
        "        net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 8))\n"
        "        optimizer = torch.optim.AdamW(net.parameters())\n"
        "        rows = torch.utils.data.DataLoader(torch.randn(16, 256), batch_size=8)\n"
        "        self.net, self.optimizer, self.rows = self.acc.prepare(net, optimizer, rows)\n"
        "        self.net[0].register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))\n"
        "    def fit(self):\n        for row in self.rows:\n            loss = self.net(row).square().mean()\n"
        "            assert row.is_cuda and loss.is_cuda and seen[-1] is torch.bfloat16\n"
        "            self.acc.backward(loss)\n            self.optimizer.step()\n            self.optimizer.zero_grad()\n"
        "seen = []\ntrainer = Trainer()\ntrainer.fit.__func__\ndef again():\n    trainer.fit()\n"
    )
    trainer = notebook.trainer
    report = om.dry_run(notebook.again)
    assert report.breakdown["optimizer_state"] >= 2 * 256 * 264 * 4
    assert {one.device.type for one in (trainer.net[0].weight, next(iter(trainer.rows)))} == {"cpu"}
    assert trainer.acc.device.type == "cpu" and trainer.rows.device.type == "cpu"


def test_accelerate_told_to_use_the_cpu_stays_there(fresh_accelerate: Any) -> None:
    notebook = notebook_of(
        "import torch\nfrom accelerate import Accelerator\nacc = Accelerator(cpu=True)\n"
        "net = acc.prepare(torch.nn.Linear(8, 8))\ndef step():\n    assert not net(torch.ones(2, 8)).is_cuda\n"
        "    assert acc.device.type == 'cpu'\n"
    )
    assert not om.dry_run(notebook.step).peak_allocated_bytes
