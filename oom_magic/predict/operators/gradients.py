"""Gradients that autograd writes in place on a real GPU, but not on meta tensors.

Two places avoid in-place writes for tensors that are "like a subclass", as every meta tensor is: sums
of gradients (torch/csrc/autograd/input_buffer.cpp, ``can_accumulate_inplace``) and some derivatives
(torch/csrc/autograd/FunctionsManual.cpp, ``areAnyTensorSubclassLike``).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from oom_magic.predict.operators.calls import TORCH

aten = torch.ops.aten

# Operators that a derivative runs in place on its first argument, with the nodes that do so.
_IN_PLACE_NODES = {
    aten.index_add.default: {"IndexSelectBackward0"},
    aten.scatter_add.default: {"GatherBackward0", "CummaxBackward0", "CumminBackward0"},
    aten.put.default: {"TakeBackward0"},
    aten.masked_scatter.default: {"MaskedSelectBackward0"},
    aten.index_fill.int_Tensor: {"TraceBackward0"},
    aten.index_put.default: {"IndexBackward0"},
    aten.scatter.src: {"TopkBackward0", "SortBackward0", "SortBackward1", "MaxBackward0", "MinBackward0",
                       "KthvalueBackward0", "MedianBackward1", "NanmedianBackward1", "ModeBackward0"},
    aten.logical_and.default: {"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0",
                               "ClampBackward0"},
    aten.add.Tensor: {"AminmaxBackward0", "Atan2Backward0"},
    aten.sub.Tensor: {"BinaryCrossEntropyWithLogitsBackward0"},
    aten.mul.Tensor: {"BinaryCrossEntropyWithLogitsBackward0"},
}  # fmt: skip
if TORCH >= (2, 15):
    _IN_PLACE_NODES[aten.masked_fill.Scalar] = {
        "MaximumBackward0", "MinimumBackward0", "ClampBackward0", "ClampMinBackward1", "ClampMaxBackward1",
    }  # fmt: skip
# In place only where the result is as large as the argument.
_BROADCASTING = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor}


class RunningNode:
    """The node of autograd that allocated last on each card, and how many allocations there were before its first."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[tuple[int, int], int]] = {}  # by card: the node's number, and that of allocations

    def note(self, card: int, num_allocations: int) -> None:
        """Look which node runs; before each allocation of a backward, at which the card had so many."""
        number = _number_of(torch._C._current_autograd_node())
        if card not in self._last or number != self._last[card][0]:
            self._last[card] = (number, num_allocations)

    def sums_itself(self, card: int, allocation: int) -> bool:
        """Whether a sum onto a tensor is of the node's formula, as ``var_mean_backward``'s, which makes a new tensor.

        The tensor was allocated while the node runs, and no two results of the node are of the same gradient.
        """
        node = torch._C._current_autograd_node()
        number, num_before = self._last.get(card, (None, 0))
        if number != _number_of(node) or allocation < num_before:
            return False
        edges = [] if node is None else [edge for edge in node.next_functions if edge[0] is not None]
        return len(set(edges)) == len(edges)


def _number_of(node: Any) -> tuple[int, int]:
    return torch._C._current_graph_task_id(), -1 if node is None else node._sequence_nr()


def may_be_in_place(func: OpOverload) -> bool:
    """Whether there may be an argument that CUDA writes an operator's result into (``reused_gradient``)."""
    return func in _IN_PLACE_NODES


def reused_gradient(
    func: OpOverload, args: tuple[Any, ...], sums_itself: Callable[[torch.Tensor], bool]
) -> torch.Tensor | None:
    """The argument that CUDA would write the result into; None if the result is a new tensor.

    ``sums_itself`` says of a tensor whether the node that runs made it, and so sums it itself.
    """
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled() or not may_be_in_place(func):
        return None
    target: torch.Tensor = args[0]
    if func is aten.add.Tensor and not sums_itself(target):
        is_autograds_own = counts(target) == reference_counts_in_autograd()
        is_like = is_dense(target) and getattr(args[1], "shape", None) == target.shape
        return target if is_autograds_own and is_like else None
    node = torch._C._current_autograd_node()
    is_named = node is not None and node.name() in _IN_PLACE_NODES[func]
    is_reused = is_named and (func not in _BROADCASTING or _fits(args[1], target))
    return target if is_reused else None


def _fits(tensor: torch.Tensor, target: torch.Tensor) -> bool:
    return torch.broadcast_shapes(tensor.shape, target.shape) == target.shape


def is_dense(tensor: torch.Tensor) -> bool:
    """c10/core/Contiguity.h, ``is_non_overlapping_and_dense``."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def counts(tensor: torch.Tensor) -> tuple[int, int]:
    """The reference counts of the tensor and of its storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


class _ReferenceCounts(TorchDispatchMode):
    """Records the reference counts of a sum's first argument."""

    seen = (0, 0)

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.add.Tensor:
            self.seen = counts(args[0])
        return func(*args, **(kwargs or {}))


@cache
def reference_counts_in_autograd() -> tuple[int, int]:
    """The counts that a mode sees for a gradient that only autograd holds, measured once.

    On a thread of its own, where the user's modes and hooks are not.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_measured).result()


def _measured() -> tuple[int, int]:
    with torch.autograd.set_detect_anomaly(False), _ReferenceCounts() as look:  # which reads gradients
        leaf = torch.empty(1, requires_grad=True, device="meta")
        shared = leaf * 2
        (shared.tanh() * shared).backward()
    return look.seen
