"""The levels that memory went through, event by event, kept bounded for long runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from oom_magic.errors import first_line
from oom_magic.garbage_collector import gc_disabled
from oom_magic.measure.history.frames import Frame
from oom_magic.memory.allocator import addresses
from oom_magic.memory.allocator.settings import AllocatorSettings
from oom_magic.memory.timeline import Mark, MarkKind

MAX_ENTRIES = 600_000  # of torch's buffer; with frames, allocations take about 1 KB of host memory each
DRAIN_EVENTS = 100_000  # a step that leaves more behind empties the buffer


class Action(IntEnum):
    """What the allocator did. The names are torch's."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2  # the memory can be used again; later than requested if another stream used it
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    OOM = 7


_COUNTED = ("alloc", "free_requested")  # what torch's counts count
_ACTIONS = {action.name.lower(): action for action in Action}


class HistoryEntry(NamedTuple):
    """One action: ``num_bytes`` as requested (segments: their size) at ``address``, called by ``frames``."""

    action: Action
    address: int
    num_bytes: int
    stream: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """A block that was given out when the allocator was asked."""

    address: int
    num_bytes: int
    requested_bytes: int
    stream: int


@dataclass(frozen=True)
class AllocatorState:
    """One device's segments (address, bytes) and the blocks given out in them."""

    segments: tuple[tuple[int, int], ...]
    blocks: tuple[LiveBlock, ...]

    @property
    def reserved_bytes(self) -> int:
        """The sum of all segments."""
        return sum(num_bytes for _, num_bytes in self.segments)


def _take_snapshot(device: int) -> dict[str, Any]:
    """What torch's allocator says; empty but for the reason if it keeps no account (cudaMallocAsync)."""
    try:
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot(device)
    except RuntimeError as error:
        snapshot = {"segments": [], "device_traces": [], "problem": first_line(error)}
    return snapshot


def read_state(segments: Sequence[dict[str, Any]], device: int) -> AllocatorState:
    """The state of ``device`` in what ``torch.cuda.memory_snapshot()`` returns."""
    mine = [segment for segment in segments if segment["device"] == device]
    blocks = []
    for segment in mine:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                requested = block.get("requested_size", block["size"])
                blocks.append(LiveBlock(address, block["size"], requested, segment["stream"]))
            address += block["size"]
    ranges = tuple((segment["address"], segment["total_size"]) for segment in mine)
    return AllocatorState(ranges, tuple(blocks))


def read_current_state(device: int) -> AllocatorState:
    """The state of ``device`` now."""
    return read_state(_take_snapshot(device)["segments"], device)


def read_settings(device: int) -> AllocatorSettings:
    """The allocator's settings as they are now, those made at run time included."""
    settings = replace(settings_in(_take_snapshot(device)), is_by_address=addresses.matter(torch.__version__))
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)  # since 2.8
    return replace(settings, memory_fraction=fraction) if fraction < 1 else settings


def settings_in(snapshot: dict[str, Any]) -> AllocatorSettings:
    """The allocator's settings that a snapshot tells; the defaults where it has an option newer than this package."""
    try:
        return AllocatorSettings.parse(snapshot.get("allocator_settings", {}).get("PYTORCH_CUDA_ALLOC_CONF", ""))
    except ValueError:
        return AllocatorSettings()


def read_trace(trace: Sequence[dict[str, Any]]) -> list[HistoryEntry]:
    """The entries of one device's trace that oom_magic knows, oldest first, with their Python frames.

    What ``torch.cuda.memory._record_memory_history()`` records by default has frames of C++ between them.
    """
    stacks: dict[tuple[int, ...], tuple[Frame, ...]] = {}
    entries = []
    for raw in trace:
        action = _ACTIONS.get(raw["action"])
        if action is None:
            continue
        frames = raw.get("frames", ())
        # torch shares the dicts of equal frames within a snapshot, so their identities name the stack
        key = tuple(map(id, frames))
        stack = stacks.get(key)
        if stack is None:
            python = (frame for frame in frames if frame["filename"].endswith(".py") or frame["filename"][:1] == "<")
            stack = tuple(Frame(frame["filename"], frame["line"], frame["name"]) for frame in python)
            stacks[key] = stack
        entries.append(HistoryEntry(action, raw.get("addr", 0), raw["size"], raw["stream"], stack))
    return entries


def count_events(device: int) -> int:
    """How many allocations and frees torch has counted since the process began."""
    counted = torch.cuda.memory_stats_as_nested_dict(device).get("allocation", {}).get("all", {})
    return int(counted.get("allocated", 0)) + int(counted.get("freed", 0))


def is_recording() -> bool:
    """Whether torch records the memory history now."""
    try:
        return bool(torch._C._cuda_isHistoryEnabled())
    except RuntimeError:  # an allocator that has no history
        return False


@dataclass(frozen=True)
class Batch:
    """What happened since the last batch.

    ``num_missing`` allocations and frees before ``entries`` are lost: the buffer overflowed or somebody
    cleared it. ``state`` and the counters hold at the end.
    """

    entries: list[HistoryEntry]
    num_missing: int
    state: AllocatorState
    allocated_bytes: int
    reserved_bytes: int
    has_retries: bool  # a request was served, or refused, only after cached segments were released


Listener = Callable[[Batch], None]


class History:
    """The history of one device, handed to its listeners piece by piece; nested observations share one.

    torch records all devices into one buffer, so whoever empties it first hands over what the others need.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.problem = ""  # why nothing is recorded
        self.is_users: bool = is_recording() and all(other.is_users for other in _histories.values())
        self.was_reset = False  # somebody set torch's counts back
        self._listeners: list[Listener] = []
        self._seen = count_events(device)
        self._num_retries = 0
        self._has_retried()
        if not is_recording():
            self._restart()

    @property
    def is_observed(self) -> bool:
        """Whether anybody still listens."""
        return bool(self._listeners)

    def subscribe(self, listener: Listener) -> None:
        """From now on ``listener`` gets what happens."""
        self.drain()
        self._listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Hand over the rest; the last one to leave ends a recording that is ours."""
        try:
            self.drain()
        finally:
            self._listeners = [one for one in self._listeners if one != listener]
            is_last = not any(history.is_observed for history in _histories.values())
            if is_last and not self.is_users and not self.problem:
                torch.cuda.memory._record_memory_history(None)

    def drain_if_large(self) -> None:
        """Hand over what has gathered if it is much; called between steps."""
        if not self.is_users and count_events(self.device) - self._seen > DRAIN_EVENTS:
            self.drain()

    def drain(self) -> None:
        """Hand the new entries to all listeners and, in a recording of ours, empty the buffer."""
        with gc_disabled():
            for history in [self] if self.is_users else list(_histories.values()):
                history._hand_over()
        if not self.is_users and not self.problem and is_recording():
            self._restart()

    def _restart(self) -> None:
        """Begin with an empty buffer: switching off is what empties it in every version."""
        try:
            torch.cuda.memory._record_memory_history(None)
            torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MAX_ENTRIES)
        except RuntimeError as error:
            self.problem = first_line(error)

    def _hand_over(self) -> None:
        if self._listeners:
            batch = self._read_batch()
            for listener in self._listeners:
                listener(batch)
        self._seen = count_events(self.device)

    def _read_batch(self) -> Batch:
        num_new = count_events(self.device) - self._seen
        snapshot = _take_snapshot(self.device)
        self.problem = self.problem or snapshot.get("problem", "")
        traces = snapshot["device_traces"]
        trace = traces[self.device] if self.device < len(traces) else []
        if num_new < 0:
            self.was_reset = True
            num_new = sum(entry["action"] in _COUNTED for entry in trace)
        entries, num_missing = newest(trace, num_new)
        return Batch(
            entries,
            num_missing,
            read_state(snapshot["segments"], self.device),
            torch.cuda.memory_allocated(self.device),
            torch.cuda.memory_reserved(self.device),
            self._has_retried(),
        )

    def _has_retried(self) -> bool:
        """Whether the allocator has released cached segments for a request since this was last asked."""
        before = self._num_retries
        self._num_retries = torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)
        return self._num_retries > before


def newest(trace: Sequence[dict[str, Any]], num_events: int) -> tuple[list[HistoryEntry], int]:
    """The entries with the last ``num_events`` allocations and frees, and how many of them are missing."""
    start, found = len(trace), 0
    while start and not (found == num_events and trace[start - 1]["action"] in _COUNTED):
        start -= 1
        found += trace[start]["action"] in _COUNTED
    # what lies between the last event before and the first of ours (a segment made for it) is ours
    return read_trace(trace[start:]), num_events - found


_histories: dict[int, History] = {}


def observe(device: int, listener: Listener) -> History:
    """Start to listen to a device; end it with ``ignore``, also if this fails."""
    history = _histories.get(device)
    if history is None:
        history = _histories[device] = History(device)
    history.subscribe(listener)
    return history


def ignore(device: int, listener: Listener) -> None:
    """Stop listening to a device."""
    history = _histories.get(device)
    if history is None:
        return
    try:
        history.unsubscribe(listener)
    finally:
        if not history.is_observed:
            del _histories[device]


_FIRST_KEPT_STEPS = 2  # the second is the first with optimizer state


class EventLog:
    """Allocations and frees in order (as in Timeline), with the bytes allocated and reserved after each."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.allocated: list[int] = []
        self.reserved: list[int] = []
        self.marks: list[Mark] = []
        self.num_forgotten_steps = 0

    def append(self, event: int, allocated_bytes: int, reserved_bytes: int) -> None:
        """An event, and the levels after it."""
        self.order.append(event)
        self.allocated.append(allocated_bytes)
        self.reserved.append(reserved_bytes)

    def mark(self, kind: MarkKind) -> None:
        """Something happens before the next event."""
        self.marks.append(Mark(len(self.order), kind))

    def forget_middle_steps(self) -> set[int]:
        """Drop what was allocated and freed within the steps that tell least; returns these allocations.

        The first two steps, the last and the one with the highest peak stay whole, so no peak is lost.
        """
        ends = [mark.position for mark in self.marks if mark.kind is MarkKind.STEP_END]
        peak = max(range(len(self.allocated)), key=self.allocated.__getitem__)
        steps = list(pairwise(ends))[_FIRST_KEPT_STEPS - 1 : -1]
        middle = [(start, end) for start, end in steps if end > start and not start <= peak < end]
        forgotten: set[int] = set()
        for start, end in reversed(_joined(middle)):
            forgotten |= self._forget(start, end)
        self.num_forgotten_steps += len(middle)
        return forgotten

    def _forget(self, start: int, end: int) -> set[int]:
        """Drop pairs inside a window; what crosses its border happens at its end, after all its marks."""
        inside = self.order[start:end]
        levels = self.allocated[start - 1 : end]
        gone = {event for event in inside if event >= 0} & {~event for event in inside if event < 0}
        changes = [
            (event, after - before)
            for event, before, after in zip(inside, levels[:-1], levels[1:], strict=True)
            if event not in gone and ~event not in gone
        ]
        # frees before allocations, so that no level exceeds one that really was
        changes.sort(key=lambda item: item[0] >= 0)
        self.order[start:end] = [event for event, _ in changes]
        self.allocated[start:end] = accumulate((change for _, change in changes), initial=levels[0])
        del self.allocated[start]
        self.reserved[start:end] = [self.reserved[end - 1]] * len(changes)
        change = len(changes) - len(inside)
        self.marks = [
            Mark(mark.position + change if mark.position > end else min(mark.position, start), mark.kind)
            for mark in self.marks
        ]
        return gone


def _joined(windows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Windows with those that touch made one."""
    joined: list[tuple[int, int]] = []
    for start, end in windows:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined
