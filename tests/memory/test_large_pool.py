"""The large pool alone: as the whole allocator has it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oom_magic.memory.allocator.caching_allocator import CachingAllocator
from oom_magic.memory.allocator.large_pool import allocated_bytes
from oom_magic.memory.allocator.segments import Block
from oom_magic.units import MIB

_SIZES = st.integers(2 * MIB // 512 + 1, 40 * MIB // 512).map(lambda blocks: blocks * 512)


@given(st.lists(st.tuples(_SIZES, st.integers(0, 5)), max_size=60), st.sets(st.integers(0, 100)))
def test_large_pool_is_the_allocators(requests: list[tuple[int, int]], empties: set[int]) -> None:
    """Each request is followed by the free of so many of the oldest allocations; now and then the cache is emptied."""
    allocator = CachingAllocator()
    blocks: dict[int, Block] = {}
    events, expected = [], []
    for number, (size, num_frees) in enumerate(requests):
        if len(events) in empties:
            allocator.empty_cache()
        blocks[number] = allocator.allocate(size)
        events.append(number)
        expected.append(allocator.allocated_bytes)
        for old in list(blocks)[: num_frees // 2]:
            if len(events) in empties:
                allocator.empty_cache()
            allocator.free(blocks.pop(old))
            events.append(~old)
            expected.append(allocator.allocated_bytes)
    assert allocated_bytes(events, [size for size, _ in requests], empties) == expected
