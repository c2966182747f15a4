"""Dry runs of optimizers and training loops against PyTorch's own counters (tests/data/record_truth.py)."""

from __future__ import annotations

import pytest

from tests.programs.optimizer_cases import OPTIMIZERS
from tests.truth.test_operators import TRUTH, VERSION, dry_numbers, recorded_here

pytestmark = recorded_here
INEXACT: set[str] = {"sparse_adam"}  # sparse gradients are refused
if VERSION.startswith("2.15"):
    INEXACT.add("muon")  # which products of two matrices and a third cublasLt takes


@pytest.fixture(scope="module")
def optimizers() -> dict[str, list[int]]:
    return dry_numbers(OPTIMIZERS)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in INEXACT])
def test_optimizer_equals_cuda(name: str, optimizers: dict[str, list[int]]) -> None:
    assert optimizers[name] == TRUTH["optimizers"][name]
