"""Measuring, replayed from snapshots that tests/data/record_snapshots.py recorded: no GPU is needed."""

from __future__ import annotations

import json
import linecache
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

import oom_magic as om
from oom_magic.errors import describe_error
from oom_magic.measure.history.assembly import Assembler
from oom_magic.measure.history.recording import AllocatorState, Batch, EventLog, LiveBlock, newest, read_state
from oom_magic.measure.measurement import find_out_of_memory
from oom_magic.memory.allocator.replay import replay
from oom_magic.memory.allocator.settings import AllocatorSettings
from oom_magic.memory.categories import Category
from oom_magic.memory.report import Device, MemoryReport
from oom_magic.memory.timeline import MarkKind, Phase
from oom_magic.units import GIB, MIB
from tests.support.folders import DATA

SNAPSHOTS = sorted((DATA / "snapshots").glob("*.json"))
CELL_FILE = "/tmp/ipykernel_7/1234567.py"
CARD = Device("NVIDIA GeForce RTX 3060", 12 * GIB, 300 * MIB)


def load(name: str) -> dict[str, Any]:
    file = DATA / "snapshots" / f"{name}.json"
    recorded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return recorded


def raw_trace(recorded: dict[str, Any]) -> list[dict[str, Any]]:
    """The trace as torch gives it: equal frames are one dict."""
    folders = {"<libraries>": sysconfig.get_path("purelib"), "<python>": sysconfig.get_path("stdlib")}
    frames = []
    for file, line, name in recorded["frames"]:
        for placeholder, folder in folders.items():
            file = file.replace(placeholder, folder)
        frames.append({"filename": file, "line": line, "name": name})
    names = ("action", "addr", "size", "stream")
    return [
        {**dict(zip(names, entry, strict=True)), "frames": [frames[number] for number in stack]}
        for *entry, stack in recorded["trace"]
    ]


def state_of(plain: dict[str, Any]) -> AllocatorState:
    blocks = tuple(LiveBlock(**block) for block in plain["blocks"])
    return AllocatorState(tuple(map(tuple, plain["segments"])), blocks)  # type: ignore[arg-type]


def batch_of(recorded: dict[str, Any], *, keep: int | None = None) -> Batch:
    """All that was recorded, or only the last ``keep`` allocations and frees."""
    trace = raw_trace(recorded)
    entries, missing = newest(trace, recorded["num_events"] if keep is None else keep)
    if keep is not None:
        missing = recorded["num_events"] - keep
    levels = recorded["allocated_bytes"], recorded["reserved_bytes"]
    return Batch(entries, missing, read_state(recorded["segments"], 0), *levels, has_retries=False)


def assembled(recorded: dict[str, Any], batch: Batch) -> Assembler:
    cell = recorded["cell"]
    linecache.cache[CELL_FILE] = (len(cell), None, cell.splitlines(keepends=True), CELL_FILE)
    given = recorded["given"]
    assembler = Assembler(state_of(given["state"]), given["count"], AllocatorSettings())
    for at_event, owners, ends_step in given["notes"]:
        known = {address: (Category(category), path) for address, category, path in owners}
        assembler.observe_owners(at_event, known, ends_step=ends_step)
    assembler.feed(batch)
    return assembler


def report_of(recorded: dict[str, Any], batch: Batch | None = None) -> MemoryReport:
    assembler = assembled(recorded, batch or batch_of(recorded))
    timeline = assembler.timeline(has_graph=False, workspace_sizes=frozenset({8320 * 1024}))
    return MemoryReport.from_timeline(timeline, CARD, source="measured", replayed=assembler.replayed(0))


@pytest.mark.parametrize("file", SNAPSHOTS, ids=lambda file: file.stem)
def test_levels_follow_torchs_counters(file: Path) -> None:
    recorded = load(file.stem)
    assembler = assembled(recorded, batch_of(recorded))
    report = report_of(recorded)
    assert assembler.drift_bytes == 0
    assert report.peak_allocated_bytes == recorded["peak_allocated_bytes"]
    assert report.peak_reserved_bytes == recorded["peak_reserved_bytes"]
    assert report.breakdown.total_bytes == report.peak_allocated_bytes


@pytest.mark.parametrize("file", SNAPSHOTS, ids=lambda file: file.stem)
def test_the_simulated_allocator_agrees(file: Path) -> None:
    recorded = load(file.stem)
    replayed = replay(report_of(recorded).timeline)
    assert replayed.peak_allocated_bytes == recorded["peak_allocated_bytes"]
    assert replayed.peak_reserved_bytes == recorded["peak_reserved_bytes"]


def test_training_by_category_line_and_step() -> None:
    recorded = load("training")
    report = report_of(recorded)
    assert report.breakdown == recorded["breakdown"]
    lines = {usage.line.line: usage.line for usage in report.lines if usage.line.file == CELL_FILE}
    assert {1, 4, 5, 7, 8} <= lines.keys()
    assert lines[7].text == "loss.backward()"
    assert [step.step for step in report.steps] == [1, 2, 3]
    assert report.steps[0].peak_allocated_bytes < report.steps[1].peak_allocated_bytes
    assert report.peak_phase is Phase.BACKWARD


def test_autograd_mirrors_forward_lines() -> None:
    operators = report_of(load("training")).timeline.operators
    assert f"backward of linear.forward ({CELL_FILE}:5)" in operators


def test_recomputing_under_activation_checkpointing_is_backward() -> None:
    timeline = report_of(load("checkpointing")).timeline
    large = timeline.phase[timeline.requested_bytes == 512 * 4096 * 4]
    assert {list(Phase)[phase] for phase in large} == {Phase.FORWARD, Phase.BACKWARD}


def test_the_failed_request_is_found() -> None:
    recorded = load("out_of_memory")
    failed = assembled(recorded, batch_of(recorded)).failed
    assert failed is not None
    assert (failed.num_bytes, failed.line.line) == (1024 * GIB, 5)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB.")
    found = find_out_of_memory(error, failed, AllocatorSettings())
    assert found is not None
    assert found.requested_bytes == 1024 * GIB
    assert found.line.text == 'more = torch.empty(2**38, device="cuda")'


def test_without_a_history_the_message_tells_the_size() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
    found = find_out_of_memory(error, None, AllocatorSettings())
    assert found is not None
    assert found.requested_bytes == found.tensor_bytes == int(2.5 * GIB)
    assert find_out_of_memory(ValueError("x"), None, AllocatorSettings()) is None


def test_empty_cache_is_marked() -> None:
    marks = report_of(load("out_of_memory")).timeline.marks
    assert [mark.kind for mark in marks] == [MarkKind.EMPTY_CACHE]


@pytest.mark.parametrize("keep", [1, 20, 61])
def test_lost_events_leave_the_end_right(keep: int) -> None:
    recorded = load("training")
    batch = batch_of(recorded, keep=keep)
    assembler = assembled(recorded, batch)
    assert assembler.num_missing == batch.num_missing > 0
    assert assembler.drift_bytes == 0
    report = report_of(recorded, batch)
    assert report.breakdown.total_bytes == report.peak_allocated_bytes <= recorded["peak_allocated_bytes"]


def test_newest_begins_with_the_segment_made_for_the_first_event() -> None:
    actions = ["alloc", "free_requested", "free_completed", "segment_alloc", "alloc", "snapshot"]
    trace = [{"action": action, "addr": 0, "size": 1, "stream": 0, "frames": []} for action in actions]
    entries, missing = newest(trace, 1)
    assert [entry.action.name for entry in entries] == ["FREE_COMPLETED", "SEGMENT_ALLOC", "ALLOC"]
    assert missing == 0
    assert newest(trace, 5)[1] == 2


def test_the_log_forgets_the_middle_and_no_peak() -> None:
    log, level = EventLog(), 0

    def change(event: int, num_bytes: int) -> None:
        nonlocal level
        level += num_bytes
        log.append(event, level, 1000)

    for step in range(8):
        change(3 * step, 10 + 5 * (step == 5))
        change(3 * step + 1, 1)  # freed in the next step
        change(~(3 * step), -10 - 5 * (step == 5))
        if step:
            change(~(3 * step - 2), -1)
        log.mark(MarkKind.STEP_END)
    peak, length = max(log.allocated), len(log.order)
    forgotten = log.forget_middle_steps()
    assert forgotten >= {6, 9, 12, 18}
    assert not forgotten & {0, 3, 15, 21}
    assert max(log.allocated) == peak
    assert len(log.order) < length
    assert log.num_forgotten_steps == 4
    alive = 0
    for event, after in zip(log.order, log.allocated, strict=True):
        size = 1 if (event if event >= 0 else ~event) % 3 else 15 if event in (15, ~15) else 10
        alive += size if event >= 0 else -size
        assert alive == after


def test_describe_error() -> None:
    assert describe_error(None) == ""
    assert describe_error(ValueError("a\nb")) == "ValueError: a"
    assert describe_error(KeyboardInterrupt()) == "KeyboardInterrupt"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_measuring_without_a_device_points_to_the_dry_run() -> None:
    with pytest.raises(RuntimeError, match=r"om\.dry_run"):
        om.measure()
