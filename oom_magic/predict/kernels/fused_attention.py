"""What the fused attention kernels take inside, forward and backward.

Sources, under aten/src/ATen/native/transformers/cuda: flash_attn/flash_api.cpp (``mha_fwd``, ``mha_bwd``),
attention.cu and attention_backward.cu (``_efficient_attention_forward`` and ``_backward``),
mem_eff_attention/kernel_backward.h (``workspace_size``), mem_eff_attention/kernels/generate_kernels.py (which tile
sizes exist); and ATen/native/cudnn/MHA.cpp.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.operator_table import Rule
from oom_magic.predict.kernels.scratch import (
    FLOAT,
    padded_head,
    split_output_bytes,
    split_row_bytes,
    tiled_row_bytes,
    workspace_bytes,
)
from oom_magic.predict.operators.calls import TORCH, Call

aten = torch.ops.aten
_ROW_TILE = 128  # rows that are added to each sequence


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


def _take_splits(call: Call) -> list[int]:
    """Logsumexp and output of each split of the keys (``set_params_splitkv``)."""
    query, key = call.args[:2]
    if _dropout(call, 3):
        return []
    return [
        call.allocate_scratch(size_function, *query.shape, *key.shape[1:3])
        for size_function in (split_row_bytes, split_output_bytes)
    ]


def _flash_backward(call: Call) -> None:
    gradient, query, key, _, out = call.args[:5]
    for tensor in (gradient, out):
        if not tensor.transpose(1, 2).is_contiguous():
            call.take_like(tensor)
    for position in range(3):
        call.output(position)
    batch, heads, length, head_size = query.shape
    call.allocate_scratch(tiled_row_bytes, length, batch * heads)
    call.allocate_scratch(tiled_row_bytes, length, batch * heads * padded_head(head_size))
    if key.shape[1] != heads:
        expanded = batch * key.shape[2] * heads * head_size * key.element_size()
        call.take(expanded)
        call.take(expanded)


def _flash_rows_forward(call: Call) -> None:
    """``mha_varlen_fwd``: rows of several lengths, of which no key is split."""
    call.output(0)
    call.output(1)
    if call.args[7]:
        call.take(16)
    call.output(3)
    call.output(2)


def _flash_rows_backward(call: Call) -> None:
    """``mha_varlen_bwd``: a tile more for each row."""
    gradient, query, _, _, out, _, offsets = call.args[:7]
    for tensor in (gradient, out):
        if not tensor.is_contiguous():
            call.take_like(tensor)
    for position in range(3):
        call.output(position)
    num_rows, heads, head_size = query.shape
    num_rows += _ROW_TILE * (len(offsets) - 1)
    call.take(heads * num_rows * FLOAT)
    call.take(heads * num_rows * padded_head(head_size) * FLOAT)


def _efficient_rows_forward(call: Call) -> None:
    """Heads above 128 are summed up in float32 first."""
    call.output(0)
    call.output(1)
    for position in (2, 3):
        call.output(position, 0)
    _sum_wide(call)


def _sum_wide(call: Call) -> None:
    out = call.outputs[0]
    if out.shape[-1] > 128 and out.dtype is not torch.float32:
        call.take_like(out, torch.float32)


def _efficient_rows_backward(call: Call) -> None:
    """As many matrices as there are rows and heads, each as long as the longest row."""
    gradient, query, _key, value, _, out, offsets, _, length, key_length = call.args[:10]
    if not gradient.is_contiguous():
        call.take_like(gradient)
    for position in range(3):
        call.output(position)
    call.output(3, 0)  # no bias
    heads = query.shape[2]
    sums = query.shape[1] * heads * FLOAT
    product = call.take_like(out, torch.float32)
    delta = call.take(sums)
    if heads > 1:  # otherwise the transposed sums are already contiguous
        copy = call.take(sums)
        call.give_back(delta)
        delta = copy
    call.give_back(product)
    is_half = query.dtype is not torch.float32
    numbers = (len(offsets) - 1, heads, length, query.shape[-1], key_length, value.shape[-1])
    workspace = call.allocate_scratch(workspace_bytes, *numbers, is_half, bool(call.args[11]))
    call.give_back(delta, workspace)


def _efficient_forward(call: Call) -> None:
    """Seed and offset, from 2.15 on without dropout; heads above 128 are summed up in float32 first."""
    if TORCH >= (2, 15) and not _dropout(call, 5):
        call.output(2)
        call.output(3)
    call.output(0)
    call.output(1)
    for position in (2, 3):
        call.output(position, 0)
    _sum_wide(call)


def _efficient_backward(call: Call) -> None:
    gradient, query, key, value, _, out = call.args[:6]
    is_half = query.dtype is not torch.float32
    if not gradient.transpose(1, 2).is_contiguous():
        call.take_like(gradient)
    for position in range(len(call.outputs)):
        call.output(position)
    batch, heads, length, _ = query.shape
    rows = batch * heads * length * FLOAT
    if is_half:
        delta = call.take(rows)
    else:
        product = call.take_like(out)
        sums = delta = call.take(rows)
        if length > 1:  # otherwise the transposed sums are already contiguous
            delta = call.take(rows)
            call.give_back(sums)
        call.give_back(product)
    numbers = (*query.shape, key.shape[2], value.shape[-1], is_half, bool(_dropout(call, 9)))
    workspace = call.allocate_scratch(workspace_bytes, *numbers)
    call.give_back(delta, workspace)


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
    call.take(batch * heads * length * (head_size + 1) * FLOAT)


RULES: dict[OpOverload, Rule] = {
    aten._flash_attention_forward.default: _flash_rows_forward,
    aten._flash_attention_backward.default: _flash_rows_backward,
    aten._efficient_attention_forward.default: _efficient_rows_forward,
    aten._efficient_attention_backward.default: _efficient_rows_backward,
    aten._scaled_dot_product_flash_attention.default: _flash_forward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn_forward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
}
