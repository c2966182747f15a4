"""Random numbers that many dry runs in a row draw: each run has the same as alone, and leaves the generator the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import oom_magic as om
from oom_magic.predict.operators.drawn_numbers import draws_kept

SIDE = 192  # more than are drawn anew each time, few enough that the tensors are real


def rows() -> None:
    """A layer, another of its shape, drawn anew once, and normal numbers among columns."""
    first, second = torch.nn.Linear(SIDE, SIDE), torch.nn.Linear(SIDE, SIDE)
    with torch.no_grad():
        torch.nn.init.kaiming_uniform_(first.weight, a=2.0)
        torch.empty(SIDE, SIDE).t().normal_(0.0, 0.02)
    wide = torch.empty(SIDE, SIDE, dtype=torch.float64).normal_(1.0, 2.0)
    for tensor in (first.weight, second.weight, wide, torch.rand(3)):
        print([one.hex() for one in tensor.detach().flatten()[:4].tolist()], tensor.sum().item())


def told(capsys: pytest.CaptureFixture[str], function: Callable[[], None], seed: int = 0) -> str:
    """What a function prints in a dry run that begins with a seed."""
    torch.manual_seed(seed)
    om.dry_run(function)
    return capsys.readouterr().out


def test_numbers_drawn_once_are_those_that_are_drawn_anew(capsys: pytest.CaptureFixture[str]) -> None:
    anew = [told(capsys, rows, seed) for seed in (0, 1)]
    assert anew[0] != anew[1] and len(anew[0].splitlines()) == 4
    with draws_kept():
        assert [told(capsys, rows, seed) for seed in (0, 1, 0, 1)] == anew * 2


def test_a_second_run_draws_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with draws_kept() as draws:
        told(capsys, rows)
        assert len(draws) == 5
        told(capsys, rows)
        with draws_kept() as inner:
            assert inner is draws and len(draws) == 5
    with draws_kept() as draws:
        assert not len(draws)


def test_a_generator_of_its_own_is_drawn_from(capsys: pytest.CaptureFixture[str]) -> None:
    def draw() -> None:
        generator = torch.Generator().manual_seed(3)
        for _ in range(2):
            print(torch.empty(SIDE, SIDE).uniform_(generator=generator).sum().item())

    with draws_kept():
        first, second = told(capsys, draw).split()
    assert first != second
