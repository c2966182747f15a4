"""What the frames of an allocation tell."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from oom_magic.measure.history.attribution import Allocation, classify, mirrored_operators
from oom_magic.measure.history.frames import AUTOGRAD_SITE, Frame, Site, site_of, source_line
from oom_magic.memory.categories import Category
from oom_magic.memory.timeline import Phase, SourceLine

TORCH = str(Path(torch.__file__).parent)
CELL = Frame("/tmp/ipykernel_42/99.py", 3, "<module>")
LINEAR = Frame(f"{TORCH}/nn/modules/linear.py", 125, "forward")
CALL = Frame(f"{TORCH}/nn/modules/module.py", 1779, "_call_impl")
ADAM = Frame(f"{TORCH}/optim/adam.py", 200, "_multi_tensor_adam")
RECOMPUTE = Frame(f"{TORCH}/utils/checkpoint.py", 1100, "unpack_hook")
BACKWARD = Frame(f"{TORCH}/autograd/__init__.py", 300, "backward")
CONVERT = Frame(f"{TORCH}/nn/modules/module.py", 1300, "convert")
APPLY = Frame(f"{TORCH}/nn/modules/module.py", 900, "_apply")
IN_FUNCTION = Frame(f"{TORCH}/autograd/function.py", 300, "apply")
KERNEL = Frame(f"{sysconfig.get_path('purelib')}/ipykernel/zmqshell.py", 500, "run_cell")


@pytest.mark.parametrize(
    ("frames", "phase", "operator"),
    [
        ((LINEAR, CALL, CELL, KERNEL), Phase.FORWARD, "linear.forward"),
        ((ADAM, CELL, KERNEL), Phase.OPTIMIZER, "_multi_tensor_adam"),
        ((BACKWARD, CELL, KERNEL), Phase.BACKWARD, "backward"),
        ((LINEAR, CALL, RECOMPUTE), Phase.BACKWARD, "linear.forward"),
        ((LINEAR, CALL, RECOMPUTE, BACKWARD, CELL), Phase.BACKWARD, "linear.forward"),
        ((CELL, IN_FUNCTION), Phase.BACKWARD, ""),
        ((LINEAR, CALL, CELL, ADAM, CELL, KERNEL), Phase.FORWARD, "linear.forward"),  # a closure of step()
        ((CELL, KERNEL), None, ""),
        ((CONVERT, APPLY, CELL, KERNEL), None, "module.convert"),
    ],
)
def test_phase_and_operator(frames: tuple[Frame, ...], phase: Phase | None, operator: str) -> None:
    site = site_of(frames)
    assert (site.phase, site.operator) == (phase, operator)
    assert site.makes_parameters == (APPLY in frames)
    assert site.calls_backward == (BACKWARD in frames)
    if CELL in frames:
        assert site.line is not None
        assert site.line.line == 3


def test_no_frames_means_autograds_thread() -> None:
    assert site_of(()) is AUTOGRAD_SITE


def test_cells_are_named_as_in_tracebacks(shell: InteractiveShell) -> None:
    file = shell.compile.cache("x = 1\ny = 2\n", 4, "x = 1\ny = 2\n")
    assert source_line(file, 2) == SourceLine("Cell In[4]", 2, "y = 2")


def allocation(phase: Phase, num_bytes: int = 512, site: Site | None = None) -> Allocation:
    return Allocation(num_bytes, num_bytes, 0, site or Site(operator="mm"), None, phase, 1)


def test_activations_outlive_the_forward() -> None:
    saved, passing = allocation(Phase.FORWARD), allocation(Phase.FORWARD)
    gradient = allocation(Phase.BACKWARD, site=AUTOGRAD_SITE)
    order = [0, 1, ~1, 2, ~0, ~2]
    classify([saved, passing, gradient], order, has_graph=False, workspace_sizes=frozenset())
    assert saved.category is Category.ACTIVATION
    assert passing.category is gradient.category is Category.TEMPORARY
    assert mirrored_operators([saved, passing, gradient], order) == {2: "backward of mm"}


@pytest.mark.parametrize("has_graph", [True, False])
def test_what_the_forward_left_is_saved_if_a_graph_is_alive(has_graph: bool) -> None:
    left = allocation(Phase.FORWARD)
    classify([left], [0], has_graph=has_graph, workspace_sizes=frozenset())
    assert left.category is (Category.ACTIVATION if has_graph else Category.TEMPORARY)


def test_a_workspace_is_of_its_size_and_no_tensors() -> None:
    workspace, tensor, freed = (allocation(Phase.FORWARD, 8192) for _ in range(3))
    tensor.claim(Category.ACTIVATION, "")
    classify([workspace, tensor, freed], [0, 1, 2, ~2], has_graph=False, workspace_sizes=frozenset({8192}))
    assert workspace.category is Category.WORKSPACE
    assert tensor.category is freed.category is Category.TEMPORARY


def test_an_input_is_known_again_by_where_it_was_made() -> None:
    site = Site(SourceLine("train.py", 3))
    first, second = allocation(Phase.OTHER, site=site), allocation(Phase.OTHER, site=site)
    second.claim(Category.INPUT, "")
    classify([first, second], [0, ~0, 1], has_graph=False, workspace_sizes=frozenset())
    assert first.category is Category.INPUT


def test_an_owner_replaces_a_guess() -> None:
    one = allocation(Phase.OTHER, site=Site())
    one.claim(Category.INPUT, "")
    one.claim(Category.PARAMETER, "layers.0")
    one.claim(Category.INPUT, "")
    assert (one.category, one.module) == (Category.PARAMETER, "layers.0")
