"""What gradients of embeddings take inside: sorted indices, segments of equal ones, and their sums.

Source: aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from oom_magic.predict.instrumentation.recorder import SizeFunction
from oom_magic.predict.kernels.scratch.sorting import radix_bytes, scan_bytes
from oom_magic.predict.setups.gpus import GPU

INDEX = 8  # bytes
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
    """Whether there are so few segments that their parts are added atomically (``use_fused_kernel``)."""
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
