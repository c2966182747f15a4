"""How CUDA's losses take their memory: the loss of each element first, then its mean or sum.

Several write the mean into the tensor of the elements, whose memory therefore stays as long as the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.operator_table import Rule
from oom_magic.predict.kernels.reductions import take_sum_buffers
from oom_magic.predict.operators.calls import Call

aten = torch.ops.aten
_NONE = 0  # at::Reduction::None


def _is_reduced(call: Call, position: int) -> bool:
    return bool(call.argument(position, call.kwargs.get("reduction", 1)) != _NONE)


def _element_bytes(call: Call) -> int:
    return int(max(call.args[0].numel(), call.args[1].numel()) * call.outputs[0].element_size())


def _shrunk(call: Call, reduction_at: int) -> None:
    """aten/src/ATen/native/cuda/Loss.cu, ``binary_cross_entropy_cuda``: the mean is copied over the elements."""
    if _is_reduced(call, reduction_at):
        call.output(0, _element_bytes(call))
        call.take(call.outputs[0].element_size())
        take_sum_buffers(call, call.args[0])


def _margin(call: Call, reduction_at: int) -> None:
    """aten/src/ATen/native/cuda/MultiMarginLoss.cu and MultiLabelMarginCriterion.cu: a loss for each row, then their
    sum."""
    scores = call.args[0]
    for position in range(len(call.outputs) - 1, 0, -1):
        call.output(position)
    if scores.dim() > 1 and _is_reduced(call, reduction_at):
        call.take(len(scores) * scores.element_size())


def _reduced(call: Call) -> None:
    """aten/src/ATen/native/Loss.cpp, ``huber_loss``: the elements are freed after their mean is made."""
    if _is_reduced(call, 2):
        call.take(_element_bytes(call))
        call.output(0)
        take_sum_buffers(call, call.args[0])


def _elementwise_loss(call: Call) -> None:
    """aten/src/ATen/native/BinaryOps.cpp, ``mse_loss``: the mean keeps the storage that was made for all elements."""
    if call.argument(2, 1) == 0:
        return
    shape = torch.broadcast_shapes(call.args[0].shape, call.args[1].shape)
    elements = torch.empty(shape, dtype=call.outputs[0].dtype, device="meta")
    call.output(0, elements.numel() * elements.element_size())
    call.take_like(elements)
    take_sum_buffers(call, elements)


def _binary_cross_entropy_with_logits(call: Call) -> None:
    """aten/src/ATen/native/Loss.cpp: two temporaries as large as the input; weights of positives are spread first."""
    call.take_like(call.args[0])
    positives = call.argument(3)
    if positives is not None:
        less_one = call.take_like(positives)
        spread = call.take_like(call.args[0])
        call.give_back(less_one, spread)
    if call.argument(4, 1) == 0:
        call.output(0)
        call.take_like(call.args[0])
        return
    call.take_like(call.args[0])
    call.output(0)
    take_sum_buffers(call, call.args[0])


def _soft_margin_backward(call: Call) -> None:
    """aten/src/ATen/native/Loss.cpp, ``soft_margin_loss_backward_out``."""
    negative, product, exponential = (call.take_like(call.args[1]) for _ in range(3))
    call.give_back(product, negative)
    call.output(0)
    call.give_back(exponential)


def _log_sigmoid(call: Call) -> None:
    """aten/src/ATen/native/cuda/Activation.cpp: CUDA needs no buffer."""
    call.output(1, 0)


def _longest(targets: torch.Tensor, lengths: Any) -> int:
    """The longest target; the width of the tensor where the lengths are on the GPU."""
    is_known = not isinstance(lengths, torch.Tensor) or not lengths.is_meta
    return max(map(int, lengths), default=0) if is_known else targets.shape[-1]


def _ctc_loss(
    scores: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """aten/src/ATen/native/cuda/LossCTC.cu, ``ctc_loss_gpu_template``: the losses, and sums over alignments."""
    length, batch = scores.shape[:2]
    return scores.new_empty(batch), scores.new_empty(batch, length, 2 * _longest(targets, target_lengths) + 1)


def _ctc_loss_backward(_gradient: torch.Tensor, scores: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _take_lengths(call: Call, batch: int) -> tuple[int, int, int]:
    """Lengths of inputs and targets, and where each target begins; in the order in which they go."""
    first, second, third = (call.take(batch * torch.int64.itemsize) for _ in range(3))
    return second, first, third


def _ctc_memory(call: Call) -> None:
    lengths = _take_lengths(call, call.args[0].shape[1])
    call.output(1)
    call.output(0)
    call.give_back(*lengths)


def _ctc_backward_memory(call: Call) -> None:
    lengths = _take_lengths(call, call.args[1].shape[1])
    sums = call.take_like(call.args[6])
    call.output(0)
    call.give_back(sums, *lengths)


def _margin_gradient(_gradient: torch.Tensor, scores: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(scores)


def _contiguous_gradient(_gradient: torch.Tensor, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    """aten/src/ATen/native/BinaryOps.cpp and Loss.cpp: ``zeros_like(input, LEGACY_CONTIGUOUS_MEMORY_FORMAT)``."""
    return tensor.new_empty(tensor.shape)


# Operators whose outputs have another memory layout on CUDA.
LAID_OUT: dict[OpOverload, Callable[..., Any]] = {
    aten.mse_loss_backward.default: _contiguous_gradient,
    aten.smooth_l1_loss_backward.default: _contiguous_gradient,
    aten.huber_loss_backward.default: _contiguous_gradient,
}
KERNELS: dict[OpOverload, Callable[..., Any]] = {
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    aten.multi_margin_loss_backward.default: _margin_gradient,
    aten.multilabel_margin_loss_backward.default: _margin_gradient,
}
RULES: dict[OpOverload, Rule] = {
    aten.binary_cross_entropy.default: partial(_shrunk, reduction_at=3),
    aten.soft_margin_loss.default: partial(_shrunk, reduction_at=2),
    aten.multi_margin_loss.default: partial(_margin, reduction_at=5),
    aten.multilabel_margin_loss_forward.default: partial(_margin, reduction_at=2),
    aten.soft_margin_loss_backward.default: _soft_margin_backward,
    aten.huber_loss.default: _reduced,
    aten.mse_loss.default: _elementwise_loss,
    aten.smooth_l1_loss.default: _elementwise_loss,
    aten.binary_cross_entropy_with_logits.default: _binary_cross_entropy_with_logits,
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten._ctc_loss.default: _ctc_memory,
    aten._ctc_loss.Tensor: _ctc_memory,
    aten._ctc_loss_backward.default: _ctc_backward_memory,
    aten._ctc_loss_backward.Tensor: _ctc_backward_memory,
}
