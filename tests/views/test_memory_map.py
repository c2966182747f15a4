"""The map of the allocator: every block of every segment is on it, and its sums are the allocator's."""

from __future__ import annotations

import pytest

from oom_magic.memory.allocator.caching_allocator import CachingAllocator
from oom_magic.memory.allocator.settings import AllocatorSettings
from oom_magic.memory.memory_map import MemoryMap, memory_map
from oom_magic.units import MIB
from tests.support.pages import assert_text_and_html_agree
from tests.support.samples import failed, predicted


def test_blocks_lie_in_the_order_of_their_addresses():
    allocator = CachingAllocator()
    live = {name: allocator.allocate(6 * MIB) for name in "abc"}
    allocator.free(live["b"])
    (segment,) = MemoryMap.of(allocator, live).segments
    assert [(block.label, block.num_bytes // MIB) for block in segment] == [
        ("a", 6),
        ("free", 6),
        ("c", 6),
        ("free", 2),
    ]


def test_an_empty_allocator_has_no_segments():
    assert MemoryMap.of(CachingAllocator(), {}).segments == ()
    assert_text_and_html_agree(MemoryMap.of(CachingAllocator(), {}).describe())


@pytest.mark.parametrize("options", ["", "expandable_segments:True"])
@pytest.mark.parametrize("make", [predicted, failed])
def test_sums_are_those_of_the_allocator(make, options):
    report = make().with_allocator(options)
    shown = memory_map(report)
    assert shown.reserved_bytes - shown.free_bytes == report.peak_allocated_bytes
    assert shown.largest_free_bytes <= shown.free_bytes
    assert_text_and_html_agree(shown.describe())


def test_expandable_segments_are_one_segment_without_holes():
    settings = AllocatorSettings.parse("expandable_segments:True")
    allocator = CachingAllocator(100 * MIB, settings)
    live = {str(size): allocator.allocate(size * MIB) for size in (4, 9, 30)}
    shown = MemoryMap.of(allocator, live)
    assert len(shown.segments) == 1
    assert shown.reserved_bytes == allocator.reserved_bytes
    assert shown.to_dict()["segments"][0][0] == {"label": "4", "num_bytes": 4 * MIB, "is_free": False}
