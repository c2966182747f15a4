"""Measuring on a CUDA device, real or stub: what is reported is what torch counts."""

from __future__ import annotations

import gc
import linecache
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from oom_magic.explain.doctor import doctor
from oom_magic.measure.device.cards import current_device
from oom_magic.measure.history import assembly
from oom_magic.measure.history import recording as history
from oom_magic.measure.measurement import measure
from oom_magic.memory.allocator.replay import replay
from oom_magic.memory.categories import Category
from oom_magic.memory.report import MemoryReport
from oom_magic.memory.timeline import Phase
from oom_magic.units import GIB, MIB

pytestmark = pytest.mark.gpu

CELL = """\
model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    batch = torch.randn(1024, 512).to("cuda")
    output = model(batch)
    loss = output.float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CELL_FILE = "/tmp/ipykernel_7/1234567.py"


def start_afresh() -> None:
    """Nothing is allocated or cached, cuBLAS's workspaces included."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@pytest.fixture(autouse=True)
def _fresh_device() -> Iterator[None]:
    start_afresh()
    yield
    torch.cuda.memory._record_memory_history(None)


def run_cell(cell: str, namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run source as a notebook runs a cell; returns its variables."""
    namespace = {"torch": torch, "nn": nn} if namespace is None else namespace
    linecache.cache[CELL_FILE] = (len(cell), None, cell.splitlines(keepends=True), CELL_FILE)
    exec(compile(cell, CELL_FILE, "exec"), namespace)
    return namespace


def measured(run: Callable[[], object], namespace: dict[str, Any] | None = None) -> MemoryReport:
    with measure(namespace=namespace or {}) as measurement:
        run()
    return measurement.report


def counters() -> dict[str, int]:
    stats: dict[str, int] = torch.cuda.memory_stats()
    return stats


def allocate(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def test_peaks_are_those_of_torch_and_the_breakdown_sums_to_them() -> None:
    kept = {}
    report = measured(lambda: kept.update(run_cell(CELL)))
    assert report.source == "measured"
    assert report.peak_allocated_bytes == torch.cuda.max_memory_allocated()
    assert report.peak_reserved_bytes == torch.cuda.max_memory_reserved()
    assert report.breakdown.total_bytes == report.peak_allocated_bytes
    assert sum(line.live_bytes for line in report.lines) == report.peak_allocated_bytes
    assert report.modules.total_bytes == report.peak_allocated_bytes
    assert report.assumptions == ()


def test_the_simulated_allocator_reserves_what_the_real_one_did() -> None:
    report = measured(lambda: run_cell(CELL))
    replayed = replay(report.timeline, settings=report.settings)
    assert replayed.peak_reserved_bytes == report.peak_reserved_bytes
    assert replayed.peak_allocated_bytes == report.peak_allocated_bytes


def test_categories_follow_who_owns_the_memory() -> None:
    variables: dict[str, Any] = {}
    report = measured(lambda: variables.update(run_cell(CELL)))
    weights = sum(p.numel() * p.element_size() for p in variables["model"].parameters())
    assert weights <= report.breakdown[Category.PARAMETER] < weights + 4 * 512
    assert 2 * weights <= report.breakdown[Category.OPTIMIZER_STATE] < 2 * weights + 8 * 512
    assert report.breakdown[Category.INPUT] == 1024 * 512 * 4
    assert report.breakdown[Category.ACTIVATION] >= 2 * 1024 * 2048 * 4
    assert {"0", "2"} <= set(report.modules)


def test_lines_are_those_of_the_cell() -> None:
    report = measured(lambda: run_cell(CELL))
    lines = {usage.line.line: usage for usage in report.lines if usage.line.file == CELL_FILE}
    assert lines[5].line.text == "output = model(batch)"
    assert lines[5].rise_bytes >= 2 * 1024 * 2048 * 4
    assert lines[1].live_bytes == report.breakdown[Category.PARAMETER]
    assert lines[8].live_bytes == report.breakdown[Category.OPTIMIZER_STATE]
    assert report.peak_line is not None
    assert report.peak_line.line == 7
    assert report.peak_phase is Phase.BACKWARD
    assert any("backward of" in name and ":5)" in name for name in report.timeline.operators)


def test_first_step_has_no_optimizer_state_yet() -> None:
    report = measured(lambda: run_cell(CELL))
    assert [step.step for step in report.steps] == [1, 2, 3, 4]
    first, *steady = (step.peak_allocated_bytes for step in report.steps)
    assert first < steady[0]
    assert len(set(steady)) == 1
    assert max(steady) == report.peak_allocated_bytes


def test_kept_bytes_and_the_names_that_keep_them() -> None:
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    before = torch.cuda.memory_allocated()
    report = measured(lambda: run_cell(CELL, names), names)
    assert report.kept_bytes == torch.cuda.memory_allocated() - before
    assert {"model", "optimizer", "batch", "output"} <= {holder.name for holder in report.holders}
    assert report.holders[0].name == "optimizer"


def test_what_was_there_before_is_named_by_its_owner_or_before() -> None:
    model = nn.Linear(1024, 1024, device="cuda")
    stray = allocate(3 * MIB)
    report = measured(lambda: allocate(MIB))
    assert report.breakdown[Category.PARAMETER] == 4 * MIB + 4096
    assert report.breakdown[Category.BEFORE] == stray.nbytes
    assert report.kept_bytes == 0
    del model


def test_a_peak_below_an_earlier_one_is_exact() -> None:
    def work() -> None:
        held = [allocate(size * MIB + 100_000) for size in (3, 30, 7, 12)]
        del held[1]
        held.append(allocate(29 * MIB))
        held.append(torch.empty(1000, device="cuda"))

    work()
    torch.cuda.reset_peak_memory_stats()
    work()
    expected = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    del_me = allocate(500 * MIB)
    del del_me
    torch.cuda.empty_cache()
    work()
    before = counters()
    report = measured(work)
    assert (report.peak_allocated_bytes, report.peak_reserved_bytes) == expected
    after = counters()
    peaks = [name for name in before if name.endswith(".peak")]
    assert [after[name] for name in peaks] == [before[name] for name in peaks]


def test_a_block_whose_rest_is_too_small_to_split_counts_whole() -> None:
    whole = allocate(12 * MIB)
    del whole
    report = measured(lambda: allocate(11 * MIB + 512 * 1024))
    assert report.peak_allocated_bytes == 12 * MIB == torch.cuda.max_memory_allocated()


def test_expandable_segments() -> None:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        report = measured(lambda: run_cell(CELL))
        assert report.settings.expandable_segments
        assert report.peak_allocated_bytes == torch.cuda.max_memory_allocated()
        assert report.peak_reserved_bytes == torch.cuda.max_memory_reserved()
        assert report.breakdown.total_bytes == report.peak_allocated_bytes
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_an_allocator_without_a_history_leaves_the_counters() -> None:
    code = """\
import torch, oom_magic as om
with om.measure() as measurement:
    kept = torch.empty(2**25, device="cuda")
report = measurement.report
assert report.peak_allocated_bytes == torch.cuda.max_memory_allocated() == 2**27
assert "torch's counters" in report.assumptions[0].text, report.assumptions
"""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync", "PYTHONPATH": "."}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_memory_used_on_another_stream() -> None:
    def work() -> None:
        tensor = allocate(5 * MIB)
        tensor.record_stream(torch.cuda.Stream())
        del tensor
        allocate(6 * MIB)

    report = measured(work)
    assert report.peak_allocated_bytes == torch.cuda.max_memory_allocated()
    assert report.assumptions == ()


def test_nested_blocks_keep_both_peaks_right() -> None:
    with measure() as outer:
        big = allocate(100 * MIB)
        del big
        with measure() as inner:
            small = allocate(10 * MIB)
            del small
        torch.cuda.reset_peak_memory_stats()
        last = allocate(20 * MIB)
    assert outer.report.peak_allocated_bytes == 100 * MIB
    assert inner.report.peak_allocated_bytes == 10 * MIB
    assert torch.cuda.max_memory_allocated() == last.nbytes
    assert inner.report.assumptions == outer.report.assumptions == ()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one device")
def test_nested_blocks_on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "DRAIN_EVENTS", 1)
    with measure("cuda:1") as second, measure(0) as first:
        run_cell(CELL)
        there = torch.empty(9 * MIB, dtype=torch.uint8, device="cuda:1")
    assert second.report.peak_allocated_bytes == there.nbytes
    assert first.report.peak_allocated_bytes == torch.cuda.max_memory_allocated(0)
    assert second.report.assumptions == first.report.assumptions == ()
    assert [step.step for step in first.report.steps] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("device", "says"),
    [
        (print, "observes a with block"),
        ("gpu0", "'gpu0' is not a device"),
        ("cpu", "cpu is not one"),
        (99, "no cuda:99"),
        (-1, "-1 is no"),
    ],
)
def test_devices_that_cannot_be_measured(device: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        measure(device)


def test_counts_that_the_user_resets() -> None:
    def work() -> None:
        first = allocate(2 * MIB)
        torch.cuda.reset_accumulated_memory_stats()
        del first
        allocate(3 * MIB)

    report = measured(work)
    assert report.peak_allocated_bytes == 3 * MIB
    assert "statistics were reset" in report.assumptions[0].text


def test_a_recording_that_the_cell_ends_is_said() -> None:
    kept = []

    def work() -> None:
        kept.append(allocate(2 * MIB))
        torch.cuda.memory._record_memory_history(None)
        kept.append(allocate(3 * MIB))

    report = measured(work)
    assert report.peak_allocated_bytes == report.kept_bytes == 5 * MIB
    assert "lost" in report.assumptions[0].text


def test_empty_cache_in_the_block_is_marked_and_replayed() -> None:
    def work() -> None:
        for size in (30, 50):
            tensor = allocate(size * MIB)
            del tensor
            torch.cuda.empty_cache()

    report = measured(work)
    assert report.peak_reserved_bytes == 50 * MIB
    assert replay(report.timeline).peak_reserved_bytes == 50 * MIB


def test_nothing_is_recorded_afterwards_and_nothing_grows() -> None:
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    run_cell(CELL, names)
    measured(lambda: run_cell(CELL, names), names)
    levels = []
    for _ in range(3):
        measured(lambda: run_cell(CELL, names), names)
        levels.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(set(levels)) == 1
    assert not history.is_recording()
    assert not _global_optimizer_post_hooks


def test_a_report_holds_no_tensor_and_no_exception() -> None:
    class UnluckyError(Exception):
        pass

    with pytest.raises(UnluckyError), measure() as measurement:
        tensor = allocate(MIB)
        ghost = weakref.ref(tensor)
        raise UnluckyError("no luck\nat all")
    del tensor
    gc.collect()
    assert ghost() is None
    assert measurement.report.error == "UnluckyError: no luck"
    assert measurement.report.out_of_memory is None


def test_a_recording_of_the_users_goes_on_untouched() -> None:
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python")
    first = allocate(2 * MIB)
    report = measured(lambda: run_cell(CELL))
    last = allocate(3 * MIB)
    assert history.is_recording()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    sizes = [entry["size"] for entry in trace if entry["action"] == "alloc"]
    assert sizes[0] == first.nbytes
    assert sizes[-1] == last.nbytes
    assert report.peak_allocated_bytes == torch.cuda.max_memory_allocated()
    assert report.breakdown[Category.BEFORE] == first.nbytes
    assert "Your own recording" in report.assumptions[0].text


def test_emptying_the_buffer_between_steps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured(lambda: run_cell(CELL)).to_dict()
    start_afresh()
    monkeypatch.setattr(history, "DRAIN_EVENTS", 1)
    assert measured(lambda: run_cell(CELL)).to_dict() == whole


def test_a_long_run_forgets_steps_and_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = CELL.replace("range(4)", "range(30)").replace("1024, 512)", "1024 + 512 * (step == 17), 512)")
    whole = measured(lambda: run_cell(cell))
    monkeypatch.setattr(history, "DRAIN_EVENTS", 1)
    monkeypatch.setattr(assembly, "MAX_EVENTS", 200)
    start_afresh()
    report = measured(lambda: run_cell(cell))
    assert report.peak_allocated_bytes == whole.peak_allocated_bytes == torch.cuda.max_memory_allocated()
    assert report.timeline.num_events < whole.timeline.num_events / 3
    assert report.breakdown.total_bytes == report.peak_allocated_bytes
    by_number = {step.step: step for step in whole.steps}
    assert {1, 2, 18, 30} <= {step.step for step in report.steps}
    for step in report.steps:
        assert step.peak_allocated_bytes == by_number[step.step].peak_allocated_bytes
    assert "left out" in report.assumptions[0].text


def test_a_full_buffer_is_said_and_the_rest_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_ENTRIES", 100)
    report = measured(lambda: run_cell(CELL))
    assert "lost" in report.assumptions[0].text
    assert report.peak_allocated_bytes == torch.cuda.max_memory_allocated()
    assert report.timeline.num_events > 60


def test_out_of_memory_is_reported_with_its_line_and_passes() -> None:
    cell = 'held = torch.empty(2**28, device="cuda")\nmore = torch.empty(2**38, device="cuda")\n'
    with pytest.raises(torch.OutOfMemoryError) as caught, measure() as measurement:
        run_cell(cell)
    report = measurement.report
    failure = report.out_of_memory
    assert failure is not None
    assert failure.message == str(caught.value)
    assert failure.requested_bytes == failure.tensor_bytes == 1024 * GIB
    assert (failure.line.line, failure.line.file) == (2, CELL_FILE)
    assert report.peak_allocated_bytes == GIB
    assert report.verdict == "out of memory"


def test_out_of_memory_in_backward_belongs_to_the_line_that_called_it() -> None:
    cell = """\
a = torch.empty(2**10, 2**18, device="cuda", requires_grad=True)
hog = [torch.empty(2**28, device="cuda") for _ in range(FILL)]
doubled = a * 2
loss = doubled.sum()
loss.backward()
"""
    free = torch.cuda.mem_get_info()[0]
    with pytest.raises(torch.OutOfMemoryError), measure() as measurement:
        run_cell(cell.replace("FILL", str(free // GIB - 2)))
    failure = measurement.report.out_of_memory
    assert failure is not None
    assert failure.line.line == 5
    assert failure.phase is Phase.BACKWARD


def test_keyboard_interrupt_ends_the_block_with_a_report() -> None:
    with pytest.raises(KeyboardInterrupt), measure() as measurement:
        allocate(2 * MIB)
        raise KeyboardInterrupt
    assert measurement.report.error == "KeyboardInterrupt"
    assert measurement.report.peak_allocated_bytes == 2 * MIB


def test_an_empty_block() -> None:
    report = measured(lambda: None)
    assert report.timeline.num_events == len(report.timeline.requested_bytes)
    assert report.peak_allocated_bytes == torch.cuda.memory_allocated()


def test_a_report_before_the_end_is_refused() -> None:
    with measure() as measurement, pytest.raises(RuntimeError, match="not ended"):
        _ = measurement.report


def test_activation_checkpointing_recomputes_in_the_backward() -> None:
    cell = """\
from torch.utils.checkpoint import checkpoint
part = nn.Sequential(nn.Linear(256, 4096), nn.GELU(), nn.Linear(4096, 256)).to("cuda")
x = torch.randn(512, 256, device="cuda", requires_grad=True)
y = checkpoint(part, x, use_reentrant=False)
y.sum().backward()
"""
    report = measured(lambda: run_cell(cell))
    timeline = report.timeline
    large = timeline.requested_bytes == 512 * 4096 * 4
    assert {Phase.FORWARD, Phase.BACKWARD} == {list(Phase)[phase] for phase in timeline.phase[large]}
    assert report.peak_allocated_bytes == torch.cuda.max_memory_allocated()


def test_the_card_and_the_system_check() -> None:
    card = current_device(0)
    assert card.total_bytes == torch.cuda.get_device_properties(0).total_memory
    assert card.context_bytes > 0
    assert card.usable_bytes <= card.total_bytes
    check = doctor()
    assert check.cards[0].device.name == card.name
    assert check.to_dict()["torch_version"] == torch.__version__
    assert card.name in str(check)
