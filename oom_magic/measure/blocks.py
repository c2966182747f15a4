"""Sizes of the allocator's blocks, worked out from the addresses in its history.

torch counts blocks as allocated, not requests: a request is rounded, and a block whose rest is too small to
split is given out whole (``round_size`` and ``should_split`` in c10/cuda/CUDACachingAllocator.cpp).
The history names the address of each block and every segment, so the free room behind a request is known
and no search has to be simulated.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from oom_magic.memory.allocator import CachingAllocator
from oom_magic.memory.allocator_settings import AllocatorSettings
from oom_magic.memory.segments import SMALL_BYTES


class Layout:
    """Which addresses of one device are given out. Sizes and addresses in bytes."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self._round = CachingAllocator(settings=settings)._round
        self._max_split_bytes = settings.max_split_size_bytes or 1 << 62
        self._segments: dict[int, int] = {}  # of the large pool, not expandable: start to size
        self._starts: list[int] = []  # of these segments, ascending
        self._large: list[int] = []  # addresses given out in them, ascending
        self._sizes: dict[int, int] = {}  # of every block given out

    def add_segment(self, address: int, num_bytes: int) -> None:
        """A segment came from the driver. Those of the small pool (2 MiB) always split, so are not kept."""
        if num_bytes > 2 * SMALL_BYTES:
            self._segments[address] = num_bytes
            insort(self._starts, address)

    def remove_segment(self, address: int) -> None:
        """A segment went back to the driver."""
        if self._segments.pop(address, None) is not None:
            del self._starts[bisect_left(self._starts, address)]

    def put(self, address: int, num_bytes: int) -> None:
        """A block of known size is given out."""
        self._sizes[address] = num_bytes
        if num_bytes > SMALL_BYTES:
            insort(self._large, address)

    def allocate(self, address: int, requested_bytes: int) -> int:
        """The size of the block that served a request."""
        size = self._round(requested_bytes)
        if size > SMALL_BYTES:
            room = self._room_behind(address, size)
            if size >= self._max_split_bytes or room - size <= SMALL_BYTES:
                size = room
        self.put(address, size)
        return size

    def free(self, address: int) -> None:
        """A block can be given out again."""
        size = self._sizes.pop(address, 0)
        if size > SMALL_BYTES:
            del self._large[bisect_left(self._large, address)]

    def _room_behind(self, address: int, size: int) -> int:
        """Bytes up to the next block given out or the segment's end (expandable ones split: ``size``)."""
        position = bisect_right(self._starts, address) - 1
        start = self._starts[position] if position >= 0 else 0
        end = start + self._segments.get(start, 0)
        if address >= end:
            return size
        following = bisect_right(self._large, address)
        if following < len(self._large):
            end = min(end, self._large[following])
        return max(end - address, size)
