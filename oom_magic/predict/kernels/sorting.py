"""Sorts, largest values and running sums on CUDA.

Sources, under aten/src/ATen/native/cuda: Sort.cpp and Sort.cu (``sort_cuda_kernel``, ``launch_stable_sort_kernel``),
TensorTopK.cpp and .cu (``mbtopk::launch``), ScanKernels.cpp.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.fake_gpu import Rule
from oom_magic.predict.kernels.copies import make_outputs
from oom_magic.predict.kernels.scratch.sorting import (
    counts_of_blocks,
    radix_bytes,
    scan_bytes,
    scan_of_blocks,
    segmented_bytes,
)
from oom_magic.predict.operators.calls import Call

aten = torch.ops.aten
_INDEX = 8  # bytes
_PAIR = 8  # bytes: a position and its row
_SMALL_SORT = 4096  # elements of a slice that one thread block sorts (``should_use_small_sort``)
_FEW_ROWS = 128  # fewer are sorted all together, then apart again (``launch_stable_sort_kernel``)
_ROW_FILLS_CARD = 1_000_000  # elements from which on a row is sorted by itself (likewise)
_DIGITS = 256
# ``should_use_multiblock``: of so many slices or fewer, those from this length on are searched by several blocks each.
_MULTIBLOCK = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800), (1 << 32, 400))


def _sort(call: Call) -> None:
    """``sort_stable``: slices that fit a thread block in place, longer ones by radix."""
    make_outputs(call)
    tensor = call.args[0]
    dim = call.kwargs.get("dim", call.argument(1, -1))
    length = tensor.shape[dim] if tensor.dim() else 1
    if length > _SMALL_SORT:
        _sort_rows(call, tensor, length, is_turned=tensor.stride(dim) != 1)
        return
    if not tensor.dim() or not tensor.is_contiguous():
        call.take_like(tensor)
    call.take(length * _INDEX)  # the indices of one slice, copied to all


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


def _search_by_blocks(call: Call, num_slices: int, length: int, item_bytes: int) -> None:
    """``mbtopk::launch``: digits are counted by each block, then over all blocks of a slice."""
    taken = [call.take(num_slices * each) for each in (item_bytes, 8, 8)]
    taken.append(call.allocate_scratch(counts_of_blocks, num_slices, length, _DIGITS * 2))
    taken.append(call.take(num_slices * _DIGITS * 4))
    taken += [call.allocate_scratch(counts_of_blocks, num_slices, length, 4) for _ in ("above", "at the value sought")]
    for _ in ("above", "at the value sought"):
        call.give_back(call.allocate_scratch(scan_of_blocks, num_slices, length))
    call.give_back(*reversed(taken))


def _cumsum(call: Call) -> None:
    tensor, made = call.args[0], call.outputs[0]
    call.output(0)
    if tensor.dtype is not made.dtype or not tensor.is_contiguous():
        call.take_like(tensor, made.dtype)
    if tensor.dim() == 1:
        call.allocate_scratch(scan_bytes, tensor.numel())


RULES: dict[OpOverload, Rule] = {
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten.topk.default: _topk,
    aten.cumsum.default: _cumsum,
}
