"""Composite operators as CUDA runs them, where meta tensors or the CPU take another path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oom_magic.predict.kernels.normalization import is_by_cudnn
from oom_magic.predict.operators.calls import TORCH

aten = torch.ops.aten


def linear(usual: Callable[..., Any]) -> Callable[..., Any]:
    """aten/src/ATen/native/Linear.cpp, ``linear``: one product of all rows, or the bias is added to it in place."""

    def in_place(tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if bias is None or tensor.dim() == 2:
            return usual(tensor, weight, bias)
        if tensor.is_contiguous() and bias.dim() == 1:
            rows = tensor.reshape(-1, tensor.shape[-1])
            shape = (*tensor.shape[:-1], weight.shape[0])
            out = aten.addmm(bias, rows, weight.t())
            return aten._unsafe_view(out, shape) if TORCH >= (2, 15) else out.view(shape)
        return aten.matmul(tensor, weight.t()).add_(bias)

    return in_place


def batch_norm(usual: Callable[..., Any]) -> Callable[..., Any]:
    """aten/src/ATen/native/Normalization.cpp, ``_batch_norm_impl_index``: cuDNN's input is contiguous, and kept so."""

    def contiguous(tensor: torch.Tensor, weight: Any, bias: Any, *args: Any) -> Any:
        if is_by_cudnn(tensor, weight, bias):
            tensor = tensor.contiguous(memory_format=torch._prims_common.suggest_memory_format(tensor))
        return usual(tensor, weight, bias, *args)

    return contiguous


def dropout(usual: Callable[..., Any]) -> Callable[..., Any]:
    """aten/src/ATen/native/Dropout.cpp, ``is_fused_kernel_acceptable``: one kernel, which keeps a mask of booleans."""

    def fused(tensor: torch.Tensor, p: float, train: bool) -> Any:
        if train and 0 < p < 1 and tensor.numel():
            return aten.native_dropout(tensor, p, train)[0]
        return usual(tensor, p, train)

    return fused


def softmax(kernel: Callable[..., Any], usual: Callable[..., Any]) -> Callable[..., Any]:
    """aten/src/ATen/native/SoftMax.cpp: float16, and only that, is widened to float32 inside the kernel."""

    def half_to_float(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if tensor.dtype is torch.float16 and dtype is torch.float32:
            return kernel(tensor, dim, True)
        return usual(tensor, dim, dtype)

    return half_to_float


def rms_norm(usual: Callable[..., Any]) -> Callable[..., Any]:
    """aten/src/ATen/native/layer_norm.cpp, ``rms_norm_symint``: fused, unless the weight has another type."""

    def fused(
        tensor: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
    ) -> Any:
        if weight is not None and weight.dtype is not tensor.dtype:
            return usual(tensor, shape, weight, eps)
        return aten._fused_rms_norm(tensor, shape, weight, eps)[0]

    return fused


def one_hot(usual: Callable[..., Any]) -> Callable[..., Any]:
    """aten/src/ATen/native/Onehot.cpp: ones are written into zeros, where tensors without data compare."""

    def scattered(tensor: torch.Tensor, num_classes: int = -1) -> Any:
        if num_classes <= 0 or not tensor.numel():
            return usual(tensor, num_classes)
        return tensor.new_zeros((*tensor.shape, num_classes)).scatter_(-1, tensor.unsqueeze(-1), 1)

    return scattered


def ctc_loss(usual: Callable[..., Any]) -> Callable[..., Any]:
    """aten/src/ATen/native/LossCTC.cpp, ``ctc_loss``: for the mean, the lengths of the targets go to the GPU."""

    def averaged(
        scores: torch.Tensor, targets: Any, lengths: Any, target_lengths: Any, blank: int = 0, reduction: int = 1,
        zero_infinity: bool = False,
    ) -> Any:  # fmt: skip
        is_mean = reduction == 1
        losses = usual(scores, targets, lengths, target_lengths, blank, 0 if is_mean else reduction, zero_infinity)
        if not is_mean:
            return losses
        there = aten._to_copy.default(target_lengths, dtype=losses.dtype, device=losses.device)
        at_least_one = there.clamp_min(1)
        del there
        return losses.div(at_least_one).mean()

    return averaged


def cumprod_backward(usual: Callable[..., Any]) -> Callable[..., Any]:
    """torch/csrc/autograd/FunctionsManual.cpp: no element is taken to be zero."""

    def without_zeros(gradient: torch.Tensor, tensor: torch.Tensor, dim: int, output: torch.Tensor) -> Any:
        if tensor.numel() <= 1 or tensor.size(dim) == 1:
            return gradient
        product = output * gradient
        zeros = tensor == 0
        zeros.any()
        backwards = product.flip(dim)
        sums = backwards.cumsum(dim)
        forwards = sums.flip(dim)
        del sums, backwards
        return forwards.div(tensor)

    return without_zeros
