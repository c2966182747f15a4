"""What a later cell does with what a cell has computed: a backward from it, and the optimizers' steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from oom_magic.half_built import is_built


def names_of_optimizers(names: Mapping[str, Any]) -> tuple[str, ...]:
    """The variables that are optimizers whose step needs no closure, each once."""
    found: dict[int, str] = {}
    for name, value in names.items():
        is_plain = isinstance(value, torch.optim.Optimizer) and not isinstance(value, torch.optim.LBFGS)
        if is_plain and is_built(value) and not name.startswith("_"):
            found.setdefault(id(value), name)
    return tuple(found.values())


def walk_back(value: Any) -> None:
    """A backward from a loss, from the one in a model's outputs, or from all outputs where there is none."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
    results = [one for one in parts if isinstance(one, torch.Tensor) and one.grad_fn is not None]
    losses = [one for one in results if not one.dim()]
    roots = losses[:1] or results
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(one) for one in roots])
