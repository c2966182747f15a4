"""A run written as PyTorch's memory snapshot, which pytorch.org/memory_viz opens."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oom_magic.memory.allocator.caching_allocator import AllocatorOutOfMemory, CachingAllocator
from oom_magic.memory.allocator.segments import Block
from oom_magic.memory.allocator.settings import AllocatorSettings
from oom_magic.memory.categories import CATEGORIES
from oom_magic.memory.timeline import PHASES, MarkKind, Timeline

Event = dict[str, Any]


def write_snapshot(
    timeline: Timeline, settings: AllocatorSettings, path: str | Path, card: str, total_bytes: int
) -> None:
    """Write a run as a snapshot: each allocation and free with its line, and the segments at the end.

    The format is that of ``torch.cuda.memory._dump_snapshot`` (torch/cuda/memory.py, ``_snapshot``), with the name and
    the size of the ``card`` besides. Addresses are those of the replayed allocator; a free counts as completed when it
    is requested. Time is the number of the event.
    """
    snapshot = {**_Writer(timeline, settings).snapshot(), "card": {"name": card, "total_bytes": total_bytes}}
    Path(path).write_bytes(pickle.dumps(snapshot, protocol=4))


class _Writer:
    """Replays a timeline through a fresh allocator, noting what it does."""

    def __init__(self, timeline: Timeline, settings: AllocatorSettings) -> None:
        self._timeline = timeline
        self._allocator = CachingAllocator(settings=settings)
        self._segments: dict[int, int] = {}  # address: bytes
        self._live: dict[int, Block] = {}  # by allocation
        self._events: list[Event] = []

    def snapshot(self) -> dict[str, Any]:
        """What ``torch.cuda.memory._snapshot()`` would return for device 0."""
        empties = set(self._timeline.positions(MarkKind.EMPTY_CACHE))
        for position, event in enumerate(self._timeline.order.tolist()):
            if position in empties:
                self._allocator.empty_cache()
            try:
                self._apply(event)
            except AllocatorOutOfMemory:
                break
        return {"segments": list(self._described_segments()), "device_traces": [self._events], "allocator_settings": {}}

    def _apply(self, event: int) -> None:
        allocation = event if event >= 0 else ~event
        stream = int(self._timeline.stream[allocation])
        if event < 0:
            block = self._live.pop(allocation)
            if block.size_bytes:
                self._note("free_requested", block.address, block.size_bytes, stream)
                self._note("free_completed", block.address, block.size_bytes, stream)
            self._allocator.free(block)
            return
        reserved = self._allocator.reserved_bytes
        requested = int(self._timeline.requested_bytes[allocation])
        block = self._live[allocation] = self._allocator.allocate(requested, stream)
        if self._allocator.reserved_bytes != reserved:
            self._note_segments(stream)
        if block.size_bytes:
            self._note("alloc", block.address, block.size_bytes, stream, self._frames(allocation))

    def _note(self, action: str, address: int, size: int, stream: int, frames: list[Event] | None = None) -> None:
        self._events.append(
            {"action": action, "addr": address, "size": size, "stream": stream, "frames": frames or [],
             "time_us": len(self._events)}
        )  # fmt: skip

    def _note_segments(self, stream: int) -> None:
        """Note segments that the driver allocated or freed since the last event."""
        now = {head.address: sum(block.size_bytes for block in chain) for head, chain in self._chains()}
        for address in self._segments.keys() - now.keys():
            self._note("segment_free", address, self._segments[address], stream)
        for address in sorted(now.keys() - self._segments.keys()):
            self._note("segment_alloc", address, now[address], stream)
        self._segments = now

    def _chains(self) -> Iterator[tuple[Block, list[Block]]]:
        """Each segment's blocks by address, after the first of them."""
        blocks = [block for block in self._live.values() if block.size_bytes]
        heads = {id(block.head): block.head for block in (*blocks, *self._allocator.free_blocks())}
        for head in sorted(heads.values(), key=lambda block: block.address):
            yield head, list(head.chain())

    def _described_segments(self) -> Iterator[Event]:
        owners = {id(block): allocation for allocation, block in self._live.items()}
        for head, chain in self._chains():
            blocks: list[Event] = []
            for block in chain:
                owner = owners.get(id(block))
                blocks.append(
                    {"address": block.address, "size": block.size_bytes,
                     "requested_size": 0 if owner is None else int(self._timeline.requested_bytes[owner]),
                     "state": "inactive" if owner is None else "active_allocated",
                     "frames": [] if owner is None else self._frames(owner)}
                )  # fmt: skip
            taken = sum(block["size"] for block in blocks if block["state"] != "inactive")
            total = sum(block.size_bytes for block in chain)
            yield {"device": 0, "address": head.address, "total_size": total, "allocated_size": taken,
                   "active_size": taken, "requested_size": sum(block["requested_size"] for block in blocks),
                   "stream": 0, "segment_type": "large" if total > 2 << 20 else "small", "is_expandable": False,
                   "segment_pool_id": (0, 0), "frames": [], "blocks": blocks}  # fmt: skip

    def _frames(self, allocation: int) -> list[Event]:
        """The operator, then the module, then the user's line, as frames from the innermost out."""
        timeline = self._timeline
        line = timeline.lines[timeline.line[allocation]]
        category = CATEGORIES[timeline.category[allocation]].label
        phase = PHASES[timeline.phase[allocation]].value
        operator = timeline.operators[timeline.operator[allocation]] or "allocation"
        frames = [{"filename": f"{category}, {phase}", "line": int(timeline.step[allocation]), "name": operator}]
        module = timeline.modules[timeline.module[allocation]]
        if module:
            frames.append({"filename": "module", "line": 0, "name": module})
        if line.file:
            frames.append({"filename": line.file, "line": line.line, "name": line.text})
        return frames
