"""What CUDA's reductions (sum, mean, norm, max, ...) take inside: buffers for the results of thread blocks.

Source: aten/src/ATen/native/cuda/Reduce.cuh (``setReduceConfig``, ``global_memory_size``) and, for the order of
dimensions, aten/src/ATen/TensorIterator.cpp (``reorder_dimensions``, ``coalesce_dimensions``).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.fake_gpu import Rule
from oom_magic.predict.kernels.copies import make_outputs
from oom_magic.predict.operators.calls import TORCH, Call
from oom_magic.predict.setups.gpus import GPU

aten = torch.ops.aten
_WARP = 32
_MAX_THREADS = 512
_MIN_VALUES, _MAX_VALUES = 16, 256  # per thread
_INPUT_VECTOR = _OUTPUT_VECTOR = 4
_OWN = 0  # an accumulator of the input's own type


def take_buffers(call: Call, tensor: torch.Tensor, dims: Iterable[int], item_bytes: int, *, values: int = 4) -> None:
    """Take the staging buffer and the semaphores of a reduction over ``dims``, where one block does not do it.

    ``item_bytes`` is the size of the accumulator, ``values`` how many a thread has (``vt0``).
    """
    reduced = set(dims)
    order = sorted(range(tensor.dim() - 1, -1, -1), key=lambda dim: dim not in reduced)
    layout = [int(number) for dim in order for number in (tensor.shape[dim], tensor.stride(dim))]
    numbers = (item_bytes, values, int(tensor.storage_offset()), len(reduced), *layout)
    call.allocate_scratch(_staging_bytes, *numbers)
    call.allocate_scratch(_semaphore_bytes, *numbers)


def take_sum_buffers(call: Call, elements: torch.Tensor) -> None:
    """Those of the sum or mean of a dense tensor with as many elements of this type."""
    flat = torch.empty(elements.numel(), dtype=elements.dtype, device="meta")
    take_buffers(call, flat, (0,), _accumulator_bytes(flat, flat))


def _staging_bytes(card: GPU, *numbers: int) -> int:
    return _buffers(card, *numbers)[0]


def _semaphore_bytes(card: GPU, *numbers: int) -> int:
    return _buffers(card, *numbers)[1]


@lru_cache(maxsize=4096)
def _buffers(card: GPU, item_bytes: int, values: int, offset: int, num_reduced: int, *layout: int) -> tuple[int, int]:
    """Bytes of both, of a tensor that has these sizes and strides, first of the dimensions that are reduced."""
    dims = list(zip(layout[::2], layout[1::2], strict=True))
    reduced, kept = _merged(dims[:num_reduced]), _merged(dims[num_reduced:])
    num_inputs = prod(size for size, _ in reduced)
    num_outputs = prod(size for size, _ in kept)
    if num_inputs == 0 or num_outputs == 0:
        return 0, 0
    along = not kept or (bool(reduced) and reduced[0][1] < kept[0][1])
    fastest = (reduced if along else kept)[:1]
    is_dense = not fastest or fastest[0][1] == 1
    first, second = (num_inputs, num_outputs) if along else (num_outputs, num_inputs)
    vector = 1
    if is_dense and along and first >= 128 and len(reduced) == 1 and not kept and values >= _INPUT_VECTOR:
        first //= _INPUT_VECTOR
    elif is_dense and not along:
        vector = _output_vector(offset, reduced, kept)
        first //= vector
    width, height = _block(first, second, _MAX_THREADS // vector)
    step_input, step_output = (width, 1) if along else (1, width)
    per_thread = -(-num_inputs // step_input)
    splits_rows = per_thread >= height * _MIN_VALUES or per_thread >= _MAX_VALUES
    if splits_rows:
        per_thread = -(-num_inputs // (step_input * height))
    else:
        step_output *= height
    grid = -(-(num_outputs // vector) // step_output)
    target = card.num_multiprocessors * (card.threads_per_multiprocessor // (width * height))
    if not splits_rows or per_thread < _MAX_VALUES or grid > target:
        return 0, 0
    blocks = max(min(-(-target // grid), -(-per_thread // _MIN_VALUES)), -(-per_thread // _MAX_VALUES))
    if blocks <= 1:
        return 0, 0
    return item_bytes * num_outputs * blocks * (1 if along else width * vector), 4 * grid


def _block(first: int, second: int, max_threads: int) -> tuple[int, int]:
    """Width and height of a thread block (``set_block_dimension``)."""
    first, second = (min(1 << max(number, 1).bit_length() - 1, max_threads) for number in (first, second))
    height = min(second, max_threads // min(first, _WARP))
    return min(first, max_threads // height), height


def _merged(dims: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sizes and strides of dimensions, the fastest first, neighbours merged."""
    group = sorted(((size, stride) for size, stride in dims if size != 1), key=lambda item: item[1])
    for position in range(len(group) - 1, 0, -1):
        (size, stride), (outer, outer_stride) = group[position - 1 : position + 1]
        if size * stride == outer_stride:
            group[position - 1 : position + 1] = [(size * outer, stride)]
    return group


def _output_vector(offset: int, reduced: list[tuple[int, int]], kept: list[tuple[int, int]]) -> int:
    """How many outputs a thread makes (``get_output_vec_size``)."""
    vector = _OUTPUT_VECTOR
    strides = [stride for _, stride in (*reduced, *kept[1:])]
    for number in (offset, kept[0][0], *strides):
        while number % vector:
            vector //= 2
    return vector


def all_dims(tensor: torch.Tensor, dims: int | Iterable[int] | None) -> list[int]:
    """The dimensions that a call's ``dim`` argument means, counted from 0; none given means all."""
    named = [dims] if isinstance(dims, int) else list(dims or ())
    return [dim % max(tensor.dim(), 1) for dim in named] or list(range(tensor.dim()))


def _reduces(item_bytes: int | None, dims_at: int, values: int) -> Rule:
    """Outputs first, then the buffers, which go at the end."""

    def rule(call: Call) -> None:
        tensor = call.args[0]
        make_outputs(call)
        dims = all_dims(tensor, call.argument(dims_at) if dims_at >= 0 else None)
        own = tensor.element_size() if item_bytes == _OWN else item_bytes
        wide = own or _accumulator_bytes(tensor, call.outputs[0])
        take_buffers(call, _as_read(call, tensor), dims, wide, values=values)

    return rule


# Operators with the same kind of reduction: bytes of the accumulator (None: the input's, of floats at least 4), the
# position of the dimensions among the arguments (-1: all dimensions), values a thread has (``vt0``).
_REDUCTIONS: tuple[tuple[tuple[OpOverload, ...], tuple[int | None, int, int]], ...] = (
    ((aten.sum.default, aten.mean.default, aten.prod.default, aten.norm.Scalar, aten.any.default, aten.all.default),
     (None, -1, 4)),
    ((aten.sum.dim_IntList, aten.mean.dim, aten.prod.dim_int, aten.any.dim, aten.all.dim), (None, 1, 4)),
    ((aten.max.default, aten.min.default), (_OWN, -1, 4)),  # ReduceMaxValuesKernel.cu, ReduceMinValuesKernel.cu
    ((aten.amax.default, aten.amin.default), (_OWN, 1, 4)),
    ((aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim), (None, 2, 4)),
    ((aten.aminmax.default,), (8, -1, 4)),
    ((aten.argmax.default, aten.argmin.default), (16, 1, 4)),
    ((aten.std.correction, aten.var.correction, aten.var_mean.correction), (16, 1, 2)),
)  # fmt: skip


def _as_read(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that the kernel reads: cast first when the result has another type (``make_reduction``)."""
    made = call.outputs[0]
    is_position = tensor.is_floating_point() and made.dtype is torch.int64  # argmax
    is_cast_inside = tensor.dtype in (torch.float16, torch.bfloat16) and made.dtype is torch.float32
    if made.dtype is tensor.dtype or is_cast_inside or made.dtype in (torch.bool, torch.uint8) or is_position:
        return tensor
    call.take_like(tensor, made.dtype)
    return torch.empty_like(tensor, dtype=made.dtype)


def _accumulator_bytes(tensor: torch.Tensor, made: torch.Tensor) -> int:
    if tensor.is_floating_point():
        return max(tensor.element_size(), 4)
    return max(made.element_size(), 1)


def _foreach_norm(call: Call) -> None:
    """aten/src/ATen/native/cuda/ForeachReduceOp.cu: first a partial norm of every chunk of 65,536 elements.

    From 2.15 on only the chunks that there are have room, and 64-bit offsets say where each tensor's begin.
    """
    tensors = call.args[0]
    numbers = (max(tensors[0].element_size(), 4), *(tensor.numel() for tensor in tensors))
    if TORCH < (2, 15):
        call.allocate_scratch(_partial_norm_bytes, *numbers)
        return
    offsets = call.take((len(tensors) + 1) * 8)
    partial = call.allocate_scratch(_packed_norm_bytes, *numbers)
    make_outputs(call)
    call.give_back(partial, offsets)


def _partial_norm_bytes(_: GPU, item_bytes: int, *numels: int) -> int:
    return len(numels) * max(-(-numel // 65536) for numel in numels) * item_bytes


def _packed_norm_bytes(_: GPU, item_bytes: int, *numels: int) -> int:
    return sum(-(-numel // 65536) for numel in numels) * item_bytes


RULES: dict[OpOverload, Rule] = {
    **{op: _reduces(*how) for ops, how in _REDUCTIONS for op in ops},
    aten._foreach_norm.Scalar: _foreach_norm,
}
