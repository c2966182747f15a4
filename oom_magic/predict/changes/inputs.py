"""Changes to what the model is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oom_magic.predict.changes.change import Change, InapplicableError

Inputs = tuple[tuple[tuple[int, ...], bool], ...]  # of a call's tensors: shape, whether integer


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """The tensors that a model is called with."""
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
    return tuple((tuple(tensor.shape), not tensor.is_floating_point()) for tensor in tensors)


class ShorterInputs(Change):
    """The model called with less along one dimension (0: fewer samples, 1: shorter sequences)."""

    def __init__(self, dimension: int, before: int, after: int) -> None:
        self.dimension = dimension
        self.before = before
        self.after = after

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(self._cut, args)), {name: self._cut(value) for name, value in kwargs.items()}

    def _cut(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() <= self.dimension:
            return value
        if value.shape[self.dimension] != self.before:
            return value
        return value.narrow(self.dimension, 0, self.after)


class ExpectedInputs(Change):
    """Nothing is changed; a run whose first call of a model has other inputs than expected ends there."""

    def __init__(self, are_expected: Callable[[Inputs], bool]) -> None:
        self._are_expected: Callable[[Inputs], bool] | None = are_expected

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        are_expected, self._are_expected = self._are_expected, None
        if are_expected is not None and not are_expected(inputs_of(args, kwargs)):
            raise InapplicableError("size_not_set_there")
        return args, kwargs
