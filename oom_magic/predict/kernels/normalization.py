"""How CUDA's normalizations, softmaxes and dropout take their memory."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.operator_table import Rule
from oom_magic.predict.kernels.copies import contiguous, make_outputs
from oom_magic.predict.kernels.reductions import accumulator_bytes, all_dims, take_buffers
from oom_magic.predict.kernels.scratch import last_power_of_2
from oom_magic.predict.operators.calls import Call, existing
from oom_magic.predict.setups.gpus import GPU

aten = torch.ops.aten


def _group_norm(call: Call) -> None:
    """aten/src/ATen/native/cuda/group_norm_kernel.cu, ``GroupNormKernelImplInternal``: statistics in single precision;
    scales and shifts where there are weights, but for single values (``GroupNorm1dForward``)."""
    make_outputs(call)
    mean = call.outputs[1]
    for _ in range(2 if mean.element_size() < 4 else 0):
        call.take_like(mean, torch.float32)
    for _ in range(2 if call.argument(1) is not None and call.argument(5) != 1 else 0):
        call.take(call.argument(3) * call.argument(4) * _wide_bytes(mean))


def _group_norm_backward(call: Call) -> None:
    """The same file, ``GroupNormBackwardKernelImplInternal`` (single values are not scaled)."""
    mean, weight = call.args[2], call.argument(4)
    batch, channels, groups = call.argument(5), call.argument(6), call.argument(8)
    make_outputs(call)
    scales = channels if weight is not None and call.argument(7) != 1 else 0
    of_input = (groups, groups, scales) if call.argument(9)[0] else ()
    sums = [call.take(batch * count * _wide_bytes(mean)) for count in (channels, channels, *of_input)]
    call.give_back(*sums[3:1:-1], *sums[4:], *sums[1::-1])


def _wide_bytes(tensor: torch.Tensor) -> int:
    """``kAccType``: sums are in single precision at least."""
    return max(tensor.element_size(), 4)


def is_by_cudnn(tensor: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """aten/src/ATen/native/Normalization.cpp, ``_batch_norm_impl_index``."""
    if weight is None or bias is None or tensor.dim() < 3 or not torch.backends.cudnn.enabled:
        return False
    is_mixed = tensor.dtype is torch.float16 and weight.dtype is torch.float32
    return is_mixed or tensor.dtype in (torch.float32, torch.float64)


def _batch_norm(call: Call) -> None:
    """aten/src/ATen/native/cuda/Normalization.cu, ``batch_norm_cuda``; cuDNN keeps statistics for a backward only."""
    call.output(0)
    tensor, weight, bias = call.args[:3]
    is_training = call.argument(5)
    if is_by_cudnn(tensor, weight, bias):
        if not is_training:
            call.output(1, 0)
            call.output(2, 0)
        return
    make_outputs(call)
    is_general = not (tensor.is_contiguous() or _is_images_by_channel(tensor))
    if is_training and is_general:
        _take_mean_and_variance(call, tensor)
    elif is_training and _is_images_by_channel(tensor):
        _take_staging(call, tensor, 4)
    for _ in range(2 if is_general and weight is None else 0):
        call.take(_wide_bytes(tensor))


def _take_mean_and_variance(call: Call, tensor: torch.Tensor) -> None:
    """``batch_norm_mean_var`` by ``var_mean_out``, which casts bfloat16 (ReduceOps.cpp, ``std_var_mean_out``)."""
    wide = torch.empty_like(tensor, dtype=torch.float32) if tensor.dtype is torch.bfloat16 else tensor
    cast = call.take_like(wide) if wide is not tensor else -1
    dims = [dim for dim in range(wide.dim()) if dim != 1]
    call.give_back(*reversed(take_buffers(call, wide, dims, 4 * _wide_bytes(wide), values=2)), cast)


def _batch_norm_backward(call: Call) -> None:
    """The same file, ``batch_norm_backward_cuda``: one kernel for all, or sums by channel first; cuDNN, in training,
    reads the gradient in the input's memory format, and computes the input's whether it is asked for or not."""
    gradient, tensor, weight = call.args[:3]
    is_training, mask = call.argument(7), call.argument(9)
    cudnn = is_by_cudnn(tensor, weight, weight)
    if cudnn and is_training:
        if not gradient.is_contiguous(memory_format=torch._prims_common.suggest_memory_format(tensor)):
            call.take_like(gradient)
        if not mask[0]:
            call.take_like(tensor)
        return
    by_channel = _is_by_channel(tensor)
    if mask[0] and any(mask[1:]) + is_training and not by_channel:
        for one in (tensor, gradient):
            if not _is_row_by_channel(one):
                call.take_like(one)
        return
    sum_bytes = tensor.shape[1] * _wide_bytes(tensor)
    call.take(sum_bytes if cudnn else 0)  # the deviation, which cuDNN did not keep
    if any(mask[1:]) or is_training:
        by_channel = by_channel and _is_by_channel(gradient)
        for _ in range(2 if by_channel or mask[0] else 0):
            call.take(sum_bytes)
        call.output(1)
        call.output(2)
        if by_channel:
            _take_staging(call, tensor, 2)
    if is_training and weight is None and not (_is_images_by_channel(tensor) and _is_images_by_channel(gradient)):
        call.take(_wide_bytes(tensor))  # a weight of one (``batch_norm_elementwise_backward_train``)


def _is_row_by_channel(tensor: torch.Tensor) -> bool:
    """Whether ``batch_norm_backward_cuda_template`` sees all that follows the channels as one dimension, uncopied."""
    try:
        tensor.view(*tensor.shape[:2], prod(tensor.shape[2:]))
    except RuntimeError:
        return False
    return True


def _is_images_by_channel(tensor: torch.Tensor) -> bool:
    """``batch_norm_choose_impl``, which does not know volumes."""
    return tensor.dim() != 5 and _is_by_channel(tensor)


def _is_by_channel(tensor: torch.Tensor) -> bool:
    """The same file, ``batch_norm_use_channels_last_kernels``."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    memory_format = formats.get(tensor.dim(), torch.contiguous_format)
    is_of_rows = tensor.is_contiguous() and tensor.stride(1) == 1
    return is_of_rows or (tensor.dim() > 3 and tensor.is_contiguous(memory_format=memory_format))


def _take_staging(call: Call, tensor: torch.Tensor, sums: int) -> None:
    """Normalization.cuh, ``batch_norm_stats_channels_last_cuda_template`` and the one for the backward: where several
    blocks share channels last, each leaves its sums."""
    numbers = tensor.numel() // tensor.shape[1], tensor.shape[1]
    staging = call.allocate_scratch(_staging_bytes, sums * _wide_bytes(tensor), *numbers)
    semaphores = call.allocate_scratch(_semaphore_bytes, *numbers)
    call.give_back(semaphores, staging)


def batch_norm_outputs(
    tensor: torch.Tensor, weight: torch.Tensor | None, *args: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The outputs of ``native_batch_norm`` in the input's memory format, statistics in single precision at least."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    mean, deviation = (tensor.new_empty(tensor.shape[1], dtype=wide) for _ in range(2))
    return torch.empty_like(tensor), mean, deviation


def batch_norm_gradients(
    gradient: torch.Tensor, tensor: torch.Tensor, weight: torch.Tensor | None, *args: Any
) -> tuple[torch.Tensor | None, ...]:
    """The outputs of ``native_batch_norm_backward`` in CUDA's memory format."""
    is_training, mask = args[4], args[-1]
    wide = tensor.new_empty(tensor.shape[1], dtype=torch.float32 if weight is None else weight.dtype)
    is_like_input = is_training and (is_by_cudnn(tensor, weight, weight) or _is_by_channel(tensor))
    return (
        (torch.empty_like(tensor) if is_like_input else tensor.new_empty(tensor.shape)) if mask[0] else None,
        wide if mask[1] else None,
        torch.empty_like(wide) if mask[2] else None,
    )


_Statistics = tuple[torch.Tensor, torch.Tensor]


def _sync_statistics(tensor: torch.Tensor, eps: float) -> _Statistics:
    """``batch_norm_stats_cuda``, of SyncBatchNorm: mean and deviation of what this process has."""
    made = tensor.new_empty(tensor.shape[1], dtype=torch.promote_types(tensor.dtype, torch.float32))
    return made, torch.empty_like(made)


def _sync_gathered(tensor: torch.Tensor, mean: torch.Tensor, *args: Any) -> _Statistics:
    """``batch_norm_gather_stats_with_counts_cuda``: mean and deviation of all processes."""
    made = mean.new_empty(mean.shape[1], dtype=torch.promote_types(mean.dtype, torch.float32))
    return made, torch.empty_like(made)


def _sync_normalized(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    """``batch_norm_elemt_cuda`` and ``batch_norm_backward_elemt_cuda``."""
    return torch.empty_like(tensor)


def _sync_sums(
    gradient: torch.Tensor, tensor: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor,
    weight: torch.Tensor | None, of_input: bool, of_weight: bool, of_bias: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """``batch_norm_backward_reduce_cuda``: two sums by channel, the gradients of weight and bias."""
    like = [mean if of_input else None] * 2 + [weight if wanted else None for wanted in (of_weight, of_bias)]
    return tuple(None if one is None else torch.empty_like(one) for one in like)


def _staged(sums: int) -> Rule:
    def rule(call: Call) -> None:
        make_outputs(call)
        if _is_by_channel(call.args[0]):
            _take_staging(call, call.args[0], sums)

    return rule


def _staging_bytes(_: GPU, each: int, rows: int, channels: int) -> int:
    blocks = _blocks_of_channels_last(rows, channels)[1]
    return each * channels * blocks if blocks > 1 else 0


def _semaphore_bytes(_: GPU, rows: int, channels: int) -> int:
    across, blocks = _blocks_of_channels_last(rows, channels)
    return 4 * across if blocks > 1 else 0


def _blocks_of_channels_last(rows: int, channels: int) -> tuple[int, int]:
    """The grid over channels and rows (``flexible_launch_configs``)."""
    width = min(last_power_of_2(channels), 32)
    height = min(last_power_of_2(-(-rows // 16)), 512 // width)
    if width * height != 512:
        width = min(last_power_of_2(channels), 512 // height)
    blocks = min(-(-rows // (height * 16)), 128)
    return -(-channels // width), 1 if blocks < 8 else blocks


def _native_dropout(call: Call) -> None:
    """aten/src/ATen/native/cuda/Dropout.cu, ``dropout_cuda``: the mask first."""
    call.output(1)


def _softmax_backward(call: Call) -> None:
    """aten/src/ATen/native/cuda/SoftMax.cu, ``softmax_backward_cuda_out``: gradient times output is aside, and
    ``host_softmax_backward`` wants that and the output contiguous."""
    call.output(0)
    gradient, output = call.args[:2]
    product = gradient * output
    call.take_like(product)
    for one in (product, output):
        if not one.is_contiguous():
            call.take_like(one)


def _safe_softmax(call: Call) -> None:
    """aten/src/ATen/native/transformers/attention.cpp: rows that are wholly masked are found and set to zero."""
    call.output(0)
    scores = call.args[0]
    call.take(scores.numel())
    call.take(scores.numel() // max(scores.shape[-1], 1))
    call.take(scores.element_size())


def _logsumexp(call: Call) -> None:
    """aten/src/ATen/native/ReduceOps.cpp, ``logsumexp_out``: the maxima, a mask of the infinite ones, the sum of the
    exponentials; all of floats."""
    made = call.outputs[0]
    is_float = call.args[0].is_floating_point() or call.args[0].is_complex()
    converted = -1 if is_float else call.take_like(call.args[0], made.dtype)
    tensor = call.args[0] if is_float else torch.empty_like(call.args[0], dtype=made.dtype)
    dims = all_dims(tensor, call.argument(1))
    maxima = call.take_like(made)
    call.give_back(*reversed(take_buffers(call, tensor, dims, tensor.element_size())))
    magnitudes = call.take_like(made)
    call.give_back(call.take_like(made, torch.bool), magnitudes)
    exponentials = call.take_like(tensor)
    call.output(0)
    call.give_back(*reversed(take_buffers(call, tensor, dims, accumulator_bytes(tensor, made))))
    call.give_back(exponentials, maxima, converted)


RULES: dict[OpOverload, Rule] = {
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.batch_norm_stats.default: _staged(4),
    aten.batch_norm_backward_reduce.default: _staged(2),
    aten.native_layer_norm.default: contiguous(before=(0,)),
    aten.native_layer_norm_backward.default: contiguous(0, before=(1,)),
    aten._softmax.default: contiguous(0),
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax.default: contiguous(0),
    aten._log_softmax_backward_data.default: contiguous(0, 1),
    aten._safe_softmax.default: _safe_softmax,
    aten.logsumexp.default: _logsumexp,
    aten.native_dropout.default: _native_dropout,
    **existing(
        {
            "_fused_rms_norm": contiguous(before=(0,)),
            "_fused_rms_norm_backward": contiguous(0, before=(1,)),
        }
    ),
}
KERNELS: dict[OpOverload, Callable[..., Any]] = {
    aten.native_batch_norm.default: batch_norm_outputs,
    aten.native_batch_norm_backward.default: batch_norm_gradients,
    aten.batch_norm_stats.default: _sync_statistics,
    aten.batch_norm_gather_stats_with_counts.default: _sync_gathered,
    aten.batch_norm_elemt.default: _sync_normalized,
    aten.batch_norm_backward_reduce.default: _sync_sums,
    aten.batch_norm_backward_elemt.default: _sync_normalized,
}
