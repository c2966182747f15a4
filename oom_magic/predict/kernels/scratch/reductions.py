"""What reductions take inside: the staging buffer of thread blocks, and their semaphores.

Source: aten/src/ATen/native/cuda/Reduce.cuh (``setReduceConfig``, ``global_memory_size``), ForeachReduceOp.cu and, for
the order of dimensions, aten/src/ATen/TensorIterator.cpp (``reorder_dimensions``, ``coalesce_dimensions``).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod

from oom_magic.predict.setups.gpus import GPU

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


def partial_norm_bytes(_: GPU, item_bytes: int, *numels: int) -> int:
    """A norm of every chunk of 65,536 elements, with as many chunks for each tensor as the longest has."""
    return len(numels) * max(-(-numel // 65536) for numel in numels) * item_bytes


def packed_norm_bytes(_: GPU, item_bytes: int, *numels: int) -> int:
    """The same with the chunks that there are."""
    return sum(-(-numel // 65536) for numel in numels) * item_bytes
