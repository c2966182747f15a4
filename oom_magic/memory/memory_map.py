"""What the caching allocator holds at one moment: its segments, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from oom_magic.memory.allocator.replay import Block, CachingAllocator, state_at
from oom_magic.memory.categories import CATEGORIES
from oom_magic.units import format_bytes
from oom_magic.views.blocks import Bar, Bars, Describable, Description, Fact, Facts, Part, Sentence
from oom_magic.views.blocks import Block as DescriptionBlock

if TYPE_CHECKING:
    from oom_magic.memory.report import MemoryReport

_MOST_SEGMENTS = 24
_LEAST_SHARE = 1 / 400  # of the widest segment: smaller neighbours of one kind are drawn as one


@dataclass(frozen=True, slots=True)
class MappedBlock:
    """A piece of a segment: what lies there (a label; "free"), its bytes, and its colour."""

    label: str
    num_bytes: int
    hue: str

    @property
    def is_free(self) -> bool:
        """Whether it is cached and not given out."""
        return self.hue == "cached"


@dataclass(frozen=True, repr=False)
class MemoryMap(Describable):
    """Segments, oldest first, each a tuple of blocks by address. Made by ``memory_map`` or ``MemoryMap.of``."""

    segments: tuple[tuple[MappedBlock, ...], ...]

    @classmethod
    def of(cls, allocator: CachingAllocator, live: Mapping[str, Block]) -> MemoryMap:
        """The map of an allocator whose given-out blocks are ``live``, by label."""
        return cls._of(allocator, [(label, "parameter", block) for label, block in live.items()])

    @classmethod
    def _of(cls, allocator: CachingAllocator, live: list[tuple[str, str, Block]]) -> MemoryMap:
        known = {id(block): (label, hue) for label, hue, block in live if not block.is_free}
        blocks = [block for _, _, block in live if not block.is_free and block.size_bytes]
        heads = {id(head): head for head in map(_head, [*blocks, *allocator.free_blocks()])}
        ordered = sorted(heads.values(), key=lambda block: block.address)
        return cls(tuple(_segment(head, known) for head in ordered))

    @property
    def reserved_bytes(self) -> int:
        """All that is held of the device."""
        return sum(block.num_bytes for segment in self.segments for block in segment)

    @property
    def free_bytes(self) -> int:
        """Cached: held of the device and not given out."""
        return sum(block.num_bytes for segment in self.segments for block in segment if block.is_free)

    @property
    def largest_free_bytes(self) -> int:
        """The largest request that needs nothing more of the device."""
        return max((block.num_bytes for segment in self.segments for block in segment if block.is_free), default=0)

    def describe(self) -> Description:
        """What is held and free, then a bar for each segment."""
        facts = (
            Fact("reserved", self.reserved_bytes, f"in {_counted(len(self.segments), 'segment')}"),
            Fact("allocated", self.reserved_bytes - self.free_bytes),
            Fact("free in the cache", self.free_bytes),
            Fact("largest free block", self.largest_free_bytes),
        )
        by_size = sorted(range(len(self.segments)), key=lambda number: -_size(self.segments[number]))
        shown = sorted(by_size[:_MOST_SEGMENTS])
        least = int(max((_size(self.segments[number]) for number in shown), default=0) * _LEAST_SHARE)
        bars = tuple(_bar(number + 1, self.segments[number], least) for number in shown)
        blocks: list[DescriptionBlock] = [Facts(facts), *([Bars(bars)] if bars else [])]
        if len(bars) < len(self.segments):
            smaller = format_bytes(sum(_size(self.segments[number]) for number in by_size[_MOST_SEGMENTS:]))
            left_out = len(self.segments) - len(bars)
            blocks.append(Sentence(f"{left_out} smaller segments, {smaller} together, are not drawn.", "quiet"))
        return Description("What the allocator holds", tuple(blocks))

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


def _head(block: Block) -> Block:
    while block.previous is not None:
        block = block.previous
    return block


def _segment(head: Block, known: Mapping[int, tuple[str, str]]) -> tuple[MappedBlock, ...]:
    found = []
    block: Block | None = head
    while block is not None:
        if block.is_mapped:
            label, hue = ("free", "cached") if block.is_free else known.get(id(block), ("allocated", "parameter"))
            found.append(MappedBlock(label, block.size_bytes, hue))
        block = block.next
    return tuple(found)


def _size(segment: tuple[MappedBlock, ...]) -> int:
    return sum(block.num_bytes for block in segment)


def _bar(number: int, segment: tuple[MappedBlock, ...], least_bytes: int) -> Bar:
    return Bar(f"segment {number}", _drawn(segment, least_bytes), _note(segment))


def _drawn(segment: tuple[MappedBlock, ...], least_bytes: int) -> tuple[Part, ...]:
    """The blocks as parts of a bar; small neighbours of one kind together."""
    parts = []
    for (label, hue, is_small), blocks in groupby(
        segment, key=lambda block: (block.label, block.hue, block.num_bytes < least_bytes)
    ):
        sizes = [block.num_bytes for block in blocks]
        parts += [Part(label, size, hue) for size in ([sum(sizes)] if is_small else sizes)]
    return tuple(parts)


def _note(segment: tuple[MappedBlock, ...]) -> str:
    free = [block.num_bytes for block in segment if block.is_free]
    if not free:
        return "full"
    return f"{format_bytes(sum(free))} free in {_counted(len(free), 'piece')}"


def _counted(number: int, thing: str) -> str:
    return f"1 {thing}" if number == 1 else f"{number} {thing}s"
