"""Operators that read values: their answer, or the size of their output, depends on the known values."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.language import _
from oom_magic.predict.fake_cuda.places import FakeDevice, Handler, Place, map_tensors, tensors_in

aten = torch.ops.aten


def _scalar(gpu: FakeDevice, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    return func(gpu.values.read(args[0]))


def _equal(gpu: FakeDevice, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    first, second = (gpu.values.get(tensor) for tensor in args)
    if first is None or second is None:
        return args[0].shape == args[1].shape
    return func(first, second)


def _allclose(gpu: FakeDevice, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> bool:
    """Unknown numbers are taken to be close."""
    with gpu:
        known = gpu.values.get(torch.isclose(*args, **kwargs).all())
    return known is None or bool(known)


def _is_uncounted(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether distinct slices along a dimension are sought, by Thrust."""
    has_dim = len(args) > 3 or kwargs.get("dim") is not None
    return func is aten.unique_dim.default or (func is aten.unique_consecutive.default and has_dim)


def _shaped_by_values(gpu: FakeDevice, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator whose output's size depends on values: from the shadows, or from a stated default."""
    tensors = tensors_in(args, kwargs)
    if all(not tensor.is_meta for tensor in tensors):
        return func(*args, **kwargs)
    read = gpu.values.read
    out = func(*map_tensors(args, read), **{key: map_tensors(value, read) for key, value in kwargs.items()})
    place = next(found for found in map(gpu.place, tensors) if found is not None)
    if place is Place.GPU and _is_uncounted(func, args, kwargs):
        gpu.values.assume_uncounted(func)
    if place is Place.GPU:
        return gpu.results_of(func, args, kwargs, out)
    return map_tensors(out, lambda tensor: gpu.copy_to(tensor, place, func.name()))


def _index(gpu: FakeDevice, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """Indexing: boolean masks become index lists, and host indices move to the GPU, as in ATen's ``make_info``."""
    target, indices, *rest = args
    place = gpu.place(target)
    if place is None and any(gpu.place(index) is Place.HOST for index in indices if index is not None):
        place = Place.HOST
    if place not in (Place.GPU, Place.HOST):
        return gpu.run(func, args, kwargs)
    mask = _mask_to_fill(gpu, indices, rest)
    if mask is not None:
        fill = aten.masked_fill_ if func._schema.is_mutable else aten.masked_fill
        first = next(position for position, index in enumerate(indices) if index is not None)
        mask = mask.reshape(*mask.shape, *[1] * (target.dim() - first - mask.dim()))
        return gpu.run(fill.Scalar, (target, mask, rest[0].item()), {})
    made: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found: Any = gpu.values.read(index).nonzero()
            if place is Place.GPU is gpu.place(index):
                found = gpu.results_of(aten.nonzero.default, (index,), {}, found)
            else:
                found = gpu.copy_to(found, place, "aten::nonzero")
            made += found.unbind(1)
        elif index is not None and gpu.place(index) is None:
            made.append(gpu.copy_to(index, place, func.name()))
        else:
            made.append(index)
    return gpu.run(func, (target, made, *rest), kwargs)


def _mask_to_fill(gpu: FakeDevice, indices: list[Any], rest: list[Any]) -> torch.Tensor | None:
    """The mask of ``x[mask] = number``, which fills where the mask is set (``canDispatchToMaskedFill``)."""
    given = [index for index in indices if index is not None]
    is_number = bool(rest) and rest[0].dim() == 0 and not rest[0].is_meta
    is_mask = len(given) == 1 and given[0].dtype is torch.bool and gpu.place(given[0]) is Place.GPU
    return given[0] if is_number and is_mask else None


def _unscale(gpu: FakeDevice, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> None:
    """``GradScaler``'s check of gradients: they are assumed to be finite, so that ``found_inf`` is unchanged."""
    gradients = args[0]
    if all(gpu.place(gradient) is None for gradient in gradients):
        func(*args, **kwargs)
        return
    gpu.values.assume(_("GradScaler: gradients are assumed to be finite, so no step is skipped"))
    for gradient in gradients:
        gpu.values.forget(gradient.untyped_storage()._cdata)


HANDLERS: dict[OpOverload, Handler] = {
    aten._local_scalar_dense.default: _scalar,
    aten.is_nonzero.default: _scalar,
    aten.equal.default: _equal,
    aten.allclose.default: _allclose,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    **dict.fromkeys(
        (
            aten.nonzero.default,
            aten.masked_select.default,
            aten._unique2.default,
            aten.unique_consecutive.default,
            aten.unique_dim.default,
            aten.repeat_interleave.Tensor,
            aten.bincount.default,
        ),
        _shaped_by_values,
    ),
    **dict.fromkeys(
        (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default), _index
    ),
}
