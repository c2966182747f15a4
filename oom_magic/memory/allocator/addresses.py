"""The addresses of segments, which decide between free blocks of one size: PyTorch takes the block at the lowest.

Since 2.13 it is that in the oldest segment, whatever the driver answers. Before, it is the driver's address, which no
document tells. On an H200 (driver 580.159.04, PyTorch 2.11; the segments of 14 runs) the first 416 MiB lay in one
range, upwards; what did not fit there got a range of its own below all others, a multiple of 32 MiB; what was left of
a range went to later segments that fitted, the lowest first; and a range that was empty was given back.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Protocol

from oom_magic.units import MIB

_FIRST_RANGE_BYTES, _RANGE_BYTES = 416 * MIB, 32 * MIB
_TOP = 1 << 47  # no address is higher


def matter(torch_version: str) -> bool:
    """Whether that version of PyTorch (``"2.11.0+cu130"``) looks at the driver's addresses."""
    return tuple(map(int, torch_version.split(".")[:2])) < (2, 13)


class Addresses(Protocol):
    """Gives addresses to segments."""

    def take(self, num_bytes: int) -> int:
        """The address of a new segment."""

    def give(self, address: int, num_bytes: int) -> None:
        """A segment was returned to the driver."""


class ByAge:
    """Addresses that grow with the age of a segment and are never used again."""

    def __init__(self, first: int) -> None:
        self._next = first

    def take(self, num_bytes: int) -> int:
        """Above all others."""
        address = self._next
        self._next += num_bytes
        return address

    def give(self, address: int, num_bytes: int) -> None:
        """Changes nothing."""


class OfDriver:
    """The driver's addresses, as far as they are known."""

    def __init__(self) -> None:
        first = _TOP - _FIRST_RANGE_BYTES
        self._starts = [first]  # of ranges, ascending; the first range is the last
        self._sizes = {first: _FIRST_RANGE_BYTES}
        self._holes = [(first, _FIRST_RANGE_BYTES)]  # ascending; none is in two ranges

    def take(self, num_bytes: int) -> int:
        """In the lowest hole that is large enough, else in a new range."""
        for at, (start, size) in enumerate(self._holes):
            if size >= num_bytes:
                self._holes[at : at + 1] = [(start + num_bytes, size - num_bytes)] if size > num_bytes else []
                return start
        size = -(-num_bytes // _RANGE_BYTES) * _RANGE_BYTES
        end = self._starts[-1]
        for start in self._starts[-2::-1]:
            if end - start - self._sizes[start] >= size:
                break
            end = start
        start = end - size
        insort(self._starts, start)
        self._sizes[start] = size
        if size > num_bytes:
            insort(self._holes, (start + num_bytes, size - num_bytes))
        return start

    def give(self, address: int, num_bytes: int) -> None:
        """A hole more, joined with those beside it; a range that is empty goes, but for the first."""
        at = bisect_right(self._starts, address) - 1
        start = self._starts[at]
        end, size = address + num_bytes, self._sizes[start]
        first = last = bisect_left(self._holes, (address, 0))
        if first and self._holes[first - 1][0] >= start and sum(self._holes[first - 1]) == address:
            first -= 1
            address = self._holes[first][0]
        if last < len(self._holes) and self._holes[last][0] == end < start + size:
            end = sum(self._holes[last])
            last += 1
        is_empty = end - address == size and at < len(self._starts) - 1
        self._holes[first:last] = [] if is_empty else [(address, end - address)]
        if is_empty:
            del self._starts[at], self._sizes[start]
