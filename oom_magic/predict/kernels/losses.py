"""How CUDA's losses take their memory: the loss of each element first, then its mean or sum.

Several write the mean into the tensor that held the elements, which so keeps their memory as long as the loss lives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.predict.pretend.calls import Call
from oom_magic.predict.pretend.pretend_gpu import Rule

aten = torch.ops.aten
_NONE = 0  # at::Reduction::None


def _is_reduced(call: Call, position: int) -> bool:
    return bool(call.argument(position, call.kwargs.get("reduction", 1)) != _NONE)


def _element_bytes(call: Call) -> int:
    return int(max(call.args[0].numel(), call.args[1].numel()) * call.outputs[0].element_size())


def _shrunk(call: Call) -> None:
    """aten/src/ATen/native/cuda/Loss.cu, ``binary_cross_entropy_cuda``: the mean is copied over the elements."""
    if _is_reduced(call, 3 if len(call.args) > 3 else 2):
        call.output(0, _element_bytes(call))
        call.take(call.outputs[0].element_size())


def _reduced(call: Call) -> None:
    """aten/src/ATen/native/Loss.cpp, ``huber_loss``: the elements are let go after their mean is made."""
    if _is_reduced(call, 2):
        call.take(_element_bytes(call))
        call.output(0)


def _soft_margin_backward(call: Call) -> None:
    """aten/src/ATen/native/Loss.cpp, ``soft_margin_loss_backward_out``."""
    negative, product, exponential = (call.take_like(call.args[1]) for _ in range(3))
    call.give_back(product, negative)
    call.output(0)
    call.give_back(exponential)


def _log_sigmoid(call: Call) -> None:
    """aten/src/ATen/native/cuda/Activation.cpp: CUDA needs no buffer."""
    call.output(1, 0)


def _margin_gradient(_gradient: torch.Tensor, scores: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(scores)


def _contiguous_gradient(_gradient: torch.Tensor, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    """aten/src/ATen/native/BinaryOps.cpp and Loss.cpp: ``zeros_like(input, LEGACY_CONTIGUOUS_MEMORY_FORMAT)``."""
    return tensor.new_empty(tensor.shape)


# Operators whose outputs lie otherwise in memory on CUDA.
LAID_OUT: dict[OpOverload, Callable[..., Any]] = {
    aten.mse_loss_backward.default: _contiguous_gradient,
    aten.smooth_l1_loss_backward.default: _contiguous_gradient,
    aten.huber_loss_backward.default: _contiguous_gradient,
}
KERNELS: dict[OpOverload, Callable[..., Any]] = {
    aten.multi_margin_loss_backward.default: _margin_gradient,
    aten.multilabel_margin_loss_backward.default: _margin_gradient,
}
RULES: dict[OpOverload, Rule] = {
    aten.binary_cross_entropy.default: _shrunk,
    aten.soft_margin_loss.default: _shrunk,
    aten.soft_margin_loss_backward.default: _soft_margin_backward,
    aten.huber_loss.default: _reduced,
    aten.log_sigmoid_forward.default: _log_sigmoid,
}
