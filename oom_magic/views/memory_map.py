"""The view of a MemoryMap: the allocator's segments as bars."""

from __future__ import annotations

from itertools import groupby

from oom_magic.language import _, ngettext
from oom_magic.memory.memory_map import MappedBlock, MemoryMap
from oom_magic.views.blocks import Bar, Bars, Block, Description, Fact, Facts, Part, Sentence, register
from oom_magic.views.words import word

_MOST_SEGMENTS = 24
_LEAST_SHARE = 1 / 400  # of the widest segment: smaller neighbours of one kind are drawn as one


@register
def describe_memory_map(shown_map: MemoryMap) -> Description:
    """Allocated and free bytes, then a bar for each segment."""
    segments = ngettext("in {count} segment", "in {count} segments", len(shown_map.segments))
    facts = (
        Fact(_("reserved"), shown_map.reserved_bytes, segments),
        Fact(_("allocated"), shown_map.reserved_bytes - shown_map.free_bytes),
        Fact(_("free in the cache"), shown_map.free_bytes),
        Fact(_("largest free block"), shown_map.largest_free_bytes),
    )
    by_size = sorted(range(len(shown_map.segments)), key=lambda number: -_size(shown_map.segments[number]))
    shown = sorted(by_size[:_MOST_SEGMENTS])
    least = int(max((_size(shown_map.segments[number]) for number in shown), default=0) * _LEAST_SHARE)
    bars = tuple(_bar(number + 1, shown_map.segments[number], least) for number in shown)
    blocks: list[Block] = [Facts(facts), *([Bars(bars)] if bars else [])]
    if len(bars) < len(shown_map.segments):
        text = ngettext(
            "{count} smaller segment, {smaller_bytes} in total, is not shown.",
            "{count} smaller segments, {smaller_bytes} in total, are not shown.",
            len(shown_map.segments) - len(bars),
            smaller_bytes=sum(_size(shown_map.segments[number]) for number in by_size[_MOST_SEGMENTS:]),
        )
        blocks.append(Sentence(text, "quiet"))
    return Description(_("What the allocator holds"), tuple(blocks))


def _size(segment: tuple[MappedBlock, ...]) -> int:
    return sum(block.num_bytes for block in segment)


def _bar(number: int, segment: tuple[MappedBlock, ...], least_bytes: int) -> Bar:
    return Bar(_("segment {number}", number=number), _drawn(segment, least_bytes), _note(segment))


def _drawn(segment: tuple[MappedBlock, ...], least_bytes: int) -> tuple[Part, ...]:
    """The blocks as parts of a bar; small neighbours of one kind together."""
    parts = []
    for (label, hue, is_small), blocks in groupby(
        segment, key=lambda block: (block.label, block.hue, block.num_bytes < least_bytes)
    ):
        sizes = [block.num_bytes for block in blocks]
        parts += [Part(word(label), size, hue) for size in ([sum(sizes)] if is_small else sizes)]
    return tuple(parts)


def _note(segment: tuple[MappedBlock, ...]) -> str:
    free = [block.num_bytes for block in segment if block.is_free]
    if not free:
        return _("full")
    return ngettext(
        "{free_bytes} free in {count} piece", "{free_bytes} free in {count} pieces", len(free), free_bytes=sum(free)
    )
