"""Sorts, distinct values of each width and sums of equal indices, whose scratch differs by card.

record_sorting.py runs them on CUDA. A stub finds no distinct indices at all, so a sum's result is left out there.
"""

from __future__ import annotations

from functools import partial

import torch

from tests.programs.operator_cases import Case

CARDS = {"rtx3060": "RTX 3060", "a100-80gb": "A100 80GB", "h100-80gb": "H100", "t4": "T4"}
_DTYPES = (torch.int64, torch.int32, torch.int16, torch.float16, torch.uint8, torch.bool)
_WAYS = {
    "sort": torch.sort,
    "unique": torch.unique,
    "unique_counts": partial(torch.unique, return_counts=True),
    "unique_inverse": partial(torch.unique, return_inverse=True),
    "unique_both": partial(torch.unique, return_inverse=True, return_counts=True),
    "consecutive": torch.unique_consecutive,
    "consecutive_counts": partial(torch.unique_consecutive, return_counts=True),
    "consecutive_inverse": partial(torch.unique_consecutive, return_inverse=True),
}


def _case(way: Case, num_items: int, dtype: torch.dtype) -> Case:
    def run() -> None:
        kept = way(torch.zeros(num_items, dtype=dtype, device="cuda"))
        torch.ones(num_items, device="cuda")  # beside what stays
        del kept

    return run


def _coalesced(num_items: int, num_columns: int) -> Case:
    """The sum of equal rows of a sparse tensor, as of an embedding's gradient."""

    def run() -> None:
        indices = torch.zeros((1, num_items), dtype=torch.long, device="cuda")
        values = torch.zeros((num_items, num_columns), device="cuda")
        torch.sparse_coo_tensor(indices, values, (10, num_columns), check_invariants=False).coalesce()

    return run


SORTING: dict[str, Case] = {
    **{f"coalesce {num_items}": _coalesced(num_items, 1) for num_items in (2, 5000, 300_000, 3_000_000)},
    **{
        f"{name} {num_items} {str(dtype).removeprefix('torch.')}": _case(way, num_items, dtype)
        for name, way in _WAYS.items()
        for num_items in (0, 5000, 300_000)
        for dtype in _DTYPES
    },
}
