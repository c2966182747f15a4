"""How CUDA composes operators of others where tensors without data, or the CPU, go another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def linear(usual: Callable[..., Any]) -> Callable[..., Any]:
    """aten/src/ATen/native/Linear.cpp, ``linear``: a bias that no product takes in is added in place."""

    def in_place(tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        is_fused = tensor.dim() == 2 or (tensor.dim() == 3 and tensor.is_contiguous())
        if bias is None or is_fused:
            return usual(tensor, weight, bias)
        return aten.matmul(tensor, weight.t()).add_(bias)

    return in_place


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
