"""The user's own float64 code with float32 in its place."""

from __future__ import annotations

import ast

import pytest
import torch
from torch import nn

from oom_magic.explain.remedies.own_code.precision import in_single_precision

LOOP = "for i in range(4):\n    xb, yb = X[i].cuda(), y[i].cuda()\n    loss = model(xb).sum()"


def test_what_earlier_cells_made_is_cast_where_the_cell_reads_it():
    wide = torch.zeros(4, 8, dtype=torch.float64)
    names = {"model": nn.Linear(8, 8).double(), "X": wide, "y": torch.zeros(4), "xb": wide, "unused": wide}
    code = in_single_precision(ast.parse(LOOP), names)
    assert code == "model = model.float()   # before the optimizer is created\nX = X.float()"


@pytest.mark.parametrize(
    ("statement", "changed"),
    [
        ("model = Net().double().cuda()", "model = Net().float().cuda()"),
        ("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)"),
        ("x = torch.zeros(3, dtype=torch.double)", "x = torch.zeros(3, dtype=torch.float)"),
        ("x = torch.zeros(3)", ""),
    ],
)
def test_statements_that_name_float64_name_float32(statement, changed):
    assert in_single_precision(ast.parse(statement), {}) == changed


def test_the_default_type_of_an_earlier_cell_is_set_back():
    torch.set_default_dtype(torch.float64)
    try:
        assert in_single_precision(ast.parse("x = 1"), {}) == "torch.set_default_dtype(torch.float32)"
    finally:
        torch.set_default_dtype(torch.float32)
