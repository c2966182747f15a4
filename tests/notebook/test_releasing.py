"""``%oom_free`` on the pretend GPU: what failed dry cells hold goes, to the byte, and names of dry cells can go."""

from __future__ import annotations

import gc
import weakref

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from oom_magic.measure.holders.release import Released
from oom_magic.units import GIB, MIB

DEFINE = """%%gpumem --no-plot
import torch
from torch import nn
model = nn.Linear(1024, 1024, bias=False, device="cuda")

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1024, 1024)
        self.kept = []

    def forward(self, x):
        self.kept.append(self.layer(x).relu())
        return self.kept[-1]

def train(rows, blocks=20):
    own = nn.Sequential(*[Block() for _ in range(blocks)]).to("cuda")
    own(torch.randn(rows, 1024, device="cuda")).sum().backward()
"""


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are dry runs here, also on a machine with a GPU."""
    monkeypatch.setattr("oom_magic.notebook.magics.has_gpu", lambda: False)
    monkeypatch.setattr("oom_magic.notebook.cells.releasing.find_accelerators", list)


def release(shell: InteractiveShell, line: str = "%oom_free") -> Released:
    result: Released = shell.run_cell(line, store_history=True).result
    return result


@pytest.mark.slow
def test_a_failed_dry_cell_leaves_nothing(shell: InteractiveShell) -> None:
    shell.run_cell(DEFINE, store_history=True)
    before = release(shell).allocated_bytes
    assert before == 4 * MIB
    assert not shell.run_cell("%%gpumem --no-plot\ntrain(200_000)", store_history=True).success
    released = release(shell)
    assert released.allocated_bytes == before
    assert released.freed_allocated_bytes > 8 * GIB
    assert str(released).index("There is no GPU here: this is") < str(released).index("\npretend NVIDIA")
    assert "nothing to release" not in str(released)
    assert released.freed[0].what.startswith("OutOfMemoryError in")
    assert released.freed[0].num_bytes > 8 * GIB
    assert [(one.name, one.num_bytes) for one in released.holders] == [("model", 4 * MIB)]
    assert shell.run_cell("%%gpumem --no-plot\ntrain(8)", store_history=True).success


def test_names_of_dry_cells_can_go(shell: InteractiveShell) -> None:
    shell.run_cell("model = 'mine'")
    shell.run_cell(DEFINE, store_history=True)
    released = release(shell, "%oom_free --names model")
    assert released.allocated_bytes == 0
    assert shell.user_ns["model"] == "mine"
    error = shell.run_cell("%oom_free --names trian").error_in_exec
    assert isinstance(error, UsageError) and "did you mean 'train'" in str(error)


def test_a_model_that_a_dry_cell_moved_is_named(shell: InteractiveShell) -> None:
    shell.run_cell("import torch\nhost = torch.nn.Linear(1024, 1024, bias=False)")
    shell.run_cell("%%gpumem --no-plot\nhost.to('cuda')\nNone", store_history=True)
    assert [(one.name, one.num_bytes) for one in release(shell).holders] == [("host", 4 * MIB)]


@pytest.mark.slow
def test_what_a_dry_cell_used_is_not_kept_alive(shell: InteractiveShell) -> None:
    shell.run_cell(
        "import torch\nhost = torch.nn.Linear(64, 64)\nhost.parent = [host]\n"
        "sgd = torch.optim.SGD(host.parameters(), lr=1, momentum=0.9)\n"
        "def step():\n    host.train(not host.training)\n    host(torch.ones(64)).sum().backward()\n    sgd.step()\n"
        "step()"
    )
    users = shell.user_ns
    tensors = [users["host"].weight, users["host"].weight.grad, users["sgd"].state[users["host"].weight]]
    ghosts = [weakref.ref(one) for one in (*tensors[:2], tensors[2]["momentum_buffer"])]
    del tensors
    for _ in range(2):
        assert shell.run_cell("%%gpumem --no-plot\nstep()", store_history=True).success
    assert not users["host"].training
    shell.run_cell("del host, sgd, step")
    gc.collect()
    assert [ghost() for ghost in ghosts] == [None] * 3


@pytest.mark.slow
def test_what_the_user_changed_since_a_dry_cell_is_seen_by_the_next(shell: InteractiveShell) -> None:
    shell.run_cell("import torch\nhost = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))")
    shell.run_cell("%%gpumem --no-plot\nhost.eval()\nhost.note = 'dry'\nhost[1] = None", store_history=True)
    assert shell.user_ns["host"].training and not hasattr(shell.user_ns["host"], "note")
    shell.run_cell("host[0] = torch.nn.Linear(8, 8)")
    shell.run_cell("%%gpumem --no-plot\nseen = host[0].in_features, host.training, host.note, host[1]")
    assert shell.run_cell("%gpumem --no-plot seen").result == (8, False, "dry", None)
    assert shell.user_ns["host"][1] is not None


def test_an_unloaded_extension_keeps_no_dry_run(shell: InteractiveShell) -> None:
    shell.run_cell("%%gpumem --no-plot\nimport torch\nkept = torch.ones(1024, device='cuda')", store_history=True)
    session = shell.magics_manager.registry["OOMMagics"].runner.session
    ghost = weakref.ref(session)
    del session
    shell.run_line_magic("reload_ext", "oom_magic")
    gc.collect()
    assert ghost() is None


def test_without_a_gpu_or_dry_cells_there_is_nothing_to_free(shell: InteractiveShell) -> None:
    assert release(shell).describe().title == "Nothing to free"
