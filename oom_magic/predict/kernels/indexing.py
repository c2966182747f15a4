"""Operators that read or write by index; gradients of embeddings, and accumulation by index, sort the indices first.

Sources: aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu, Indexing.cu
(``index_put_with_sort_kernel``).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.operator_table import Rule
from oom_magic.predict.instrumentation.recorder import SizeFunction
from oom_magic.predict.kernels.reductions import take_sorting
from oom_magic.predict.kernels.scratch import (
    INDEX,
    Above,
    atomic_index_bytes,
    atomic_sum_bytes,
    count_bytes,
    distinct_bytes,
    index_bytes,
    index_radix_bytes,
    one_index,
    part_bytes,
    part_index_bytes,
    scan_bytes,
    segment_bytes,
    segment_scan_bytes,
    select_bytes,
    unique_bytes,
)
from oom_magic.predict.operators.calls import Call

aten = torch.ops.aten
_UNSORTED_EMBEDDING_INDICES = 3072  # up to here one kernel adds them unsorted (``embedding_dense_backward_cuda``)
_MAX_OF_BAG = 2  # at::native::EmbeddingBagMode


def _sort_pairs(call: Call, num_items: int, num_keys: int, above: int = 0) -> None:
    """``radix_sort_pairs`` of indices with their positions; both results stay to the end of the call."""
    indices = Above(index_bytes, above)
    for _ in ("sorted", "original"):
        call.allocate_scratch(indices, num_items)
    positions = call.allocate_scratch(indices, num_items)
    storage = call.allocate_scratch(Above(index_radix_bytes, above), num_items, num_keys)
    call.give_back(storage, positions)


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


def _embedding_backward(call: Call) -> None:
    """``embedding_dense_backward_cuda``: few indices are added up unsorted."""
    gradient, indices = call.args[:2]
    for tensor in (gradient, indices):
        if not tensor.is_contiguous():
            call.take_like(tensor)
    scales = bool(call.argument(4))
    _add_up(call, indices.numel(), scales, least=0 if scales else _UNSORTED_EMBEDDING_INDICES)


def _embedding_renorm(call: Call) -> None:
    """``embedding_renorm_cuda_``: the rows' indices in order, each once."""
    indices = call.args[1]
    num_items = indices.numel()
    call.take_like(indices)
    call.take_like(indices)
    order = call.take(num_items * INDEX)
    take_sorting(call, torch.empty(num_items, dtype=indices.dtype, device="meta"))
    call.give_back(order)
    call.take_like(indices)
    call.take(INDEX)
    call.allocate_scratch(distinct_bytes, num_items)


def _embedding_bag_backward(call: Call) -> None:
    """``_embedding_bag_dense_backward_cuda``: a maximum's gradients are added atomically, others sorted."""
    gradient, indices = call.args[:2]
    if not gradient.is_contiguous():
        call.take_like(gradient)
    if call.argument(7) != _MAX_OF_BAG:
        _add_up(call, indices.numel(), bool(call.argument(6)), least=0)


def _add_up(call: Call, num_items: int, scales: bool, least: int) -> None:
    """``embedding_backward_cuda_kernel`` on sorted indices."""
    num_weights = call.outputs[0].shape[0]

    def take(size_function: SizeFunction, *numbers: int) -> int:
        return call.allocate_scratch(Above(size_function, least), num_items, *numbers)

    _sort_pairs(call, num_items, num_weights, least)
    if scales:
        take(index_bytes)
        for _ in range(2):
            call.give_back(take(scan_bytes))
    call.output(0)
    take(index_bytes)  # where each segment of equal indices starts
    take(one_index)
    unused_keys = take(index_bytes)
    call.give_back(take(unique_bytes), unused_keys)
    _sum_segments(take, call)


def _embedding_bag(call: Call) -> None:
    """aten/src/ATen/native/cuda/EmbeddingBag.cu, ``_embedding_bag_cuda``: sizes of bags, bags of indices, sums."""
    for position in (2, 1, 0):
        call.output(position)


def _masked_scatter(call: Call) -> None:
    """aten/src/ATen/native/cuda/IndexKernel.cpp, ``masked_scatter__cuda``: set elements before each, as integers."""
    call.output(0)
    num_items = call.outputs[0].numel()
    call.take(num_items * INDEX)
    call.allocate_scratch(scan_bytes, num_items)


def _sum_segments(take: Callable[..., int], call: Call) -> None:
    """The rest of ``embedding_backward_cuda_kernel``: parts of segments are summed up, then each segment."""
    made = call.outputs[0]
    num_weights, width = made.shape
    for _ in ("parts of each segment", "where they start"):
        take(segment_bytes, num_weights)
    call.give_back(take(segment_scan_bytes, num_weights))
    take(one_index)
    take(part_index_bytes, num_weights)
    take(atomic_index_bytes, num_weights, width)
    take(atomic_sum_bytes, num_weights, width, made.element_size())
    take(part_bytes, num_weights, width, made.element_size())


def _is_in(call: Call) -> None:
    """cuda/TensorCompare.cu, ``isin_default_kernel_gpu``: few numbers are compared with each element. Many are sorted
    among the elements (TensorCompare.cpp, ``isin_sorting``), which takes what is not counted here."""
    call.output(0)
    elements, tested = (tensor.numel() for tensor in call.args[:2])
    if tested < int(10 * elements**0.145):
        call.take(elements * tested)
        call.take(elements)
    elif elements:
        call.gpu.values.assume_uncounted(aten.isin.Tensor_Tensor)


def _nonzero(call: Call) -> None:
    """aten/src/ATen/native/cuda/Nonzero.cu: they are counted, then chosen."""
    tensor = call.args[0]
    if not tensor.is_contiguous():
        call.take_like(tensor)
    _find_nonzero(call, tensor.numel(), lambda: call.output(0))


def _find_nonzero(call: Call, num_items: int, make: Callable[[], object]) -> None:
    number = call.take(torch.int32.itemsize)
    call.give_back(call.allocate_scratch(count_bytes, num_items))
    make()
    call.give_back(call.allocate_scratch(select_bytes, num_items), number)


def _masked_select(call: Call) -> None:
    """cuda/IndexKernel.cpp, ``masked_select_out_cuda_impl``: where the mask is set, then what is there."""
    shape = torch.broadcast_shapes(call.args[0].shape, call.args[1].shape)
    places = call.outputs[0].numel() * max(len(shape), 1) * INDEX
    _find_nonzero(call, shape.numel(), lambda: call.take(places))


def _repeat_interleave(call: Call) -> None:
    """aten/src/ATen/native/Repeat.h: where each repetition ends."""
    repeats = call.args[0]
    call.take(repeats.numel() * INDEX)
    widened = -1 if repeats.dtype is torch.int64 else call.take(repeats.numel() * INDEX)
    call.give_back(call.allocate_scratch(scan_bytes, repeats.numel()), widened)


def _index_put(call: Call) -> None:
    """A number goes to the GPU first. Values that are accumulated, or put in a determined order, are sorted."""
    target, indices, values = call.args[:3]
    call.output(0)
    if not values.is_meta:
        call.take(values.element_size())
    if call.argument(3, False) or (_is_ordered() and values.numel() > 1):
        dims = [dim for dim, index in enumerate(indices) if index is not None]
        num_items = torch.broadcast_shapes(*(indices[dim].shape for dim in dims)).numel()
        num_rows = prod(target.shape[dim] for dim in dims)
        is_together = dims[-1] - dims[0] == len(dims) - 1  # else they are brought to the front
        num_keys = prod(target.shape[: dims[0]]) * num_rows if is_together else num_rows
        _put_sorted(call, values, len(dims), num_items, num_keys, num_items * target.numel() // max(num_rows, 1))


def _is_ordered() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def _put_sorted(
    call: Call, values: torch.Tensor, num_indices: int, num_items: int, num_rows: int, num_values: int
) -> None:
    """Indices are made linear, sorted, and the values of each run of equal ones are put, spread if they are fewer."""
    linear = -1
    for _ in range(num_indices):
        wrapped = call.take(num_items * INDEX)
        scaled = call.take(num_items * INDEX)
        call.give_back(wrapped)
        linear, spare = (scaled, -1) if linear < 0 else (linear, scaled)
        call.give_back(spare)
    if not values.is_contiguous() or values.numel() != num_values:
        call.take(num_values * values.element_size())
    _sort_pairs(call, num_items, max(num_rows - 1, 1))


def _scatter(call: Call) -> None:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, ``_scatter_via_index_put``, where the order is determined."""
    call.output(0)
    if _is_ordered():
        _scatter_in_order(call)
        call.give_back_all()


def _scatter_in_order(call: Call) -> None:
    """Rows are put whole where the index is the same for all of a row."""
    target, dim, index, source = call.args[:4]
    others = [other for other in range(target.dim()) if other != dim % target.dim()]
    if not any(index.stride(other) for other in others):
        _put_rows(call, source[tuple(map(slice, index.shape))])
        return
    for other in others:
        call.take(index.shape[other] * INDEX)
    _put_sorted(call, source, target.dim(), index.numel(), target.numel(), index.numel())


def _scatter_reduced(call: Call) -> None:
    """The same file, ``scatter_reduce_two``: for a mean, ones are counted at each target."""
    call.output(0)
    reduction = call.argument(4)
    is_ordered = _is_ordered() and reduction in ("sum", "mean")
    if is_ordered:
        _scatter_in_order(call)
        call.give_back_all()
    if reduction == "mean":
        call.take_like(call.args[3])
        call.take_like(call.args[0])
        number = call.take_like(call.args[0], torch.bool)
        call.give_back(number)
        if is_ordered:
            _scatter_in_order(call)


def _index_mean(call: Call) -> None:
    """cuda/Indexing.cu, ``index_reduce_func_cuda_impl``: likewise."""
    call.output(0)
    if call.argument(4) == "mean":
        call.take_like(call.args[0])
        call.give_back(call.take_like(call.args[3]))
        call.take_like(call.args[0], torch.bool)


def _index_add(call: Call) -> None:
    """cuda/Indexing.cu, ``index_add_cuda_out``: the scaled source is put, where the order is determined."""
    call.output(0)
    if _is_ordered():
        source = call.args[3]
        call.take_like(source)
        _put_rows(call, source.new_empty(source.shape))


def _index_copy(call: Call) -> None:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, ``index_copy_out``: likewise."""
    call.output(0)
    if _is_ordered():
        _put_rows(call, call.args[3])


def _put_rows(call: Call, source: torch.Tensor) -> None:
    target, dim, index = call.args[:3]
    num_rows = prod(target.shape[: dim % target.dim() + 1]) if target.dim() else 1
    num_items = index.shape[dim] if index.dim() == target.dim() > 0 else index.numel()
    _put_sorted(call, source, 1, num_items, num_rows, source.numel())


RULES: dict[OpOverload, Rule] = {
    aten.embedding.default: _embedding,
    aten.isin.Tensor_Tensor: _is_in,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.embedding_renorm_.default: _embedding_renorm,
    aten.index.Tensor: _index,
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
    aten._embedding_bag_dense_backward.default: _embedding_bag_backward,
    aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_.default: _masked_scatter,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten._index_put_impl_.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten._unsafe_index.Tensor: _index,
    aten.scatter.src: _scatter,
    aten.scatter_.src: _scatter,
    aten.scatter_add.default: _scatter,
    aten.index_add.default: _index_add,
    aten.index_copy.default: _index_copy,
    aten.scatter_reduce.two: _scatter_reduced,
    aten.scatter_reduce_.two: _scatter_reduced,
    aten.index_reduce.default: _index_mean,
}
