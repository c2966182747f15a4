"""What fused attention takes inside: splits of the keys, sums of rows, the backward's workspace.

Sources are named in ``fused_attention``, whose rules say when each is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from oom_magic.predict.setups.gpus import GPU

FLOAT = 4  # bytes
Capability = tuple[int, int]
_GRADIENT_ACCUMULATOR_LIMIT = 200  # thread blocks, over all heads ("Keys splitting heuristic", attention_backward.cu)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


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
    sums_in_memory: bool = False  # gradients of key and value are summed up in float32 in the workspace


def _backward_tile(capability: Capability, head_size: int, is_half: bool, has_dropout: bool) -> _Tile:
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
