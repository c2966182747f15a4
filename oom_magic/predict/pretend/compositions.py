"""How CUDA composes operators of others where tensors without data, or the CPU, go another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oom_magic.predict.kernels.normalization import is_by_cudnn

aten = torch.ops.aten


def linear(usual: Callable[..., Any]) -> Callable[..., Any]:
    """aten/src/ATen/native/Linear.cpp, ``linear``: one product of all rows, or the bias is added to it in place."""

    def in_place(tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if bias is None or tensor.dim() == 2:
            return usual(tensor, weight, bias)
        if tensor.is_contiguous() and bias.dim() == 1:
            rows = tensor.reshape(-1, tensor.shape[-1])
            return aten.addmm(bias, rows, weight.t()).view(*tensor.shape[:-1], weight.shape[0])
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
