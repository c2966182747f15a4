"""What dry runs leave behind in a process that imports its libraries inside them: nothing, and nothing replaced."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import oom_magic as om

_CODE = r"""
import gc, json, os, sys, threading, types
import torch, torch.utils.checkpoint
import transformers  # which sets variables itself
before = dict(os.environ)
from IPython.core.interactiveshell import InteractiveShell
import oom_magic as om
from oom_magic.explain.remedies import rehearsal as prices
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.session import DrySession

def trains(rows):
    from tqdm import tqdm
    for _ in tqdm(range(2)):
        pass
    model = torch.nn.Linear(64, 64, device="cuda")
    model(torch.zeros(rows, 64, device="cuda")).sum().backward()
    torch.optim.AdamW(model.parameters()).step()

def checkpointed():
    model = torch.nn.Linear(64, 64, device="cuda")
    hidden = torch.utils.checkpoint.checkpoint(model, torch.zeros(8, 64, device="cuda"), use_reentrant=False)
    hidden.repeat(2**27, 1)

prices.PATIENCE_SECONDS = 5
CARD = "%%gpumem --dry-run --no-plot --memory 2GiB\nimport torch\n"

def in_cells():
    shell = InteractiveShell.instance(history_manager=None)
    shell.run_line_magic("load_ext", "oom_magic")
    shell.run_cell(CARD + "model = torch.nn.Linear(1024, 1024, device='cuda')", store_history=True)
    failing = (
        "batch_size = 64\nx = torch.zeros(batch_size, 4096, 1024, device='cuda')\n"
        "torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).repeat(4, 1, 1).square().mean().backward()"
    )
    assert not shell.run_cell(CARD + failing, store_history=True).success
    for line in ("%oom_explain", "%oom_free"):
        assert shell.run_cell(line, store_history=True).success
    shell.run_line_magic("unload_ext", "oom_magic")
    shell.reset(new_session=False)

entries = {
    "fits": lambda: om.dry_run(trains, 8),
    "does not fit": lambda: om.dry_run(trains, 2**30),
    "does not fit behind a checkpoint": lambda: om.dry_run(checkpointed),
    "size": lambda: om.size(trains, rows=(8, 64)),
    "cells": in_cells,
    "setup": om.TrainingSetup("distilbert-base-uncased", method="lora", seq_len=64).dry_run,
    "doctor": lambda: om.doctor(model="distilbert-base-uncased", gpu="RTX 3060", memory="4GiB"),
}

def alive():
    gc.collect()
    kinds = (DrySession, FakeGPU, BaseException, types.FrameType, types.TracebackType)
    live = [one for one in gc.get_objects() if issubclass(type(one), (torch.Tensor, *kinds))]
    with torch._C.DisableTorchFunctionSubclass():  # libraries keep small tables of real tensors
        return {id(one): type(one).__name__ for one in live if not isinstance(one, torch.Tensor) or one.is_meta}

known, left = alive(), {}
for name, run in entries.items():
    run()
    left[name] = [kind for key, kind in alive().items() if key not in known]

def is_replaced(value):
    return str(getattr(value, "__module__", "")).startswith("oom_magic.predict")

def values(module):
    for name, value in vars(module).items():
        yield name, value
        if type(value) is type:
            yield from vars(value).items()

left["environment"] = dict(os.environ.items() ^ before.items())
left["threads"] = [one.name for one in threading.enumerate() if "HistorySaving" not in one.name][1:]
left["replaced"] = [
    f"{module.__name__}.{name}"
    for module in list(sys.modules.values())
    if type(module) is types.ModuleType and not module.__name__.startswith(("oom_magic", "__main__"))
    for name, value in values(module) if is_replaced(value)
]
import peft, transformers
model = transformers.BertModel(transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"])).save_pretrained(sys.argv[1])
model.save_pretrained(sys.argv[1])
print(json.dumps(left), file=sys.stderr)
"""


@pytest.mark.slow
def test_dry_runs_leave_nothing_alive_and_nothing_replaced(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    done = subprocess.run([sys.executable, "-c", _CODE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    left = json.loads(done.stderr.splitlines()[-1])
    assert not any(left.values()), left
    # libraries that were first imported in a dry run, which writes no files, write them afterwards
    assert {file.name for file in tmp_path.glob("*.safetensors")} == {"adapter_model.safetensors", "model.safetensors"}


_LIBRARY = """\
import torch
from huggingface_hub.constants import HF_HUB_OFFLINE as is_offline
from torch import Generator
from torch.cuda import CUDAGraph, Event, Stream, current_stream, is_available
"""


def test_what_a_library_copies_in_a_dry_run_is_the_original_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_library_that_copies.py").write_text(_LIBRARY)

    def train() -> None:
        import a_library_that_copies as library  # type: ignore[import-not-found]

        assert library.is_offline and library.is_available()
        stream = library.Stream()
        assert isinstance(stream, library.Stream)
        library.current_stream().wait_stream(stream)

    om.dry_run(train)
    library = sys.modules.pop("a_library_that_copies")
    for name in ("CUDAGraph", "Event", "Stream"):
        assert getattr(library, name) is getattr(torch.cuda, name)
    assert library.Generator is torch.Generator
    assert not library.is_offline
    assert library.is_available() == torch.cuda.is_available()
    assert library.current_stream.__wrapped__ is torch.cuda.current_stream


def test_what_a_library_puts_into_pytorch_is_taken_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_library_that_patches.py").write_text(_PATCHING_LIBRARY)
    linear = torch.nn.functional.linear

    def train() -> None:
        import a_library_that_patches  # type: ignore[import-not-found] # noqa: F401

        torch.nn.Linear(8, 8).to("cuda")(torch.zeros(1, 8, device="cuda"))

    om.dry_run(train)
    patches = sys.modules.pop("a_library_that_patches")
    assert patches.calls, "what the library put there was called in the run"
    assert torch.nn.functional.linear is linear


_PATCHING_LIBRARY = """\
import torch.nn.functional as F
calls, linear = [], F.linear
def another_linear(*args, **kwargs):
    calls.append(args)
    return linear(*args, **kwargs)
F.linear = another_linear
"""
