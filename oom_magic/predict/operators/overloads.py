"""Operators by name, for those that not every PyTorch has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

aten = torch.ops.aten
Kernel = Callable[..., Any]
T = TypeVar("T")
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))  # (2, 13)


def find_overload(name: str) -> OpOverload | None:
    """The operator ``"softmax.int"`` or ``"mm"`` of aten; None where this PyTorch has none."""
    packet, _, overload = name.partition(".")
    found: OpOverload | None = getattr(getattr(aten, packet, None), overload or "default", None)
    return found


def original(op: OpOverload) -> Kernel:
    """The kernel that PyTorch itself would run for ``op`` at the autograd key."""
    for key in (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd):
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
            return lambda *args, **kwargs: op._op_dk(key, *args, **kwargs)
    raise LookupError(f"{op.name()} has no autograd kernel; remove it from the list.")


def existing(table: dict[str, T]) -> dict[OpOverload, T]:
    """``table`` by operator, without those that this PyTorch does not have."""
    found = {find_overload(name): value for name, value in table.items()}
    return {overload: value for overload, value in found.items() if overload is not None}
