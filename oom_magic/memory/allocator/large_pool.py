"""A fast subset of ``CachingAllocator``: bytes allocated from its large pool, on a device that is never full.

It is called while a slider is dragged, so blocks are plain lists and only the total is recorded.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from typing import Any

from oom_magic.memory.allocator.segments import ADDRESS_BITS, GRANULE_BYTES, MIN_LARGE_BYTES, SMALL_BYTES, round_up
from oom_magic.units import MIB

_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer: of blocks below ``MIN_LARGE_BYTES``
_ADDRESS, _SIZE, _PREVIOUS, _NEXT, _IS_FREE = range(5)


def allocated_bytes(
    events: Sequence[int], block_bytes: Sequence[int], empties: Collection[int] = frozenset()
) -> list[int]:
    """Bytes allocated after each of ``events`` (``a``: allocation ``a`` is made, ``~a``: it is freed).

    ``block_bytes[a]`` is the least block for allocation ``a``, more than 1 MiB. The cache is emptied before each of
    the events whose positions are ``empties``.
    """
    keys: list[int] = []
    free: dict[int, list[Any]] = {}
    given: dict[int, list[Any]] = {}
    end = allocated = 0
    after: list[int] = []
    for position, event in enumerate(events):
        if position in empties:
            _empty(keys, free)
        if event >= 0:
            size = block_bytes[event]
            at = bisect_left(keys, size << ADDRESS_BITS)
            if at < len(keys):
                block = free.pop(keys.pop(at))
            else:
                segment = _SEGMENT_BYTES if size < MIN_LARGE_BYTES else round_up(size, GRANULE_BYTES)
                block = [end, segment, None, None, False]
                end += segment
            if block[_SIZE] - size > SMALL_BYTES:
                _give(keys, free, _split(block, size))
            block[_IS_FREE] = False
            given[event] = block
            allocated += block[_SIZE]
        else:
            block = given.pop(~event)
            allocated -= block[_SIZE]
            _merge(keys, free, block)
            _give(keys, free, block)
        after.append(allocated)
    return after


def _split(block: list[Any], size: int) -> list[Any]:
    """Cut a block down to ``size`` and return the remainder as a new block."""
    following = block[_NEXT]
    rest = [block[_ADDRESS] + size, block[_SIZE] - size, block, following, False]
    block[_SIZE], block[_NEXT] = size, rest
    if following is not None:
        following[_PREVIOUS] = rest
    return rest


def _merge(keys: list[int], free: dict[int, list[Any]], block: list[Any]) -> None:
    """Merge a block with its free neighbours."""
    for side, other in ((_PREVIOUS, _NEXT), (_NEXT, _PREVIOUS)):
        neighbour = block[side]
        if neighbour is not None and neighbour[_IS_FREE]:
            key = neighbour[_SIZE] << ADDRESS_BITS | neighbour[_ADDRESS]
            del keys[bisect_left(keys, key)]
            del free[key]
            block[_ADDRESS] = min(block[_ADDRESS], neighbour[_ADDRESS])
            block[_SIZE] += neighbour[_SIZE]
            beyond = block[side] = neighbour[side]
            if beyond is not None:
                beyond[other] = block


def _give(keys: list[int], free: dict[int, list[Any]], block: list[Any]) -> None:
    block[_IS_FREE] = True
    key = block[_SIZE] << ADDRESS_BITS | block[_ADDRESS]
    insort(keys, key)
    free[key] = block


def _empty(keys: list[int], free: dict[int, list[Any]]) -> None:
    """Return the segments that are entirely free to the device."""
    whole = [key for key, block in free.items() if block[_PREVIOUS] is None and block[_NEXT] is None]
    for key in whole:
        del free[key]
    keys[:] = sorted(free)
