"""How the allocator's segments look."""

from __future__ import annotations

from itertools import groupby

from oom_magic.memory.memory_map import MappedBlock, MemoryMap
from oom_magic.units import format_bytes
from oom_magic.views.blocks import Bar, Bars, Block, Description, Fact, Facts, Part, Sentence
from oom_magic.views.registry import register

_MOST_SEGMENTS = 24
_LEAST_SHARE = 1 / 400  # of the widest segment: smaller neighbours of one kind are drawn as one


@register
def describe_memory_map(shown_map: MemoryMap) -> Description:
    """What is held and free, then a bar for each segment."""
    facts = (
        Fact("reserved", shown_map.reserved_bytes, f"in {_counted(len(shown_map.segments), 'segment')}"),
        Fact("allocated", shown_map.reserved_bytes - shown_map.free_bytes),
        Fact("free in the cache", shown_map.free_bytes),
        Fact("largest free block", shown_map.largest_free_bytes),
    )
    by_size = sorted(range(len(shown_map.segments)), key=lambda number: -_size(shown_map.segments[number]))
    shown = sorted(by_size[:_MOST_SEGMENTS])
    least = int(max((_size(shown_map.segments[number]) for number in shown), default=0) * _LEAST_SHARE)
    bars = tuple(_bar(number + 1, shown_map.segments[number], least) for number in shown)
    blocks: list[Block] = [Facts(facts), *([Bars(bars)] if bars else [])]
    if len(bars) < len(shown_map.segments):
        smaller = format_bytes(sum(_size(shown_map.segments[number]) for number in by_size[_MOST_SEGMENTS:]))
        left_out = len(shown_map.segments) - len(bars)
        blocks.append(Sentence(f"{left_out} smaller segments, {smaller} together, are not drawn.", "quiet"))
    return Description("What the allocator holds", tuple(blocks))


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
