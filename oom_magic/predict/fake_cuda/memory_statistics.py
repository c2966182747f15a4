"""``torch.cuda.memory_stats`` and ``memory_snapshot`` of a pretend card, in PyTorch's own words.

Source: torch/csrc/cuda/Module.cpp, ``THCPModule_memoryStats`` and ``THCPModule_memorySnapshot``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from oom_magic.memory.allocator.segments import Block
from oom_magic.predict.instrumentation.recorder import Recorder
from oom_magic.units import MIB

_POOLS = ("all", "small_pool", "large_pool")
_SMALL_BYTES = MIB  # kSmallSize: blocks up to it come from the small pool


def memory_statistics(recorder: Recorder, since: int, peak_reserved_bytes: int) -> dict[str, Any]:
    """The nested statistics; peaks are those since the event numbered ``since``.

    Segments and what is left of split blocks are counted as they are now; only reserved bytes have a peak of their own.
    """
    found: dict[str, Any] = {}
    for name, weights in _weights(recorder).items():
        found[name] = {pool: _over_time(recorder, weights, pool, since) for pool in _POOLS}
    found["active"], found["active_bytes"] = found["allocation"], found["allocated_bytes"]
    for name, now in _segments_now(recorder).items():
        found[name] = {pool: _only_now(now[pool]) for pool in _POOLS}
    allocator = recorder.allocator
    found["reserved_bytes"]["all"]["peak"] = peak_reserved_bytes
    found["segment"]["all"].update(allocated=allocator.num_device_allocs, freed=allocator.num_device_frees)
    nothing = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
    return {
        **found,
        "num_alloc_retries": allocator.num_retries,
        "num_ooms": 0,
        "num_oom_rejections": 0,
        "num_sync_all_streams": allocator.num_retries,
        "num_device_alloc": allocator.num_device_allocs,
        "num_device_free": allocator.num_device_frees,
        "max_split_size": allocator.settings.max_split_size_bytes or -1,
        "oversize_allocations": nothing,
        "oversize_segments": nothing,
    }


def _weights(recorder: Recorder) -> dict[str, np.ndarray]:
    """What each allocation counts for."""
    requested = np.array([column[0] for column in recorder.columns], dtype=np.int64)
    blocks = np.array(recorder.block_bytes, dtype=np.int64)
    return {"allocation": np.ones_like(blocks), "allocated_bytes": blocks, "requested_bytes": requested}


def _over_time(recorder: Recorder, weights: np.ndarray, pool: str, since: int) -> dict[str, int]:
    if pool != "all":
        is_small = np.array(recorder.block_bytes, dtype=np.int64) <= _SMALL_BYTES
        weights = weights * (is_small if pool == "small_pool" else ~is_small)
    order = np.array(recorder.order, dtype=np.int64)
    changes = np.where(order >= 0, 1, -1) * weights[np.where(order >= 0, order, ~order)]
    levels = np.concatenate([[0], np.cumsum(changes)])
    return {
        "current": int(levels[-1]),
        "peak": int(levels[since:].max()),
        "allocated": int(changes[changes > 0].sum()),
        "freed": int(-changes[changes < 0].sum()),
    }


def _segments_now(recorder: Recorder) -> dict[str, dict[str, int]]:
    names = ("segment", "reserved_bytes", "inactive_split", "inactive_split_bytes")
    found = {name: dict.fromkeys(_POOLS, 0) for name in names}
    for segment in _segments(recorder):
        splits = [block for block in segment if block.is_free and block.is_split]
        counts = (1, sum(block.size_bytes for block in segment), len(splits), sum(one.size_bytes for one in splits))
        for pool in ("all", _pool(segment)):
            for name, count in zip(names, counts, strict=True):
                found[name][pool] += count
    return found


def _only_now(count: int) -> dict[str, int]:
    return {"current": count, "peak": count, "allocated": count, "freed": 0}


def _pool(segment: list[Block]) -> str:
    pool = next((block.pool for block in segment if block.pool is not None), None)
    return "small_pool" if pool is not None and pool.is_small else "large_pool"


def _segments(recorder: Recorder) -> Iterator[list[Block]]:
    """The blocks of each segment, by address."""
    blocks = [block for block in recorder.blocks.values() if block.size_bytes]
    for head in {id(one): one for one in map(_head, [*blocks, *recorder.allocator.free_blocks()])}.values():
        segment, block = [], head
        while block is not None:
            segment.append(block)
            block = block.next  # type: ignore[assignment]
        yield segment


def _head(block: Block) -> Block:
    while block.previous is not None:
        block = block.previous
    return block


def memory_snapshot(recorder: Recorder, card: int) -> list[dict[str, Any]]:
    """The segments, as ``torch.cuda.memory_snapshot`` lists them; without frames."""
    requested = {id(block): recorder.columns[number][0] for number, block in recorder.blocks.items()}
    return [_segment(segment, requested, card) for segment in sorted(_segments(recorder), key=lambda s: s[0].address)]


def _segment(segment: list[Block], requested: dict[int, int], card: int) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = [
        {
            "address": block.address,
            "size": block.size_bytes,
            "requested_size": requested.get(id(block), 0),
            "state": "inactive" if block.is_free else "active_allocated",
            "frames": [],
        }
        for block in segment
    ]
    allocated = sum(block.size_bytes for block in segment if not block.is_free)
    return {
        "device": card,
        "address": segment[0].address,
        "total_size": sum(block.size_bytes for block in segment),
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(requested.get(id(block), 0) for block in segment),
        "stream": 0,
        "segment_type": "small" if _pool(segment) == "small_pool" else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
