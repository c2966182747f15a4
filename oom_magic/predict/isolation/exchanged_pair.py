"""A real tensor and the copy that it is exchanged for.

The tensor itself shows whether it is exchanged: the copy then has the real tensor's data.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from oom_magic.predict.isolation.tensor_names import is_plain

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(frozen=True, slots=True)
class ExchangedPair:
    """A real tensor, its copy, the address of the real tensor's data (``_cdata``), its hooks, how often the copy and
    the real tensor had been written to."""

    tensor: torch.Tensor
    copy: torch.Tensor
    real: int
    hooks: tuple[Any, ...]
    versions: tuple[int, int]

    @classmethod
    def of(cls, tensor: torch.Tensor, copy: torch.Tensor) -> ExchangedPair:
        """The pair of a tensor that still has its own data."""
        hooks = tuple(getattr(tensor, name) for name in _HOOKS) if tensor.is_leaf else ()
        return cls(tensor, copy, tensor._cdata, hooks, (copy._version, tensor._version))

    @property
    def is_written(self) -> bool:
        """While they are exchanged: whether the run wrote to the copy, or gave it other data."""
        kinds = ((one.dtype, one.shape, one.stride()) for one in (self.tensor, self.copy))
        return self.tensor._version != self.versions[0] or next(kinds) != next(kinds)

    def remembered(self) -> tuple[weakref.ref[torch.Tensor], torch.Tensor]:
        """The copy, by a weak reference to its tensor, for the session's next run."""
        return weakref.ref(self.tensor), self.copy

    def swap(self) -> None:
        """Give the tensor the copy's data. Raises RuntimeError if C++ watches either.

        The copy calls the tensor's hooks: C++ keeps them with the data, Python with the object. So they are set where
        they are already, which lets C++ know (``THPVariable_set_backwards_hooks`` in
        torch/csrc/autograd/python_variable.cpp).
        """
        torch._C._swap_tensor_impl(self.tensor, self.copy)
        for name, hooks in zip(_HOOKS, self.hooks, strict=False):
            if hooks is not None:
                setattr(self.tensor, name, hooks)

    def swap_back(self) -> None:
        """Give the tensor its own data back, if the copy has it, and its hooks."""
        self._swap_back()
        for name, hooks in zip(_HOOKS, self.hooks, strict=False):
            if getattr(self.tensor, name) is not hooks:
                setattr(self.tensor, name, hooks)

    def _swap_back(self) -> None:
        if self.copy._cdata != self.real:
            return
        for _unused in range(2):  # an error may be transient
            try:
                torch._C._swap_tensor_impl(self.tensor, self.copy)
            except RuntimeError:
                continue
            return
        # C++ watches the copy: whoever holds the tensor is given one with its data
        own = torch.nn.Parameter(self.copy) if isinstance(self.tensor, torch.nn.Parameter) else self.copy
        _replace_in_containers(self.tensor, own)


def tables_of_hooks(tensor: torch.Tensor) -> Iterator[Any]:
    """The tables of hooks of a tensor that has some."""
    if is_plain(tensor):
        tables = [getattr(tensor, name) for name in _HOOKS]
        yield from (table for table in tables if table is not None)


def _replace_in_containers(old: Any, new: Any) -> None:
    for holder in gc.get_referrers(old):
        if isinstance(holder, dict):
            holder.update({key: new for key, value in list(holder.items()) if value is old})
        elif isinstance(holder, list):
            holder[:] = [new if value is old else value for value in holder]
