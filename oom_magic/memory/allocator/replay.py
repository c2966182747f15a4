"""PyTorch's CUDA caching allocator, in Python: what is reserved, what is stuck, when it runs out.

The rules are those of ``DeviceCachingAllocator`` in c10/cuda/CUDACachingAllocator.cpp; each function here
names the one it follows. tests/data holds histories recorded from PyTorch 2.13: every byte agrees.

Assumptions: the driver deals in granules of 2 MiB and loses none to fragmentation; memory freed while another
stream still uses it (``record_stream``) returns by the next request; a private pool of a CUDA graph, which has a
negative number in a stream's place (recorded streams have their addresses), keeps what it has.
PyTorch before 2.13 chose between equal blocks by real address: recorded training still agrees, some random
stress does not.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from types import MappingProxyType

import numpy as np

from oom_magic.language import _
from oom_magic.memory.allocator.segments import (
    ADDRESS_BITS,
    GRANULE_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    UNLIMITED,
    Block,
    DeviceMemory,
    Pool,
    round_up,
)
from oom_magic.memory.allocator.settings import AllocatorSettings
from oom_magic.memory.timeline import IntArray, MarkKind, Timeline
from oom_magic.units import format_bytes

__all__ = [
    "AllocatorOutOfMemory",
    "AllocatorSettings",
    "Block",
    "CachingAllocator",
    "Replay",
    "ReplayFailure",
    "minimum_device_bytes",
    "most_with",
    "replay",
    "state_at",
]

_DEFAULT_SETTINGS = AllocatorSettings()
_NOWHERE = Block(0, 0, None)  # of requests for 0 bytes


class AllocatorOutOfMemory(Exception):  # noqa: N818 (torch.OutOfMemoryError is its model)
    """A request that the simulated allocator could not serve, with the numbers of PyTorch's message.

    ``requested_bytes`` is what the tensor asked for and ``segment_bytes`` what the driver was asked for
    ("Tried to allocate"); the others hold after all that could be released was.
    """

    def __init__(
        self,
        *,
        requested_bytes: int,
        segment_bytes: int,
        free_bytes: int,
        allocated_bytes: int,
        reserved_bytes: int,
        capacity_bytes: int,
    ) -> None:
        self.requested_bytes = requested_bytes
        self.segment_bytes = segment_bytes
        self.free_bytes = free_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.capacity_bytes = capacity_bytes
        super().__init__(
            f"Tried to allocate {format_bytes(segment_bytes)} for {format_bytes(requested_bytes)}; "
            f"{format_bytes(free_bytes)} of {format_bytes(capacity_bytes)} are free, "
            f"{format_bytes(allocated_bytes)} allocated, {format_bytes(reserved_bytes)} reserved."
        )


class CachingAllocator:
    """PyTorch's allocator on a device with ``capacity_bytes`` for it (context and other processes apart).

    Without a capacity the device never runs out. ``device_bytes``, the device's whole memory (default: the
    capacity), is what ``settings.memory_fraction`` is a fraction of. ``allocated_bytes``, ``reserved_bytes``
    and their peaks are what ``torch.cuda`` would say, ``num_retries`` its ``num_alloc_retries``.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        settings: AllocatorSettings = _DEFAULT_SETTINGS,
        *,
        device_bytes: int | None = None,
    ) -> None:
        capacity = UNLIMITED if capacity_bytes is None else capacity_bytes
        total = capacity if device_bytes is None else device_bytes
        has_limit = settings.memory_fraction is not None
        limit = int((settings.memory_fraction or 0) * total) if has_limit else UNLIMITED
        self.settings = settings
        self.allocated_bytes = self.peak_allocated_bytes = self.num_retries = 0
        self._device = DeviceMemory(capacity, limit, total)
        self._pools: dict[int, tuple[Pool, Pool]] = {}  # by stream: small, large
        self._max_split_bytes = settings.max_split_size_bytes or UNLIMITED
        self._split_below_bytes = UNLIMITED if settings.expandable_segments else self._max_split_bytes
        self._rounds_finely = all(number <= 1 for number in settings.roundup_power2_divisions)
        self._collects = has_limit and settings.garbage_collection_threshold > 0
        self._num_large_searches = 0  # the clock of garbage collection

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the allocator holds of the device."""
        return self._device.reserved_bytes

    @property
    def limit_bytes(self) -> int | None:
        """What the allocator may hold at most, whatever the device has; None: no limit was set."""
        return None if self._device.limit_bytes >= UNLIMITED else self._device.limit_bytes

    def limit(self, limit_bytes: int) -> None:
        """Set ``limit_bytes``, as ``torch.cuda.set_per_process_memory_fraction`` does."""
        self._device.limit_bytes = limit_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes that it held, within an event too."""
        return self._device.peak_reserved_bytes

    @property
    def num_device_allocs(self) -> int:
        """How often the driver gave memory."""
        return self._device.num_allocs

    @property
    def num_device_frees(self) -> int:
        """How often memory went back to the driver."""
        return self._device.num_frees

    def allocate(self, requested_bytes: int, stream: int = 0) -> Block:
        """The block that serves a request (``malloc``, ``alloc_found_block``).

        All its ``size_bytes``, which may exceed what was asked, count as allocated.
        Raises AllocatorOutOfMemory when nothing that can be released helps.
        """
        if requested_bytes <= 0:
            return _NOWHERE
        if self._rounds_finely:
            size = (requested_bytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES
        else:
            size = self._round(requested_bytes)
        pools = self._pools.get(stream)
        if pools is None:
            pools = self._pools[stream] = (Pool(True, self.settings), Pool(False, self.settings))
        pool = pools[size > SMALL_BYTES]
        block = self._find(pool, size) or self._obtain(pool, size, requested_bytes)
        remainder = block.size_bytes - size
        if remainder >= pool.min_remainder_bytes and size < self._split_below_bytes:
            rest = Block(block.address + size, remainder, pool, block.base)
            rest.is_free = True
            rest.born = self._num_large_searches
            block.size_bytes = size
            rest.previous = block
            following = rest.next = block.next
            block.next = rest
            if following is not None:
                following.previous = rest
            key = remainder << ADDRESS_BITS | rest.address
            insort(pool.keys, key)
            pool.blocks[key] = rest
        block.is_free = False
        allocated = self.allocated_bytes = self.allocated_bytes + block.size_bytes
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        return block

    def free(self, block: Block) -> None:
        """Return a block to the cache, merged with its free neighbours (``free_block``)."""
        pool = block.pool
        if pool is None:
            return
        if block.is_free:
            raise ValueError(
                _("The block at address {address} was freed already; free each block once.", address=block.address)
            )
        self.allocated_bytes -= block.size_bytes
        keys, blocks = pool.keys, pool.blocks
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.is_free:
                key = neighbour.size_bytes << ADDRESS_BITS | neighbour.address
                del keys[bisect_left(keys, key)]
                del blocks[key]
                block.absorb(neighbour)
        block.is_free = True
        block.born = self._num_large_searches
        key = block.size_bytes << ADDRESS_BITS | block.address
        insort(keys, key)
        blocks[key] = block

    def empty_cache(self) -> None:
        """Give back to the driver all that is wholly free: segments, pages (``release_cached_blocks``)."""
        pools = [pools for stream, pools in self._pools.items() if stream >= 0]
        for pool in chain((large for _unused, large in pools), (small for small, _unused in pools)):
            for block in [pool.blocks[key] for key in pool.keys]:
                if self.settings.expandable_segments:
                    self._device.unmap(block, pool)
                elif not block.is_split:
                    self._device.release(block)

    def free_blocks(self) -> list[Block]:
        """The blocks that are cached, in no order."""
        pools = chain.from_iterable(self._pools.values())
        return [block for pool in pools for block in pool.blocks.values()]

    def _round(self, requested_bytes: int) -> int:
        """Bytes of the block for a request, with ``roundup_power2_divisions`` (``round_size``)."""
        interval = min(max(requested_bytes.bit_length() - 21, 0), 15)
        divisions = self.settings.roundup_power2_divisions[interval]
        if divisions > 1 and requested_bytes > MIN_BLOCK_BYTES * divisions:
            return round_up(requested_bytes, (1 << (requested_bytes.bit_length() - 1)) // divisions)
        return round_up(requested_bytes, MIN_BLOCK_BYTES)

    def _find(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block that serves ``size``, from the oldest segment (``get_free_block``)."""
        if not pool.is_small:
            self._num_large_searches += 1
        keys = pool.keys
        position = bisect_left(keys, size << ADDRESS_BITS)
        if position == len(keys):
            return None
        if self.settings.expandable_segments:
            position = _least_expandable(pool, position)
        found = keys[position] >> ADDRESS_BITS
        max_split = self._max_split_bytes
        if found >= max_split and (size < max_split or found >= size + self.settings.max_non_split_rounding_bytes):
            return None
        return pool.blocks.pop(keys.pop(position))

    def _obtain(self, pool: Pool, size: int, requested_bytes: int) -> Block:
        """A block of new memory, after releasing cached memory if it must be (``malloc``)."""
        device = self._device
        grow = device.expand if self.settings.expandable_segments else device.grow
        if self._collects:
            self._collect_garbage()
        block = grow(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = grow(pool, size)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = grow(pool, size)
        if block is None:
            raise AllocatorOutOfMemory(
                requested_bytes=requested_bytes,
                segment_bytes=pool.segment_bytes(size),
                free_bytes=device.free_bytes,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=device.reserved_bytes,
                capacity_bytes=device.capacity_bytes,
            )
        return block

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release blocks too large to split, until ``size`` may fit (``release_available_cached_blocks``)."""
        max_split = self._max_split_bytes
        if max_split == UNLIMITED or self.settings.expandable_segments:
            return False
        wanted = max(size, max_split)
        position = bisect_left(pool.keys, wanted << ADDRESS_BITS)
        if position < len(pool.keys):
            self._device.release(pool.blocks[pool.keys[position]])
            return True
        released = 0
        while released < wanted and pool.keys and pool.keys[-1] >> ADDRESS_BITS >= max_split:
            released += pool.keys[-1] >> ADDRESS_BITS
            self._device.release(pool.blocks[pool.keys[-1]])
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Release the large segments that were free for longest (``garbage_collect_cached_blocks``)."""
        threshold = int(self.settings.garbage_collection_threshold * self._device.limit_bytes)
        excess = self._device.reserved_bytes - threshold
        now = self._num_large_searches
        cached = chain.from_iterable(large.blocks.values() for _unused, large in self._pools.values())
        idle = [block for block in cached if not block.is_split]
        while idle and excess > 0:
            mean_age = sum(now - block.born for block in idle) / len(idle)
            for block in idle:
                if now - block.born >= mean_age:
                    excess -= block.size_bytes
                    self._device.release(block)
            idle = [block for block in idle if now - block.born < mean_age]


def _least_expandable(pool: Pool, position: int) -> int:
    """From ``position`` on, the first block that can grow to no more than the next (``get_free_block``)."""

    def room(position: int) -> int:
        block = pool.blocks[pool.keys[position]]
        following = block.next
        if following is None or following.is_mapped:
            return block.size_bytes
        return block.size_bytes + following.size_bytes

    while position + 1 < len(pool.keys) and room(position + 1) < room(position):
        position += 1
    return position


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
    settings: AllocatorSettings = _DEFAULT_SETTINGS,
    device_bytes: int | None = None,
) -> Replay:
    """Run a timeline through a fresh ``CachingAllocator`` (which explains the arguments).

    ``EMPTY_CACHE`` marks empty its cache. The replay stops at the first request that cannot be served.
    """
    allocator = CachingAllocator(capacity_bytes, settings, device_bytes=device_bytes)
    allocated: list[int] = []
    reserved: list[int] = []
    blocks = [_NOWHERE] * timeline.num_allocations
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


def most_with(
    timeline: Timeline, passing: Sequence[tuple[int, int]], capacity_bytes: int, settings: AllocatorSettings
) -> tuple[int, int]:
    """The peaks of allocated and reserved bytes if memory is taken besides, for a moment, wherever it fits.

    ``passing`` has the event before which, and how much: workspaces, which libraries do without where they do not
    fit. The peaks are those of a timeline that ends on a device of ``capacity_bytes`` without them.
    """
    allocator = CachingAllocator(capacity_bytes, settings)
    blocks = [_NOWHERE] * timeline.num_allocations
    try:
        _run(timeline, allocator, [], [], blocks, [0] * timeline.num_allocations, dict(passing))
    except AllocatorOutOfMemory:  # the cache is so broken up then that all of the device is in use
        return capacity_bytes, capacity_bytes
    return allocator.peak_allocated_bytes, allocator.peak_reserved_bytes


def _take_for_a_moment(allocator: CachingAllocator, num_bytes: int) -> None:
    with suppress(AllocatorOutOfMemory):
        allocator.free(allocator.allocate(num_bytes))


def _run(
    timeline: Timeline,
    allocator: CachingAllocator,
    allocated: list[int],
    reserved: list[int],
    blocks: list[Block],
    block_bytes: list[int],
    passing: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Replay until the end or an exception, filling the lists; ``passing``: taken for a moment before those events."""
    requested, streams = timeline.requested_bytes.tolist(), timeline.stream.tolist()
    allocate, free = allocator.allocate, allocator.free
    note_allocated, note_reserved = allocated.append, reserved.append
    for events in _between_stops(timeline, allocator, passing):
        for event in events:
            if event >= 0:
                block = blocks[event] = allocate(requested[event], streams[event])
                block_bytes[event] = block.size_bytes
            else:
                free(blocks[~event])
            note_allocated(allocator.allocated_bytes)
            note_reserved(allocator.reserved_bytes)


def _between_stops(
    timeline: Timeline, allocator: CachingAllocator, passing: Mapping[int, int] = MappingProxyType({})
) -> Iterator[list[int]]:
    """The events between those at which the cache is emptied or something passes, which is done here."""
    order = timeline.order.tolist()
    empties = {mark.position for mark in timeline.marks if mark.kind is MarkKind.EMPTY_CACHE}
    for start, stop in pairwise([0, *sorted(empties.union(passing)), len(order)]):
        _take_for_a_moment(allocator, passing.get(start, 0))
        if start in empties:
            allocator.empty_cache()
            _take_for_a_moment(allocator, passing.get(start, 0))
        yield order[start:stop]


def state_at(
    timeline: Timeline, capacity_bytes: int | None, settings: AllocatorSettings = _DEFAULT_SETTINGS
) -> tuple[CachingAllocator, list[Block]]:
    """The allocator at the end of a timeline (or at its failure), and each allocation's block."""
    allocator = CachingAllocator(capacity_bytes, settings)
    blocks = [_NOWHERE] * timeline.num_allocations
    with suppress(AllocatorOutOfMemory):
        _run(timeline, allocator, [], [], blocks, [0] * timeline.num_allocations)
    return allocator, blocks


def minimum_device_bytes(timeline: Timeline, settings: AllocatorSettings = _DEFAULT_SETTINGS) -> int:
    """Least device memory, context apart, in which the timeline ends without failure, in bytes.

    By bisection to 2 MiB: the timeline was replayed to its end with what is returned, and failed with 2 MiB
    less. Rarely (one in 600 random timelines) a device a little larger fails again, because a retry comes
    later and finds the cache more broken up. Raises ValueError if no amount is enough, as with a memory
    fraction of 0.
    """

    requested, streams = timeline.requested_bytes.tolist(), timeline.stream.tolist()

    def taken(num_granules: int) -> int | None:
        """The most granules taken of so many, with which it ends the same way; None where it fails."""
        allocator = CachingAllocator(num_granules * GRANULE_BYTES, settings)
        blocks = [_NOWHERE] * timeline.num_allocations
        try:
            for events in _between_stops(timeline, allocator):
                for event in events:  # nothing is noted of what a search tries
                    if event >= 0:
                        blocks[event] = allocator.allocate(requested[event], streams[event])
                    else:
                        allocator.free(blocks[~event])
        except AllocatorOutOfMemory:
            return None
        return -(-allocator.peak_reserved_bytes // GRANULE_BYTES) if is_plain else num_granules

    is_plain = settings.memory_fraction is None and not settings.expandable_segments  # else limits follow the capacity
    unlimited = replay(timeline, settings=replace(settings, memory_fraction=None))
    too_few = unlimited.peak_allocated_bytes // GRANULE_BYTES - 1
    enough = -(-unlimited.peak_reserved_bytes // GRANULE_BYTES)
    while taken(enough) is None:
        too_few, enough = enough, 2 * enough
        if enough * GRANULE_BYTES > UNLIMITED:
            raise ValueError(
                _("No device is large enough with memory_fraction {fraction}.", fraction=settings.memory_fraction)
            )
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        used = taken(middle)
        if used is None:
            too_few = middle
        else:
            enough = max(used, too_few + 1)
    return enough * GRANULE_BYTES
