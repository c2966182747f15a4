"""Kernels whose outputs or scratch come in an order of their own."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.fake_gpu import Rule
from oom_magic.predict.kernels.copies import make_outputs
from oom_magic.predict.kernels.reductions import take_sum_buffers
from oom_magic.predict.operators.calls import Call
from oom_magic.predict.operators.overloads import TORCH, existing
from oom_magic.predict.setups.gpus import GPU

aten = torch.ops.aten


def grouped_rules(gpu: GPU) -> dict[OpOverload, Rule]:
    """aten/src/ATen/native/cuda/GroupMM.cu: pointers and sizes of each group, and the workspace of CUTLASS.

    It runs on 9.0 and 10.x with bfloat16; elsewhere the groups are multiplied one by one into the output.
    """

    def multiply(call: Call) -> None:
        first, second = call.args[:2]
        if gpu.capability[0] not in (9, 10) or first.dtype is not torch.bfloat16:
            return
        call.output(0)
        num_groups = next(tensor.shape[0] for tensor in (second, *call.args[2:3], first) if tensor.dim() != 2)
        call.take(60 * num_groups)
        is_backward = first.dim() == second.dim() == 2
        each = 512 if gpu.capability[0] == 9 else 5888 if is_backward else 5376
        call.take(each * gpu.num_multiprocessors)

    return existing({"_grouped_mm": multiply})


def _copied(*, before: tuple[int, ...] = (), after: tuple[int, ...] = ()) -> Rule:
    """A kernel that wants the arguments at these positions contiguous: copies before and after its outputs."""

    def rule(call: Call) -> None:
        for position in before:
            _copy_contiguous(call, position)
        for position in range(len(call.outputs)):
            call.output(position)
        for position in after:
            _copy_contiguous(call, position)

    return rule


def _copy_contiguous(call: Call, position: int) -> None:
    tensor = call.args[position]
    if not tensor.is_contiguous():
        call.take_like(tensor)


def _native_dropout(call: Call) -> None:
    """aten/src/ATen/native/cuda/Dropout.cu, ``dropout_cuda``: the mask first."""
    call.output(1)


def _softmax_backward(call: Call) -> None:
    """aten/src/ATen/native/cuda/SoftMax.cu, ``softmax_backward_cuda_out``: gradient times output is aside."""
    call.output(0)
    gradient, output = call.args[:2]
    call.take_like(output, torch.promote_types(gradient.dtype, output.dtype))


def _safe_softmax(call: Call) -> None:
    """aten/src/ATen/native/transformers/attention.cpp: rows that are masked wholly are found and set to zero."""
    call.output(0)
    scores = call.args[0]
    call.take(scores.numel())
    call.take(scores.numel() // max(scores.shape[-1], 1))
    call.take(scores.element_size())


def _logsumexp(call: Call) -> None:
    """aten/src/ATen/native/ReduceOps.cpp, ``logsumexp_out_impl``: maxima, those that are infinite, exponentials."""
    tensor, made = call.args[0], call.outputs[0]
    maxima = call.take_like(made)
    magnitudes = call.take_like(made)
    call.give_back(call.take_like(made, torch.bool), magnitudes)
    exponentials = call.take_like(tensor)
    call.output(0)
    call.give_back(exponentials, maxima)


def _elementwise_loss(call: Call) -> None:
    """aten/src/ATen/native/BinaryOps.cpp, ``mse_loss``: the mean keeps the storage that was made for all elements."""
    if call.argument(2, 1) == 0:
        return
    shape = torch.broadcast_shapes(call.args[0].shape, call.args[1].shape)
    elements = torch.empty(shape, dtype=call.outputs[0].dtype, device="meta")
    call.output(0, elements.numel() * elements.element_size())
    call.take_like(elements)
    take_sum_buffers(call, elements)


def _binary_cross_entropy_with_logits(call: Call) -> None:
    """aten/src/ATen/native/Loss.cpp: two temporaries as large as the input; weights of positives are spread first."""
    call.take_like(call.args[0])
    positives = call.argument(3)
    if positives is not None:
        less_one = call.take_like(positives)
        spread = call.take_like(call.args[0])
        call.give_back(less_one, spread)
    if call.argument(4, 1) == 0:
        call.output(0)
        call.take_like(call.args[0])
        return
    call.take_like(call.args[0])
    call.output(0)
    take_sum_buffers(call, call.args[0])


def _foreach_norm(call: Call) -> None:
    """aten/src/ATen/native/cuda/ForeachReduceOp.cu: first a partial norm of every chunk of 65,536 elements.

    From 2.15 on only the chunks that there are have room, and 64-bit offsets say where each tensor's begin.
    """
    tensors = call.args[0]
    numbers = (max(tensors[0].element_size(), 4), *(tensor.numel() for tensor in tensors))
    if TORCH < (2, 15):
        call.allocate_scratch(_partial_norm_bytes, *numbers)
        return
    offsets = call.take((len(tensors) + 1) * 8)
    partial = call.allocate_scratch(_packed_norm_bytes, *numbers)
    make_outputs(call)
    call.give_back(partial, offsets)


def _partial_norm_bytes(_: GPU, item_bytes: int, *numels: int) -> int:
    return len(numels) * max(-(-numel // 65536) for numel in numels) * item_bytes


def _packed_norm_bytes(_: GPU, item_bytes: int, *numels: int) -> int:
    return sum(-(-numel // 65536) for numel in numels) * item_bytes


def _embedding(call: Call) -> None:
    """aten/src/ATen/native/Embedding.cpp, ``embedding_symint``: indices are read as one row."""
    indices = call.args[1]
    is_row = indices.dim() == 1 or indices.is_contiguous()
    reads = -1 if is_row else call.take_like(indices)
    call.output(0)
    call.give_back(reads)


def _index(call: Call) -> None:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, ``AdvancedIndex``: several indices are laid out alike."""
    given = torch.broadcast_tensors(*(index for index in call.args[1] if index is not None))
    if len({index.stride() for index in given}) > 1:
        for index in given:
            if not index.is_contiguous():
                call.take_like(index)


def _where(call: Call) -> None:
    """aten/src/ATen/native/TensorCompare.cpp, ``where_self_out``: numbers on the host go to the GPU."""
    for number in call.args[1:]:
        if not number.is_meta:
            call.take(number.element_size())


def _scalar_power(call: Call) -> None:
    """aten/src/ATen/native/Pow.cpp, ``pow.Scalar_out``: the base goes to the GPU."""
    call.output(0)
    call.take(call.outputs[0].element_size())


def _roll(call: Call) -> None:
    """aten/src/ATen/native/TensorTransformations.h, ``roll_common``: one dimension after the other."""
    tensor, shifts = call.args[:2]
    copy = -1 if tensor.is_contiguous() else call.take_like(tensor)
    for _ in shifts[1:]:
        call.take_like(tensor)
        call.give_back(copy)
        copy = -1
    call.output(0)


RULES: dict[OpOverload, Rule] = {
    aten.native_dropout.default: _native_dropout,
    aten.native_layer_norm.default: _copied(before=(0,)),
    aten.native_layer_norm_backward.default: _copied(before=(1,), after=(0,)),
    aten._softmax.default: _copied(after=(0,)),
    aten._log_softmax.default: _copied(after=(0,)),
    aten._log_softmax_backward_data.default: _copied(after=(0, 1)),
    aten.logsumexp.default: _logsumexp,
    aten.mse_loss.default: _elementwise_loss,
    aten.smooth_l1_loss.default: _elementwise_loss,
    aten.binary_cross_entropy_with_logits.default: _binary_cross_entropy_with_logits,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten.pow.Scalar: _scalar_power,
    aten.roll.default: _roll,
    aten.where.self: _where,
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    **existing(
        {
            "_fused_rms_norm": _copied(before=(0,)),
            "_fused_rms_norm_backward": _copied(before=(1,), after=(0,)),
        }
    ),
}
