"""What the caching allocator holds at one moment: its segments, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oom_magic.memory.allocator.caching_allocator import CachingAllocator
from oom_magic.memory.allocator.replay import state_at
from oom_magic.memory.allocator.segments import Block
from oom_magic.memory.categories import CATEGORIES
from oom_magic.results import Result

if TYPE_CHECKING:
    from oom_magic.memory.report import MemoryReport


@dataclass(frozen=True, slots=True)
class MappedBlock:
    """A piece of a segment: its label (such as "free"), its bytes, and its color."""

    label: str
    num_bytes: int
    hue: str

    @property
    def is_free(self) -> bool:
        """Whether the block is cached and not allocated."""
        return self.hue == "cached"


@dataclass(frozen=True, repr=False)
class MemoryMap(Result):
    """Segments, oldest first, each a tuple of blocks by address. Made by ``memory_map`` or ``MemoryMap.of``."""

    segments: tuple[tuple[MappedBlock, ...], ...]

    @classmethod
    def of(cls, allocator: CachingAllocator, live: Mapping[str, Block]) -> MemoryMap:
        """The map of an allocator whose allocated blocks are ``live``, by label."""
        return cls._of(allocator, [(label, "parameter", block) for label, block in live.items()])

    @classmethod
    def _of(cls, allocator: CachingAllocator, live: list[tuple[str, str, Block]]) -> MemoryMap:
        known = {id(block): (label, hue) for label, hue, block in live if not block.is_free}
        blocks = [block for _, _, block in live if not block.is_free and block.size_bytes]
        heads = {id(block.head): block.head for block in (*blocks, *allocator.free_blocks())}
        ordered = sorted(heads.values(), key=lambda block: block.address)
        return cls(tuple(_segment(head, known) for head in ordered))

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the allocator has reserved."""
        return sum(block.num_bytes for segment in self.segments for block in segment)

    @property
    def free_bytes(self) -> int:
        """Bytes that are cached: reserved and not allocated."""
        return sum(block.num_bytes for segment in self.segments for block in segment if block.is_free)

    @property
    def largest_free_bytes(self) -> int:
        """The largest request that needs no more memory of the device."""
        return max((block.num_bytes for segment in self.segments for block in segment if block.is_free), default=0)

    def to_dict(self) -> dict[str, Any]:
        """The segments as lists of blocks."""
        return {"segments": [[{"label": block.label, "num_bytes": block.num_bytes, "is_free": block.is_free}
                              for block in segment] for segment in self.segments]}  # fmt: skip


def memory_map(report: MemoryReport, position: int | None = None) -> MemoryMap:
    """The allocator's segments in a run, after event ``position`` of its timeline.

    Without a position: at the failure of a run that is out of memory, else at the peak.
    """
    if position is None and report.out_of_memory is None:
        position = report.peak_position
    timeline = report.timeline if position is None else report.timeline.until(position + 1)
    allocator, blocks = state_at(timeline, report.device.usable_bytes, report.settings)
    live = [
        (CATEGORIES[timeline.category[at]].label, CATEGORIES[timeline.category[at]].value, blocks[at])
        for at in timeline.live_at(timeline.num_events - 1).tolist()
    ]
    return MemoryMap._of(allocator, live)


def _segment(head: Block, known: Mapping[int, tuple[str, str]]) -> tuple[MappedBlock, ...]:
    found = []
    for block in head.chain():
        if block.is_mapped:
            label, hue = ("free", "cached") if block.is_free else known.get(id(block), ("allocated", "parameter"))
            found.append(MappedBlock(label, block.size_bytes, hue))
    return tuple(found)
