"""Replays a timeline through the allocator: reserved memory, the failure if any, the least memory that is enough."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from oom_magic.language import _
from oom_magic.memory.allocator.caching_allocator import AllocatorOutOfMemory, CachingAllocator
from oom_magic.memory.allocator.later_steps import FEW_STEPS, MOST_STEPS, Course, course_of
from oom_magic.memory.allocator.segments import (
    GRANULE_BYTES,
    NOWHERE,
    UNLIMITED,
    Block,
)
from oom_magic.memory.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from oom_magic.memory.timeline import IntArray, MarkKind, Timeline
from oom_magic.units import format_bytes


@dataclass(frozen=True)
class ReplayFailure:
    """The request that could not be served: event ``position`` of the timeline, and PyTorch's numbers."""

    position: int
    allocation: int
    requested_bytes: int
    segment_bytes: int  # "Tried to allocate"
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, eq=False)
class Replay:
    """What the allocator does on a timeline, up to its end or the first failure.

    ``allocated_bytes[e]`` and ``reserved_bytes[e]`` hold after event ``e``; with a failure they end before
    its position. ``block_bytes[a]`` is the size of allocation ``a``'s block (0: none, or not reached).
    """

    allocated_bytes: IntArray
    reserved_bytes: IntArray
    block_bytes: IntArray
    peak_reserved_bytes: int
    num_retries: int
    failure: ReplayFailure | None

    @property
    def peak_allocated_bytes(self) -> int:
        """As ``torch.cuda.max_memory_allocated()`` at the end."""
        return int(self.allocated_bytes.max(initial=0))

    @property
    def peak_position(self) -> int:
        """The first event after which ``allocated_bytes`` is at its peak; -1 without events."""
        return int(self.allocated_bytes.argmax()) if len(self.allocated_bytes) else -1


def replay(
    timeline: Timeline,
    *,
    capacity_bytes: int | None = None,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    device_bytes: int | None = None,
) -> Replay:
    """Run a timeline through a fresh ``CachingAllocator`` (which explains the arguments).

    ``EMPTY_CACHE`` marks empty its cache. The replay stops at the first request that cannot be served.
    """
    allocator = CachingAllocator(capacity_bytes, settings, device_bytes=device_bytes)
    allocated: list[int] = []
    reserved: list[int] = []
    blocks = [NOWHERE] * timeline.num_allocations
    block_bytes = [0] * timeline.num_allocations
    failure = None
    try:
        _run(timeline, allocator, allocated, reserved, blocks, block_bytes)
    except AllocatorOutOfMemory as error:
        position = len(allocated)
        failure = ReplayFailure(position, int(timeline.order[position]), **vars(error))
    return Replay(
        np.array(allocated, dtype=np.int64),
        np.array(reserved, dtype=np.int64),
        np.array(block_bytes, dtype=np.int64),
        allocator.peak_reserved_bytes,
        allocator.num_retries,
        failure,
    )


def peaks_at_most(
    timeline: Timeline,
    transient: Sequence[tuple[int, int]],
    kept: Collection[int],
    capacity_bytes: int,
    settings: AllocatorSettings,
) -> tuple[int, int]:
    """Peak allocated and peak reserved bytes with ``transient`` memory allocated wherever it fits, and ``kept``
    allocations never freed.

    ``transient``: pairs of an event and the bytes allocated just before it: workspaces that libraries can do without.
    The timeline must end on a device of ``capacity_bytes`` without them; if it does not with the ``kept`` allocations,
    the peaks are those on a device of any size.
    """
    allocator = CachingAllocator(capacity_bytes, settings)
    blocks = [NOWHERE] * timeline.num_allocations
    try:
        _run(timeline, allocator, [], [], blocks, [0] * timeline.num_allocations, dict(transient), frozenset(kept))
    except AllocatorOutOfMemory:
        if kept:
            return peaks_at_most(timeline, (), kept, UNLIMITED, settings)
        return capacity_bytes, capacity_bytes  # the cache is then so fragmented that the whole device is in use
    return allocator.peak_allocated_bytes, allocator.peak_reserved_bytes


def _take_transient(allocator: CachingAllocator, num_bytes: int) -> None:
    with suppress(AllocatorOutOfMemory):
        allocator.free(allocator.allocate(num_bytes))


def _run(
    timeline: Timeline,
    allocator: CachingAllocator,
    allocated: list[int],
    reserved: list[int],
    blocks: list[Block],
    block_bytes: list[int],
    transient: Mapping[int, int] = MappingProxyType({}),
    kept: frozenset[int] = frozenset(),
) -> None:
    """Replay until the end or an exception, filling the lists; ``transient`` bytes are taken just before their events,
    and allocations ``kept`` are not freed."""
    requested, streams = timeline.requested_bytes.tolist(), timeline.stream.tolist()
    allocate, free = allocator.allocate, allocator.free
    note_allocated, note_reserved = allocated.append, reserved.append
    for events in _between_stops(timeline, allocator, transient):
        for event in events:
            if event >= 0:
                block = blocks[event] = allocate(requested[event], streams[event])
                block_bytes[event] = block.size_bytes
            elif ~event not in kept:
                free(blocks[~event])
            note_allocated(allocator.allocated_bytes)
            note_reserved(allocator.reserved_bytes)


def _between_stops(
    timeline: Timeline, allocator: CachingAllocator, transient: Mapping[int, int] = MappingProxyType({})
) -> Iterator[list[int]]:
    """Runs of events; empties the cache, and allocates and frees ``transient`` memory, between them."""
    order = timeline.order.tolist()
    empties = set(timeline.positions(MarkKind.EMPTY_CACHE))
    for start, stop in pairwise([0, *sorted(empties.union(transient)), len(order)]):
        _take_transient(allocator, transient.get(start, 0))
        if start in empties:
            allocator.empty_cache()
            _take_transient(allocator, transient.get(start, 0))
        yield order[start:stop]


def state_at(
    timeline: Timeline, capacity_bytes: int | None, settings: AllocatorSettings = DEFAULT_SETTINGS
) -> tuple[CachingAllocator, list[Block]]:
    """The allocator at the end of a timeline (or at its failure), and each allocation's block."""
    allocator = CachingAllocator(capacity_bytes, settings)
    blocks = [NOWHERE] * timeline.num_allocations
    with suppress(AllocatorOutOfMemory):
        _run(timeline, allocator, [], [], blocks, [0] * timeline.num_allocations)
    return allocator, blocks


def minimum_device_bytes(
    timeline: Timeline,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    batches: int = 1,
    more_batches: int = 0,
    exact_up_to_bytes: int | None = None,
) -> int:
    """Least device memory, context apart, in which the timeline ends without failure, in bytes.

    Where the run was left after a step, its code would have gone on: the last step is replayed again and again, until
    it leaves the allocator as a time before. Of each step's ``batches`` batches, over which gradients are
    accumulated, the last comes ``more_batches`` more times.

    By bisection to 2 MiB: the timeline was replayed to its end with what is returned, and failed with 2 MiB
    less. Rarely (one in 600 random timelines) a device a little larger fails again, because a retry comes
    later and finds the cache more fragmented. What is returned above ``exact_up_to_bytes``, for a device that is too
    small anyway, may be 0.2 % more than the least: there the search ends earlier. Raises ValueError if no amount is
    enough, as with a memory fraction of 0.
    """
    search = _LeastCapacity(course_of(timeline, batches, more_batches), settings, exact_up_to_bytes)
    unlimited = search.ended(UNLIMITED // GRANULE_BYTES, replace(settings, memory_fraction=None))
    assert unlimited is not None, "it is never full"
    too_few = unlimited.peak_allocated_bytes // GRANULE_BYTES - 1
    ample = -(-unlimited.peak_reserved_bytes // GRANULE_BYTES)
    if not search.is_plain:
        too_few, ample = search.widened(too_few, ample)
    enough = search.narrowed(too_few, ample, FEW_STEPS)
    if enough < ample and search.ended(enough) is None:
        enough = search.narrowed(*search.widened(enough, enough + 1))
    return enough * GRANULE_BYTES


_NEARLY = 512  # a search that need not be exact ends within this part of what it finds


class _LeastCapacity:
    """The search for the least capacity, in granules, with which a course ends: at first with few of its later steps,
    which is what takes time."""

    def __init__(self, course: Course, settings: AllocatorSettings, exact_up_to_bytes: int | None) -> None:
        self._course, self._settings = course, settings
        self._exact_up_to = UNLIMITED if exact_up_to_bytes is None else exact_up_to_bytes // GRANULE_BYTES
        # Else limits follow the capacity.
        self.is_plain = settings.memory_fraction is None and not settings.expandable_segments

    def ended(
        self, num_granules: int, settings: AllocatorSettings | None = None, most_steps: int = MOST_STEPS
    ) -> CachingAllocator | None:
        """The allocator after the run with this capacity; None if the run fails with it."""
        allocator = CachingAllocator(num_granules * GRANULE_BYTES, settings or self._settings)
        try:
            self._course.run(allocator, most_steps)
        except AllocatorOutOfMemory:
            return None
        return allocator

    def widened(self, too_few: int, enough: int) -> tuple[int, int]:
        """Capacities with which the run fails, and ends. Raises ValueError if it ends with none."""
        while self.ended(enough) is None:
            too_few, enough = enough, enough + max(2 * (enough - too_few), 1)
            if enough * GRANULE_BYTES > UNLIMITED:
                fraction = self._settings.memory_fraction
                raise ValueError(_("No device is large enough with memory_fraction {fraction}.", fraction=fraction))
        return too_few, enough

    def narrowed(self, too_few: int, enough: int, most_steps: int = MOST_STEPS) -> int:
        """The least capacity with which the run ends, or nearly, between two with which it fails, and ends."""
        if self.is_plain and enough - too_few > 1 and self.ended(enough - 1, most_steps=most_steps) is None:
            return enough  # most often nothing that an unlimited run reserved can be spared
        while enough - too_few > (1 if too_few < self._exact_up_to else 1 + too_few // _NEARLY):
            middle = (too_few + enough) // 2
            allocator = self.ended(middle, most_steps=most_steps)
            if allocator is None:
                too_few = middle
            else:
                used = -(-allocator.peak_reserved_bytes // GRANULE_BYTES) if self.is_plain else middle
                enough = max(used, too_few + 1)
        return enough


def failure_message(
    error: AllocatorOutOfMemory | ReplayFailure,
    total_bytes: int,
    context_bytes: int,
    limit_bytes: int | None = None,
    device_index: int = 0,
) -> str:
    """PyTorch's own wording (c10/cuda/CUDACachingAllocator.cpp, ``malloc``); ``limit_bytes`` is that of a fraction."""
    cached = error.reserved_bytes - error.allocated_bytes
    allowed = "" if limit_bytes is None else f"{format_bytes(limit_bytes)} allowed; "
    return (
        f"CUDA out of memory. Tried to allocate {format_bytes(error.segment_bytes)}. GPU {device_index} has a total "
        f"capacity of {format_bytes(total_bytes)} of which {format_bytes(error.free_bytes)} is free. "
        "Including non-PyTorch memory, "
        f"this process has {format_bytes(error.reserved_bytes + context_bytes)} memory in use. "
        f"{allowed}Of the allocated memory {format_bytes(error.allocated_bytes)} is allocated by PyTorch, "
        f"and {format_bytes(cached)} is reserved by PyTorch but unallocated. "
        "If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )
