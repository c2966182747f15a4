"""A cache of operators' outputs by the shapes of their arguments.

Most kernels for ``meta`` tensors are Python code and take most of a dry run's time, while a model repeats its layers
and a training run its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.places import META

aten = torch.ops.aten
_REDUCED = (torch.float16, torch.bfloat16)
_PLAIN = (int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_BACKWARDS = {aten.threshold_backward.default, aten.leaky_relu_backward.default}  # the gradient is read last
_BY_ELEMENT = {  # not tagged as such
    *_BACKWARDS, aten.elu_backward.default, aten.hardsigmoid_backward.default, aten.hardswish_backward.default,
    aten.hardtanh_backward.default, aten.softplus_backward.default, aten.floor_divide.default,
}  # fmt: skip
_OTHERWISE = {aten.clone.default, aten.native_dropout_backward.default}  # tagged, with kernels of their own
_DECIDING = {"aten::select_backward": 2, "aten::slice_backward": 2}  # arguments before those of the part
_NEW: Any = object()  # in place of a maker that is not known yet
_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class _NotByShapeError(Exception):
    """An argument whose shape alone does not decide the output."""


class KnownOutputs:
    """Outputs of operators whose kernel depends on the shapes of its arguments only."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Callable[[tuple[Any, ...]], Any] | None] = {}

    def of(
        self,
        func: OpOverload,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kernels: Mapping[OpOverload, Callable[..., Any]],
    ) -> Any:
        """What ``func(*args, **kwargs)`` returns on CUDA; ``kernels``: what stands for operators there."""
        count = _DECIDING.get(name)
        try:
            key = (name, torch.get_default_dtype(), _key(args[:count]), _key(tuple(kwargs.items())) if kwargs else ())
        except _NotByShapeError:
            return _kernel(func, kernels)(*args, **kwargs)
        make = self._known.get(key, _NEW)
        if make is not None and make is not _NEW:
            return make(args)
        out = _kernel(func, kernels)(*args, **kwargs)
        if make is None:
            return out
        is_view = torch.Tag.inplace_view in func.tags  # of another part of its memory, which the key does not hold
        is_same = key[2:] == (_key(args[:count]), _key(tuple(kwargs.items())))
        self._known[key] = _maker(out, args, kwargs) if is_same and not is_view else None
        return out


def _kernel(func: OpOverload, kernels: Mapping[OpOverload, Callable[..., Any]]) -> Callable[..., Any]:
    return kernels.get(func) or reading_in_place(func)


def reading_in_place(func: OpOverload) -> Callable[..., Any]:
    """``func``, whose result lies as CUDA lays it out, which reads each argument where it is.

    PyTorch's kernels for ``meta`` tensors cast one of half precision first (torch/_prims_common/wrappers.py,
    ``elementwise_type_promotion_wrapper``; torch/_decomp/decompositions.py, ``type_casts``). So one number expanded,
    the gradient of a sum, becomes a tensor in order, and the result lies like it instead of like the others.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if not isinstance(out, torch.Tensor) or out.layout is not torch.strided or func._schema.is_mutable:
            return out
        tensors = _tensors((args, tuple(kwargs.values())))
        strides = out.stride()
        if func in _BY_ELEMENT or (torch.Tag.pointwise in func.tags and func not in _OTHERWISE):
            strides = _iterated(func, args, out, tensors)
        elif any(map(_is_expanded, tensors)):
            wide = func(*map(_widened, args), **{key: _widened(value) for key, value in kwargs.items()})
            strides = wide.stride() if wide.shape == out.shape else strides
        return out if strides == out.stride() else _empty((tuple(out.shape), strides, out.dtype))

    return run


def _iterated(
    func: OpOverload, args: tuple[Any, ...], out: torch.Tensor, tensors: list[torch.Tensor]
) -> tuple[int, ...]:
    """The strides of what is computed element by element, from the arguments in the kernel's order.

    An image of one channel or pixel lies in order and with its channels last: in order is asked first, but a number in
    the other argument's place is a tensor of another shape (aten/src/ATen/TensorIterator.cpp,
    ``compute_fast_setup_type``). Kernels for ``meta`` tensors ask for both at once.
    """
    has_number = func._schema.arguments[1:2] and func._schema.arguments[1].name == "other" and len(tensors) == 1
    if not has_number and all(one.shape == out.shape and one.is_contiguous() for one in tensors):
        return torch._prims_common.make_contiguous_strides_for(out.shape)
    return iterated(tensors[::-1] if func in _BACKWARDS else tensors, out.shape)


def iterated(tensors: list[torch.Tensor], shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a result of this shape that is computed element by element; the first tensor is asked first."""
    return torch._prims_common.compute_elementwise_output_strides(*(one.expand(shape) for one in tensors))


def _is_expanded(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _REDUCED and tensor.is_meta and 0 in tensor.stride()


def _widened(value: Any) -> Any:
    """In single precision, where it lies."""
    if isinstance(value, torch.Tensor) and value.is_meta and value.dtype in _REDUCED:
        return _empty((tuple(value.shape), value.stride(), torch.float32))
    return type(value)(map(_widened, value)) if isinstance(value, (tuple, list)) else value


def _key(value: Any) -> Hashable:
    """The properties of an argument that a kernel may use."""
    if isinstance(value, torch.Tensor):
        dtype = value.dtype
        if not value.is_meta or value.layout is not torch.strided or dtype.is_complex:
            raise _NotByShapeError
        return value.shape, value.stride(), dtype
    if isinstance(value, (tuple, list)):
        # sizes, which are most of what comes here, as below without a call each
        return tuple([(int, item) if type(item) is int else _key(item) for item in value])
    if isinstance(value, float):
        return float  # no layout depends on the value of a number, which optimizers change in each step
    if isinstance(value, _PLAIN):
        return type(value), value
    raise _NotByShapeError


def _maker(out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[tuple[Any, ...]], Any] | None:
    """A function that makes the output again; None if the output shares the arguments' memory in an unknown way."""
    if out is None:
        return lambda args: None
    if args and out is args[0] and isinstance(out, torch.Tensor):
        return lambda args: args[0]
    tensors = [out] if isinstance(out, torch.Tensor) else out
    if not isinstance(tensors, (tuple, list)):
        return None
    made = _tensors(tensors)
    if any(tensor.layout is not torch.strided for tensor in made):
        return None
    layouts = [_layout(item) if isinstance(item, torch.Tensor) else item for item in tensors]
    storages = [tensor.untyped_storage()._cdata for tensor in made]
    given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, tuple(kwargs.values())))}
    is_own = len(set(storages)) == len(storages) and given.isdisjoint(storages)
    if not is_own or len(made) != sum(layout is not None for layout in layouts):
        return None
    if isinstance(out, torch.Tensor):
        return lambda args: _empty(layouts[0])
    kind = type(out)
    return lambda args: kind(map(_empty, layouts))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (tuple, list)) else []


def _layout(tensor: torch.Tensor) -> _Layout | None:
    """The arguments to make a tensor that has exactly the memory its shape needs."""
    layout = tuple(tensor.shape), tensor.stride(), tensor.dtype
    is_plain = tensor.layout is torch.strided and not tensor.is_complex() and type(tensor) is torch.Tensor
    made = _empty(layout) if is_plain and not tensor.storage_offset() else None
    return layout if made is not None and made.untyped_storage().nbytes() == tensor.untyped_storage().nbytes() else None


def _empty(layout: _Layout | None) -> torch.Tensor | None:
    if layout is None:
        return None
    size, stride, dtype = layout
    if not torch._C._len_torch_dispatch_stack():  # type: ignore[attr-defined]
        return torch.empty_strided(size, stride, dtype=dtype, device=META)
    with torch._C._DisableTorchDispatch():  # the pretend GPU may be on twice
        return torch.empty_strided(size, stride, dtype=dtype, device=META)
