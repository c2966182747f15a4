"""Sorts, largest values and running sums on CUDA.

Sources, under aten/src/ATen/native/cuda: Sort.cpp and Sort.cu (``sort_cuda_kernel``, ``launch_stable_sort_kernel``),
TensorTopK.cpp and .cu (``mbtopk::launch``), ScanKernels.cpp. Tiles are those of CUB (cub/device/dispatch/tuning:
tuning_radix_sort.cuh, tuning_scan.cuh, tuning_unique_by_key.cuh), as the CUDA builds of PyTorch 2.13 and 2.15 have.
"""

from __future__ import annotations

from math import ceil

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.fake_gpu import Rule
from oom_magic.predict.kernels.copies import make_outputs
from oom_magic.predict.operators.calls import Call
from oom_magic.predict.setups.gpus import GPU

_SCAN_TILE = 896  # items
# Items of a tile by compute capability; a card has that of the highest one that it reaches.
_UNIQUE_TILE = {(0, 0): 320, (8, 0): 1344, (8, 6): 320, (9, 0): 4864}
_HISTOGRAM = 256 * 8  # bytes: the bins of one pass
_LOOK_BACK = 256 * 4  # bytes of a tile
_PASS_BITS = 8
_NO_VALUE = 1  # bytes: keys only


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 256) * 256


def radix_bytes(card: GPU, num_items: int, key_bytes: int, value_bytes: int = _NO_VALUE, num_bits: int = 0) -> int:
    """``DeviceRadixSort`` by ``num_bits`` (0: all) of the keys: bins, states of tiles, a second copy, counters."""
    num_bits = num_bits or 8 * key_bytes
    widest = max(key_bytes, value_bytes, 4)
    if num_items <= 256 * (19 * 4 // widest):  # one thread block
        return 1
    values = _aligned(num_items * value_bytes) if value_bytes > _NO_VALUE else 0
    copies = _aligned(num_items * key_bytes) + values if num_bits > _PASS_BITS else 0
    if key_bytes < 4:
        return _spine_bytes(card) + copies + 255
    num_tiles = ceil(num_items / _radix_tile(card, key_bytes, value_bytes))
    return ceil(num_bits / _PASS_BITS) * _HISTOGRAM + num_tiles * _LOOK_BACK + copies + 256 + 255


def _radix_tile(card: GPU, key_bytes: int, value_bytes: int) -> int:
    """Items of a tile in a pass ("onesweep")."""
    widest, is_pairs = max(key_bytes, value_bytes), value_bytes > _NO_VALUE
    if card.capability < (8, 0):
        return 256 * ((46 if key_bytes == value_bytes == 4 else 23) * 4 // widest)
    if card.capability < (9, 0):
        return 384 * ((17 if key_bytes == 4 and is_pairs else 21) * 4 // widest)
    if key_bytes == 4:
        return 384 * ((20 if not is_pairs else 24 if value_bytes >= 8 else 16) * 4 // widest)
    return 384 * ((24 if value_bytes >= 8 else 30) * 4 // widest)


def _spine_bytes(card: GPU) -> int:
    """Keys of 16 bits are counted first: bins of five times as many blocks as the card can run at once."""
    num_blocks = 5 * card.num_multiprocessors * (card.threads_per_multiprocessor // 256)
    return (num_blocks * 128 + 5632) * 8


def segmented_bytes(_: GPU, num_items: int, key_bytes: int, value_bytes: int) -> int:
    """``DeviceSegmentedRadixSort``: a second copy."""
    return _aligned(num_items * key_bytes) + _aligned(num_items * value_bytes) + 255


def scan_bytes(_: GPU, num_items: int, tile: int = _SCAN_TILE) -> int:
    """A scan: the states of its tiles."""
    return 511 + _aligned((ceil(num_items / tile) + 32) * 16)


def unique_bytes(card: GPU, num_items: int) -> int:
    """``DeviceSelect::UniqueByKey``."""
    return scan_bytes(card, num_items, _UNIQUE_TILE[max(at for at in _UNIQUE_TILE if at <= card.capability)])


aten = torch.ops.aten
_INDEX = 8  # bytes
_PAIR = 8  # bytes: a position and its row
_SMALL_SORT = 4096  # elements of a slice that one thread block sorts
_FEW_ROWS = 128  # fewer are sorted all together, then apart again
_ROW_FILLS_CARD = 1_000_000  # elements from which on a row is sorted by itself (``launch_stable_sort_kernel``)
_BLOCK = 256  # threads
_DIGITS = 256
_TOPK_BLOCKS = 65536 // (40 * _BLOCK)  # of a multiprocessor: its registers, and 40 for each thread
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
    taken.append(call.allocate_scratch(_counts_of_blocks, num_slices, length, _DIGITS * 2))
    taken.append(call.take(num_slices * _DIGITS * 4))
    taken += [call.allocate_scratch(_counts_of_blocks, num_slices, length, 4) for _ in ("above", "at the value sought")]
    for _ in ("above", "at the value sought"):
        call.give_back(call.allocate_scratch(_scan_of_blocks, num_slices, length))
    call.give_back(*reversed(taken))


def _num_blocks(card: GPU, num_slices: int, length: int) -> int:
    threads = card.num_multiprocessors * _TOPK_BLOCKS * _BLOCK
    each = max(4, min(64, ceil(num_slices * length / threads)))
    return num_slices * ceil(length / (each * _BLOCK))


def _counts_of_blocks(card: GPU, num_slices: int, length: int, item_bytes: int) -> int:
    return _num_blocks(card, num_slices, length) * item_bytes


def _scan_of_blocks(card: GPU, num_slices: int, length: int) -> int:
    return scan_bytes(card, _num_blocks(card, num_slices, length))


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
