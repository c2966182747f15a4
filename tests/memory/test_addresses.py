"""Segments at the driver's addresses: what runs on an H200 reserved (data/driver_addresses_h200.json), and invariants."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oom_magic.memory.allocator import addresses
from oom_magic.memory.allocator.caching_allocator import CachingAllocator
from oom_magic.memory.allocator.settings import AllocatorSettings
from oom_magic.units import GIB, MIB
from tests.support.folders import DATA

RUNS = json.loads((DATA / "driver_addresses_h200.json").read_text("utf-8"))["runs"]


def _reserved(events: list[int], limit_bytes: int, is_by_address: bool) -> list[int]:
    """MiB after each event: ``n``: so many bytes are requested; ``~a``: the request numbered ``a`` is freed."""
    allocator = CachingAllocator(141 * GIB, AllocatorSettings(is_by_address=is_by_address))
    allocator.limit(limit_bytes)
    blocks, found = [], []
    for event in events:
        if event >= 0:
            blocks.append(allocator.allocate(event))
        else:
            allocator.free(blocks[~event])
        found.append(allocator.reserved_bytes // MIB)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_every_event_reserves_what_it_did_on_the_card(name: str) -> None:
    """Kernels of PyTorch 2.11, whose order of free blocks follows the driver; by the age of segments two runs differ."""
    run = RUNS[name]
    changes, measured = dict(run["reserved_mib"]), []
    for position in range(len(run["events"])):
        measured.append(changes.get(position, measured[-1] if measured else 0))
    assert _reserved(run["events"], run["limit_bytes"], True) == measured
    assert (_reserved(run["events"], run["limit_bytes"], False) == measured) == (name == "time series")


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300)), max_size=60))
def test_segments_never_overlap_and_ranges_that_are_empty_go(steps: list[tuple[bool, int]]) -> None:
    driver = addresses.OfDriver()
    live: dict[int, int] = {}
    for is_taken, number in steps:
        if is_taken or not live:
            address, size = driver.take(2 * MIB * number), 2 * MIB * number
            assert all(address + size <= one or one + other <= address for one, other in live.items())
            live[address] = size
        else:
            address = sorted(live)[number % len(live)]
            driver.give(address, live.pop(address))
    for address, size in live.items():
        driver.give(address, size)
    assert driver.take(416 * MIB) == addresses.OfDriver().take(416 * MIB)


@pytest.mark.parametrize(("version", "expected"), [("2.6.0", True), ("2.11.0+cu130", True), ("2.13.0", False)])
def test_which_versions_look_at_them(version: str, expected: bool) -> None:
    assert addresses.matter(version) is expected
