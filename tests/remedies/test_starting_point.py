"""What a run began from: taken back to it, and forward again."""

from __future__ import annotations

import ast
import gc
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from oom_magic.explain.live.growth import Growth
from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.remedies.rehearsal import Variation
from oom_magic.notebook.cells.explanations import as_they_were
from oom_magic.predict.instrumentation import stop_rule
from oom_magic.predict.instrumentation.starting_point import StartingPoint
from oom_magic.predict.isolation.snapshot import Snapshot
from oom_magic.predict.session import DrySession
from tests.support.versions import recorded_with


class Runner:
    """Something of the user's with state of its own."""

    endless: Iterator[int]

    def __init__(self) -> None:
        self.optimizer = None
        self.history = ["begun"]


def gone_back(start: StartingPoint, namespace: dict) -> Snapshot:
    noted = Snapshot()
    start.restore(noted.add)
    return noted


def test_names_objects_and_states_areas_they_were_and_then_as_they_are() -> None:
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    names = {"net": net, "optimizer": optimizer, "runner": Runner(), "losses": [], "batch_size": 8, "_": 1}
    start = StartingPoint([names])
    for _ in range(2):
        loss = net(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        names["losses"].append(loss)
    names |= {"batch_size": 64, "loss": loss, "_": 2}
    names["runner"].optimizer = optimizer
    names["runner"].history.append("ran")
    net.eval()
    net.head = torch.nn.Linear(4, 2)
    noted = gone_back(start, names)
    assert names.keys() == {"net", "optimizer", "runner", "losses", "batch_size", "_"}
    assert (names["batch_size"], names["losses"], names["_"]) == (8, [], 2)
    assert names["runner"].optimizer is None and names["runner"].history == ["begun"]
    assert net.training and not hasattr(net, "head") and not optimizer.state
    assert start.dropped == {"loss"} and not start.had_grad(net.weight)
    noted.restore()
    assert names["batch_size"] == 64 and len(names["losses"]) == 2 and names["runner"].optimizer is optimizer
    assert not net.training and "head" in net._modules and len(optimizer.state) == 2


def test_the_groups_of_an_optimizer_that_loaded_a_state_since() -> None:
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    names = {"net": net, "optimizer": optimizer}
    start = StartingPoint([names])
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.2
    gone_back(start, names)
    assert [one["lr"] for one in optimizer.param_groups] == [0.1]
    assert optimizer.param_groups[0]["params"][0] is net.weight


def test_it_keeps_nothing_alive() -> None:
    names = {"net": torch.nn.Linear(4, 4), "runner": Runner()}
    refs = [weakref.ref(one) for one in names.values()]
    start = StartingPoint([names])
    names.clear()
    gc.collect()
    assert all(ref() is None for ref in refs)
    gone_back(start, names)
    assert names == {}


def test_a_name_that_is_read_first_is_kept_if_asked() -> None:
    names: dict = {}
    start = StartingPoint([names])
    names["made"] = torch.ones(2)
    noted = gone_back(start, names)
    assert "made" not in names and start.keep("made") and not start.keep("other")
    noted.restore()
    gone_back(start, names)
    assert "made" in names


def test_a_dry_run_from_there_takes_what_was_there_and_not_what_was_made() -> None:
    """A model moved to another type, an optimizer's state and results since then: none of it counts twice."""
    net = torch.nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(net.parameters())
    names = {"net": net, "optimizer": optimizer, "torch": torch}
    start = StartingPoint([names])
    net.to(torch.bfloat16)
    net(torch.ones(2, 1024, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    names["out"] = net(torch.ones(2, 1024, dtype=torch.bfloat16))
    code = (
        "net.to('cuda')\nfor _ in range(2):\n    net(torch.ones(2, 1024, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()"
    )
    session = DrySession("RTX 3060", is_lasting=False, has_bar=False, start=start)
    report = session.run(lambda: exec(code, names), [names])
    weights = 4 * 2**20
    parts = report.breakdown
    assert parts["parameter"] == parts["gradient"] == weights and parts["optimizer_state"] // weights == 2
    assert parts["before"] == 0
    assert net.weight.dtype == torch.bfloat16 and len(optimizer.state) == 1 and "out" in names


def test_the_runs_own_iterators_are_in_no_container_after_a_dry_run_from_there() -> None:
    runner = Runner()
    runner.endless = itertools.cycle([1, 2])
    names: dict[str, Any] = {"rows": [itertools.cycle([3, 4])], "runner": runner, "own": itertools.cycle([5])}
    before = runner.endless, names["rows"][0], names["own"]
    session = DrySession(is_lasting=False, has_bar=False, start=StartingPoint([names]))
    session.run(lambda: exec("next(runner.endless), next(rows[0]), next(own)", names), [names])
    assert (runner.endless, names["rows"][0], names["own"]) == before
    assert (next(runner.endless), next(names["rows"][0])) == (1, 3)


def test_what_is_in_the_way_takes_nothing_where_it_is_left_out() -> None:
    names = {"old": torch.zeros(1024, 1024), "torch": torch}
    code = "torch.ones(1024, 1024, device='cuda')"
    start = StartingPoint([names])
    for absent, before in ((frozenset(), 0), (frozenset({id(names["old"])}), 0)):
        session = DrySession("RTX 3060", is_lasting=False, has_bar=False, start=start, absent=absent)
        report = session.run(lambda: exec(code, names), [names])
        assert report.breakdown["before"] == before
        assert report.peak_allocated_bytes == 4 * 2**20


def test_a_tensor_in_place_of_one_that_is_gone_is_freed_when_its_name_is_bound_anew() -> None:
    """A rehearsal begins with a queue like the one that the failed run has bound anew: only its name holds it."""
    names: dict[str, Any] = {"queue": torch.zeros(2**20), "torch": torch}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "device", property(lambda _self: torch.device("cuda")))
        start = StartingPoint([names])
    names["queue"] = torch.zeros(2**21)
    start.needed = {"queue"}
    found: list[int] = []

    def program() -> None:
        found.append(torch.cuda.memory_allocated())  # of other tests' tensors, too
        for _ in range(3):
            exec("queue = torch.cat([queue, torch.zeros(2**18, device='cuda')])", names)
            found.append(torch.cuda.memory_allocated())

    DrySession("RTX 3060", is_lasting=False, has_bar=False, start=start).run(program, [names])
    assert max(found) - found[0] <= 2**22  # 3 MiB of keys, and the rest of a block; with the first queue 7 MiB


@pytest.mark.slow
@pytest.mark.parametrize(("more", "kept_mib"), [("", 0), ("; kept = [out]", 64), ("; other = out[:1]", 64)])
def test_what_a_name_held_goes_when_the_cell_binds_it_anew(more: str, kept_mib: int) -> None:
    names = {"torch": torch}
    first = DrySession("RTX 3060", has_bar=False)
    tensor = "torch.ones({}, 2**20, dtype=torch.uint8, device='cuda')"
    made = f"model = {tensor.format(32)}; out = {tensor.format(64)}{more}"
    cell = f"for _ in range(1):\n    out = {tensor.format(16)}\n    del model\nbig = {tensor.format(256)}"
    first.run(lambda: exec(made, names), [])
    first.run(lambda: exec(cell, names), [names])
    rehearsal = CellRehearsal(
        lambda tree, names: exec(compile(tree, "<cell>", "exec"), names), ast.parse(cell), names, origin=first
    )
    for _ in range(2):
        assert rehearsal.begin([], 0).peak_allocated_bytes == (16 + 256 + kept_mib) * 2**20
    assert sorted(names)[:1] == ["__builtins__"] and not any(name.startswith("__oom") for name in names)


STEP = "net(torch.ones(1, 2048, device='cuda')).sum().backward(); optimizer.step(); optimizer.zero_grad()"
HALVED = "if is_half: net.to(torch.bfloat16)\nnet(torch.ones(8192, 2048, device='cuda', dtype=net.weight.dtype))"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("cell", "mib"),
    [
        # weights, gradients, state, what the foreach implementation computes at once; two workspaces
        pytest.param(STEP, 5 * 16 + 2 * 8.125, marks=recorded_with("2.13")),
        # halved: weights, input and output, a workspace; the frames of the failed run hold a view of the whole weights
        (HALVED, 8 + 32 + 32 + 8.125),
    ],
)
def test_what_the_failed_run_made_of_a_pretended_model_does_not_count(cell: str, mib: float) -> None:
    names = {"torch": torch, "is_half": False}
    first = DrySession("RTX 3060", memory=DrySession("RTX 3060").gpu.context_bytes + 90 * 2**20, has_bar=False)
    made = "net = torch.nn.Linear(2048, 2048, bias=False).cuda(); optimizer = torch.optim.Adam(net.parameters())"
    first.run(lambda: exec(made, names), [])
    assert first.run(lambda: exec(cell, names), [names]).out_of_memory is not None
    names["is_half"] = True
    rehearsal = CellRehearsal(
        lambda tree, names: exec(compile(tree, "<cell>", "exec"), names), ast.parse(cell), names, origin=first
    )
    assert rehearsal.begin([], 0).peak_allocated_bytes == pytest.approx(mib * 2**20, rel=0.01)


@pytest.mark.slow
def test_a_result_that_goes_takes_the_weights_of_its_graph_along() -> None:
    names = {"torch": torch}
    first = DrySession("RTX 3060", has_bar=False)
    cell = "out = None\nbig = torch.ones(64, 2**20, dtype=torch.uint8, device='cuda')"
    made = "net = torch.nn.Linear(2048, 2048, bias=False).cuda()\nout = net(torch.ones(1, 2048, device='cuda')).sum()"
    first.run(lambda: exec(f"{made}\nout.backward()\nfor weight in net.parameters(): weight.grad = None", names), [])
    for name in ("net", "weight"):
        del names[name]
    first.run(lambda: exec(cell, names), [names])
    rehearsal = CellRehearsal(
        lambda tree, names: exec(compile(tree, "<cell>", "exec"), names), ast.parse(cell), names, origin=first
    )
    assert rehearsal.begin([], 0).peak_allocated_bytes == 64 * 2**20 + _workspaces_of(first)


def test_a_sparse_tensor_of_an_earlier_cell_is_there_when_a_later_one_is_rehearsed() -> None:
    names = {"torch": torch}
    first = DrySession("RTX 3060", has_bar=False)
    made = (  # on the host its integers are real, and its numbers are not
        "places = torch.randint(0, 2**16, (2, 2**19))\n"
        "adj = torch.sparse_coo_tensor(places, torch.ones(2**19), (2**16, 2**16)).coalesce().cuda()\n"
        "x = torch.ones(2**16, 8, device='cuda')"
    )
    cell = "rows, columns = adj.indices()\nout = torch.zeros_like(x).index_add_(0, rows, x[columns])"
    first.run(lambda: exec(made, names), [])
    true = first.run(lambda: exec(cell, names), [names])
    assert true.peak_allocated_bytes > 2**19 * 8 * (3 + 4)  # indices of 8 bytes and values of 4, beside what is read
    rehearsal = CellRehearsal(
        lambda tree, names: exec(compile(tree, "<cell>", "exec"), names), ast.parse(cell), names, origin=first
    )
    assert rehearsal.begin([], 0).peak_allocated_bytes == true.peak_allocated_bytes


@pytest.mark.slow
def test_what_earlier_training_left_with_cublas_is_there_when_an_evaluation_is_rehearsed() -> None:
    names = {"torch": torch}
    first = DrySession("RTX 3060", has_bar=False)
    made = "net = torch.nn.Linear(2048, 2048).cuda()\nnet(torch.ones(1, 2048, device='cuda')).sum().backward()"
    cell = "with torch.no_grad(): net(torch.ones(64, 2048, device='cuda'))"
    first.run(lambda: exec(made, names), [])
    true = first.run(lambda: exec(cell, names), [names])
    rehearsal = CellRehearsal(
        lambda tree, names: exec(compile(tree, "<cell>", "exec"), names), ast.parse(cell), names, origin=first
    )
    assert rehearsal.begin([], 0).peak_allocated_bytes == true.peak_allocated_bytes


def test_the_batch_is_that_of_the_call_which_filled_the_card_not_of_a_small_one_after_it() -> None:
    names = {"torch": torch, "net": torch.nn.Linear(256, 256)}
    cell = (
        "inside, edge = (net(torch.ones(rows, 256, device='cuda')).exp() for rows in (4096, 8))\n"
        "(inside.sum() + edge.sum()).backward()"
    )
    rehearsal = CellRehearsal(
        lambda tree, names: exec(compile(tree, "<cell>", "exec"), names),
        ast.parse("net.cuda()\n" + cell),
        names,
        gpu="RTX 3060",
    )
    rehearsal.begin([], 0)
    assert rehearsal.sizes["batch"] == 4096


@pytest.mark.slow
def test_what_never_steps_is_left_after_a_while_and_all_runs_but_the_advised_after_as_many_calls(monkeypatch) -> None:
    monkeypatch.setattr(stop_rule, "SECONDS_WITHOUT_STEPS", 0)
    names = {"torch": torch, "net": torch.nn.Linear(256, 256), "kept": [], "rows": 4096}
    cell = "net.cuda()\nfor _ in range(1000):\n    kept.append(net(torch.ones(rows, 256, device='cuda')))"
    rehearsal = CellRehearsal(
        lambda tree, names: exec(compile(tree, "<cell>", "exec"), names), ast.parse(cell), names, gpu="RTX 3060"
    )
    report = rehearsal.begin([], 64 * 2**20)
    assert rehearsal.calls_followed > 1 and report.peak_reserved_bytes >= 64 * 2**20
    assert rehearsal.run(Variation()).peak_allocated_bytes == report.peak_allocated_bytes
    assert rehearsal.run_on(Variation()).peak_allocated_bytes > 1000 * 4096 * 256 * 4  # the advised one to its end
    assert rehearsal.run(Variation()).peak_allocated_bytes == report.peak_allocated_bytes


def test_where_an_evaluation_may_follow_steps_that_take_the_same_are_not_followed_further() -> None:
    names = {"torch": torch, "net": torch.nn.Linear(64, 64)}
    cell = "net.cuda(); opt = torch.optim.Adam(net.parameters())\nfor step in range(100):\n    rows = {rows}\n    "
    cell += "net(torch.ones(rows, 64, device='cuda')).sum().backward(); opt.step(); opt.zero_grad()"
    num_steps = {}
    for rows in ("64", "64 + 64 * step"):
        rehearsal = CellRehearsal(
            lambda tree, names: exec(compile(tree, "<cell>", "exec"), names),
            ast.parse(cell.format(rows=rows)),
            names,
            gpu="RTX 3060",
        )
        for is_brief in (True, False):
            num_steps[rows, is_brief] = rehearsal.begin([], 2**40, is_brief).timeline.num_steps()
    assert num_steps.pop(("64", True)) == 4  # the first makes the optimizer's state
    assert set(num_steps.values()) == {100}


def _workspaces_of(session: DrySession) -> int:
    return sum(one.num_bytes for one in session.fake_gpu.workspaces_before())


@pytest.mark.slow
def test_what_was_there_is_placed_in_the_order_of_its_addresses():
    """In another order the cache would be in other pieces, and a run would need more or less."""
    weights = [torch.nn.Parameter(torch.empty(number)) for number in (1000, 2000, 3000)]

    def move() -> None:
        for one in reversed(weights):
            one.data = one.data.cuda()

    session = DrySession("RTX 3060", has_bar=False)
    session.run(move)
    session.run(lambda: None)
    report = DrySession("RTX 3060", origin=session, has_bar=False, is_lasting=False).run(lambda: weights[0] * 2)
    assert report.timeline.requested_bytes[:3].tolist() == [12000, 8000, 4000]


def test_a_run_that_has_ended_is_not_held_by_where_it_began() -> None:
    """Its copies lead to the user's objects: optimizers of earlier cells stayed on the card after they were deleted."""

    class Copies:
        def original(self, one: Any) -> Any:
            return one

    copies = Copies()
    start, seen = StartingPoint([{"optimizers": []}]), weakref.ref(copies)
    start.restore(Snapshot().add, lambda _, held=copies: torch.ones(1), copies.original)
    del copies
    gc.collect()
    assert seen() is None


def test_all_that_is_collected_together_goes_back_to_what_it_was() -> None:
    """Scores of a run on the host, and their targets of the run before on the card, could not be compared."""
    names: dict[str, Any] = {"history": {"scores": [], "target": [0]}, "seen": {}}
    start = StartingPoint([names])
    names["history"]["scores"].append(1)
    names["history"]["target"].append(1)
    names["seen"][0] = 1
    grown = [
        Growth(name, f"{name}.append(x)", "cell:1", 1, 1, False)
        for name in ("history['scores']", "history['target']", "seen")
    ]
    first = replace(grown[0], beside=tuple(grown[1:]))
    assert as_they_were(first, names, start) == "history['scores'].clear()\ndel history['target'][1:]\nseen.clear()"
    assert as_they_were(first, names, None) == as_they_were(None, names, start) == ""
