"""Sparse tensors (``torch.sparse_coo``) on the pretend GPU: their indices and values are fake tensors.

What an operator does with them follows aten/src/ATen/native/sparse/ (SparseTensor.cpp, cuda/SparseCUDATensor.cu,
cuda/SparseCUDATensorMath.cu), as operators on the parts, which take their memory. Distinct indices are counted where
their values are known; else all are assumed to be distinct.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.language import _
from oom_magic.predict.fake_cuda.places import META, FakeDevice, Handler, Place, map_tensors, tensors_in
from oom_magic.predict.kernels.scratch import merge_sort_bytes, unique_by_thrust_bytes
from oom_magic.predict.operators.calls import find_overload

aten = torch.ops.aten


def is_sparse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a fake sparse tensor is among an operator's arguments."""
    return any(tensor.layout is torch.sparse_coo and tensor.is_meta for tensor in tensors_in(args, kwargs))


def run_sparse(gpu: FakeDevice, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on sparse tensors. Raises NotImplementedError with a sentence for those not followed."""
    if func in _AS_THEY_ARE:
        return func(*args, **kwargs)
    run = _RUN.get(func)
    if run is not None:
        with gpu:
            return run(gpu, *args, **kwargs)
    if torch.Tag.pointwise in func.tags and len(tensors_in(args, kwargs)) == 1:
        with gpu:
            return _of_values(func, args, kwargs)
    raise NotImplementedError(
        _(
            "{operator} of a sparse tensor is not supported in a dry run; use a dense one there (.to_dense()).",
            operator=func.name(),
        )
    )


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices and the values of a sparse tensor, which are its memory."""
    with torch._C._DisableTorchDispatch():
        return tensor._indices(), tensor._values()


def made_of_parts(like: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, is_coalesced: bool) -> torch.Tensor:
    """A sparse tensor like another, of other indices and values: on the host some may be real and others not."""
    if indices.is_meta != values.is_meta:
        indices, values = indices.to(META), values.to(META)
    with torch._C._DisableTorchDispatch():
        made: torch.Tensor = aten._sparse_coo_tensor_with_dims_and_tensors(
            like.sparse_dim(), like.dense_dim(), like.shape, indices, values, dtype=values.dtype,
            layout=torch.sparse_coo, device=values.device, pin_memory=None, is_coalesced=is_coalesced,
        )  # fmt: skip
    return made


def _of_values(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that goes by element and leaves zeros as they are."""
    indices, values = parts_of(args[0])
    done = func(values, *args[1:], **kwargs)
    return args[0] if done is values else made_of_parts(args[0], indices.clone(), done, args[0].is_coalesced())


def _copied(gpu: FakeDevice, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    options = {name: value for name, value in options.items() if name in ("device", "non_blocking")}
    dtype = options.pop("dtype", None)
    indices, values = parts_of(tensor)
    moved = [aten._to_copy(indices, **options), aten._to_copy(values, dtype=dtype or values.dtype, **options)]
    return made_of_parts(tensor, moved[0], moved[1], tensor.is_coalesced())


def _cloned(gpu: FakeDevice, tensor: torch.Tensor, **_unused: Any) -> torch.Tensor:
    """A copy; a gradient that is stored keeps contiguous parts (torch/csrc/autograd/functions/accumulate_grad.h)."""
    indices, values = parts_of(tensor)
    node = torch._C._current_autograd_node()
    is_stored = node is not None and node.name().endswith("AccumulateGrad") and not torch.is_grad_enabled()
    if is_stored and indices.is_contiguous() and values.is_contiguous():
        return made_of_parts(tensor, indices, values, tensor.is_coalesced())
    return made_of_parts(tensor, indices.clone(), values.clone(), tensor.is_coalesced())


def _coalesced(gpu: FakeDevice, tensor: torch.Tensor) -> torch.Tensor:
    """aten/src/ATen/native/sparse/cuda/SparseCUDATensor.cu, ``_coalesce_sparse_cuda``."""
    indices, values = parts_of(tensor)
    number = values.shape[0]
    if number < 2:
        return made_of_parts(tensor, indices.clone(), values.clone(), True)
    known = gpu.values.get(indices)
    distinct = None if known is None else _distinct(known, tensor.shape)
    num_unique = number if distinct is None else distinct.shape[1]
    order = [indices.new_empty(number) for _unused in ("flat indices", "order", "where each begins")]
    for size_function in (merge_sort_bytes, unique_by_thrust_bytes):
        indices.new_empty(size_function(gpu.card, number), dtype=torch.uint8)
    made_values = values.new_empty((num_unique, *values.shape[1:]))
    made_indices = order[0][:num_unique][None] if len(indices) == 1 else indices.new_empty((len(indices), num_unique))
    order.clear()
    if distinct is not None:
        gpu.values.put(made_indices, distinct)
    return made_of_parts(tensor, made_indices, made_values, True)


def _distinct(indices: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """In order, by their places in a dense tensor: distinct columns take fifty times as long."""
    sizes = shape[: len(indices)]
    strides = torch.tensor([math.prod(sizes[at + 1 :]) for at in range(len(sizes))])
    return torch.stack(torch.unravel_index(torch.unique(strides @ indices), sizes))


def _added_to_dense(gpu: FakeDevice, dense: torch.Tensor, sparse: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
    """``add_out_dense_sparse_cuda``: by one kernel if the indices are distinct, else row by row in any order."""
    indices, values = parts_of(sparse)
    if sparse.is_coalesced() or not values.shape[0]:
        return dense
    rows = _flat(indices, sparse)
    dense.view(-1, *dense.shape[len(indices) :]).index_add_(0, rows, values, alpha=alpha)
    return dense


def _flat(indices: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    """``flatten_indices``: indices of one dimension are used as they are."""
    return indices[0] if len(indices) == 1 else indices.new_empty(indices.shape[1])


def _added(gpu: FakeDevice, first: torch.Tensor, second: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
    if first.layout is torch.strided:
        return _added_to_dense(gpu, first.clone(), second, alpha=alpha)
    joined = [
        torch.cat([one, other], dim) for dim, one, other in zip((1, 0), parts_of(first), parts_of(second), strict=True)
    ]
    return made_of_parts(first, joined[0], joined[1], False)


def _to_dense(gpu: FakeDevice, sparse: torch.Tensor, dtype: torch.dtype | None = None, **_unused: Any) -> torch.Tensor:
    dense = parts_of(sparse)[1].new_zeros(sparse.shape)
    _added_to_dense(gpu, dense, sparse)
    return dense if dtype is None else dense.to(dtype)


def _masked(gpu: FakeDevice, dense: torch.Tensor, mask: torch.Tensor, *_unused: Any) -> torch.Tensor:
    """``sparse_mask``: the elements of a tensor at another's indices; the indices are copied."""
    indices, _values = parts_of(mask)
    if dense.layout is torch.sparse_coo:
        return _intersected(dense, mask)
    rows = dense.reshape(-1, *dense.shape[len(indices) :])
    picked = rows.index_select(0, _flat(indices, mask))
    return made_of_parts(mask, indices.clone(), picked, mask.is_coalesced())


def _intersected(sparse: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``_sparse_binary_op_intersection_kernel_impl`` (SparseBinaryOpIntersectionCommon.h): each index is looked up."""
    indices, values = parts_of(sparse)
    wanted, _values = parts_of(mask)
    looked_up = [
        _flat(indices, sparse),
        _flat(wanted, mask),
        *(wanted.new_empty(wanted.shape[1]) for _unused in ("how many", "first")),
    ]
    picked = values.new_empty((wanted.shape[1], *values.shape[1:]))
    del looked_up
    return made_of_parts(mask, wanted.clone(), picked, mask.is_coalesced())


def _product(gpu: FakeDevice, sparse: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """``s_addmm_out_sparse_dense_cuda``: rows as in CSR, 32-bit indices, and the output."""
    gpu.values.assume(_("a sparse matrix product: cuSPARSE decides its own workspace at run time; it is not counted"))
    indices, _values = parts_of(sparse if sparse.is_coalesced() else _coalesced(gpu, sparse))
    out = dense.new_empty((sparse.shape[0], dense.shape[1]))
    rows, columns = indices[0].to(torch.int32), indices[1].to(torch.int32)
    begins = rows.new_empty(sparse.shape[0] + 1)
    del rows, columns, begins
    return out


def _added_product(
    gpu: FakeDevice, bias: torch.Tensor, sparse: torch.Tensor, dense: torch.Tensor, **_unused: Any
) -> torch.Tensor:
    return _product(gpu, sparse, dense)


def _transposed(gpu: FakeDevice, sparse: torch.Tensor, first: int = 0, second: int = 1) -> torch.Tensor:
    indices, values = parts_of(sparse)
    indices, values = indices.clone(), values.clone()
    with torch._C._DisableTorchDispatch():
        sizes = list(sparse.shape)
        sizes[first], sizes[second] = sizes[second], sizes[first]
        like = torch.empty(sizes, layout=torch.sparse_coo, device=META)
    return made_of_parts(like, indices, values, False)


def _construct(gpu: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sparse tensor of its parts, which are its memory; on the host one of them may be real."""
    parts = [tensor for tensor in tensors_in(args, kwargs) if tensor.is_meta]
    if not parts:
        return func(*args, **kwargs)
    gpu.has_sparse = True
    if all(gpu.place(part) is Place.HOST for part in parts):
        args = map_tensors(args, lambda part: part if part.is_meta else gpu.copy_to(part, Place.HOST, func.name()))
    return func(*args, **{**kwargs, "device": META})


def _bag_backward(gpu: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """aten/src/ATen/native/EmbeddingBag.cpp, ``_embedding_bag_backward``."""
    gradient, indices, offsets, offset2bag, bag_size, maximum, num_weights, scale, mode, is_sparse_, *rest = args
    with gpu:
        if is_sparse_:
            return aten._embedding_bag_sparse_backward(
                gradient, indices, offsets, offset2bag, bag_size, num_weights, scale, mode, *rest, **kwargs
            )
        return aten._embedding_bag_dense_backward(
            gradient.contiguous(), indices, offset2bag, bag_size, maximum, num_weights, scale, mode, *rest, **kwargs
        )


def _found(names: str) -> list[OpOverload]:
    return [overload for name in names.split() if (overload := find_overload(name)) is not None]


_AS_THEY_ARE = frozenset(
    _found(
        "_indices _values indices values crow_indices _nnz sparse_dim dense_dim is_coalesced _dimI _dimV "
        "_coalesced_ detach alias"
    )
)
_Run = Callable[..., Any]
_RUN: dict[OpOverload, _Run] = {
    overload: run
    for names, run in (
        ("_to_copy", _copied),
        ("clone", _cloned),
        ("_coalesce", _coalesced),
        ("add_.Tensor", _added_to_dense),
        ("add.Tensor", _added),
        ("_to_dense", _to_dense),
        ("sparse_mask", _masked),
        ("mm", _product),
        ("_sparse_addmm addmm", _added_product),
        ("transpose.int t", _transposed),
    )
    for overload in _found(names)
}
HANDLERS: dict[OpOverload, Handler] = {
    aten._sparse_coo_tensor_with_dims_and_tensors.default: _construct,
    aten._embedding_bag_backward.default: _bag_backward,
}
