"""What the fused attention kernels take inside, forward and backward.

Sources, under aten/src/ATen/native/transformers/cuda: flash_attn/flash_api.cpp (``mha_fwd``, ``mha_bwd``),
attention.cu and attention_backward.cu (``_efficient_attention_forward`` and ``_backward``),
mem_eff_attention/kernel_backward.h (``workspace_size``), mem_eff_attention/kernels/generate_kernels.py (which tile
sizes exist); and ATen/native/cudnn/MHA.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.fake_gpu import Rule
from oom_magic.predict.operators.calls import TORCH, Call
from oom_magic.predict.setups.gpus import GPU

aten = torch.ops.aten
Capability = tuple[int, int]
_FLOAT = 4  # bytes
_GRADIENT_ACCUMULATOR_LIMIT = 200  # thread blocks to which the splits of keys are held


def _flash_forward(call: Call) -> None:
    call.output(0)
    call.output(1)
    splits = _take_splits(call)
    if _dropout(call, 3):
        first_state = call.take(16)
        call.output(7)
        call.output(6)
        call.give_back(first_state)
    call.output(6)
    call.output(7)
    call.give_back(*splits)


def _dropout(call: Call, position: int) -> float:
    return float(call.argument(position, call.kwargs.get("dropout_p", 0.0)))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _take_splits(call: Call) -> list[int]:
    """Logsumexp and output of each split of the keys (``set_params_splitkv``)."""
    query, key = call.args[:2]
    if _dropout(call, 3):
        return []
    return [
        call.allocate_scratch(size_function, *query.shape, *key.shape[1:3])
        for size_function in (_split_row_bytes, _split_output_bytes)
    ]


def _split_row_bytes(
    card: GPU, batch: int, heads: int, length: int, head_size: int, key_heads: int, key_length: int
) -> int:
    if length == 1 and heads > key_heads:  # seqlenq_ngroups_swapped
        length, heads = heads // key_heads, key_heads
    block = 256 if head_size <= 64 else 128 if head_size <= 128 else 64
    num_tiles = batch * heads * ceil(length / 64)
    splits = _num_splits(num_tiles, 2 * card.num_multiprocessors, ceil(key_length / block))
    return splits * batch * heads * length * _FLOAT if splits > 1 else 0


def _split_output_bytes(card: GPU, batch: int, heads: int, length: int, head_size: int, *key: int) -> int:
    return _split_row_bytes(card, batch, heads, length, head_size, *key) * _padded_head(head_size)


def _padded_head(head_size: int) -> int:
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


def _flash_backward(call: Call) -> None:
    gradient, query, key, _, out = call.args[:5]
    for tensor in (gradient, out):
        if not tensor.transpose(1, 2).is_contiguous():
            call.take_like(tensor)
    for position in range(3):
        call.output(position)
    batch, heads, length, head_size = query.shape
    call.allocate_scratch(_tiled_row_bytes, length, batch * heads)
    call.allocate_scratch(_tiled_row_bytes, length, batch * heads * _padded_head(head_size))
    if key.shape[1] != heads:
        expanded = batch * key.shape[2] * heads * head_size * key.element_size()
        call.take(expanded)
        call.take(expanded)


def _tiled_row_bytes(_: GPU, length: int, per_row: int) -> int:
    return _round_up(length, 128) * per_row * _FLOAT


def _efficient_forward(call: Call) -> None:
    """Seed and offset, from 2.15 on without dropout; heads above 128 are summed up in float32 first."""
    if TORCH >= (2, 15) and not _dropout(call, 5):
        call.output(2)
        call.output(3)
    call.output(0)
    call.output(1)
    for position in (2, 3):
        call.output(position, 0)
    out = call.outputs[0]
    if out.shape[-1] > 128 and out.dtype is not torch.float32:
        call.take_like(out, torch.float32)


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


def _efficient_backward(call: Call) -> None:
    gradient, query, key, value, _, out = call.args[:6]
    is_half = query.dtype is not torch.float32
    if not gradient.transpose(1, 2).is_contiguous():
        call.take_like(gradient)
    for position in range(len(call.outputs)):
        call.output(position)
    batch, heads, length, _ = query.shape
    rows = batch * heads * length * _FLOAT
    if is_half:
        delta = call.take(rows)
    else:
        product = call.take_like(out)
        sums = delta = call.take(rows)
        if length > 1:  # else the transposed sums are contiguous already
            delta = call.take(rows)
            call.give_back(sums)
        call.give_back(product)
    numbers = (*query.shape, key.shape[2], value.shape[-1], is_half, bool(_dropout(call, 9)))
    workspace = call.allocate_scratch(_workspace_bytes, *numbers)
    call.give_back(delta, workspace)


def _workspace_bytes(
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
    return batch * heads * _round_up(num_floats, 4) * _FLOAT


def _cudnn_forward(call: Call) -> None:
    """Seed and offset first; the logsumexp is for a backward only."""
    for position in (6, 7, 0):
        call.output(position)
    call.output(1, None if call.args[4] else 0)


def _cudnn_backward(call: Call) -> None:
    """The front end's own workspace: the gradient of the query in float32, and the sums of its rows."""
    for position in range(3):
        call.output(position)
    query = call.args[1]
    batch, heads, length, head_size = query.shape
    call.take(batch * heads * length * (head_size + 1) * _FLOAT)


RULES: dict[OpOverload, Rule] = {
    aten._scaled_dot_product_flash_attention.default: _flash_forward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn_forward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
}
