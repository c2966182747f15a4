"""Choices by values that nobody knows: ``argmax`` and ``topk`` are taken to choose each possibility as often.

So a router sends to each expert the same number of tokens. The first choice is in the middle: tokens of a vocabulary
that mean something special, such as its end, lie at an end of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten
_ARGUMENTS = {aten.argmax.default, aten.argmin.default}
_WITH_INDICES = {aten.max.dim: 1, aten.min.dim: 1, aten.topk.default: 2}  # at which position is the dimension
CHOOSING = frozenset([*_ARGUMENTS, *_WITH_INDICES])


def spread_choices(func: OpOverload, args: tuple[Any, ...], out: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The tensor of indices among an operator's results, and what they are taken to be; None for other operators."""
    position = 1 if func in _ARGUMENTS else _WITH_INDICES.get(func)
    if position is None:
        return None
    tensor, indices = args[0], out if func in _ARGUMENTS else out[1]
    dim = args[position] if len(args) > position else None if func in _ARGUMENTS else -1
    if dim is None or not tensor.dim():
        return indices, torch.full_like(indices, tensor.numel() // 2, device="cpu")
    number = tensor.shape[dim]
    if indices.dim() < tensor.dim():
        return indices, _spread(indices.unsqueeze(dim).shape, dim, number).squeeze(dim)
    return indices, _spread(indices.shape, dim, number)


def _spread(shape: torch.Size, dim: int, number: int) -> torch.Tensor:
    """Along ``dim`` different numbers below ``number``, which begin one later for each next position in the others."""
    others = list(shape)
    num_chosen = others.pop(dim)
    rows = torch.arange(torch.Size(others).numel(), device="cpu").view(others)
    along = [1] * len(shape)
    along[dim] = num_chosen
    return (rows.unsqueeze(dim) + torch.arange(num_chosen, device="cpu").view(along) + number // 2) % max(number, 1)
