"""What is freed when: objects that refer to each other, errors that the code caught."""

from __future__ import annotations

import gc
import sys
import types
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize

import oom_magic as om
from oom_magic.predict.isolation.gradients_from_before import has_own_memory, num_uses
from oom_magic.predict.session import DrySession
from tests.support.put_back import observed

CYCLES_TRUTH = [142878208, 148897792]  # peaks of ``cycles`` on PyTorch 2.13.0's CUDA build, CPython 3.11


class Keeper:
    """Refers to itself, so that only the collector frees what it holds."""

    me: Keeper
    junk: list[list[int]]
    out: torch.Tensor


def cycles(num_steps: int = 300) -> None:
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(num_steps):
        keeper = Keeper()
        keeper.me, keeper.junk = keeper, [[] for _ in range(60)]
        keeper.out = model(torch.randn(1024, 1024, device="cuda"))
        keeper.out.mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.skipif(
    not (3, 11) <= sys.version_info < (3, 13),
    reason="recorded with CPython 3.11: 3.10 makes other objects, 3.13 collects after 2,000 instead of 700",
)
@pytest.mark.slow
def test_collector_runs_when_cpythons_would() -> None:
    om.dry_run(cycles, 3)  # fills PyTorch's caches
    reports = [om.dry_run(cycles, gpu="A100 80GB", stop_after_steps=None) for _ in range(2)]
    peaks = [[report.peak_allocated_bytes, report.peak_reserved_bytes] for report in reports]
    assert peaks[0] == peaks[1]
    assert peaks[0] == pytest.approx(CYCLES_TRUTH, rel=0.13)  # two turns of the loop, 6 % each: where a count begins
    assert any("Python's garbage collector" in assumption.text for assumption in reports[0].assumptions)


def test_code_turns_the_collector_off() -> None:
    seen: list[bool] = []

    def program() -> None:
        gc.disable()
        seen.append(gc.isenabled())
        cycles(60)
        allocated = torch.cuda.memory_allocated()
        gc.collect()
        seen.append(allocated - torch.cuda.memory_allocated() > 59 * 4 * 2**20)

    switches = gc.enable, gc.disable, gc.isenabled, gc.collect, gc.isenabled()
    observed(program, gpu="A100 80GB", stop_after_steps=None)
    assert seen == [False, True]
    assert switches == (gc.enable, gc.disable, gc.isenabled, gc.collect, gc.isenabled())


def test_caught_error_frees_what_it_held_and_is_no_verdict() -> None:
    seen: list[Any] = []

    def forward(batch: int) -> torch.Tensor:
        model = torch.nn.Linear(4096, 4096).cuda()
        out: torch.Tensor = model(torch.randn(batch * 1024, 4096, device="cuda"))
        return out

    def program() -> None:
        try:
            forward(4096)
        except torch.OutOfMemoryError as error:
            seen.append(str(error)[:18])
        seen.append(torch.cuda.memory_allocated())

    report = observed(program)
    assert seen == ["CUDA out of memory", 0]
    assert report.out_of_memory is None
    assert any("the code caught the error" in assumption.text for assumption in report.assumptions)


def test_batch_size_finder_finds_what_fits() -> None:
    found: list[int] = []

    def program() -> None:
        batch = 1
        while True:
            try:
                torch.randn(batch, 2**28, device="cuda")
            except torch.OutOfMemoryError:
                found.append(batch - 1)
                return
            batch += 1

    report = observed(program, memory="8GiB")
    assert found == [7]  # GiB, beside the context
    assert report.out_of_memory is None


class Buffer:
    def __init__(self) -> None:
        self.rows: list[Any] = []


class Remembering(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.rows: list[Any] = []


@pytest.mark.parametrize("holder", [Buffer(), Remembering(), {"rows": []}], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("is_kept", [False, True], ids=["let go", "kept"])
def test_what_fills_a_list_from_before_the_run_is_freed_with_the_list(holder: Any, is_kept: bool) -> None:
    """``agent.memory = []`` after an episode: the first one's list is given back to the user, but not its tensors."""
    table = holder if isinstance(holder, dict) else vars(holder)
    before = id(table["rows"])  # a name for the list would keep it

    def program() -> None:
        for _ in range(2):
            for _ in range(200):
                table["rows"].append(torch.zeros(1 << 18, device="cuda"))
            if not is_kept:
                table["rows"] = []

    report = DrySession(has_bar=False, is_lasting=False).run(program, [{"holder": holder}])
    assert report.peak_allocated_bytes >> 20 == (400 if is_kept else 200)
    assert id(table["rows"]) == before and not table["rows"]


def test_an_error_that_is_kept_holds_nothing_of_its_run_in_the_next_one() -> None:
    holder = Buffer()
    kept: list[BaseException] = []

    def fill(times: int) -> None:
        for _ in range(times):
            for _ in range(200):
                holder.rows.append(torch.zeros(1 << 18, device="cuda"))
            holder.rows = []

    def fills_and_fails() -> None:
        fill(1)
        try:
            torch.zeros(1 << 40, device="cuda")
        except torch.OutOfMemoryError as error:
            kept.append(error)

    for program in (fills_and_fails, lambda: fill(2)):
        report = DrySession(has_bar=False, is_lasting=False).run(program, [{"holder": holder}])
        assert report.peak_allocated_bytes >> 20 == 200


def test_cached_parametrizations_end_with_their_block() -> None:
    def program() -> None:
        layer = parametrizations.weight_norm(torch.nn.Linear(512, 512)).cuda()
        with torch.no_grad(), parametrize.cached():
            assert layer.weight is layer.weight
            inside = torch.cuda.memory_allocated()
        assert torch.cuda.memory_allocated() == inside - 4 * 512 * 512

    om.dry_run(program)


DROPPED = {  # MiB before and after, and on PyTorch 2.13.0's CUDA build, too
    "model": ("model.cuda()", "del model", [16, 4]),
    "rebound": ("model.cuda()", "model = None", [16, 4]),
    "trained": (
        "model.cuda()\nmodel(torch.ones(1, 2048, device='cuda')).sum().backward()\noptimizer.step()",
        "del model, optimizer",
        [80, 20],
    ),
    "data": ("tensor.data = tensor.data.cuda()", "del tensor", [16, 4]),
    "list": ("for at in range(4): tensors[at] = tensors[at].cuda()", "del tensors", [64, 4]),
    "anew": ("model.cuda()", "model = torch.nn.Linear(1024, 2048, bias=False).cuda()", [16, 12]),
    "attribute": ("box.model = model.cuda(); del model", "box.model = None", [16, 4]),
    "item": ("tensors[0] = models['a'].cuda()", "models.clear(); del tensors, model", [16, 4]),
    "kept": ("model.cuda()\nkept = [model]", "del model", [16, 20]),
    "weight": ("model.cuda()\nkept = model.weight", "del model", [16, 20]),
    "view": ("model.cuda()\nkept = model.weight.detach()[:3]", "del model", [16, 20]),
}


@pytest.mark.parametrize("name", DROPPED)
def test_what_is_from_before_the_run_and_dropped_whole_is_freed(name: str) -> None:
    """``del model`` of a model that an earlier cell made kept its memory: too much for what follows."""
    before, drop, expected = DROPPED[name]
    model = torch.nn.Linear(2048, 2048, bias=False)
    namespace: dict[str, Any] = {"torch": torch, "model": model, "optimizer": torch.optim.Adam(model.parameters())}
    if name not in ("trained", "kept", "weight", "view"):
        del namespace["optimizer"]
    namespace |= {"tensor": torch.zeros(2**22), "tensors": [torch.zeros(2**22) for _ in range(4)]}
    namespace |= {"box": types.SimpleNamespace(model=model), "models": {"a": model}}
    if name not in ("attribute", "item"):
        del namespace["box"], namespace["models"]
    elif name == "attribute":
        del namespace["models"]
    else:
        del namespace["box"]
    del model

    def program() -> None:
        exec(before, namespace)
        found = [torch.cuda.memory_allocated() >> 20]
        exec(drop, namespace)
        if name in ("attribute", "item"):  # what changed in containers is looked for now and then
            for _ in range(40):
                torch.zeros(1, device="cuda")
        following = torch.zeros(2**20, device="cuda")
        assert [*found, torch.cuda.memory_allocated() >> 20] == expected
        del following

    DrySession("A100 80GB", has_bar=False).run(program, [namespace])
    assert {"model", "tensor", "tensors"} <= namespace.keys() and isinstance(namespace["model"], torch.nn.Module)
    assert not namespace["model"].weight.is_meta and namespace["tensor"].device.type == "cpu"


def test_what_a_run_dropped_is_made_anew_for_the_sessions_next() -> None:
    namespace: dict[str, Any] = {"torch": torch, "model": torch.nn.Linear(2048, 2048)}
    session = DrySession("A100 80GB", has_bar=False)
    session.run(lambda: exec("model.cuda(); del model; torch.zeros(2**20, device='cuda')", namespace), [namespace])
    run = "model.cuda(); torch.zeros(8, device='cuda'); assert torch.cuda.memory_allocated() >> 20 == 16"
    session.run(lambda: exec(run, namespace), [namespace])


def test_tensors_in_one_memory_are_counted_whatever_the_version_of_pytorch() -> None:
    one = torch.ones(3)
    assert num_uses(one) == 1 and has_own_memory(one)
    view = one.detach()
    assert num_uses(one) == num_uses(view) == 2 and not has_own_memory(one)
    del view
    assert num_uses(one) == 1
