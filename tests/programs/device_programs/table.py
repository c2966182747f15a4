"""The table of programs, and the loop that most of them share."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

CUDA = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
OnStep = Callable[[], None]
PROGRAMS: dict[str, Callable[[OnStep], None]] = {}


def program(function: Callable[..., None], name: str = "", **how: Any) -> Callable[..., None]:
    """Take a function into the table, under its own name or another with arguments."""
    PROGRAMS[name or function.__name__] = partial(function, **how) if how else function
    return function


@contextlib.contextmanager
def searching(is_on: bool) -> Iterator[None]:
    """``torch.backends.cudnn.benchmark``."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, is_on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def train(
    model: nn.Module,
    on_step: OnStep,
    loss_of: Callable[[], torch.Tensor],
    amp: torch.dtype | None = None,
    steps: int = 3,
    optimizer: Any = None,
    accumulate: int = 1,
) -> None:
    """The usual loop; float16 has a scaler."""
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    scaler = torch.amp.GradScaler(CUDA, enabled=amp is torch.float16)
    for _ in range(steps):
        for _ in range(accumulate):
            with torch.autocast(CUDA, amp or torch.bfloat16, enabled=amp is not None):
                loss = loss_of()
            scaler.scale(loss / accumulate).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        on_step()


def tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(5, vocabulary, shape, device=CUDA)


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1]).to(CUDA)
