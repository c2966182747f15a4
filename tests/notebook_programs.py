"""Small programs for "cuda" with the habits of notebooks: blocks that reach too far, options for the whole process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CUDA = "cuda"


def backward_under_autocast(use_reentrant: bool) -> Callable[[], None]:
    """Weights that autocast has cast are cast again once a checkpoint was recomputed: CUDA's thread leaves no block."""

    def train() -> None:
        layers = nn.ModuleList([nn.Linear(768, 768) for _ in range(4)]).to(CUDA)
        optimizer = torch.optim.SGD(layers.parameters(), 0.1, 0.9)
        with torch.autocast(CUDA, torch.bfloat16):
            for _ in range(2):
                x = torch.randn(64, 768, device=CUDA, requires_grad=True)
                for layer in layers:
                    x = layer(F.gelu(checkpoint(layer, x, use_reentrant=use_reentrant)))
                loss: Any = x.square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    return train


NOTEBOOKS: dict[str, Callable[[], None]] = {
    "backward_under_autocast": backward_under_autocast(use_reentrant=False),
    "backward_under_autocast_reentrant": backward_under_autocast(use_reentrant=True),
}
