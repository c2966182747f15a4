"""What CUDA's operators along a dimension take inside: reductions (sum, mean, norm, max, ...), sorts, running sums.

``scratch`` computes a reduction's buffers for the results of thread blocks, and names its sources. Sources of the
others, under aten/src/ATen/native/cuda: Sort.cpp and Sort.cu (``sort_cuda_kernel``, ``launch_stable_sort_kernel``),
TensorTopK.cpp and .cu (``mbtopk::launch``), ScanKernels.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil, log, log2

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.operator_table import Rule
from oom_magic.predict.kernels.copies import make_outputs, then_copied
from oom_magic.predict.kernels.scratch import (
    count_bytes,
    counts_of_blocks,
    distinct_bytes,
    packed_norm_bytes,
    partial_norm_bytes,
    radix_bytes,
    runs_bytes,
    scan_bytes_of,
    scan_of_blocks,
    segmented_bytes,
    semaphore_bytes,
    staging_bytes,
    sum_bytes,
)
from oom_magic.predict.operators.calls import TORCH, Call
from oom_magic.predict.operators.gradients import is_dense

aten = torch.ops.aten
_INDEX = 8  # bytes
_PAIR = 8  # bytes: a position and its row
_SMALL_SORT = 4096  # elements of a slice that one thread block sorts (``should_use_small_sort``)
_MODE_IN_BLOCK = 2048  # elements of a slice that one thread block searches for its mode
_FEW_ROWS = 128  # fewer slices are sorted together, then separated again (``launch_stable_sort_kernel``)
_ROW_FILLS_CARD = 1_000_000  # rows of at least this many elements are sorted one by one (likewise)
_DIGITS = 256
# ``should_use_multiblock``: with at most so many slices, those of at least this length are searched by several blocks
# each.
_MULTIBLOCK = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800), (1 << 32, 400))


def take_buffers(
    call: Call, tensor: torch.Tensor, dims: Iterable[int], item_bytes: int, *, values: int = 4
) -> tuple[int, int]:
    """Take the staging buffer and the semaphores of a reduction over ``dims`` if it needs several blocks; their
    numbers.

    ``item_bytes`` is the size of the accumulator, ``values`` how many a thread has (``vt0``).
    """
    reduced = set(dims)
    order = sorted(range(tensor.dim() - 1, -1, -1), key=lambda dim: dim not in reduced)
    layout = [int(number) for dim in order for number in (tensor.shape[dim], tensor.stride(dim))]
    numbers = (item_bytes, values, int(tensor.storage_offset()), len(reduced), *layout)
    staging = call.allocate_scratch(staging_bytes, *numbers)
    return staging, call.allocate_scratch(semaphore_bytes, *numbers)


def take_sum_buffers(call: Call, elements: torch.Tensor) -> None:
    """The buffers of the sum or mean of a dense tensor with this number of elements of this type."""
    flat = torch.empty(elements.numel(), dtype=elements.dtype, device="meta")
    take_buffers(call, flat, (0,), accumulator_bytes(flat, flat))


def all_dims(tensor: torch.Tensor, dims: int | Iterable[int] | None) -> list[int]:
    """The dimensions that a call's ``dim`` argument means, counted from 0; none given means all."""
    named = [dims] if isinstance(dims, int) else list(dims or ())
    return [dim % max(tensor.dim(), 1) for dim in named] or list(range(tensor.dim()))


def accumulator_bytes(read: torch.Tensor, made: torch.Tensor) -> int:
    """Of a sum's accumulator: of floats at least 4."""
    return max(read.element_size(), 4) if read.is_floating_point() else max(made.element_size(), 1)


def _own_bytes(read: torch.Tensor, _made: torch.Tensor) -> int:
    """ReduceMaxValuesKernel.cu, ReduceMinValuesKernel.cu."""
    return read.element_size()


def _truth_bytes(_read: torch.Tensor, _made: torch.Tensor) -> int:
    """ReduceLogicKernel.cu: a bool, whatever is read."""
    return 1


def _place_bytes(_read: torch.Tensor, _made: torch.Tensor) -> int:
    """ReduceArgMaxKernel.cu, TensorCompare.cu: a value and where it is."""
    return 16


def _moment_bytes(read: torch.Tensor, _made: torch.Tensor) -> int:
    """ReduceMomentKernel.cu, ``WelfordData``: mean, squares and two counts, one of them a float."""
    return 32 if read.element_size() == 8 else 16


def _reduces(item_bytes: Callable[[torch.Tensor, torch.Tensor], int], dims_at: int, values: int) -> Rule:
    """Outputs first, then the buffers, which go at the end."""

    def rule(call: Call) -> None:
        make_outputs(call)
        dims = all_dims(call.args[0], call.argument(dims_at) if dims_at >= 0 else None)
        read = call.args[0] if item_bytes is _place_bytes else _as_read(call, call.args[0])
        take_buffers(call, read, dims, item_bytes(read, call.outputs[0]), values=values)

    return rule


# Operators with the same kind of reduction: bytes of the accumulator, the position of the dimensions among the
# arguments (-1: all dimensions), values a thread has (``vt0``).
_REDUCTIONS: tuple[
    tuple[tuple[OpOverload, ...], tuple[Callable[[torch.Tensor, torch.Tensor], int], int, int]], ...
] = (
    ((aten.sum.default, aten.mean.default, aten.prod.default, aten.norm.Scalar), (accumulator_bytes, -1, 4)),
    ((aten.sum.dim_IntList, aten.mean.dim, aten.prod.dim_int, aten.nansum.default), (accumulator_bytes, 1, 4)),
    ((aten.any.default, aten.all.default), (_truth_bytes, -1, 4)),
    ((aten.any.dim, aten.all.dim, aten.any.dims, aten.all.dims), (_truth_bytes, 1, 4)),
    ((aten.max.default, aten.min.default), (_own_bytes, -1, 4)),
    ((aten.amax.default, aten.amin.default), (_own_bytes, 1, 4)),
    ((aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim), (accumulator_bytes, 2, 4)),
    ((aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim), (_place_bytes, 1, 4)),
    ((aten.std.correction, aten.var.correction, aten.var_mean.correction, aten.std_mean.correction),
     (_moment_bytes, 1, 2)),
)  # fmt: skip


def _extremes(call: Call) -> None:
    """aten/src/ATen/native/TensorCompare.cpp, ``aminmax_out``: pairs, of all elements from a contiguous copy."""
    tensor, dim = call.args[0], call.kwargs.get("dim")
    make_outputs(call)
    if dim is None and not tensor.is_contiguous():
        call.take_like(tensor)
    read = tensor if dim is not None else tensor.new_empty(tensor.shape)
    take_buffers(call, read, all_dims(tensor, dim), 2 * tensor.element_size())


def _as_read(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that the kernel reads: cast first when the result has another type (``make_reduction``)."""
    made = call.outputs[0]
    is_cast_inside = tensor.dtype in (torch.float16, torch.bfloat16) and made.dtype is torch.float32
    if made.dtype is tensor.dtype or is_cast_inside or made.dtype in (torch.bool, torch.uint8):
        return tensor
    call.take_like(tensor, made.dtype)
    return torch.empty_like(tensor, dtype=made.dtype)


def _foreach_norm(call: Call) -> None:
    """aten/src/ATen/native/cuda/ForeachReduceOp.cu: first a partial norm of every chunk of 65,536 elements.

    From 2.15 on there is room only for the existing chunks, and 64-bit offsets say where each tensor's begin.
    """
    tensors = call.args[0]
    numbers = (max(tensors[0].element_size(), 4), *(tensor.numel() for tensor in tensors))
    if TORCH < (2, 15):
        call.allocate_scratch(partial_norm_bytes, *numbers)
        return
    offsets = call.take((len(tensors) + 1) * 8)
    partial = call.allocate_scratch(packed_norm_bytes, *numbers)
    make_outputs(call)
    call.give_back(partial, offsets)


def _renorm(call: Call) -> None:
    """aten/src/ATen/native/Normalization.cpp, ``renorm_out``: each slice's norm, and its factor in the input's type."""
    tensor, dim = call.args[0], call.args[2] % call.args[0].dim()
    others = [one for one in range(tensor.dim()) if one != dim]
    wide = max(tensor.element_size(), 4)
    call.output(0)
    norm = call.take(tensor.shape[dim] * wide)
    staging, semaphores = take_buffers(call, tensor, others, wide)
    call.give_back(semaphores, staging)
    factor = call.take(tensor.shape[dim] * tensor.element_size()) if wide > tensor.element_size() else -1
    call.give_back(factor, norm)


def _sort(call: Call) -> None:
    """``sort_stable``."""
    make_outputs(call)
    take_sorting(call, call.args[0], call.kwargs.get("dim", call.argument(1, -1)))


def take_sorting(call: Call, tensor: torch.Tensor, dim: int = -1) -> None:
    """Take what sorting along ``dim`` needs, and give it back: slices that fit a thread block are sorted in place,
    longer ones by radix."""
    length = tensor.shape[dim] if tensor.dim() else 1
    if length > _SMALL_SORT:
        _sort_rows(call, tensor, length, is_turned=tensor.stride(dim) != 1)
        return
    copy = -1 if tensor.dim() and is_dense(tensor) else call.take_like(tensor)
    call.give_back(call.take(length * _INDEX), copy)  # the indices of one slice, copied to all


def _sort_rows(call: Call, tensor: torch.Tensor, length: int, is_turned: bool = False) -> None:
    """``launch_stable_sort_kernel``, on copies where the slices do not lie in rows."""
    size, num_items = tensor.element_size(), tensor.numel()
    num_rows = num_items // length
    taken = [call.take(num_items * num_bytes) for num_bytes in (size, size, _INDEX)] if is_turned else []
    if num_rows == 1 or length >= _ROW_FILLS_CARD:
        taken.append(call.take(length * _INDEX))
        for _ in range(num_rows):
            call.give_back(call.allocate_scratch(radix_bytes, length, size, _INDEX))
    elif num_rows < _FEW_ROWS:
        taken += [call.take(num_items * _PAIR) for _ in ("pairs", "sorted pairs")]
        values = call.take(num_items * size)
        call.give_back(call.allocate_scratch(radix_bytes, num_items, size, _PAIR), values)
        num_bits = (num_rows - 1).bit_length()
        call.give_back(call.allocate_scratch(radix_bytes, num_items, _PAIR, 1, num_bits))
    else:
        taken.append(call.take(num_items * _INDEX))
        call.give_back(call.allocate_scratch(segmented_bytes, num_items, size, _INDEX))
    call.give_back(*reversed(taken))


def _permutation(call: Call) -> None:
    """aten/src/ATen/native/cuda/Randperm.cu, ``randperm_out_cuda``: numbers are sorted by random keys, whose bits leave
    a chance of one in ten that two of twelve permutations have equal ones."""
    count, item_bytes = call.args[0], call.outputs[0].element_size()
    call.output(0)
    if not count:
        return
    call.give_back(call.take(8))
    num_bits = min(ceil(log2(count - (6 * count**2 + 1) / (12 * log(0.9)))), 64)
    key_bytes = 4 if num_bits <= 32 else 8
    call.take(count * item_bytes)
    call.take(count * key_bytes)
    call.take(count * key_bytes)
    call.allocate_scratch(radix_bytes, count, key_bytes, item_bytes, num_bits)


def _topk(call: Call) -> None:
    """The largest values of each slice, then their order."""
    make_outputs(call)
    tensor, count = call.args[:2]
    if not tensor.is_contiguous():
        call.take_like(tensor)
    length = tensor.shape[call.argument(2, -1)] if tensor.dim() else 1
    num_slices = tensor.numel() // max(length, 1)
    if length >= next(least for most, least in _MULTIBLOCK if num_slices <= most):
        _search_by_blocks(call, num_slices, length, tensor.element_size())
    if count > _SMALL_SORT and call.argument(4, True):
        values = call.outputs[0]
        order = call.take_like(values, torch.int64), call.take_like(values)
        _sort_rows(call, values, count)
        call.give_back(call.take_like(values, torch.int64), *reversed(order))


def _mode(call: Call) -> None:
    """TensorModeKernel.cpp, ``mode_kernel_impl``: slices in rows, on a copy of their own where each needs more than a
    thread block. Then they are sorted by Thrust, one after the other, with the numbers of their elements
    (TensorModeKernel.cu, ``calculate_mode``)."""
    make_outputs(call)
    tensor, dim = call.args[0], call.argument(1, -1)
    is_long = tensor.dim() > 0 and tensor.shape[dim] > _MODE_IN_BLOCK
    if tensor.dim() and (is_long or not tensor.transpose(dim, -1).is_contiguous()):
        call.take_like(tensor)
    if is_long and tensor.numel():
        numbers = call.take(tensor.shape[dim] * _INDEX)
        sorting = call.allocate_scratch(radix_bytes, tensor.shape[dim], tensor.element_size(), _INDEX)
        call.give_back(sorting, numbers)


def _search_by_blocks(call: Call, num_slices: int, length: int, item_bytes: int) -> None:
    """``mbtopk::launch``: digits are counted by each block, then over all blocks of a slice."""
    taken = [call.take(num_slices * each) for each in (item_bytes, 8, 2 * max(item_bytes, 4))]
    taken.append(call.allocate_scratch(counts_of_blocks, num_slices, length, _DIGITS * 2))
    taken.append(call.take(num_slices * _DIGITS * 4))
    taken += [call.allocate_scratch(counts_of_blocks, num_slices, length, 4) for _ in ("above", "at the value sought")]
    for _ in ("above", "at the value sought"):
        call.give_back(call.allocate_scratch(scan_of_blocks, num_slices, length))
    call.give_back(*reversed(taken))


def _running(call: Call) -> None:
    """A running sum or product; of one dimension by CUB, unless the order of floats is determined."""
    tensor, made = call.args[0], call.outputs[0]
    call.output(0)
    for needs_copy in (tensor.dtype is not made.dtype, not tensor.is_contiguous()):
        if needs_copy:
            call.take_like(tensor, made.dtype)
    is_ordered = made.is_floating_point() and torch.are_deterministic_algorithms_enabled()
    if tensor.dim() == 1 and not is_ordered:
        call.allocate_scratch(scan_bytes_of, tensor.numel(), made.element_size())


def _histogram(call: Call) -> None:
    """SummaryOps.cu, ``_histc_cuda_template``: where no range is given, from the least to the largest."""
    call.output(0)
    if call.argument(2, 0) == call.argument(3, 0):
        _find_range(call)


def _counts(call: Call) -> None:
    """The same file, ``_bincount_cuda``: weights that are no float32 become float64; then the range is found."""
    weights = call.argument(1)
    if weights is not None and weights.dtype not in (torch.float32, torch.float64):
        call.take_like(weights, torch.float64)
    _find_range(call)
    call.output(0)


def _unique(call: Call) -> None:
    """UniqueCub.cu: all values are sorted, with their positions for the inverse; those of bool are counted."""
    tensor = call.args[0]
    has_inverse, has_counts = call.argument(2, False), call.argument(3, False)
    num_items = tensor.numel()
    if not num_items:
        return
    if not tensor.is_contiguous():
        call.take_like(tensor)
    if tensor.dtype is torch.bool:
        call.take(4)
        call.give_back(call.allocate_scratch(count_bytes, num_items))
        call.output(0, 2)
        call.output(2, 2 * _INDEX)
        return
    call.take_like(tensor)
    if has_inverse:
        positions = call.take(num_items * _INDEX)
        call.take(num_items * _INDEX)
        call.give_back(call.allocate_scratch(radix_bytes, num_items, tensor.element_size(), _INDEX), positions)
    else:
        call.give_back(call.allocate_scratch(radix_bytes, num_items, tensor.element_size()))
    _find_distinct(call, has_counts, _INDEX if has_inverse else 0)


def _unique_in_order(call: Call) -> None:
    """The same for values that are in order; along a dimension by Thrust, whose scratch is not known."""
    tensor = call.args[0]
    if call.argument(3) is not None or not tensor.numel():
        return
    if not tensor.is_contiguous():
        call.take_like(tensor)
    _find_distinct(call, call.argument(2, False), 4 if call.argument(1, False) else 0)


def _find_distinct(call: Call, has_counts: bool, place_bytes: int) -> None:
    """``compute_unique``: room for as many values as there are stays with the result. ``place_bytes`` are those of a
    value's place in the sum for the inverse (0: none is made)."""
    tensor = call.args[0]
    num_items, item_bytes = tensor.numel(), tensor.element_size()
    if place_bytes:
        call.output(1, num_items * _INDEX)
        places = call.take(num_items * place_bytes)
        call.give_back(call.allocate_scratch(sum_bytes, num_items), places)
    call.output(0, num_items * item_bytes)
    call.take(_INDEX)
    if has_counts:
        call.output(2, num_items * _INDEX)
        call.allocate_scratch(runs_bytes, num_items)
        return
    is_half = tensor.is_floating_point() and item_bytes == 2
    width = 4 if tensor.dtype is torch.bool else item_bytes  # bool is read through an iterator
    call.allocate_scratch(distinct_bytes, num_items, width, int(is_half))


def _find_range(call: Call) -> None:
    tensor = call.args[0]
    for _ in ("least", "largest"):
        call.take(tensor.element_size())
    copy = -1 if tensor.is_contiguous() else call.take_like(tensor)
    buffers = take_buffers(call, tensor.new_empty(tensor.numel()), (0,), 2 * tensor.element_size())
    call.give_back(*reversed(buffers), copy)


RULES: dict[OpOverload, Rule] = {
    **{op: _reduces(*how) for ops, how in _REDUCTIONS for op in ops},
    aten.aminmax.default: _extremes,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.renorm.default: _renorm,
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    **dict.fromkeys(
        (aten.randperm.default, aten.randperm.generator, aten.randperm.out, aten.randperm.generator_out), _permutation
    ),
    aten.topk.default: _topk,
    aten.cumsum.default: _running,
    aten.cumprod.default: _running,
    aten.logcumsumexp.default: _running,
    aten.histc.default: _histogram,
    aten.histc.out: then_copied(_histogram),
    aten.mode.default: _mode,
    aten.bincount.default: _counts,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique_in_order,
}
