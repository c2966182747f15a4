"""Where the allocator's blocks come from: segments of device memory, of fixed size or expandable.

The rules are those of c10/cuda/CUDACachingAllocator.cpp; each function names the one it follows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from oom_magic.memory.allocator.addresses import Addresses, ByAge, OfDriver
from oom_magic.memory.allocator.settings import AllocatorSettings
from oom_magic.units import MIB

MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BYTES = MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own size
GRANULE_BYTES = 2 * MIB  # kRoundLarge, and the unit in which the driver allocates
UNLIMITED = 1 << 46  # stands for "no limit": more than any device has, and whole granules
ADDRESS_BITS = 64  # a free block's place in the order of (size, address) is size << ADDRESS_BITS | address


def round_up(num_bytes: int, unit_bytes: int) -> int:
    """The next multiple of ``unit_bytes``, in bytes."""
    return -(-num_bytes // unit_bytes) * unit_bytes


class Block:
    """A piece of a segment: ``size_bytes`` at ``address``, given out for a request or free.

    Between free blocks of equal size PyTorch prefers that with the lower address (addresses.py).
    A request of 0 bytes gets a block of size 0 that is in no segment.
    """

    __slots__ = ("address", "base", "born", "is_free", "is_mapped", "next", "pool", "previous", "size_bytes")

    def __init__(self, address: int, size_bytes: int, pool: Pool | None, base: int = 0) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pool = pool
        self.base = base  # where its expandable segment begins
        self.previous: Block | None = None
        self.next: Block | None = None
        self.is_free = False  # free, and mapped
        self.is_mapped = True  # mapped to memory
        self.born = 0  # how many searches the large pool had seen when it was freed last

    @property
    def is_split(self) -> bool:
        """Whether the block is only a part of its segment."""
        return self.previous is not None or self.next is not None

    @property
    def head(self) -> Block:
        """The first block of its segment."""
        block = self
        while block.previous is not None:
            block = block.previous
        return block

    def chain(self) -> Iterator[Block]:
        """This block and those behind it in its segment, by address."""
        block: Block | None = self
        while block is not None:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        """Put ``block`` between this one and the next (``Block::splice``)."""
        block.previous, block.next = self, self.next
        if self.next is not None:
            self.next.previous = block
        self.next = block

    def absorb(self, neighbour: Block) -> None:
        """Merge with an adjacent block (``try_merge_blocks``)."""
        self.size_bytes += neighbour.size_bytes
        if neighbour is self.previous:
            self.address = neighbour.address
            self.previous = neighbour.previous
            if self.previous is not None:
                self.previous.next = self
        else:
            self.next = neighbour.next
            if self.next is not None:
                self.next.previous = self


NOWHERE = Block(0, 0, None)  # of requests for 0 bytes


class Pool:
    """The free blocks of one stream and one kind, small or large (``BlockPool``)."""

    __slots__ = ("blocks", "is_small", "keys", "min_remainder_bytes", "page_bytes", "unmapped")

    def __init__(self, is_small: bool, settings: AllocatorSettings) -> None:
        self.is_small = is_small
        self.keys: list[int] = []  # ascending
        self.blocks: dict[int, Block] = {}  # by key
        self.unmapped: list[Block] = []  # parts of expandable segments without memory, by address
        self.page_bytes = SMALL_SEGMENT_BYTES if is_small else settings.large_segment_bytes
        splits_finely = is_small or settings.expandable_segments
        self.min_remainder_bytes = MIN_BLOCK_BYTES if splits_finely else SMALL_BYTES + 1  # should_split

    def insert(self, block: Block) -> None:
        """Add a free block."""
        key = block.size_bytes << ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        key = block.size_bytes << ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]

    def insert_unmapped(self, block: Block) -> None:
        """Add a part of an expandable segment that has no memory."""
        insort(self.unmapped, block, key=lambda other: other.address)

    def segment_bytes(self, size: int) -> int:
        """Bytes to ask of the driver for a block of ``size`` (``get_allocation_size``)."""
        if self.is_small:
            return SMALL_SEGMENT_BYTES
        return self.page_bytes if size < MIN_LARGE_BYTES else round_up(size, GRANULE_BYTES)


class DeviceMemory:
    """The memory of a device, and what the allocator holds of it."""

    def __init__(self, capacity_bytes: int, limit_bytes: int, total_bytes: int, is_by_address: bool) -> None:
        self.capacity_bytes = capacity_bytes
        self.free_bytes = capacity_bytes
        self.limit_bytes = limit_bytes  # of the memory fraction
        self.total_bytes = total_bytes
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.num_allocs = self.num_frees = 0
        self._addresses: Addresses = OfDriver() if is_by_address else ByAge(GRANULE_BYTES)

    def resize(self, capacity_bytes: int) -> None:
        """Give the device another capacity, whatever is held of it."""
        self.free_bytes += capacity_bytes - self.capacity_bytes
        self.capacity_bytes = capacity_bytes

    def grow(self, pool: Pool, size: int) -> Block | None:
        """A new segment as one block, or None if there is too little memory (``alloc_block``)."""
        num_bytes = pool.segment_bytes(size)
        if self.reserved_bytes + num_bytes > self.limit_bytes or not self._take(num_bytes):
            return None
        return Block(self._addresses.take(round_up(num_bytes, GRANULE_BYTES)), num_bytes, pool)

    def release(self, block: Block) -> None:
        """Return an unsplit free block to the driver (``release_block``)."""
        assert block.pool is not None
        block.pool.remove(block)
        self._give(block.size_bytes)
        self._addresses.give(block.address, round_up(block.size_bytes, GRANULE_BYTES))

    def expand(self, pool: Pool, size: int) -> Block | None:
        """A block of at least ``size``, some of it newly mapped (``try_allocate_expandable_block``).

        None if there is too little memory; what was mapped until then stays mapped.
        """
        if self.reserved_bytes + pool.segment_bytes(size) > self.limit_bytes:
            return None
        block = self._find_expandable(pool, size)
        if not block.is_mapped and not self._map(block, min(block.size_bytes, size), pool):
            return None
        while block.size_bytes < size:
            following = block.next
            assert following is not None
            if not self._map(following, min(size - block.size_bytes, following.size_bytes), pool):
                return None
            block = following
        pool.remove(block)
        return block

    def unmap(self, block: Block, pool: Pool) -> None:
        """Return the whole pages within a free block to the driver (``unmap_block``)."""
        page = pool.page_bytes
        begin = block.base + round_up(block.address - block.base, page)
        end = block.address + block.size_bytes
        end -= (end - block.base) % page
        if begin >= end:
            return
        pool.remove(block)
        before, after = begin - block.address, block.address + block.size_bytes - end
        unmapped = Block(begin, end - begin, pool, block.base)
        unmapped.is_mapped = False
        block.append(unmapped)
        if after:
            rest = Block(end, after, pool, block.base)
            rest.is_free = True
            unmapped.append(rest)
            pool.insert(rest)
        if before:
            block.size_bytes = before
            pool.insert(block)
        else:
            unmapped.previous = block.previous
            if unmapped.previous is not None:
                unmapped.previous.next = unmapped
        self._give(unmapped.size_bytes)
        for neighbour in (unmapped.previous, unmapped.next):
            if neighbour is not None and not neighbour.is_mapped:
                pool.unmapped.remove(neighbour)
                unmapped.absorb(neighbour)
        if unmapped.is_split:  # else the segment is empty, and goes (release_expandable_segment)
            pool.insert_unmapped(unmapped)

    def _find_expandable(self, pool: Pool, size: int) -> Block:
        """The first block of the lowest free or unmapped room for ``size`` (``find_expandable_block``)."""
        for block in pool.unmapped:
            start = block.previous if block.previous is not None and block.previous.is_free else block
            room = 0
            part: Block | None = start
            while part is not None and room < size and (part.is_free or not part.is_mapped):
                room += part.size_bytes
                part = part.next
            if room >= size:
                return start
        room = max(self.total_bytes + self.total_bytes // 8, 1)
        num_bytes = round_up(room, pool.page_bytes)
        address = self._addresses.take(round_up(num_bytes, GRANULE_BYTES))
        segment = Block(address, num_bytes, pool, base=address)
        segment.is_mapped = False
        pool.insert_unmapped(segment)
        return segment

    def _map(self, block: Block, size: int, pool: Pool) -> bool:
        """Map memory for the first ``size`` bytes, in whole pages; whether there was enough (``map_block``)."""
        num_bytes = round_up(size, pool.page_bytes)
        if not self._take(num_bytes):
            return False
        pool.unmapped.remove(block)
        if num_bytes < block.size_bytes:
            rest = Block(block.address + num_bytes, block.size_bytes - num_bytes, pool, block.base)
            rest.is_mapped = False
            block.append(rest)
            pool.insert_unmapped(rest)
            block.size_bytes = num_bytes
        block.is_mapped = block.is_free = True
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.is_free:
                pool.remove(neighbour)
                block.absorb(neighbour)
        pool.insert(block)
        return True

    def _take(self, num_bytes: int) -> bool:
        taken = round_up(num_bytes, GRANULE_BYTES)
        if taken > self.free_bytes:
            return False
        self.free_bytes -= taken
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.num_allocs += 1
        return True

    def _give(self, num_bytes: int) -> None:
        self.free_bytes += round_up(num_bytes, GRANULE_BYTES)
        self.reserved_bytes -= num_bytes
        self.num_frees += 1
