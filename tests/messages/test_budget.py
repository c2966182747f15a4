"""The budget: rows that add up to the capacity, whichever sizes a version prints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oom_magic.explain.evidence.budget import budget_of
from oom_magic.explain.messages.reading import read
from tests.support.oom_templates import GIB, MIB, VERSIONS, Numbers, render, shuffled_numbers


def rows_of(version, **changes):
    budget = budget_of(read(render(version, Numbers(**changes))[0])[0])
    return {row.key: row.num_bytes for row in budget.rows}, budget


@given(st.sampled_from(VERSIONS), st.integers(0, 10_000))
def test_rows_add_up_exactly(version, seed):
    failure = read(render(version, shuffled_numbers(seed))[0])[0]
    budget = budget_of(failure)
    if failure.total_bytes is None and version != "mps":
        assert budget is None
        return
    assert sum(row.num_bytes for row in budget.rows) == budget.capacity_bytes
    assert len({row.key for row in budget.rows}) == len(budget.rows)


def test_everything_accounted_for_leaves_rounding():
    rows, budget = rows_of(
        "T6",
        total=16 * GIB,
        free=GIB,
        allocated=9 * GIB,
        stuck=2 * GIB,
        process=12 * GIB,
        others=((5, 3 * GIB),),
    )
    assert rows == {
        "budget_allocated": 9 * GIB,
        "budget_stuck": 2 * GIB,
        "budget_own_outside": GIB,
        "budget_other_processes": 3 * GIB,
        "budget_free": GIB,
        "budget_rounding": 0,
    }
    assert 0 < budget.rounding_bytes < 64 * MIB


def test_rounding_is_called_rounding():
    rows, budget = rows_of("T6", total=15 * GIB + 1234567, free=71 * MIB, allocated=14 * GIB, stuck=57 * MIB,
                           process=14 * GIB + 900 * MIB, others=())  # fmt: skip
    rest = rows.get("budget_rounding", rows.get("budget_unexplained"))
    assert ("budget_rounding" in rows) == (abs(rest) <= budget.rounding_bytes)


def test_cached_excludes_and_reserved_includes_allocated():
    old, _ = rows_of("T1", allocated=4 * GIB, stuck=GIB)
    new, _ = rows_of("T2", allocated=4 * GIB, stuck=GIB)
    assert old == new
    assert "budget_outside" in old


def test_own_process_listed_under_a_pid_is_not_another():
    rows, _ = rows_of("T6", total=16 * GIB, allocated=14 * GIB, stuck=MIB, process=None, others=((77, 15 * GIB),))
    assert "budget_other_processes" not in rows
    assert rows["budget_own_outside"] == GIB - MIB


def test_more_than_the_card_holds_was_moved_off_it():
    rows, _ = rows_of("T6", total=12 * GIB, free=0, allocated=24 * GIB, stuck=0, process=2**64, others=())
    assert rows["budget_in_system_memory"] == -12 * GIB


def test_contradicting_sizes_are_said_to_contradict():
    rows, _ = rows_of("hip", total=15 * GIB, free=84 * GIB, allocated=2 * GIB, stuck=8 * GIB)
    assert rows["budget_contradiction"] < 0


def test_private_pools_are_shown_apart():
    rows, _ = rows_of("T6", allocated=6 * GIB, pool=5 * GIB)
    assert (rows["budget_allocated"], rows["budget_private_pools"]) == (GIB, 5 * GIB)


@pytest.mark.parametrize("text", ["CUDA out of memory. Tried to allocate 2.32 GiB.", "std::bad_alloc"])
def test_no_capacity_no_budget(text):
    assert budget_of(read(text)[0]) is None
