"""Sorts and distinct values of each width, whose scratch differs by card: record_sorting.py runs them on CUDA."""

from __future__ import annotations

from functools import partial

import torch
from operator_cases import Case

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


SORTING: dict[str, Case] = {
    f"{name} {num_items} {str(dtype).removeprefix('torch.')}": _case(way, num_items, dtype)
    for name, way in _WAYS.items()
    for num_items in (0, 5000, 300_000)
    for dtype in _DTYPES
}
