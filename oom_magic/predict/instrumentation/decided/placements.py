"""Places of the user's values as code tells them, and the tensors that a place is of."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import torch

from oom_magic.predict.isolation.live_objects import TRAINING_TOOLS


class Where(Enum):
    """The place of a value's tensors; DEVICE is what names the GPU, ASKED what tells whether there is one."""

    UNKNOWN = "unknown"
    HOST = "host"
    GPU = "gpu"
    DEVICE = "device"
    ASKED = "asked"


@dataclass(eq=False)
class PlacedParts:
    """A container, an object of a class of the user's, or the class: the places of its items or attributes."""

    items: dict[Hashable, Place] = field(default_factory=dict)
    kind: ast.ClassDef | None = None
    is_class: bool = False


@dataclass(frozen=True, eq=False)
class Function:
    """A function of the user's: its code and the names that it sees."""

    node: ast.FunctionDef | ast.Lambda
    names: dict[str, Place]
    above: Mapping[str, Any]
    defaults: Mapping[str, Place]
    owner: PlacedParts | None = None  # of a method
    kind: PlacedParts | None = None  # the class that defines the method


Place: TypeAlias = "Where | PlacedParts | Function"

REST = object()  # the key of all items that have none of their own


def item_of(value: Place, key: Hashable) -> Place:
    """The place of an item, or of any where it has none of its own."""
    if not isinstance(value, PlacedParts):
        return value
    return value.items[key] if key in value.items else value.items.get(REST, whole(value))


def whole(value: Place, within: tuple[Place, ...] = ()) -> Where:
    """The place that all of a value has."""
    if isinstance(value, Where):
        return value
    if not isinstance(value, PlacedParts) or value in within:
        return Where.UNKNOWN
    found = joined(whole(item, (*within, value)) for item in value.items.values())
    return found if found in (Where.GPU, Where.HOST) else Where.UNKNOWN  # type: ignore[return-value]


def joined(values: Iterable[Place]) -> Place:
    """The place of a value that is one of these or holds all of them; unknown if they differ."""
    known = [one for one in values if one not in (Where.UNKNOWN, Where.ASKED)]
    if all(one is known[0] for one in known):
        return known[0] if known else Where.UNKNOWN
    wholes = set(map(whole, known)) - {Where.UNKNOWN, Where.DEVICE, Where.ASKED}
    return wholes.pop() if len(wholes) == 1 else Where.UNKNOWN


def computed(values: Iterable[Place]) -> Place:
    """The place of what is computed from these: a GPU takes numbers from the host, but no tensors."""
    wholes = set(map(whole, values))
    order = (Where.GPU, Where.DEVICE, Where.HOST, Where.ASKED)
    return next((one for one in order if one in wholes), Where.UNKNOWN)


# -- the values themselves ------------------------------------------------------


def tensors_placed(place: Place, value: Any, within: tuple[Place, ...] = ()) -> Iterator[torch.Tensor]:
    """The tensors of a name's value that are on the GPU by its place."""
    if place is Where.GPU:
        yield from _tensors_in(value, True)
    elif isinstance(place, PlacedParts) and place not in within:
        for key, held in _items_of(value):
            of_item = place.items.get(key, place.items.get(REST, Where.UNKNOWN))
            yield from tensors_placed(of_item, held, (*within, place))


def name_gpu(place: Place, value: Any, within: tuple[Place, ...] = ()) -> Iterator[Callable[[], None]]:
    """Let a value's fields, or a function's defaults, that are the CPU for want of a GPU name the GPU.

    Yields what undoes each.
    """
    if isinstance(place, Function) and isinstance(value, FunctionType):
        yield from _name_gpu_by_default(place.defaults, value)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # nothing in it yet
                held = cell.cell_contents
                if place.names.get(name) is Where.DEVICE and is_cpu(held):
                    yield functools.partial(setattr, cell, "cell_contents", held)
                    cell.cell_contents = as_gpu(held)
    elif isinstance(value, type) and issubclass(value, Enum):
        return  # its members cannot be set
    elif isinstance(place, PlacedParts) and place.is_class and isinstance(value, type):
        for name, held in list(vars(value).items()):
            if place.items.get(name) is Where.DEVICE and is_cpu(held):
                yield functools.partial(setattr, value, name, held)
                setattr(value, name, as_gpu(held))
        if dataclasses.is_dataclass(value) and isinstance(value.__init__, FunctionType):
            yield from _name_gpu_by_default(place.items, value.__init__)
    elif isinstance(place, PlacedParts) and place not in within and not isinstance(value, type):
        held = value.keywords if isinstance(value, functools.partial) else getattr(value, "__dict__", {})
        yield from _name_gpu_in(place.items, value if isinstance(value, dict) else held, (*within, place))


def _name_gpu_by_default(places: Mapping[Any, Place], function: FunctionType) -> Iterator[Callable[[], None]]:
    code, defaults = function.__code__, function.__defaults__
    if defaults is not None:
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        is_device = [
            places.get(name) is Where.DEVICE and is_cpu(one) for name, one in zip(names, defaults, strict=True)
        ]
        if any(is_device):
            yield functools.partial(setattr, function, "__defaults__", defaults)
            now = (as_gpu(one) if is_one else one for is_one, one in zip(is_device, defaults, strict=True))
            function.__defaults__ = tuple(now)
    yield from _name_gpu_in(places, function.__kwdefaults__ or {}, ())


def _name_gpu_in(
    places: Mapping[Any, Place], items: dict[Any, Any], within: tuple[Place, ...]
) -> Iterator[Callable[[], None]]:
    for key, held in list(items.items()):
        place = places.get(key, Where.UNKNOWN)
        if place is Where.DEVICE and is_cpu(held):
            yield functools.partial(items.__setitem__, key, held)
            items[key] = as_gpu(held)
        else:
            yield from name_gpu(place, held, within)


def as_gpu(value: Any) -> Any:
    """What a name of the CPU is with a GPU; anything else as it is."""
    if not is_cpu(value):
        return value
    return "cuda" if isinstance(value, str) else torch.device("cuda")


def is_cpu(value: Any) -> bool:
    """Whether a value is a name of the CPU."""
    return value == "cpu" if isinstance(value, str) else isinstance(value, torch.device) and value.type == "cpu"


def _items_of(value: Any) -> list[tuple[Hashable, Any]]:
    """The items of a container, or the attributes of an object."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple, deque, torch.nn.Sequential, torch.nn.ModuleList)):
        return list(enumerate(value))
    held = dict(getattr(value, "__dict__", {}))
    if isinstance(value, torch.nn.Module):
        held |= {**value._parameters, **value._buffers, **value._modules}
    return list(held.items())


def _tensors_in(value: Any, is_opened: bool) -> Iterator[torch.Tensor]:
    """All tensors of models and containers; of other objects (``is_opened``) those that they hold themselves."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from itertools.chain(value.parameters(), value.buffers())
        for module in value.modules():
            yield from (one for one in vars(module).values() if isinstance(one, torch.Tensor))
    elif isinstance(value, (dict, list, tuple, set, deque)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item, False)
    elif isinstance(value, torch.optim.Optimizer):
        yield from optimizer_state(value)
    elif is_opened and not isinstance(value, (type, ModuleType, FunctionType, *TRAINING_TOOLS)):
        for item in vars(value).values() if hasattr(value, "__dict__") else ():
            yield from _tensors_in(item, False)


def optimizer_state(optimizer: torch.optim.Optimizer, of: Collection[int] | None = None) -> Iterator[torch.Tensor]:
    """The state that an optimizer keeps beside its parameters (those with the identities ``of``)."""
    for parameter, state in list(optimizer.state.items()):
        for value in state.values() if of is None or id(parameter) in of else ():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                yield value


def move_to_gpu(tensors: Iterable[torch.Tensor]) -> None:
    """Move tensors in place, inside a dry run; those that share memory still do."""
    sharing: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        sharing.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    with torch.no_grad():
        for together in sharing.values():
            widest = max(together, key=torch.Tensor.numel)
            moved = widest.detach().to("cuda")
            for tensor in together:
                _put(tensor, moved if tensor is widest else _view(tensor, widest, moved))


def _view(tensor: torch.Tensor, widest: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """What a tensor, that shares the memory of the ``widest``, is beside that one ``moved``."""
    offset = tensor.storage_offset() - widest.storage_offset()
    if tensor.dtype is not widest.dtype or offset < 0 or not widest.is_contiguous():
        return tensor.detach().to("cuda")
    return moved.as_strided(tensor.size(), tensor.stride(), offset)


def _put(tensor: torch.Tensor, moved: torch.Tensor) -> None:
    try:
        tensor.data = moved
    except RuntimeError:  # a small one of the host has real data, not fake
        torch._C._swap_tensor_impl(tensor, moved.requires_grad_(tensor.requires_grad))
