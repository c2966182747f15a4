"""Fake quantization, for training that is aware of it: made of other operators on every device.

Sources, under aten/src/ATen/native/quantized: FakeQuantPerTensorAffine.cpp, FakeQuantPerChannelAffine.cpp,
cuda/FusedObsFakeQuant.cu (``fused_moving_avg_obs_fake_quant_cuda``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_Pair = tuple[torch.Tensor, torch.Tensor]


def _per_tensor(tensor: torch.Tensor, *_unused: Any) -> _Pair:
    """The values, and a mask of those within the range."""
    return torch.empty_like(tensor), torch.empty_like(tensor, dtype=torch.bool)


def _per_channel(tensor: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, *_unused: Any) -> _Pair:
    """Likewise; whole zero points are compared with the range."""
    if not zero_point.is_floating_point():
        torch.aminmax(zero_point)
    return _per_tensor(tensor)


def _learned_per_tensor(tensor: torch.Tensor, *_unused: Any) -> torch.Tensor:
    return _per_tensor(tensor)[0]


def _learned_per_channel(
    tensor: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, *_unused: Any
) -> torch.Tensor:
    whole = torch.empty_like(zero_point).to(torch.int32)
    return _per_channel(tensor, scale, whole)[0]


def _gradients_per_tensor(gradient: torch.Tensor, tensor: torch.Tensor, *_unused: Any) -> tuple[torch.Tensor, ...]:
    """Of the tensor, and of scale and zero point, summed up."""
    found, of_scale, of_zero_point = (torch.empty_like(tensor) for _ in range(3))
    return found, of_scale.sum().unsqueeze(0), of_zero_point.sum().unsqueeze(0)


def _gradients_per_channel(
    gradient: torch.Tensor, tensor: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, axis: int,
    *_unused: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Likewise, for each channel."""
    rounded = torch.empty_like(zero_point)
    torch.aminmax(rounded)
    found, of_scale, of_zero_point = (torch.empty_like(tensor) for _ in range(3))
    dims = [dim for dim in range(tensor.dim()) if dim != axis]
    made = found, of_scale.sum(dims), of_zero_point.sum(dims)
    del rounded
    return made


def _observed(
    tensor: torch.Tensor, observer_on: torch.Tensor, fake_quant_on: torch.Tensor, running_min: torch.Tensor,
    running_max: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, averaging: float, least: int, most: int,
    axis: int, per_row: bool = False, symmetric: bool = False,
) -> _Pair:  # fmt: skip
    """The range is observed, by channel with a tensor for each on the first call; then the tensor is quantized."""
    in_order = tensor.contiguous()
    if not per_row:
        torch.aminmax(in_order)
        return _per_tensor(tensor)
    if not running_min.numel():
        for state in (running_min, running_max, scale, zero_point):
            state.resize_(tensor.shape[axis])
    rows = tensor if tensor.dim() == 2 else tensor.transpose(0, axis).flatten(1)
    torch.aminmax(rows, dim=1)
    return _per_channel(tensor, scale, zero_point)


COMPOSED: dict[str, Callable[..., Any]] = {
    "fake_quantize_per_tensor_affine_cachemask": _per_tensor,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _per_tensor,
    "fake_quantize_per_channel_affine_cachemask": _per_channel,
    "_fake_quantize_learnable_per_tensor_affine": _learned_per_tensor,
    "_fake_quantize_learnable_per_tensor_affine_backward": _gradients_per_tensor,
    "_fake_quantize_learnable_per_channel_affine": _learned_per_channel,
    "_fake_quantize_learnable_per_channel_affine_backward": _gradients_per_channel,
    "_fused_moving_avg_obs_fq_helper": _observed,
}
