"""Copies between the host and the pretend GPU, and between its cards, below autograd; numbers that become indices;
memory that storages and DLPack hand on without an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.memory.categories import Category
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.places import META, Handler, Place, is_large
from oom_magic.predict.operators.calls import Call
from oom_magic.predict.operators.sparse import run_sparse
from oom_magic.predict.operators.type_checks import refuse_quantized

aten = torch.ops.aten
_OF_ONE_AXIS = {int, slice, type(None), type(...)}  # parts of an index that are no sequences
_FEWEST_OF_ONE_AXIS = 32  # a list with as many is one index, whatever it holds (``treatSequenceAsTuple``)


def index_of_tensors(index: Any, tensor: Callable[[Any, torch.dtype], Any]) -> Any:
    """The index, with what ``tensor`` makes of each sequence of numbers in it.

    C++ makes a tensor on the device of the one that is indexed (torch/csrc/autograd/python_variable_indexing.cpp,
    ``sequenceToVariable``); autograd keeps it.
    """
    if not isinstance(index, (tuple, list, range)):
        return index
    if isinstance(index, tuple) and _OF_ONE_AXIS.issuperset(map(type, index)):
        return index
    parts = index if _is_of_several_axes(index) else (index,)
    found = [_of_tensor(part, tensor) for part in parts]
    return index if all(made is part for made, part in zip(found, parts, strict=True)) else tuple(found)


def _is_of_several_axes(index: Any) -> bool:
    if not isinstance(index, list):
        return isinstance(index, tuple)
    several = (list, tuple, range, slice, torch.Tensor, type(None), type(...))
    return len(index) < _FEWEST_OF_ONE_AXIS and any(isinstance(part, several) for part in index)


def _of_tensor(part: Any, tensor: Callable[[Any, torch.dtype], Any]) -> Any:
    if not isinstance(part, (list, tuple, range)) or not all(isinstance(number, Real) for number in _leaves(part)):
        return part
    leaves = list(_leaves(part))
    return tensor(part, torch.bool if leaves and all(type(leaf) is bool for leaf in leaves) else torch.long)


def _leaves(part: Any) -> Iterable[Any]:
    for one in part:
        yield from _leaves(one) if isinstance(one, (list, tuple, range)) else (one,)


def _to_copy(gpu: FakeGPU, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """``Tensor.to`` that copies: to the place in ``creating``, else to the source's place."""
    source = args[0]
    origin = gpu.place(source)
    device = kwargs.get("device")
    if device is not None and device.type == "cuda":  # from code that torch-function modes do not see
        with gpu.creating_on(Place.GPU, device.index):
            return _to_copy(gpu, func, args, {**kwargs, "device": META})
    place = gpu.meant_by_meta() if device is not None and device.type == "meta" else origin
    if device is not None and device.type == "cpu" and gpu.creating is None:
        place = Place.HOST
    is_joining = origin is None and gpu.creating is Place.HOST and device == META  # see DeviceView.joined
    if origin is None and place in (None, Place.HOST) and not is_joining:
        return func(*args, **kwargs)
    refuse_quantized("torch.Tensor.to", source)
    if source.layout is torch.sparse_coo:
        gpu.has_sparse = True
        return run_sparse(gpu, func, args, kwargs)
    card = gpu.current if gpu.creating is None else gpu.creating_card  # a handler runs on the card of its source
    if place is Place.GPU and origin is Place.GPU and card == gpu.current:
        return gpu.run(func, args, {**kwargs, "device": META})
    place = place or Place.GPU
    out = func(*args, **{**kwargs, "device": META, "non_blocking": False})
    # the gradient of what ``_on_host`` copied goes back to a real tensor, of whatever size
    is_back = place is origin is Place.HOST and torch._C._current_graph_task_id() != -1
    is_real = is_back or (place is Place.HOST and not is_large(out) and not is_joining)
    with gpu.on_card(card if place is Place.GPU else gpu.current):
        if not is_real:
            gpu.adopt(out, place, func.name())
        if (place is Place.GPU) != (origin is Place.GPU):
            _stage(gpu, func, out, source, place is Place.GPU, kwargs.get("non_blocking", False))
    if is_real:
        if (values := gpu.values.get(source) if is_back else gpu.values.read(source)) is None:
            values = torch.ones((), dtype=out.dtype, device="cpu")
        return torch.empty_strided(out.size(), out.stride(), dtype=out.dtype, device="cpu").copy_(values)
    gpu.values.copy(source, out)
    if place is Place.GPU:
        gpu.assign(out, Category.INPUT)
        if origin is Place.GPU:
            gpu.note_gradient(out, card)
    return out


def _stage(
    gpu: FakeGPU, func: OpOverload, target: torch.Tensor, source: torch.Tensor, to_gpu: bool, non_blocking: bool
) -> None:
    """Take the temporary memory that a copy between host and GPU needs on the GPU if the layouts or types differ.

    Source: aten/src/ATen/native/cuda/Copy.cu, ``copy_kernel_cuda``. Types are converted on the host, but on the GPU
    when the copy does not block.
    """
    source = source.expand_as(target)
    is_same_type = target.dtype is source.dtype
    if is_same_type and _is_one_run(target, source):
        return
    call = Call(gpu, (), {}, None, func.name(), gpu.attribution.phase(False))
    is_converted = non_blocking and not is_same_type
    if to_gpu:
        if is_converted or not target.is_contiguous():
            call.take_like(target, source.dtype if is_converted else target.dtype)
    else:
        if is_converted:
            source = torch.empty_like(source, dtype=target.dtype)
            call.take_like(source)
        if not source.is_contiguous():
            call.take_like(source)
    call.end()


def _is_one_run(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether both tensors have no gaps, and their elements are in the same order in memory."""
    laid_out = torch.empty_like(target, device=META)  # like target's strides if it has no gaps
    longer = [dim for dim, size in enumerate(target.shape) if size > 1]
    return all(target.stride(dim) == source.stride(dim) == laid_out.stride(dim) for dim in longer)


def _copy(gpu: FakeGPU, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """``Tensor.copy_`` within and between host and GPU."""
    target, source = args[0], args[1]
    if gpu.place(target) is not None or gpu.place(source) is not None:
        to_gpu, from_gpu = (gpu.place(tensor) is Place.GPU for tensor in (target, source))
        if to_gpu != from_gpu:
            _stage(gpu, func, target, source, to_gpu, bool(args[2]) if len(args) > 2 else False)
        gpu.values.copy(source.expand(target.shape), target)
        return target
    return func(*args, **kwargs)


def storages_followed(gpu: FakeGPU) -> dict[str, Any]:
    """Replacements in ``torch.UntypedStorage``, for changes of storages that no operator makes.

    ``copy.deepcopy`` of tensors copies storages; FSDP frees their memory and allocates it again. Each fake one has an
    address of its own, by which libraries find tensors that share one.
    """
    original, address = torch.UntypedStorage.clone, torch.UntypedStorage.data_ptr

    def data_ptr(storage: torch.UntypedStorage) -> int:
        return gpu.address(storage) if storage.device == META and storage.nbytes() else address(storage)

    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            if storage.device != META:
                return original(storage)
            whole = torch.empty(0, dtype=torch.uint8, device=META).set_(storage)  # type: ignore[call-overload]
            place = gpu.place(whole)
            return original(storage) if place is None else gpu.copy_to(whole, place, "aten::copy_").untyped_storage()

    resize, make = torch.UntypedStorage.resize_, torch.UntypedStorage.__new__

    def new(kind: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make(kind, *args, **({} if device is None else {"device": device}), **kwargs)
        size = args[0] if args else kwargs.get("size", 0)
        like = torch.empty(size, dtype=torch.uint8) if isinstance(size, int) else torch.tensor(size, dtype=torch.uint8)
        return like.to(device).untyped_storage()

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        resized = resize(storage, size)
        if storage.device == META:
            gpu.resized(storage)
        return resized

    share = torch.UntypedStorage.share_memory_

    def share_memory_(storage: torch.UntypedStorage) -> Any:
        return storage if storage.device == META else share(storage)

    return {"__new__": new, "clone": clone, "data_ptr": data_ptr, "resize_": resize_, "share_memory_": share_memory_}


class _Shared:
    """A DLPack capsule of a fake tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def shared_by_dlpack() -> dict[str, Any]:
    """Replacements in ``torch._C``: a tensor that another library returns is the same memory again."""
    take = torch._C._from_dlpack

    def _from_dlpack(capsule: Any) -> Any:
        return capsule.tensor.detach() if isinstance(capsule, _Shared) else take(capsule)

    def giving(give: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tensor, **options: _Shared(tensor) if tensor.is_cuda else give(tensor, **options)

    changes = {"_from_dlpack": _from_dlpack, "_to_dlpack": giving(torch._C._to_dlpack)}
    if hasattr(torch._C, "_to_dlpack_versioned"):
        changes["_to_dlpack_versioned"] = giving(torch._C._to_dlpack_versioned)
    return changes


def _set(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A host tensor without data, such as a weight, takes over another one, which may be real."""
    target, source = args
    if target.is_meta and source.device.type == "cpu" and gpu.place(target) is Place.HOST:
        source = source.to(META)
        gpu.adopt(source, Place.HOST, "")
    return func(target, source)


HANDLERS: dict[OpOverload, Handler] = {
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
    aten.set_.source_Tensor: _set,
}
