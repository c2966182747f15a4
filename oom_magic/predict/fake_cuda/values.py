"""True values for small tensors on the pretend GPU.

Host code branches on masks, lengths and counts (``mask.all()``, ``.item()``, boolean indexing). A small integer or
boolean tensor whose inputs are all known therefore carries a real copy of its storage on the CPU, a *shadow*, on
which every operator is repeated. What has no shadow is read as a documented default, and the report says where.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU, Handler, Place, map_tensors, tensors_in

aten = torch.ops.aten

SHADOW_ELEMENTS = 1 << 22  # of an integer or boolean tensor
SHADOW_FLOAT_ELEMENTS = 1 << 16
UNKNOWN_NUMBER = 1.0  # what an unknown number is read as: can be divided by and has a logarithm


class Values:
    """The shadows, by storage."""

    def __init__(self, gpu: FakeGPU, assume: Callable[[str], None]) -> None:
        self._gpu = gpu
        self.assume = assume
        self._shadows: dict[int, torch.UntypedStorage] = {}
        self._passed: set[int] = set()  # storages with the outcome of a check of unknown values

    def forget(self, key: int) -> None:
        """A storage died."""
        self._shadows.pop(key, None)
        self._passed.discard(key)

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The true values of a tensor (itself when it is real); None when they are not known."""
        if not tensor.is_meta:
            return tensor
        shadow = self._shadows.get(tensor.untyped_storage()._cdata)
        if shadow is None:
            return None
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(shadow, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]

    def put(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Let a pretended tensor have these values."""
        storage = tensor.untyped_storage()
        shadow = torch.UntypedStorage(storage.nbytes())
        empty = torch.empty(0, dtype=tensor.dtype)
        target = empty.set_(shadow, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]
        target.copy_(value.detach())
        self._shadows[storage._cdata] = shadow

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """``target`` now holds what ``source`` holds."""
        value = self.get(source)
        if not target.is_meta:
            target.copy_(self.read(source))
        elif value is not None and is_small(target) and value.shape == target.shape:
            self.put(target, value)
        else:
            self.forget(target.untyped_storage()._cdata)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values that host code gets to see, as a real tensor of the same shape, without its memory."""
        value = self.get(tensor)
        if value is None:
            default = UNKNOWN_NUMBER if tensor.dtype != torch.bool else self._has_passed(tensor)
            self.assume(f"a value computed on the pretend GPU is read; {default} was taken")
            value = torch.full((), default, dtype=tensor.dtype, device="cpu").expand(tensor.shape)
        return value

    def follow_creation(self, func: OpOverload, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Shadow what a factory made: ``zeros``, ``arange``, ``full``, ``randint``, ..."""
        if not isinstance(out, torch.Tensor) or not is_small(out) or is_empty(func):
            return
        if is_random(func) and out.is_floating_point():
            return
        options = {**kwargs, "device": torch.device("cpu")}
        if "pin_memory" in options:
            options["pin_memory"] = None
        self.put(out, func(*args, **options))

    def follow(
        self, func: OpOverload, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor], out: Any
    ) -> None:
        """Repeat an operator that just ran on the shadows, or forget what it overwrote."""
        if _is_check(func, args) or (func in _CONJUNCTIONS and all(map(self._has_passed, tensors))):
            self._passed.add(out.untyped_storage()._cdata)
        if not self._shadows:
            return
        is_written = not is_random(func) and not is_empty(func)
        is_known = is_written and all(self.get(tensor) is not None for tensor in tensors)
        if func._schema.is_mutable:
            self._follow_in_place(func, args, kwargs, is_known)
        elif is_known and all(map(is_small, tensors_in((out,), {}))):
            values = self._repeat(func, args, kwargs)
            for made, value in zip(tensors_in((out,), {}), tensors_in((values,), {}), strict=False):
                self.put(made, value)

    def _has_passed(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta and tensor.untyped_storage()._cdata in self._passed

    def _repeat(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator on the shadows; nothing where the CPU has no kernel for these types."""
        options = {key: map_tensors(value, self.get) for key, value in kwargs.items()}
        if options.get("device") is not None:
            options["device"] = torch.device("cpu")
        try:
            return func(*map_tensors(args, self.get), **options)
        except (RuntimeError, NotImplementedError, IndexError):
            return ()

    def _follow_in_place(self, func: OpOverload, args: Any, kwargs: dict[str, Any], is_known: bool) -> None:
        targets = [
            tensor
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_in((value,), {})
        ]
        overwrites = func in _OVERWRITES and bool(targets) and is_small(targets[0])
        if overwrites and self.get(targets[0]) is None:
            self.put(targets[0], torch.zeros((), dtype=targets[0].dtype))
            is_known = True
        if is_known:
            func(*map_tensors(args, self.get), **{key: map_tensors(value, self.get) for key, value in kwargs.items()})
            return
        for target in targets:
            self.forget(target.untyped_storage()._cdata)


_CHECKS = {aten.all.default, aten.all.dim, aten._is_all_true.default}
_CONJUNCTIONS = {aten.bitwise_and.Tensor, aten.logical_and.default, aten.mul.Tensor}
_OVERWRITES = {aten.fill_.Scalar, aten.zero_.default}


def _is_check(func: OpOverload, args: Any) -> bool:
    """Whether code that asks this expects a yes: ``all``, and the parts of ``isfinite``: ``x == x``, ``x != inf``."""
    is_self = func is aten.eq.Tensor and args[0] is args[1]
    is_bounded = func is aten.ne.Scalar and args[1] == float("inf")
    return func in _CHECKS or is_self or is_bounded


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor of this shape and type carries true values."""
    is_float = tensor.is_floating_point() or tensor.is_complex()
    limit = SHADOW_FLOAT_ELEMENTS if is_float else SHADOW_ELEMENTS
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() <= limit * tensor.element_size()


def is_empty(func: OpOverload) -> bool:
    """Whether an operator leaves its output as it finds it (``empty``, ``new_empty_strided``, ...)."""
    return "empty" in func.name()


def is_random(func: OpOverload) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def _scalar(gpu: FakeGPU, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    return func(gpu.values.read(args[0]))


def _equal(gpu: FakeGPU, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    first, second = (gpu.values.get(tensor) for tensor in args)
    if first is None or second is None:
        return args[0].shape == args[1].shape
    return func(first, second)


def _shaped_by_values(gpu: FakeGPU, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator whose output's size depends on values: from the shadows, or from a stated default."""
    tensors = tensors_in(args, kwargs)
    if all(not tensor.is_meta for tensor in tensors):
        return func(*args, **kwargs)
    read = gpu.values.read
    out = func(*map_tensors(args, read), **{key: map_tensors(value, read) for key, value in kwargs.items()})
    place = next(found for found in map(gpu.place, tensors) if found is not None)
    return map_tensors(out, lambda tensor: gpu.copy_to(tensor, place, func.name()))


def _index(gpu: FakeGPU, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """Indexing: boolean masks become index lists, and host indices move to the GPU, as in ATen's ``make_info``."""
    target, indices, *rest = args
    place = gpu.place(target)
    if place is not Place.GPU:
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
            columns = gpu.values.read(index).nonzero().unbind(1)
            made += [gpu.copy_to(column.contiguous(), Place.GPU, "aten::nonzero") for column in columns]
        elif index is not None and gpu.place(index) is None:
            made.append(gpu.copy_to(index, Place.GPU, func.name()))
        else:
            made.append(index)
    return gpu.run(func, (target, made, *rest), kwargs)


def _mask_to_fill(gpu: FakeGPU, indices: list[Any], rest: list[Any]) -> torch.Tensor | None:
    """The mask of ``x[mask] = number``, which fills where the mask is set (``canDispatchToMaskedFill``)."""
    given = [index for index in indices if index is not None]
    is_number = bool(rest) and rest[0].dim() == 0 and not rest[0].is_meta
    is_mask = len(given) == 1 and given[0].dtype is torch.bool and gpu.place(given[0]) is Place.GPU
    return given[0] if is_number and is_mask else None


def _unscale(gpu: FakeGPU, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> None:
    """``GradScaler``'s check of gradients: they are taken to be finite, so that ``found_inf`` stays what it is."""
    gradients = args[0]
    if all(gpu.place(gradient) is None for gradient in gradients):
        func(*args, **kwargs)
        return
    gpu.values.assume("GradScaler: gradients are taken to be finite, so no step is skipped")
    for gradient in gradients:
        gpu.values.forget(gradient.untyped_storage()._cdata)


HANDLERS: dict[OpOverload, Handler] = {
    aten._local_scalar_dense.default: _scalar,
    aten.is_nonzero.default: _scalar,
    aten.equal.default: _equal,
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
