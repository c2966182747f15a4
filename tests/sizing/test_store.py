"""Sizes are kept on disk: there at once the second time, and never those of something else."""

from __future__ import annotations

import linecache
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from oom_magic.language import using_language
from oom_magic.predict.setups.setup import TrainingSetup, local_configurations
from oom_magic.predict.sizing import store
from oom_magic.predict.sizing.fingerprint import fingerprint
from oom_magic.predict.sizing.sizes import size
from tests.sizing.test_sizes import same


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store, "is_on", True)
    monkeypatch.setattr(store, "folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.mark.slow
def test_the_second_time_nothing_is_run(folder: Path) -> None:
    pytest.importorskip("transformers")
    setup = TrainingSetup("gpt2", gpu="A100 80GB")
    first, second = (setup.sizes(microbatch_size=(2, 8)) for _ in range(2))
    assert first.num_traces > 0
    assert second.num_traces == 0
    assert same(first.report(microbatch_size=5), second.report(microbatch_size=5))
    assert first.peak_allocated_bytes(microbatch_size=5) == second.peak_allocated_bytes(microbatch_size=5)
    other = second.on("RTX 4090")  # what was read from disk is compared with runs of this process
    assert same(other.report(microbatch_size=3), setup.replace(gpu="RTX 4090", microbatch_size=3).dry_run())
    assert all(file.stat().st_mode & 0o077 == 0 for file in folder.iterdir())
    assert "torch" not in loaded_to_read(folder)


def loaded_to_read(folder: Path) -> list[str]:
    """The modules that a new process has when it has read all that is kept."""
    code = "import pickle, sys, zlib\nfor name in sys.argv[1:]:\n    pickle.loads(zlib.decompress(open(name, 'rb').read()))"
    command = [sys.executable, "-c", f"{code}\nprint(*sys.modules)", *map(str, folder.iterdir())]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.slow
def test_sliders_of_a_function_are_there_again_without_pytorch(tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(
        "def train(batch_size=8):\n    import torch\n    net = torch.nn.Linear(64, 64).cuda()\n"
        "    net(torch.ones(batch_size, 64, device='cuda')).sum().backward()\n"
    )
    code = "import sys, oom_magic, training; oom_magic.sliders(training.train, gpu='T4'); print('torch' in sys.modules)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code]
    runs = [
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [run.stdout.split()[-1] for run in runs] == ["True", "False"]


def made(what: Any, found: list[Any]) -> Any:
    found.append(what)
    return f"made of {what}"


def test_each_thing_is_kept_for_itself_and_damage_only_costs_time(folder: Path) -> None:
    calls: list[Any] = []
    for what in (1, 1, 2, 1):
        assert store.stored(lambda what=what: what, lambda what=what: made(what, calls)) == f"made of {what}"
    assert calls == [1, 2]
    for file in folder.iterdir():
        file.write_bytes(b"damaged")
    assert store.stored(lambda: 1, lambda: made(1, calls)) == "made of 1"
    assert calls == [1, 2, 1]
    assert store.stored(lambda: 3, lambda: lambda: 0)() == 0  # cannot be pickled
    assert {file.suffix for file in folder.iterdir()} == {".sizes"}


def test_other_versions_and_settings_have_files_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    store.stored(lambda: 1, lambda: made(1, calls))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    store.stored(lambda: 1, lambda: made(1, calls))
    monkeypatch.setattr(torch, "__version__", "2.99")
    store.stored(lambda: 1, lambda: made(1, calls))
    torch.set_grad_enabled(False)
    store.stored(lambda: 1, lambda: made(1, calls))
    torch.set_grad_enabled(True)
    with using_language("zh"):  # what could not be followed is said in words
        store.stored(lambda: 1, lambda: made(1, calls))
    assert len(calls) == len(list(folder.iterdir())) == 5


def test_nothing_is_kept_where_a_library_was_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
    calls: list[Any] = []
    own = FunctionType((lambda self, x: x).__code__, {"__name__": "liger_kernel.transformers"})
    with monkeypatch.context() as changes:
        changes.setattr(modeling.GPT2MLP, "forward", own)
        store.stored(lambda: 1, lambda: made(1, calls))
    with monkeypatch.context() as changes:
        changes.setattr(torch.nn.functional, "scaled_dot_product_attention", own)
        store.stored(lambda: 1, lambda: made(1, calls))
    with torch.device("cpu"):
        store.stored(lambda: 1, lambda: made(1, calls))
    assert len(calls) == 3 and not folder.exists()


TRAINING = """
import torch
class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = torch.nn.Linear(width, WIDE)
    def forward(self, x):
        return self.layer(x)
def train(batch_size=4, width=64):
    model = Net(width).cuda()
    optimizer = OPTIMIZER(model.parameters())
    for _ in range(2):
        model(torch.zeros(batch_size, width, device="cuda")).sum().backward()
        optimizer.step()
"""


def in_a_cell(text: str, **names: Any) -> Any:
    """A function as a cell defines it, where these names stand."""
    linecache.cache["<ipython-input-3-abc>"] = (len(text), None, text.splitlines(keepends=True), "")
    space = {"__name__": "__main__", "WIDE": 32, "OPTIMIZER": torch.optim.AdamW, **names}
    exec(compile(text, "<ipython-input-3-abc>", "exec"), space)
    return space["train"]


def test_a_function_is_not_run_the_second_time(folder: Path) -> None:
    first, again = (size(in_a_cell(TRAINING), batch_size=(1, 8), gpu="T4") for _ in range(2))
    assert first.num_traces > 0 and again.num_traces == 0
    assert same(first.report(batch_size=5), again.report(batch_size=5))
    assert size(in_a_cell(TRAINING), batch_size=(1, 9), gpu="T4").num_traces > 0


def test_functions_are_known_by_their_code_and_what_it_uses() -> None:
    net = in_a_cell(TRAINING).__globals__["Net"]
    others = [
        in_a_cell(TRAINING),
        in_a_cell(TRAINING, WIDE=33),
        in_a_cell(TRAINING, OPTIMIZER=torch.optim.SGD),
        in_a_cell(TRAINING.replace("Linear(width, WIDE)", "Linear(width, WIDE, bias=False)")),
        in_a_cell(TRAINING.replace("range(2)", "range(3)")),
        in_a_cell("\n" + TRAINING),  # reports name its lines
        partial(in_a_cell(TRAINING), width=128),
        net(4).forward,  # tensors: whatever they are, they are not told
    ]
    told = [fingerprint(other) for other in others]
    assert told[-1] is None and len(set(map(repr, told))) == len(told) and None not in told[:-1]
    assert fingerprint(in_a_cell(TRAINING)) == told[0]
    train = in_a_cell(TRAINING)
    train.__globals__["Net"].forward = lambda self, x: self.layer(x).relu()
    assert fingerprint(train) != told[0]


def test_without_hugging_faces_libraries_a_function_is_known_too(monkeypatch: pytest.MonkeyPatch) -> None:
    known = fingerprint(in_a_cell(TRAINING))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", None)
    assert known is not None and fingerprint(in_a_cell(TRAINING)) == known


def test_a_function_that_reads_what_cannot_be_known_is_run_anew(folder: Path, tmp_path: Path) -> None:
    weights = torch.zeros(8)
    steps = TRAINING.replace("range(2)", "range(STEPS())")
    asking = TRAINING.replace("range(2)", "range(len(os.environ.get('x', 'ab')))")
    for function in (in_a_cell(steps, STEPS=lambda: int(weights.numel() / 4)), in_a_cell("import os\n" + asking)):
        assert fingerprint(function) is None
    torch.save(2, tmp_path / "width")
    reading = TRAINING.replace("range(2)", "range(int(torch.load(PLACE + 'h')))")
    train = in_a_cell(reading, PLACE=str(tmp_path / "widt"))
    assert fingerprint(train) is not None  # no name of a file in it
    assert size(train, batch_size=(1, 2), gpu="T4").num_traces > 0
    assert not folder.exists()


def test_a_library_whose_files_changed_is_another(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    file = tmp_path / "part" / "modeling.py"
    file.write_text("size = 1")
    first = store.digest_of_code([tmp_path])
    assert store.digest_of_code([tmp_path]) == first
    file.write_text("size = 10")
    assert store.digest_of_code([tmp_path]) != first


def test_a_configuration_on_the_machine_is_part_of_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = local_configurations("openai-community/gpt2")
    Path("openai-community/gpt2").mkdir(parents=True)
    Path("openai-community/gpt2/config.json").write_text("{}")
    assert local_configurations("openai-community/gpt2") != before


def test_a_folder_that_cannot_be_written_only_costs_time(folder: Path) -> None:
    folder.write_text("a file")
    assert store.stored(lambda: 1, lambda: "made") == "made"


def test_the_longest_unused_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(store, "MOST_BYTES", 0)
    store.stored(lambda: 1, lambda: made(1, calls))
    assert list(folder.iterdir()) == []
