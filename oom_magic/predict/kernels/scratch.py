"""How many bytes kernels take inside, from the card and dimensions alone. It does not need torch, because sizes stored
on disk call it.

Sources, under aten/src/ATen/native/cuda, stand with each group. Tiles of sorts and scans are those of CUB
(cub/device/dispatch/tuning: tuning_radix_sort.cuh, tuning_scan.cuh, tuning_unique_by_key.cuh), as the CUDA builds of
PyTorch 2.13 and 2.15 have. ``fused_attention`` names those of attention, and says when each is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from typing import Any, TypeVar

from oom_magic.memory.workspaces import Workspaces
from oom_magic.predict.instrumentation.recorder import SizeFunction
from oom_magic.predict.setups.gpus import GPU
from oom_magic.predict.sizing.store import torch_version

_T = TypeVar("_T")

INDEX = 8  # bytes
_SCAN_THREADS = 128
_SCAN_TILE = 896  # items: 128 threads of 7 with 8 bytes (the default policy: 15 with 4 bytes)
# Items of a tile by compute capability; a card has that of the highest capability that it reaches.
_DISTINCT_TILES = {  # of items of 1, 2, 4 and 8 bytes; the first also of 16-bit floats, on any card
    (0, 0): (1280, 1280, 1280, 640),
    (8, 0): (19840, 8064, 4608, 1920),
    (8, 6): (1280, 1280, 1280, 640),
    (9, 0): (5632, 5632, 6528, 4224),
}
_RUN_TILE = 768
_MERGE_TILE = 4096
_SUM_TILE = {(0, 0): 1920, (8, 0): 3840, (8, 6): 1920, (9, 0): 3072}
_SELECT_TILE = {(0, 0): 640, (8, 0): 2304, (8, 6): 640, (9, 0): 4224, (10, 0): 3520}
_ONE_BLOCK_COUNTS = 4096  # items
_UNIQUE_TILE = {(0, 0): 320, (8, 0): 1344, (8, 6): 320, (9, 0): 4928}
_HISTOGRAM = 256 * 8  # bytes: the bins of one pass
_LOOK_BACK = 256 * 4  # bytes of a tile
_PASS_BITS = 8
_ONE_SWEEP = (9, 0)  # keys of 1 and 2 bytes, too, are counted in the pass that moves them
_NO_VALUE = 1  # bytes: keys only
_BLOCK = 256  # threads
_TOPK_BLOCKS = 65536 // (40 * _BLOCK)  # of a multiprocessor: its registers, and 40 for each thread (TensorTopK.cu)


def _round_up(number: int, multiple: int = 256) -> int:
    return -(-number // multiple) * multiple


def last_power_of_2(number: int) -> int:
    """The largest power of two up to a number, at least 1 (aten/src/ATen/native/cuda/LaunchUtils.h, ``lastPow2``)."""
    return 1 << max(number, 1).bit_length() - 1


def radix_bytes(card: GPU, num_items: int, key_bytes: int, value_bytes: int = _NO_VALUE, num_bits: int = 0) -> int:
    """``DeviceRadixSort`` by ``num_bits`` (0: all) of the keys: bins, states of tiles, a second copy, counters."""
    num_bits = num_bits or 8 * key_bytes
    widest = max(key_bytes, value_bytes, 4)
    if num_items <= 256 * (19 * 4 // widest):  # one thread block (``SingleTilePolicy``: 19 items of 4 bytes a thread)
        return 1
    copies = _round_up(num_items * key_bytes)
    copies += _round_up(num_items * value_bytes) if value_bytes > _NO_VALUE else 0
    if key_bytes < 4 and card.capability < _ONE_SWEEP:
        return _spine_bytes(card, key_bytes) + copies + 255
    num_tiles = ceil(num_items / _radix_tile(card, key_bytes, value_bytes))
    num_passes = ceil(num_bits / _PASS_BITS)
    return num_passes * _HISTOGRAM + num_tiles * _LOOK_BACK + copies * (num_passes > 1) + 256 + 255


def _radix_tile(card: GPU, key_bytes: int, value_bytes: int) -> int:
    """Items of a tile in a pass (``OnesweepPolicy``: threads of a block, items of 4 bytes of a thread)."""
    widest, is_pairs = max(key_bytes, value_bytes), value_bytes > _NO_VALUE
    if card.capability < (8, 0):
        return 256 * ((46 if key_bytes == value_bytes == 4 else 23) * 4 // widest)
    if card.capability < _ONE_SWEEP:
        return 384 * ((17 if key_bytes == 4 and is_pairs else 21) * 4 // widest)
    if key_bytes < 4:
        return 512 * 19 if not is_pairs else 384 * 9 if key_bytes == 1 else 512 * 11
    if key_bytes == 4:
        return 384 * (19 if not is_pairs else 14 if value_bytes >= 8 else 16)
    return 384 * ((24 if value_bytes >= 8 else 30) * 4 // widest)


def _spine_bytes(card: GPU, key_bytes: int) -> int:
    """Shorter keys are counted first: bins of five times as many blocks as the card can run at once.

    Five is CUB's ``subscription_factor``; 128 and 64 are the bins of 7 and 6 bits (``RADIX_BITS``), 5632 the tile in
    which bins are scanned (``ScanPolicy``: 512 threads of 23 items of 4 bytes, so 11 of 8).
    """
    num_blocks = 5 * card.num_multiprocessors * (card.threads_per_multiprocessor // 256)
    return (num_blocks * (64 if key_bytes == 1 else 128) + 5632) * 8


def segmented_bytes(_: GPU, num_items: int, key_bytes: int, value_bytes: int) -> int:
    """``DeviceSegmentedRadixSort``: a second copy."""
    return _round_up(num_items * key_bytes) + _round_up(num_items * value_bytes) + 255


def scan_bytes(_: GPU, num_items: int, tile: int = _SCAN_TILE) -> int:
    """A scan of items of 8 bytes: the states of its tiles."""
    return 511 + _round_up((ceil(num_items / tile) + 32) * 16)


def scan_bytes_of(card: GPU, num_items: int, item_bytes: int) -> int:
    """A scan of items of this size, a thread taking 60 bytes; values of 16 bits lie apart from their states."""
    if item_bytes >= 8:
        return scan_bytes(card, num_items)
    num_states = ceil(num_items / (_SCAN_THREADS * (60 // item_bytes))) + 32
    if item_bytes == 4:
        return 511 + _round_up(num_states * 8)
    return 511 + _round_up(num_states * 4) + 2 * _round_up(num_states * 2)


def unique_bytes(card: GPU, num_items: int) -> int:
    """``DeviceSelect::UniqueByKey``."""
    return scan_bytes(card, num_items, _of_card(card, _UNIQUE_TILE))


def distinct_bytes(card: GPU, num_items: int, item_bytes: int = INDEX, is_half: int = False) -> int:
    """``DeviceSelect::Unique``: as a scan, with states of 8 bytes."""
    tiles = _of_card(card, _DISTINCT_TILES) if not is_half else _DISTINCT_TILES[0, 0]
    return _narrow_scan_bytes(num_items, tiles[item_bytes.bit_length() - 1])


def select_bytes(card: GPU, num_items: int) -> int:
    """``DeviceSelect::Flagged``."""
    return _narrow_scan_bytes(num_items, _of_card(card, _SELECT_TILE))


def merge_sort_bytes(_: GPU, num_items: int) -> int:
    """``DeviceMergeSort`` of indices with their positions: copies of both, and where each tile's parts begin."""
    return 2 * _round_up(num_items * INDEX) + _round_up((ceil(num_items / _MERGE_TILE) + 1) * INDEX) + 255


def unique_by_thrust_bytes(card: GPU, num_items: int) -> int:
    """``thrust::unique_by_key``: as a scan with states of 8 bytes, and how many were kept."""
    return _narrow_scan_bytes(num_items, _of_card(card, _UNIQUE_TILE)) + 512


def sum_bytes(card: GPU, num_items: int) -> int:
    """``DeviceScan::InclusiveSum`` of items of 4 bytes."""
    return _narrow_scan_bytes(num_items, _of_card(card, _SUM_TILE))


def runs_bytes(_: GPU, num_items: int) -> int:
    """``DeviceRunLengthEncode::Encode``."""
    return 255 + _round_up((ceil(num_items / _RUN_TILE) + 32) * 16)


def _narrow_scan_bytes(num_items: int, tile: int) -> int:
    return 511 + _round_up((ceil(num_items / tile) + 32) * 8)


def _of_card(card: GPU, table: Mapping[tuple[int, int], _T]) -> _T:
    return table[max(at for at in table if at <= card.capability)]


def count_bytes(card: GPU, num_items: int) -> int:
    """``DeviceReduce::Sum`` to an integer: one for each of five times as many blocks as the card runs at once."""
    if num_items <= _ONE_BLOCK_COUNTS:
        return 1
    return _round_up(5 * card.num_multiprocessors * (card.threads_per_multiprocessor // 256) * 4) + 255


def _num_blocks(card: GPU, num_slices: int, length: int) -> int:
    threads = card.num_multiprocessors * _TOPK_BLOCKS * _BLOCK  # get_items_per_thread of TensorTopK.cu
    each = max(4, min(64, ceil(num_slices * length / threads)))
    return num_slices * ceil(length / (each * _BLOCK))


def counts_of_blocks(card: GPU, num_slices: int, length: int, item_bytes: int) -> int:
    """The counters of a blockwise search for the largest."""
    return _num_blocks(card, num_slices, length) * item_bytes


def scan_of_blocks(card: GPU, num_slices: int, length: int) -> int:
    """A scan over those counts."""
    return scan_bytes(card, _num_blocks(card, num_slices, length))


# Gradients of embeddings: EmbeddingBackwardKernel.cu.
_ROWS_PER_THREAD = 10  # NROWS_PER_THREAD
_ATOMIC_BLOCKS = 4  # a multiprocessor (``use_fused_kernel``)


@dataclass(frozen=True, slots=True)
class Above:
    """The size of what is taken only for more items than ``least``."""

    size_function: SizeFunction
    least: int

    def __call__(self, card: GPU, num_items: int, *numbers: int) -> int:
        return self.size_function(card, num_items, *numbers) if num_items > self.least else 0


def index_bytes(_: GPU, num_items: int) -> int:
    """An index for each item."""
    return num_items * INDEX


def one_index(*_: Any) -> int:
    """A single count."""
    return INDEX


def index_radix_bytes(card: GPU, num_items: int, num_keys: int) -> int:
    """The storage of sorting the indices."""
    return radix_bytes(card, num_items, INDEX, INDEX, num_keys.bit_length())


def _num_segments(num_items: int, num_weights: int) -> int:
    return min(num_items, num_weights)


def _num_parts(num_items: int, num_weights: int) -> int:
    return num_items // _ROWS_PER_THREAD + _num_segments(num_items, num_weights)


def segment_bytes(_: GPU, num_items: int, num_weights: int) -> int:
    """An index for each segment of equal ones, as many as there may be."""
    return _num_segments(num_items, num_weights) * INDEX


def segment_scan_bytes(card: GPU, num_items: int, num_weights: int) -> int:
    """A scan over the segments."""
    return scan_bytes(card, _num_segments(num_items, num_weights))


def part_index_bytes(_: GPU, num_items: int, num_weights: int) -> int:
    """An index for each part of a segment."""
    return _num_parts(num_items, num_weights) * INDEX


def _adds_atomically(card: GPU, num_items: int, num_weights: int, width: int) -> bool:
    """Whether there are few enough segments for their parts to be added atomically (``use_fused_kernel``)."""
    threads = -(-width // 32) * 32
    num_blocks = ceil(_num_segments(num_items, num_weights) * threads / min(threads, 1024))
    is_few = num_blocks < _ATOMIC_BLOCKS * card.num_multiprocessors
    return is_few and _num_parts(num_items, num_weights) > 4 * num_blocks


def atomic_index_bytes(card: GPU, num_items: int, num_weights: int, width: int) -> int:
    """The parts' segments, where parts are added atomically."""
    return part_index_bytes(card, num_items, num_weights) * _adds_atomically(card, num_items, num_weights, width)


def atomic_sum_bytes(card: GPU, num_items: int, num_weights: int, width: int, item_bytes: int) -> int:
    """The sums in float32, where parts of 16-bit numbers are added atomically."""
    is_wider = item_bytes < 4 and _adds_atomically(card, num_items, num_weights, width)
    return num_weights * width * 4 * is_wider


def part_bytes(card: GPU, num_items: int, num_weights: int, width: int, item_bytes: int) -> int:
    """The sum of each part, where they are not."""
    is_whole = not _adds_atomically(card, num_items, num_weights, width)
    return _num_parts(num_items, num_weights) * width * max(item_bytes, 4) * is_whole


# Reductions: Reduce.cuh (``setReduceConfig``, ``global_memory_size``), ForeachReduceOp.cu and, for the order of
# dimensions, aten/src/ATen/TensorIterator.cpp (``reorder_dimensions``, ``coalesce_dimensions``).
_WARP = 32
_MAX_THREADS = 512
_MIN_VALUES, _MAX_VALUES = 16, 256  # per thread
_INPUT_VECTOR = _OUTPUT_VECTOR = 4


def staging_bytes(card: GPU, *numbers: int) -> int:
    """Bytes for the results of thread blocks; ``_buffers`` says of which numbers."""
    return _buffers(card, *numbers)[0]


def semaphore_bytes(card: GPU, *numbers: int) -> int:
    """Bytes of the counters of outputs that several blocks make, of the same numbers."""
    return _buffers(card, *numbers)[1]


@lru_cache(maxsize=4096)
def _buffers(card: GPU, item_bytes: int, values: int, offset: int, num_reduced: int, *layout: int) -> tuple[int, int]:
    """Bytes of both buffers, for a tensor of these sizes and strides, the reduced dimensions first."""
    dims = list(zip(layout[::2], layout[1::2], strict=True))
    reduced, others = _merged(dims[:num_reduced]), _merged(dims[num_reduced:])
    num_inputs = prod(size for size, _ in reduced)
    num_outputs = prod(size for size, _ in others)
    if num_inputs == 0 or num_outputs == 0:
        return 0, 0
    along = not others or (bool(reduced) and reduced[0][1] < others[0][1])
    fastest = (reduced if along else others)[:1]
    is_dense = not fastest or fastest[0][1] == 1
    first, second = (num_inputs, num_outputs) if along else (num_outputs, num_inputs)
    vector = 1
    if is_dense and along and first >= 128 and len(reduced) == 1 and not others and values >= _INPUT_VECTOR:
        first //= _INPUT_VECTOR
    elif is_dense and not along:
        vector = _output_vector(offset, reduced, others)
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
    first, second = (min(last_power_of_2(number), max_threads) for number in (first, second))
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


def _output_vector(offset: int, reduced: list[tuple[int, int]], others: list[tuple[int, int]]) -> int:
    """How many outputs a thread makes (``get_output_vec_size``)."""
    vector = _OUTPUT_VECTOR
    strides = [stride for _, stride in (*reduced, *others[1:])]
    for number in (offset, others[0][0], *strides):
        while number % vector:
            vector //= 2
    return vector


def partial_norm_bytes(_: GPU, item_bytes: int, *numels: int) -> int:
    """A norm of every chunk of 65,536 elements, with as many chunks for each tensor as the longest has."""
    return len(numels) * max(-(-numel // 65536) for numel in numels) * item_bytes


def packed_norm_bytes(_: GPU, item_bytes: int, *numels: int) -> int:
    """The same for the existing chunks only."""
    return sum(-(-numel // 65536) for numel in numels) * item_bytes


FLOAT = 4  # bytes
_GRADIENT_ACCUMULATOR_LIMIT = 200  # thread blocks, over all heads ("Keys splitting heuristic", attention_backward.cu)


def split_row_bytes(
    card: GPU, batch: int, heads: int, length: int, head_size: int, key_heads: int, key_length: int
) -> int:
    """Logsumexp of each split of the keys (``set_params_splitkv``); none where they are not split."""
    if length == 1 and heads > key_heads:  # seqlenq_ngroups_swapped
        length, heads = heads // key_heads, key_heads
    block = 256 if head_size <= 64 else 128 if head_size <= 128 else 64
    num_tiles = batch * heads * ceil(length / 64)
    splits = _num_splits(num_tiles, 2 * card.num_multiprocessors, ceil(key_length / block))
    return splits * batch * heads * length * FLOAT if splits > 1 else 0


def split_output_bytes(card: GPU, batch: int, heads: int, length: int, head_size: int, *key: int) -> int:
    """The output of each split."""
    return split_row_bytes(card, batch, heads, length, head_size, *key) * padded_head(head_size)


def padded_head(head_size: int) -> int:
    """The size of a head in the kernels' own buffers."""
    return _round_up(head_size, 32 if head_size <= 128 else 64)


@lru_cache(maxsize=4096)
def _num_splits(num_tiles: int, num_slots: int, num_blocks: int) -> int:
    """Into how many parts flash attention cuts the keys to keep a card busy (``num_splits_heuristic``)."""
    if num_tiles >= 0.8 * num_slots:
        return 1
    efficiency: dict[int, float] = {}
    for splits in range(1, min(128, num_slots, num_blocks) + 1):
        if splits == 1 or ceil(num_blocks / splits) != ceil(num_blocks / (splits - 1)):
            waves = num_tiles * splits / num_slots
            efficiency[splits] = waves / ceil(waves)
    best = max(efficiency.values(), default=0.0)
    return next((splits for splits, reached in efficiency.items() if reached >= 0.85 * best), 1)


def tiled_row_bytes(_: GPU, length: int, per_row: int) -> int:
    """``per_row`` floats for each row, in tiles of 128."""
    return _round_up(length, 128) * per_row * FLOAT


@dataclass(frozen=True, slots=True)
class _Tile:
    """The part of the attention matrix that a thread block of the backward kernel works on."""

    num_queries: int
    num_keys: int
    num_columns: int = 64  # of the gradient of the query
    sums_in_memory: bool = False  # whether gradients of key and value are summed in float32 in the workspace


def _backward_tile(capability: tuple[int, int], head_size: int, is_half: bool, has_dropout: bool) -> _Tile:
    """The kernel that is taken: the smallest for the head size whose shared memory the card has."""
    has_small_memory = capability in ((8, 6), (8, 7), (8, 9)) or capability >= (12, 0)  # 100 KiB a block
    if head_size <= 64:
        return _Tile(64, 64)
    if not is_half:
        return _Tile(128 if capability >= (8, 0) and not has_small_memory else 64, 64)
    if head_size > 128:
        return _Tile(128, 64, sums_in_memory=True)
    if capability < (8, 0):
        return _Tile(128, 64)
    if not has_small_memory:
        return _Tile(128, 128, num_columns=128)
    if capability < (9, 0) and head_size <= 96 and not has_dropout:
        return _Tile(128, 64)
    return _Tile(64, 64, sums_in_memory=True)


def workspace_bytes(
    card: GPU,
    batch: int,
    heads: int,
    length: int,
    head_size: int,
    key_length: int,
    value_size: int,
    is_half: int,
    has_dropout: int,
) -> int:
    """``workspace_size``: partial gradients of the query with their locks, and of key and value if need be."""
    tile = _backward_tile(card.capability, max(head_size, value_size), bool(is_half), bool(has_dropout))
    num_tiles = ceil(length / tile.num_queries) * ceil(head_size / tile.num_columns)
    num_floats = num_tiles * (tile.num_queries * tile.num_columns + 4)
    if tile.sums_in_memory:
        most = _GRADIENT_ACCUMULATOR_LIMIT // (batch * heads)
        splits = max(min(ceil(key_length / tile.num_keys), most), 1)
        for size in (head_size, value_size):
            num_floats += splits * tile.num_keys * _round_up(size, tile.num_queries)
    return batch * heads * _round_up(num_floats, 4) * FLOAT


# Matrix products: ``memory.workspaces`` says how large.
HERE = Workspaces.here(torch_version())


def cublas_bytes(card: GPU) -> int:
    """Bytes of cuBLAS' workspace."""
    return HERE.cublas_bytes(card.capability)


def cublas_lt_bytes(_card: GPU) -> int:
    """Bytes of cublasLt's own workspace."""
    return HERE.cublas_lt_bytes()
