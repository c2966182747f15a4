"""Sorts and scans inside CUDA's operators, and the operators that sort indices: gradients of embeddings and indexing.

Sources: aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu, Indexing.cu
(``index_put_with_sort_kernel``), Sort.cpp, ScanKernels.cpp; temporary storage: CUB's DeviceRadixSort (onesweep) and
DeviceScan, with the tile sizes that CUB chooses for 64-bit keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

import torch
from torch._ops import OpOverload

from oom_magic.predict.pretend.calls import Call
from oom_magic.predict.pretend.pretend_gpu import Rule
from oom_magic.predict.setups.gpus import GPU

aten = torch.ops.aten
_INDEX = 8  # bytes
_UNSORTED_EMBEDDING_INDICES = 3072  # up to here one kernel adds gradients up without sorting
_SMALL_SORT = 4096  # elements of a slice that one thread block sorts
_ROWS_PER_THREAD = 10
_ATOMIC_BLOCKS = 4  # a multiprocessor
_SINGLE_TILE = 2304  # items that one thread block sorts by radix
_SCAN_TILE = 896
# Items of a tile by compute capability; a card has that of the highest one that it reaches.
_RADIX_TILE = {(0, 0): 2816, (8, 0): 3840, (9, 0): 4608}
_UNIQUE_TILE = {(0, 0): 320, (8, 0): 1344, (8, 6): 320, (9, 0): 4864}


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 256) * 256


def _radix_bytes(num_items: int, num_bits: int, tile: int) -> int:
    """Temporary storage of ``radix_sort_pairs``: bins of each pass, tile states, pairs, counters."""
    if num_items <= _SINGLE_TILE:
        return 1
    num_passes = ceil(num_bits / 8)
    copies = 2 * _aligned(num_items * _INDEX) if num_passes > 1 else 0
    return num_passes * 256 * _INDEX + ceil(num_items / tile) * 1024 + copies + 256 + 255


def _scan_bytes(num_items: int, tile: int) -> int:
    """Temporary storage of a scan: the states of its tiles."""
    return 511 + _aligned((ceil(num_items / tile) + 32) * 16)


def _sum_segments(call: Call, num_items: int, num_multiprocessors: int) -> None:
    """The rest of ``embedding_backward_cuda_kernel``: parts of segments are summed up, then each segment.

    With few segments the parts are added atomically instead (``use_fused_kernel``).
    """
    made = call.outputs[0]
    num_weights, width = made.shape
    num_segments = min(num_items, num_weights)
    for _ in ("parts of each segment", "where they start"):
        call.take(num_segments * _INDEX)
    call.give_back(call.take(_scan_bytes(num_segments, _SCAN_TILE)))
    call.take(_INDEX)
    num_parts = num_items // _ROWS_PER_THREAD + num_segments
    call.take(num_parts * _INDEX)
    threads = -(-width // 32) * 32
    num_blocks = ceil(num_segments * threads / min(threads, 1024))
    if num_blocks < _ATOMIC_BLOCKS * num_multiprocessors and num_parts > 4 * num_blocks:
        call.take(num_parts * _INDEX)
        call.take(made.numel() * 4 if made.element_size() < 4 else 0)
    else:
        call.take(num_parts * width * max(made.element_size(), 4))


@dataclass(frozen=True, slots=True)
class _Sorting:
    """The operators that sort or scan, on a card: tile sizes of CUB there, and how many multiprocessors it has."""

    radix_tile: int
    unique_tile: int
    num_multiprocessors: int

    def sort_pairs(self, call: Call, num_items: int, num_bits: int) -> None:
        """``radix_sort_pairs`` of indices with their positions; both results stay to the end of the call."""
        for _ in ("sorted", "original"):
            call.take(num_items * _INDEX)
        positions = call.take(num_items * _INDEX)
        storage = call.take(_radix_bytes(num_items, num_bits, self.radix_tile))
        call.give_back(storage, positions)

    def embedding_backward(self, call: Call) -> None:
        """``embedding_dense_backward_cuda``: few indices are added up unsorted."""
        gradient, indices, num_weights = call.args[:3]
        for tensor in (gradient, indices):
            if not tensor.is_contiguous():
                call.take_like(tensor)
        num_items = indices.numel()
        scales = bool(call.argument(4))
        if num_items <= _UNSORTED_EMBEDDING_INDICES and not scales:
            return
        self.sort_pairs(call, num_items, num_weights.bit_length())
        if scales:
            call.take(num_items * _INDEX)
            for _ in range(2):
                call.give_back(call.take(_scan_bytes(num_items, _SCAN_TILE)))
        call.output(0)
        call.take(num_items * _INDEX)  # where each segment of equal indices starts
        call.take(_INDEX)
        unused_keys = call.take(num_items * _INDEX)
        call.give_back(call.take(_scan_bytes(num_items, self.unique_tile)), unused_keys)
        _sum_segments(call, num_items, self.num_multiprocessors)

    def index_put(self, call: Call) -> None:
        """Accumulating values: indices are made linear, sorted, and each run of equal ones is added up."""
        target, indices, values = call.args[:3]
        call.output(0)
        if not call.argument(3, False):
            return
        given = [index for index in indices if index is not None]
        num_items = torch.broadcast_shapes(*(index.shape for index in given)).numel()
        linear = -1
        for index in given:
            wrapped = call.take(index.numel() * _INDEX)
            scaled = call.take(index.numel() * _INDEX)
            call.give_back(wrapped)
            linear, spare = (scaled, -1) if linear < 0 else (linear, scaled)
            call.give_back(spare)
        if not values.is_contiguous():
            call.take_like(values)
        num_rows = prod(target.shape[dim] for dim, index in enumerate(indices) if index is not None)
        self.sort_pairs(call, num_items, num_rows.bit_length())

    def sort(self, call: Call) -> None:
        """``sort_stable``: slices that fit a thread block in place, a long row by radix."""
        tensor = call.args[0]
        for position in range(2):
            call.output(position)
        if not tensor.dim() or not tensor.is_contiguous():
            call.take_like(tensor)
        dim = call.kwargs.get("dim", call.argument(1, -1))
        length = tensor.shape[dim] if tensor.dim() else 1
        if length <= _SMALL_SORT:
            call.take(length * _INDEX)  # the indices of one slice, copied to all
        elif tensor.dim() == 1:
            call.take(tensor.numel() * _INDEX)
            call.take(_radix_bytes(tensor.numel(), 8 * tensor.element_size(), self.radix_tile))


def _cumsum(call: Call) -> None:
    tensor, made = call.args[0], call.outputs[0]
    call.output(0)
    if tensor.dtype is not made.dtype or not tensor.is_contiguous():
        call.take_like(tensor, made.dtype)
    if tensor.dim() == 1:
        call.take(_scan_bytes(tensor.numel(), _SCAN_TILE))


def sorting_rules(gpu: GPU) -> dict[OpOverload, Rule]:
    """The rules of operators that sort or scan, on this card."""
    radix_tile, unique_tile = (
        tiles[max(capability for capability in tiles if capability <= gpu.capability)]
        for tiles in (_RADIX_TILE, _UNIQUE_TILE)
    )
    sorting = _Sorting(radix_tile, unique_tile, gpu.num_multiprocessors)
    return {
        aten.embedding_dense_backward.default: sorting.embedding_backward,
        aten.index_put.default: sorting.index_put,
        aten.index_put_.default: sorting.index_put,
        aten._index_put_impl_.default: sorting.index_put,
        aten.sort.default: sorting.sort,
        aten.sort.stable: sorting.sort,
        aten.cumsum.default: _cumsum,
    }
