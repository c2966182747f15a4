"""PyTorch's CUDA caching allocator, in Python: what is reserved, what is stuck, when it runs out.

The rules are those of ``DeviceCachingAllocator`` in c10/cuda/CUDACachingAllocator.cpp; each function here
names the one it follows. tests/data holds histories recorded from PyTorch 2.13: every byte agrees.

Assumptions: the driver allocates in units of 2 MiB and loses none to fragmentation; memory freed while another
stream still uses it (``record_stream``) returns by the next request; a private pool of a CUDA graph, which has a
negative number in a stream's place (recorded streams have their addresses), keeps what it has. Before 2.13 the
driver's addresses matter, of which addresses.py knows what was seen on one card.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import chain

from oom_magic.language import _
from oom_magic.memory.allocator.segments import (
    ADDRESS_BITS,
    MIN_BLOCK_BYTES,
    NOWHERE,
    SMALL_BYTES,
    UNLIMITED,
    Block,
    DeviceMemory,
    Pool,
    round_up,
)
from oom_magic.memory.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from oom_magic.units import format_bytes


class AllocatorOutOfMemory(Exception):  # noqa: N818 (torch.OutOfMemoryError is its model)
    """A request that the simulated allocator could not serve, with the numbers of PyTorch's message.

    ``requested_bytes`` is what the tensor asked for and ``segment_bytes`` what the driver was asked for
    ("Tried to allocate"); the other numbers are those after everything releasable was released.
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
        settings: AllocatorSettings = DEFAULT_SETTINGS,
        *,
        device_bytes: int | None = None,
    ) -> None:
        capacity = UNLIMITED if capacity_bytes is None else capacity_bytes
        total = capacity if device_bytes is None else device_bytes
        has_limit = settings.memory_fraction is not None
        limit = int((settings.memory_fraction or 0) * total) if has_limit else UNLIMITED
        self.settings = settings
        self.allocated_bytes = self.peak_allocated_bytes = self.num_retries = 0
        self._device = DeviceMemory(capacity, limit, total, settings.is_by_address)
        self._pools: dict[int, tuple[Pool, Pool]] = {}  # by stream: small, large
        self._max_split_bytes = settings.max_split_size_bytes or UNLIMITED
        self._split_below_bytes = UNLIMITED if settings.expandable_segments else self._max_split_bytes
        self._rounds_finely = all(number <= 1 for number in settings.roundup_power2_divisions)
        self._collects = has_limit and settings.garbage_collection_threshold > 0
        self._num_large_searches = 0  # the clock of garbage collection

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the allocator has reserved."""
        return self._device.reserved_bytes

    @property
    def limit_bytes(self) -> int | None:
        """The most bytes that the allocator may reserve; None: no limit was set."""
        return None if self._device.limit_bytes >= UNLIMITED else self._device.limit_bytes

    def limit(self, limit_bytes: int) -> None:
        """Set ``limit_bytes``, as ``torch.cuda.set_per_process_memory_fraction`` does."""
        self._device.limit_bytes = limit_bytes

    def resize(self, capacity_bytes: int | None) -> None:
        """Give the device another capacity; None: it never runs out."""
        self._device.resize(UNLIMITED if capacity_bytes is None else capacity_bytes)

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes that were reserved at any moment, also within an event."""
        return self._device.peak_reserved_bytes

    @property
    def num_device_allocs(self) -> int:
        """How many allocations the driver made."""
        return self._device.num_allocs

    @property
    def num_device_frees(self) -> int:
        """How many allocations were returned to the driver."""
        return self._device.num_frees

    def allocate(self, requested_bytes: int, stream: int = 0) -> Block:
        """The block that serves a request (``malloc``, ``alloc_found_block``).

        All its ``size_bytes``, which may exceed what was asked, count as allocated.
        Raises AllocatorOutOfMemory when nothing that can be released helps.
        """
        if requested_bytes <= 0:
            return NOWHERE
        if self._rounds_finely:
            size = (requested_bytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES
        else:
            size = self.rounded(requested_bytes)
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
                _("The block at address {address} was already freed; free each block only once.", address=block.address)
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
        """Return all entirely free segments and pages to the driver (``release_cached_blocks``)."""
        pools = [pools for stream, pools in self._pools.items() if stream >= 0]
        for pool in chain((large for _unused, large in pools), (small for small, _unused in pools)):
            for block in [pool.blocks[key] for key in pool.keys]:
                if self.settings.expandable_segments:
                    self._device.unmap(block, pool)
                elif not block.is_split:
                    self._device.release(block)

    def free_blocks(self) -> list[Block]:
        """The cached blocks, in no order."""
        pools = chain.from_iterable(self._pools.values())
        return [block for pool in pools for block in pool.blocks.values()]

    def rounded(self, requested_bytes: int) -> int:
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
