"""The budget of a device at the moment of failure: rows that add up to its capacity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from oom_magic.explain.messages.failure import Failure, rounding_bytes


@dataclass(frozen=True)
class BudgetRow:
    """One holder of device memory; ``key`` names its sentence in the catalogue."""

    key: str
    num_bytes: int


@dataclass(frozen=True)
class Budget:
    """Who holds how much of the device; the rows' bytes add up to ``capacity_bytes`` exactly.

    The last row is what the message leaves unexplained. It may be negative: by less than
    ``rounding_bytes`` because each printed size is rounded, by more where memory was moved off the
    device or the numbers contradict each other (its key says which).
    """

    capacity_bytes: int
    rows: tuple[BudgetRow, ...]
    rounding_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self)


def budget_of(failure: Failure) -> Budget | None:
    """The budget of the device that a message describes, or None where it prints no capacity."""
    capacity = failure.total_bytes
    if capacity is None and failure.backend == "mps":
        capacity = failure.limit_bytes
    if capacity is None:
        return None
    rows = [row for row in _rows(failure) if row.num_bytes or row.key == "budget_free"]
    rest = capacity - sum(row.num_bytes for row in rows)
    rounding = rounding_bytes(capacity) + sum(rounding_bytes(row.num_bytes) for row in rows)
    rows.append(BudgetRow(_rest_key(failure, rest, rounding), rest))
    return Budget(capacity, tuple(rows), rounding)


def _rows(failure: Failure) -> Iterator[BudgetRow]:
    """The rows that the message accounts for."""
    pool = failure.private_pool_bytes or 0
    if failure.allocated_bytes is not None:
        yield BudgetRow("budget_allocated", failure.allocated_bytes - pool)
        yield BudgetRow("budget_private_pools", pool)
        if failure.stuck_bytes is not None:
            yield BudgetRow("budget_stuck", failure.stuck_bytes)
    elif failure.reserved_bytes is not None:
        yield BudgetRow("budget_reserved", failure.reserved_bytes)
    own = failure.own_process_bytes
    if own is not None and failure.allocated_bytes is None:
        yield BudgetRow("budget_own_process", own)
    elif own is not None and failure.pytorch_bytes is not None:
        yield BudgetRow("budget_own_outside", max(0, own - failure.pytorch_bytes))
    yield BudgetRow(
        "budget_listed_process" if failure.is_of_unknown_owner else "budget_other_processes", failure.listed_other_bytes
    )
    if failure.mps_other_bytes is not None:
        yield BudgetRow("budget_mps_other", failure.mps_other_bytes)
    if failure.free_bytes is not None:
        yield BudgetRow("budget_free", failure.free_bytes)


def _rest_key(failure: Failure, rest: int, rounding: int) -> str:
    """The sentence for the unexplained rest."""
    if abs(rest) <= rounding:
        return "budget_rounding"
    if rest < 0 and failure.mps_other_bytes is not None:
        return "budget_above_limit"
    if rest < 0:
        is_fallback = failure.backend == "cuda" and (failure.free_bytes or 0) <= (failure.total_bytes or 0)
        return "budget_in_system_memory" if is_fallback else "budget_contradiction"
    if failure.free_bytes is None or failure.stuck_bytes is None:
        return "budget_not_said"
    if failure.own_process_bytes is not None:
        return "budget_unexplained"
    return "budget_outside" if failure.backend == "cuda" else "budget_outside_device"
