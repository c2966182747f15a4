"""The pretend GPU as the user's code sees it: devices of tensors, moves between them, factories.

A torch-function mode: it answers above autograd, in Python, and only calls that query or name a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch._C import DisableTorchFunction  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _device as device_context

from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.host_arrays import HostArray
from oom_magic.predict.fake_cuda.legacy_types import type_of
from oom_magic.predict.fake_cuda.places import META, Location, Place, as_class_of, map_tensors, tensors_in
from oom_magic.predict.fake_cuda.transfers import index_of_tensors

Answer = Callable[["DeviceView", Any, tuple[Any, ...], dict[str, Any]], Any]
aten = torch.ops.aten


class DeviceView(TorchFunctionMode):
    """The mode. ``torch.set_default_device`` has one of its own, which comes after it."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The result of the user's call, as tensors on a GPU would give it; one thread at a time."""
        if func in _SAME_ON_ANY_DEVICE:
            return func(*args, **kwargs or {})
        lock = self.gpu.lock
        if lock is None or func is _T.backward:  # it calls the user's code, which may wait for another thread
            return self._see(func, args, kwargs or {})
        if self.gpu.ending is not None:
            raise self.gpu.ending
        with lock:
            return self._see(func, args, kwargs or {})

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("pin_memory"):  # ordinary host memory here; a build without CUDA cannot pin any
            kwargs = {**kwargs, "pin_memory": False}
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(self, func, args, kwargs)
        device = kwargs.get("device")
        if device is None:
            return self.where_arguments_are(func, args, kwargs)
        there = self.find_location(device)
        if there.place is Place.HOST:
            if func in _LIKE_ANOTHER and self.gpu.has_fake_on_host and Place.HOST in self._places(args, kwargs):
                return self._on_host(func, args, {name: value for name, value in kwargs.items() if name != "device"})
            with self.gpu.creating_on(*there):  # not where the tensor is that it is like
                return func(*args, **kwargs)
        with self.gpu.creating_on(*there):
            return func(*args, **{**kwargs, "device": META})

    def where_arguments_are(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that names no device."""
        if self.gpu.uses_current_card_only and not self.gpu.has_fake_on_host:
            return func(*args, **kwargs)
        with self.gpu.on_card_among(args, kwargs):  # for what C++ code makes "like" its arguments
            if self.gpu.has_fake_on_host:
                return self._on_host(func, args, kwargs)
            return func(*args, **kwargs)

    def _places(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Place | None]:
        return [self.gpu.place(tensor) for tensor in tensors_in(args, kwargs)]

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that names no device, where some host tensors are fake and others real.

        Real ones that are trained are copied, which autograd records, so that each gets a gradient of its own kind.
        """
        tensors = tensors_in(args, kwargs)
        places = [self.gpu.place(tensor) for tensor in tensors]
        if Place.HOST not in places or Place.GPU in places:
            return func(*args, **kwargs)
        here = Location(Place.HOST)
        with self.gpu.creating_on(*here):
            is_whole = func in _COMPARING_DEVICES
            with DisableTorchFunction():
                copies = {
                    id(tensor): self.copy(tensor, here, {"dtype": tensor.dtype})
                    for tensor in (tensors if None in places and (is_whole or torch.is_grad_enabled()) else ())
                    if not tensor.is_meta and (is_whole or tensor.requires_grad)
                }
            if copies:
                args, kwargs = map_tensors((args, kwargs), lambda tensor: copies.get(id(tensor), tensor))
            return func(*args, **kwargs)

    def around(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps user code that autograd calls, where this mode is off as it is inside operators."""

        def followed(*args: Any) -> Any:
            if self in _get_current_function_mode_stack():
                return hook(*args)
            with self:
                return hook(*args)

        return followed

    def find_location(self, device: Any) -> Location:
        """The place and card meant by what the user's code passed as a device. Raises CUDA's error for a card that does
        not exist."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type == "cuda":
            return Location(Place.GPU, self.gpu.card_named(device.index))
        return Location(Place(device.type) if device.type in ("cpu", "meta") else Place.META)

    def location(self, tensor: torch.Tensor) -> Location:
        """Where a tensor is; real tensors are on the host."""
        location = self.gpu.location(tensor)
        if location is None:
            return Location(Place.META if tensor.is_meta else Place.HOST)
        return location

    def place(self, tensor: torch.Tensor) -> Place:
        """Where a tensor is, whatever the card."""
        return self.location(tensor).place

    def move(self, tensor: torch.Tensor, there: Location, dtype: torch.dtype | None, **options: Any) -> torch.Tensor:
        """``tensor.to(there, dtype)`` as autograd records it: the gradient goes back to where the tensor is."""
        with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
            options = {"dtype": dtype or tensor.dtype, **options}
            if _is_followed_back(tensor):
                return cast(torch.Tensor, _Moved.apply(tensor, self, there, options))
            return as_class_of(tensor, self.copy(tensor, there, options))

    def copy(self, tensor: torch.Tensor, there: Location, options: dict[str, Any]) -> torch.Tensor:
        """The copy itself, below autograd."""
        with self.gpu.creating_on(*there):
            moved: torch.Tensor = aten._to_copy.default(tensor, device=META, **options)
        return moved


class _Moved(torch.autograd.Function):
    """``ToCopyBackward0`` (FunctionsManual.cpp) between places: of two "meta" tensors PyTorch would copy nothing."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, view: DeviceView, there: Location, options: dict[str, Any]
    ) -> torch.Tensor:
        """The tensor there."""
        ctx.origin = view, view.location(tensor), tensor.dtype
        ctx.is_fake = tensor.is_meta
        return view.copy(tensor, there, options)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        """The gradient where the tensor was."""
        view, origin, dtype = ctx.origin
        if view.location(gradient) == origin and gradient.dtype is dtype:
            return gradient, None, None, None
        if ctx.is_fake and origin.place is Place.HOST:  # a copy to the host is real where it is small
            with DisableTorchFunction(), view.gpu.creating_on(*origin):
                return view.gpu.copy_to(gradient, Place.HOST, "").to(dtype), None, None, None
        return view.move(gradient, origin, dtype), None, None, None


@contextmanager
def view_hidden() -> Iterator[None]:
    """Disable this mode inside the block; other torch-function modes stay."""
    modes = _get_current_function_mode_stack()
    set_function_modes([mode for mode in modes if not isinstance(mode, DeviceView)])
    try:
        yield
    finally:
        set_function_modes(modes)


def set_function_modes(modes: list[Any]) -> None:
    """Make these the thread's torch-function modes, outermost first."""
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


def _is_followed_back(tensor: torch.Tensor) -> bool:
    return (
        tensor.requires_grad and torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()  # type: ignore[attr-defined]
    )


def _device(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    location = view.gpu.location(args[0])
    return func(*args) if location is None else location.device


def _named_device(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """``torch.device(0)``: a number means a GPU."""
    named: torch.device = func("cuda", *args) if args and isinstance(args[0], int) else func(*args, **kwargs)
    return named


def _parsed_to(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch._C._nn._parse_to``, with which ``Module.to`` reads its arguments: the device stays as it was named."""
    if args and isinstance(args[0], int):
        args = (torch.device("cuda", args[0]), *args[1:])
    if args and isinstance(args[0], torch.Tensor):
        args = (view.location(args[0]).device, args[0].dtype, *args[1:])
    if isinstance(kwargs.get("device"), int):
        kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
    return func(*args, **kwargs)


def _is_at(place: Place) -> Answer:
    def answer(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return view.place(args[0]) is place

    return answer


def _get_device(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    location = view.location(args[0])
    return location.card if location.place is Place.GPU else -1


def _data_ptr(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """A distinct address for each fake storage that has memory."""
    tensor = args[0]
    if not tensor.is_meta:
        return int(func(tensor))
    if not tensor.untyped_storage().nbytes():
        return 0
    return int(view.gpu.address(tensor.untyped_storage()) + tensor.storage_offset() * tensor.element_size())


def _to(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    options = dict(kwargs)
    copy = options.pop("copy", False)
    if (rest and isinstance(rest[0], torch.Tensor)) or "other" in options:
        other = options.pop("other", None) if not rest else rest.pop(0)
        rest = [view.location(other).device, other.dtype, *rest]
    if len(rest) > 2 and isinstance(rest[-1], bool) and len(rest) - isinstance(rest[0], (str, torch.device, int)) > 2:
        copy = rest.pop()
    device, dtype, non_blocking, memory_format = _parsed_to(view, torch._C._nn._parse_to, tuple(rest), options)
    here = view.location(tensor)
    there = here if device is None else view.find_location(device)
    layout = {} if memory_format is None else {"memory_format": memory_format}
    if there == here:
        return func(tensor, dtype or tensor.dtype, non_blocking, copy, **layout)
    return view.move(tensor, there, dtype, non_blocking=non_blocking, **layout)


def _cuda(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = args[1] if len(args) > 1 else kwargs.get("device")
    there = view.find_location("cuda" if device is None else device)
    return args[0] if view.location(args[0]) == there else view.move(args[0], there, None)


def _cpu(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if view.place(args[0]) is Place.HOST else view.move(args[0], Location(Place.HOST), None)


def _type_as(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _to(view, _T.to, args, kwargs)


def _get_item(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0], _index(view, *args))


def _index(view: DeviceView, tensor: torch.Tensor, index: Any) -> Any:
    """``x[..., [0, 2]]``: a list of numbers becomes an index on the GPU."""

    def made(numbers: Any, dtype: torch.dtype) -> Any:
        if view.place(tensor) is not Place.GPU:
            return numbers
        return view.move(torch.tensor(numbers, dtype=dtype, device="cpu"), view.location(tensor), None)

    return index_of_tensors(index, made)


def _set_item(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``x[index] = number``: the number stays on the host (torch/csrc/autograd/python_variable_indexing.cpp)."""
    tensor, index, value = args
    if isinstance(value, (bool, int, float)) and view.place(tensor) is Place.GPU:
        value = torch.tensor(value, dtype=tensor.dtype, device="cpu")
    func(tensor, _index(view, tensor, index), value)


def _same(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _no(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return False


def _yes(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


def _from_data(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.tensor`` and its like: built on the host, then moved, so that the values are known."""
    device = device_context.CURRENT_DEVICE if kwargs.get("device") is None else kwargs["device"]
    source = args[0] if args else kwargs.get("data")
    if isinstance(source, torch.Tensor):
        device = device or view.location(source).device
    options = {key: value for key, value in kwargs.items() if key not in ("device", "requires_grad")}
    there = Location(Place.HOST) if device is None else view.find_location(device)
    if isinstance(source, torch.Tensor) and source.is_meta:
        is_new = func is torch.tensor  # the others give the tensor itself where it is as wanted, and its gradient
        made = (source.detach() if is_new else source).to(options.get("dtype") or source.dtype)
        if (is_new or options.get("copy")) and view.location(source) == there and made.dtype is source.dtype:
            made = made.clone()
    else:
        made = func(*args, device="cpu", **options)
    if view.location(made) != there:
        made = view.move(made, there, None)
    return made.requires_grad_() if kwargs.get("requires_grad") else made


def _grad(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    view.gpu.check_alone(args[0])
    return view.where_arguments_are(func, args, kwargs)


def _set_grad(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``parameter.grad = other``: of one from before the run, that is fake, a gradient on the host is fake, too."""
    tensor, other = args
    if isinstance(other, torch.Tensor) and tensor.is_meta and not other.is_meta and view.place(tensor) is Place.HOST:
        with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
            other = view.gpu.copy_to(other, Place.HOST, "")
    func(tensor, other)


def _set_data(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``tensor.data = other``, which a GPU allows between host and device and in inference mode, not meta tensors."""
    tensor, other = args
    with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]  # a parameter without a size yet allows nothing
        is_other_kind = tensor.is_meta and tensor.is_inference() != other.is_inference()
    if tensor.is_meta == other.is_meta and not is_other_kind:
        return func(tensor, other)
    view.gpu.check_written(tensor)
    grad = tensor.grad if tensor.is_leaf else None
    with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
        made = other.detach().requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, made)
    if made.is_meta:  # an old graph holds the weight, not what was in it
        made.grad = None
        with torch.inference_mode(made.is_inference()):
            func(made, made.detach().new_empty(0))
    if grad is not None:
        zeros = partial(torch.zeros, grad.shape, dtype=tensor.dtype, device="cpu")  # where the tensor is real now
        tensor.grad = view.move(grad, Location(Place.HOST), tensor.dtype) if tensor.is_meta else zeros()
    return None


def _new(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.new(sizes)`` and ``x.new(data)``; torch.optim makes sparse tensors by ``x.new(indices, values, size)``."""
    tensor, *given = args
    if tensor.layout is torch.sparse_coo and len(args) > 2:
        return torch.sparse_coo_tensor(*given, check_invariants=False)
    if given and isinstance(given[0], (list, tuple, np.ndarray)) and not isinstance(given[0], torch.Size):
        return _new_tensor(view, func, args, kwargs)
    return view.where_arguments_are(func, args, kwargs)


def _new_tensor(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.new_tensor(data)``: of the type and device of ``x``, wherever the data are (csrc/utils/tensor_new.cpp)."""
    tensor, *data = args
    like = {"dtype": tensor.dtype, "device": view.location(tensor).device}
    named = {name: value for name, value in kwargs.items() if value is not None}
    return _from_data(view, torch.tensor, tuple(data), like | named)


def _dlpack_device(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    location = view.location(args[0])
    return (2, location.card) if location.place is Place.GPU else func(*args, **kwargs)  # kDLCUDA


def _numpy(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    here = view.location(tensor)
    if here.place is Place.GPU:
        raise TypeError(
            f"can't convert {here.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )
    if not tensor.is_meta:
        return func(*args, **kwargs)
    dtype = torch.empty(0, dtype=tensor.dtype, device="cpu").numpy().dtype
    return HostArray.of(np.ones((), dtype=dtype), tensor.shape)


def _tolist(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = _cpu(view, func, args, kwargs)
    if tensor.is_meta:
        with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
            return view.gpu.values.read(tensor).tolist()
    return func(tensor)


def shown_without_values(view: DeviceView) -> dict[str, Any]:
    """A replacement in ``torch._tensor_str``: a fake tensor prints its device, without values."""
    original = torch._tensor_str._str

    def _str(tensor: torch.Tensor, *, tensor_contents: Any = None) -> str:
        location = view.gpu.location(tensor)
        if location is None:
            return original(tensor, tensor_contents=tensor_contents)
        return f"tensor(..., device='{location.device}', size={tuple(tensor.shape)}, dtype={tensor.dtype})"

    return {"_str": _str}


def saved_tensor_hooks_followed(view: DeviceView) -> dict[str, Any]:
    """A replacement in ``torch._C._autograd``: what ``saved_tensors_hooks`` calls sees devices, too."""
    push = torch._C._autograd._push_saved_tensors_default_hooks
    return {"_push_saved_tensors_default_hooks": lambda pack, unpack: push(view.around(pack), view.around(unpack))}


def _backward(view: DeviceView, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Tensor.backward`` with this mode still on, for hooks and recomputation in user code."""
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    options = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    options["grad_tensors"] = options.pop("gradient", None)
    options["create_graph"] = options.get("create_graph") or False
    with view:
        torch.autograd.backward(args[0], **options)


_COMPARING_DEVICES = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}  # of arguments, before any operator
_LIKE_ANOTHER = {
    torch.empty_like,
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
}
_T = torch.Tensor
# The functions that are called most often, above all by distributed wrappers: they neither take memory nor name a
# device.
_SAME_ON_ANY_DEVICE: set[Any] = {
    *(getattr(_T, name) for name in ("size", "stride", "dim", "numel", "element_size", "storage_offset")),
    *(getattr(_T, name) for name in ("is_contiguous", "is_complex", "is_floating_point", "is_inference")),
    *(getattr(_T, name).__get__ for name in ("shape", "dtype", "layout", "itemsize", "requires_grad", "is_leaf")),
    *(getattr(_T, name).__get__ for name in ("grad", "grad_fn", "is_sparse", "ndim", "_base", "_version")),
    *(getattr(_T, name).__get__ for name in ("_backward_hooks", "_post_accumulate_grad_hooks")),
    *(_T.untyped_storage, torch.is_complex, torch.is_floating_point, torch._C._set_grad_enabled),
    *(_T.view, _T.as_strided, _T.narrow, _T.view_as, torch.as_strided, torch.chunk),
}
_ANSWERS: dict[Any, Answer] = {
    torch.device: _named_device,
    torch._C._nn._parse_to: _parsed_to,
    _T.device.__get__: _device,  # type: ignore[attr-defined]
    _T.is_cuda.__get__: _is_at(Place.GPU),  # type: ignore[attr-defined]
    _T.is_cpu.__get__: _is_at(Place.HOST),  # type: ignore[attr-defined]
    _T.is_meta.__get__: _is_at(Place.META),  # type: ignore[attr-defined]
    _T.get_device: _get_device,
    _T.data_ptr: _data_ptr,
    _T.to: _to,
    _T.cuda: _cuda,
    _T.cpu: _cpu,
    _T.pin_memory: _same,
    _T.is_pinned: _no,
    _T.new: _new,
    _T.new_tensor: _new_tensor,
    _T.type: type_of,
    _T.type_as: _type_as,
    _T.__dlpack_device__: _dlpack_device,
    _T.__setitem__: _set_item,
    _T.__getitem__: _get_item,
    torch._has_compatible_shallow_copy_type: _yes,
    torch.tensor: _from_data,
    torch.as_tensor: _from_data,
    torch.asarray: _from_data,
    _T.grad.__get__: _grad,  # type: ignore[attr-defined,union-attr]
    _T.grad.__set__: _set_grad,  # type: ignore[attr-defined,union-attr]
    _T.data.__set__: _set_data,  # type: ignore[attr-defined]
    _T.numpy: _numpy,
    _T.__array__: _numpy,
    _T.tolist: _tolist,
    _T.backward: _backward,
}
