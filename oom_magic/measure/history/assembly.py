"""Builds the Timeline and the Replay of a measured run from the history of PyTorch's allocator."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from oom_magic.measure.history.attribution import Allocation, Owner, classify, mirrored_operators
from oom_magic.measure.history.frames import Frame, Site, site_of
from oom_magic.measure.history.recording import Action, AllocatorState, Batch, EventLog, HistoryEntry, LiveBlock
from oom_magic.memory.allocator.caching_allocator import CachingAllocator
from oom_magic.memory.allocator.replay import Replay
from oom_magic.memory.allocator.segments import MIN_BLOCK_BYTES, SMALL_BYTES, Pool, round_up
from oom_magic.memory.allocator.settings import AllocatorSettings
from oom_magic.memory.categories import CATEGORIES, Category
from oom_magic.memory.report import OutOfMemory
from oom_magic.memory.timeline import PHASES, IntArray, MarkKind, NameTable, Phase, SourceLine, Timeline


class Layout:
    """The allocated addresses of one device. Sizes and addresses in bytes."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self._round = CachingAllocator(settings=settings).rounded
        self._max_split_bytes = settings.max_split_size_bytes or 1 << 62
        self._segments: dict[int, int] = {}  # of the large pool, not expandable: start to size
        self._starts: list[int] = []  # of these segments, ascending
        self._large: list[int] = []  # addresses given out in them, ascending
        self._sizes: dict[int, int] = {}  # of every block given out

    def add_segment(self, address: int, num_bytes: int) -> None:
        """A segment was allocated by the driver. Those of the small pool (2 MiB) always split, so are not kept."""
        if num_bytes > 2 * SMALL_BYTES:
            self._segments[address] = num_bytes
            insort(self._starts, address)

    def remove_segment(self, address: int) -> None:
        """A segment was returned to the driver."""
        if self._segments.pop(address, None) is not None:
            del self._starts[bisect_left(self._starts, address)]

    def put(self, address: int, num_bytes: int) -> None:
        """A block of known size is allocated."""
        self._sizes[address] = num_bytes
        if num_bytes > SMALL_BYTES:
            insort(self._large, address)

    def allocate(self, address: int, requested_bytes: int) -> int:
        """The size of the block that served a request."""
        size = self._round(requested_bytes)
        if size > SMALL_BYTES:
            room = self._room_after(address, size)
            if size >= self._max_split_bytes or room - size <= SMALL_BYTES:
                size = room
        self.put(address, size)
        return size

    def free(self, address: int) -> None:
        """A block is free."""
        size = self._sizes.pop(address, 0)
        if size > SMALL_BYTES:
            del self._large[bisect_left(self._large, address)]

    def _room_after(self, address: int, size: int) -> int:
        """Bytes up to the next allocated block or the segment's end (expandable ones always split: ``size``)."""
        position = bisect_right(self._starts, address) - 1
        start = self._starts[position] if position >= 0 else 0
        end = start + self._segments.get(start, 0)
        if address >= end:
            return size
        following = bisect_right(self._large, address)
        if following < len(self._large):
            end = min(end, self._large[following])
        return max(end - address, size)


_COLUMNS = ("requested_bytes", "category", "phase", "step", "operator", "line", "module", "stream")
MAX_EVENTS = 400_000  # beyond this the middle of a long run is dropped; 0.2 KB of host memory each
_UNRECORDED = Site()  # of allocations whose making was not recorded
_FORGOTTEN = Allocation(0, 0, 0, _UNRECORDED, None, Phase.OTHER, 0)


class Observation(NamedTuple):
    """The owners of memory by address, seen after ``at_event`` allocations and frees, perhaps at a step's end."""

    at_event: int
    number: int
    owners: Mapping[int, Owner]
    ends_step: bool


class FailedRequest(NamedTuple):
    """A request that could not be served: its block's size, and where it was made."""

    num_bytes: int
    line: SourceLine
    operator: str
    phase: Phase
    step: int

    def segment_bytes(self, settings: AllocatorSettings) -> int:
        """What the driver was asked for, in bytes (``get_allocation_size``)."""
        return Pool(self.num_bytes <= SMALL_BYTES, settings).segment_bytes(self.num_bytes)

    def out_of_memory(self, message: str, requested_bytes: int) -> OutOfMemory:
        """The failure as a report has it: ``requested_bytes`` of the driver, with the message that says so."""
        return OutOfMemory(
            message=message,
            requested_bytes=requested_bytes,
            tensor_bytes=self.num_bytes,
            step=self.step,
            phase=self.phase,
            operator=self.operator,
            line=self.line,
            module="",
        )


class Assembler:
    """Builds one timeline from batches of history and observed owners. ``count``: torch's number of events so far."""

    def __init__(self, state: AllocatorState, count: int, settings: AllocatorSettings) -> None:
        self.num_missing = 0  # events that the history lost
        self.drift_bytes = 0  # torch's counter minus the reconstructed value; 0 unless an event was misread
        self.failed: FailedRequest | None = None
        self.allocations: list[Allocation] = []
        self._settings = settings
        self._count = count
        self.log = EventLog()
        self._observations: list[Observation] = []
        self._num_observations = 0
        self._live: dict[int, int] = {}
        self._layout = Layout(settings)
        self._sites: dict[tuple[Frame, ...], Site] = {}
        self._allocated_now = 0
        self._reserved_now = self._peak_reserved_bytes = state.reserved_bytes
        self._phase, self._step = Phase.OTHER, 0
        self._last_line: SourceLine | None = None
        self._backward_line: SourceLine | None = None
        self._cache_emptied = self._has_retries = False
        self._handlers: dict[Action, Callable[[HistoryEntry], None]] = {
            Action.ALLOC: self._on_alloc,
            Action.FREE_REQUESTED: self._on_free,
            Action.FREE_COMPLETED: lambda entry: self._layout.free(entry.address),
            Action.SEGMENT_ALLOC: self._on_segment_alloc,
            Action.SEGMENT_FREE: self._on_segment_free,
            Action.SEGMENT_MAP: self._on_reserved,
            Action.SEGMENT_UNMAP: self._on_reserved,
            Action.OOM: self._on_oom,
        }
        self._adopt(state.segments, state.blocks, Category.BEFORE)

    def observe_owners(self, at_event: int, owners: Mapping[int, Owner], *, ends_step: bool = False) -> None:
        """Note the owners of memory that were seen when torch's count of events was ``at_event``."""
        self._num_observations += 1
        insort(self._observations, Observation(at_event, self._num_observations, owners, ends_step))

    def feed(self, batch: Batch) -> None:
        """Add the events since the last batch."""
        if batch.num_missing:
            self._resume(batch)
        # the counter is exact at the end, so reserved is counted back from there
        self._reserved_now = batch.reserved_bytes - sum(map(_reserved_change, batch.entries))
        self._has_retries = batch.has_retries or self._settings.garbage_collection_threshold > 0
        for entry in batch.entries:
            if self._observations and self._observations[0].at_event <= self._count:
                self._apply_observations()
            self._handlers[entry.action](entry)
        self._apply_observations()
        self.drift_bytes = batch.allocated_bytes - self._allocated_now
        if len(self.log.order) > MAX_EVENTS:
            for index in self.log.forget_middle_steps():
                self.allocations[index] = _FORGOTTEN

    def new_addresses(self) -> set[int]:
        """Addresses of memory that was allocated since the start and is still alive."""
        return {address for address, index in self._live.items() if not self.allocations[index].is_before}

    def timeline(self, *, has_graph: bool, workspace_sizes: frozenset[int]) -> Timeline:
        """The record so far. ``has_graph``: an autograd graph is alive, so forward's results are saved."""
        self._mark_empty_cache()
        self._renumber()
        order = self.log.order
        classify(self.allocations, order, has_graph=has_graph, workspace_sizes=workspace_sizes)
        mirrored = mirrored_operators(self.allocations, order)
        operators, lines, modules = NameTable(""), NameTable(SourceLine("", 0)), NameTable("")
        rows = [
            (
                one.requested_bytes,
                CATEGORIES.index(one.category or Category.TEMPORARY),
                PHASES.index(one.phase),
                one.step,
                operators.number(mirrored.get(index, one.site.operator)),
                lines.number(one.line or SourceLine("", 0)),
                modules.number(one.module),
                one.stream,
            )
            for index, one in enumerate(self.allocations)
        ]
        columns: IntArray = np.array(rows, dtype=np.int64).reshape(-1, len(_COLUMNS))
        arrays = dict(zip(_COLUMNS, columns.T, strict=True))
        return Timeline(
            order=np.array(order, dtype=np.int64),
            **arrays,
            operators=operators.items(),
            lines=lines.items(),
            modules=modules.items(),
            marks=tuple(self.log.marks),
        )

    def replayed(self, num_retries: int) -> Replay:
        """What the real allocator did, in the form in which a replay returns it."""
        block_bytes = [one.block_bytes for one in self.allocations]
        return Replay(
            np.array(self.log.allocated, dtype=np.int64),
            np.array(self.log.reserved, dtype=np.int64),
            np.array(block_bytes, dtype=np.int64),
            self._peak_reserved_bytes,
            num_retries,
            None,
        )

    def _adopt(
        self, segments: Iterable[tuple[int, int]], blocks: Iterable[LiveBlock], category: Category | None
    ) -> None:
        """Add blocks that are alive and whose allocation was not recorded."""
        for address, num_bytes in segments:
            self._layout.add_segment(address, num_bytes)
        for block in blocks:
            self._layout.put(block.address, block.num_bytes)
            if block.address not in self._live:
                allocation = self._allocation(block.requested_bytes, block.num_bytes, block.stream, _UNRECORDED)
                allocation.category, allocation.is_before = category, category is Category.BEFORE
                self._add(block.address, allocation)

    def _resume(self, batch: Batch) -> None:
        """Continue after lost events from the state in which the recorded ones must have begun."""
        segments, blocks = state_before(batch)
        self.num_missing += batch.num_missing
        self._count += batch.num_missing
        for address in self._live.keys() - blocks.keys():
            self._remove(address)
        self._layout = Layout(self._settings)
        self._adopt(segments.items(), blocks.values(), None)

    def _apply_observations(self) -> None:
        while self._observations and self._observations[0].at_event <= self._count:
            observation = self._observations.pop(0)
            for address, (category, module) in observation.owners.items():
                index = self._live.get(address)
                if index is not None:
                    self.allocations[index].claim(category, module)
            if observation.ends_step:
                self.log.mark(MarkKind.STEP_END)
                self._step = max(self._step, 1) + 1

    def _allocation(self, requested_bytes: int, block_bytes: int, stream: int, site: Site) -> Allocation:
        return Allocation(requested_bytes, block_bytes, stream, site, None, self._phase, self._step)

    def _add(self, address: int, allocation: Allocation) -> None:
        index = self._live[address] = len(self.allocations)
        self.allocations.append(allocation)
        self._allocated_now += allocation.block_bytes
        self.log.append(index, self._allocated_now, self._reserved_now)

    def _remove(self, address: int) -> None:
        index = self._live.pop(address, None)
        if index is not None:
            self._allocated_now -= self.allocations[index].block_bytes
            self.log.append(~index, self._allocated_now, self._reserved_now)

    def _renumber(self) -> None:
        """Drop the allocations of the steps that were left out."""
        remaining = sorted(event for event in self.log.order if event >= 0)
        numbers = {index: number for number, index in enumerate(remaining)}
        self.allocations = [self.allocations[index] for index in remaining]
        self.log.order = [numbers[event] if event >= 0 else ~numbers[~event] for event in self.log.order]
        self._live = {address: numbers[index] for address, index in self._live.items()}

    def _on_alloc(self, entry: HistoryEntry) -> None:
        self._mark_empty_cache()
        self._count += 1
        site, line, phase = self._attribute(entry.frames)
        size = self._layout.allocate(entry.address, entry.num_bytes)
        allocation = self._allocation(entry.num_bytes, size, entry.stream, site)
        allocation.line, allocation.phase = line, phase
        self._add(entry.address, allocation)

    def _on_free(self, entry: HistoryEntry) -> None:
        self._count += 1
        self._remove(entry.address)

    def _on_segment_alloc(self, entry: HistoryEntry) -> None:
        self._attribute_freed_segments()
        self._layout.add_segment(entry.address, entry.num_bytes)
        self._on_reserved(entry)

    def _on_segment_free(self, entry: HistoryEntry) -> None:
        self._layout.remove_segment(entry.address)
        self._cache_emptied = True
        self._on_reserved(entry)

    def _on_reserved(self, entry: HistoryEntry) -> None:
        self._reserved_now += _reserved_change(entry)
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, self._reserved_now)

    def _on_oom(self, entry: HistoryEntry) -> None:
        self._attribute_freed_segments()
        site, line, phase = self._attribute(entry.frames)
        line = line or SourceLine("", 0)
        self.failed = FailedRequest(entry.num_bytes, line, site.operator, phase, self._step)

    def _attribute_freed_segments(self) -> None:
        """Attribute segments freed just before a new one to its request, if the allocator retried at all."""
        if self._has_retries:
            self._cache_emptied = False
        self._mark_empty_cache()

    def _mark_empty_cache(self) -> None:
        if self._cache_emptied:
            self.log.mark(MarkKind.EMPTY_CACHE)
            self._cache_emptied = False

    def _attribute(self, frames: tuple[Frame, ...]) -> tuple[Site, SourceLine | None, Phase]:
        """Site, line and phase of an allocation; what the stack does not show is inferred from earlier allocations.

        A line of the user's that calls operators directly is forward once a module has run in the step.
        What autograd's threads do belongs to the line that called backward.
        """
        site = self._sites.get(frames)
        if site is None:
            site = self._sites[frames] = site_of(frames)
        if site.phase is not None:
            self._phase = site.phase if site.phase is Phase.FORWARD else Phase.OTHER
            self._step = max(self._step, 1)
        phase = site.phase or self._phase
        line = site.line
        if line is None:
            line = (self._backward_line or self._last_line) if phase is Phase.BACKWARD else None
        elif site.calls_backward:
            self._backward_line = line
        elif phase is not Phase.BACKWARD:
            self._last_line, self._backward_line = line, None
        return site, line, phase


def _reserved_change(entry: HistoryEntry) -> int:
    """What an entry adds to the reserved bytes."""
    if entry.action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
        return entry.num_bytes
    return -entry.num_bytes if entry.action in (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP) else 0


def state_before(batch: Batch) -> tuple[dict[int, int], dict[int, LiveBlock]]:
    """Segments and blocks when the batch's entries began, worked out backwards from their end."""
    segments = dict(batch.state.segments)
    blocks = {block.address: block for block in batch.state.blocks}
    for entry in reversed(batch.entries):
        if entry.action == Action.ALLOC:
            blocks.pop(entry.address, None)
        elif entry.action == Action.FREE_REQUESTED:
            size = round_up(entry.num_bytes, MIN_BLOCK_BYTES)
            blocks[entry.address] = LiveBlock(entry.address, size, entry.num_bytes, entry.stream)
        elif entry.action == Action.SEGMENT_ALLOC:
            segments.pop(entry.address, None)
        elif entry.action == Action.SEGMENT_FREE:
            segments[entry.address] = entry.num_bytes
    return segments, blocks
