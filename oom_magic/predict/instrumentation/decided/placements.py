"""Places of the user's values as code tells them, and the tensors that a place is of."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader

from oom_magic.half_built import is_built
from oom_magic.predict.instrumentation.decided.computed import Computed
from oom_magic.predict.isolation.live_objects import TRAINING_TOOLS
from oom_magic.predict.isolation.objects.copies import set_items
from oom_magic.user_code import is_users_file


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


Place: TypeAlias = "Where | PlacedParts | Function | Computed"

_WRAPPERS_DEEP = 4
REST = object()  # the key of all items that have none of their own


def item_of(value: Place, key: Hashable) -> Place:
    """The place of an item, or of any where it has none of its own."""
    if not isinstance(value, PlacedParts):
        return Where.UNKNOWN if isinstance(value, Computed) else value
    return value.items[key] if key in value.items else value.items.get(REST, whole(value))


def whole(value: Place, within: tuple[Place, ...] = ()) -> Where:
    """The place that all of a value has."""
    if isinstance(value, Where):
        return value
    if isinstance(value, Computed):
        return Where.ASKED
    if not isinstance(value, PlacedParts) or value in within:
        return Where.UNKNOWN
    found = joined(whole(item, (*within, value)) for item in value.items.values())
    return found if found in (Where.GPU, Where.HOST) else Where.UNKNOWN  # type: ignore[return-value]


def put(parts: PlacedParts, where: Where, within: tuple[Place, ...] = ()) -> None:
    """Move an object, in place: its tensors are then there, and its fields that name a device still do."""
    kept: dict[Hashable, Place] = {}
    for key, held in parts.items.items():
        if isinstance(held, PlacedParts) and held not in within:
            put(held, where, (*within, parts))
        if not isinstance(held, Where) or held in (Where.DEVICE, Where.ASKED):
            kept[key] = held
    parts.items = {**kept, REST: where}


def copied(place: Place, made: dict[int, Place] | None = None) -> Place:
    """The place of a deep copy, which may be moved by itself."""
    made = {} if made is None else made
    if isinstance(place, PlacedParts) and not place.is_class:
        if id(place) not in made:
            made[id(place)] = copy = PlacedParts(kind=place.kind)
            copy.items = {key: copied(held, made) for key, held in place.items.items()}
        return made[id(place)]
    return place


def joined(values: Iterable[Place]) -> Place:
    """The place of a value that is one of these or holds all of them; unknown if they differ."""
    known = [one for one in values if one not in (Where.UNKNOWN, Where.ASKED) and not isinstance(one, Computed)]
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
    elif isinstance(value, torch.optim.Optimizer) and is_built(value):
        return  # its state goes with its parameters
    elif isinstance(place, PlacedParts) and place not in within:
        for key, held in _items_of(value):
            of_item = place.items.get(key, place.items.get(REST, Where.UNKNOWN))
            yield from tensors_placed(of_item, held, (*within, place))


def name_gpu(place: Place, value: Any, within: tuple[Place, ...] = ()) -> Iterator[Callable[[], None]]:
    """Let a value's fields, or a function's defaults, be what they are with a GPU, where code set them for want of one.

    Yields what undoes each.
    """
    if isinstance(value, torch.nn.Module) and "forward" in vars(value) and whole(place) is Where.GPU:
        for context in _autocasts(vars(value)["forward"]):
            yield from _name_gpu_in({"device": Where.DEVICE}, vars(context), within)
    if isinstance(place, Function) and isinstance(value, FunctionType):
        yield from _name_gpu_by_default(place.defaults, value)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # nothing in it yet
                held = cell.cell_contents
                now = with_gpu(place.names.get(name), held)
                if now is not held:
                    yield functools.partial(setattr, cell, "cell_contents", held)
                    cell.cell_contents = now
    elif isinstance(value, type) and issubclass(value, Enum):
        if isinstance(place, PlacedParts):
            yield from _name_gpu_in_members(place.items, value)
    elif isinstance(place, PlacedParts) and place.is_class and isinstance(value, type):
        for name, held in list(vars(value).items()):
            now = with_gpu(place.items.get(name), held)
            if now is not held:
                yield functools.partial(setattr, value, name, held)
                setattr(value, name, now)
        for name, one in getattr(value, "__pydantic_fields__", {}).items():
            now = with_gpu(place.items.get(name), one.default)
            if now is not one.default:
                yield functools.partial(_set_pydantic_default, value, one, one.default)
                _set_pydantic_default(value, one, now)
        for made in (vars(value).get("__init__"), getattr(vars(value).get("__new__"), "__func__", None)):
            if isinstance(made, FunctionType) and not is_users_file(made.__code__.co_filename):  # a dataclass's, say
                yield from _name_gpu_by_default(place.items, made)
    elif isinstance(place, PlacedParts) and place not in within and not isinstance(value, type):
        for fields in _fields_of(value):
            yield from _name_gpu_in(place.items, fields, (*within, place))
        yield from _name_gpu_in_slots(place.items, value)
    elif place is Where.GPU and isinstance(value, DataLoader):  # accelerate's, which moves batches
        yield from _name_gpu_in({"device": Where.DEVICE}, vars(value), within)


def _name_gpu_in_slots(places: Mapping[Any, Place], value: Any) -> Iterator[Callable[[], None]]:
    """Fields that no dict holds: those of classes with slots, and of tuples with names."""
    for kind in type(value).__mro__ if places else ():
        for name, member in vars(kind).items():
            if name in places and isinstance(member, MemberDescriptorType) and hasattr(value, name):
                held = member.__get__(value)
                now = with_gpu(places[name], held)
                if now is not held:
                    yield functools.partial(member.__set__, value, held)
                    member.__set__(value, now)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        before = list(value)
        yield functools.partial(set_items, value, before)
        set_items(value, [with_gpu(places.get(name), one) for name, one in zip(value._fields, before, strict=True)])


def _set_pydantic_default(kind: Any, one: Any, default: Any) -> None:
    one.default = default
    kind.model_rebuild(force=True)


def _fields_of(value: Any) -> Iterator[MutableMapping[Any, Any]]:
    """Where an object, or a container, keeps what may name a device."""
    if isinstance(value, MutableMapping):
        yield value
    elif isinstance(value, (list, deque)):
        yield dict(enumerate(value))
    else:
        yield value.keywords if isinstance(value, functools.partial) else getattr(value, "__dict__", {})
    if isinstance(value, torch.nn.Module) and is_built(value):
        yield value._modules
    elif isinstance(value, torch.optim.Optimizer) and is_built(value):
        yield from (value.defaults, *value.param_groups)
    elif isinstance(value, DataLoader) and value.batch_sampler is not None:
        yield vars(value.batch_sampler)


def _autocasts(function: Any, deep: int = _WRAPPERS_DEEP) -> Iterator[torch.autocast]:
    """What wraps a model's forward (``Accelerator.prepare_model``, with mixed precision)."""
    function = getattr(function, "__func__", function)
    cells = getattr(function, "__closure__", None) or ()
    held = [*getattr(function, "__dict__", {}).values(), *(cell.cell_contents for cell in cells)]
    yield from (one for one in held if isinstance(one, torch.autocast))
    for one in held if deep else ():
        if callable(one) and not isinstance(one, (torch.autocast, torch.nn.Module)):
            yield from _autocasts(one, deep - 1)


def _name_gpu_in_members(places: Mapping[Any, Place], kind: type[Enum]) -> Iterator[Callable[[], None]]:
    """Members are not assigned to: their values are. One that is itself a text, or has two names without a GPU, is
    replaced in its class."""
    members = dict(kind.__members__)
    for name, member in members.items():
        if places.get(name) is not Where.DEVICE or not is_cpu(member.value):
            continue
        now, num_names = as_gpu(member.value), sum(one is member for one in members.values())
        if not isinstance(member, str) and num_names == 1:
            yield functools.partial(setattr, member, "_value_", member.value)
            member._value_ = now
            continue
        make: Any = str if isinstance(member, str) else object
        made = make.__new__(kind, *([now] if make is str else []))
        vars(made).update(vars(member), _name_=name, _value_=now)
        yield functools.partial(_put_member, kind, name, member, vars(kind).get(name, REST))
        _put_member(kind, name, made, made)


def _put_member(kind: type[Enum], name: str, member: Any, own: Any) -> None:
    """Let a name of an enumeration stand for a member; ``own`` is what is among the attributes of the class."""
    kind._member_map_[name] = member
    if own is not REST:
        type.__setattr__(kind, name, own)
    elif name in vars(kind):
        type.__delattr__(kind, name)


def _name_gpu_by_default(places: Mapping[Any, Place], function: FunctionType) -> Iterator[Callable[[], None]]:
    code, defaults = function.__code__, function.__defaults__
    if defaults is not None:
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        now = tuple(with_gpu(places.get(name), one) for name, one in zip(names, defaults, strict=True))
        if any(map(operator.is_not, now, defaults)):
            yield functools.partial(setattr, function, "__defaults__", defaults)
            function.__defaults__ = now
    yield from _name_gpu_in(places, function.__kwdefaults__ or {}, ())


def _name_gpu_in(
    places: Mapping[Any, Place], items: MutableMapping[Any, Any], within: tuple[Place, ...]
) -> Iterator[Callable[[], None]]:
    for key, held in list(items.items()):
        place = places.get(key, places.get(REST, Where.UNKNOWN))
        now = with_gpu(place, held)
        if now is not held:
            yield functools.partial(items.__setitem__, key, held)
            items[key] = now
        else:
            yield from name_gpu(place, held, within)
    for key, place in places.items():
        if isinstance(place, Computed) and place.test is not None and key not in items:
            now = place.with_gpu(REST)
            if now is not REST:
                yield functools.partial(items.pop, key, None)
                items[key] = now


def with_gpu(place: Place | None, held: Any) -> Any:
    """What a field, that code set for want of a GPU, is with one; any other as it is."""
    if isinstance(place, Computed):
        return place.with_gpu(held)
    return as_gpu(held) if place is Where.DEVICE else held


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
    if isinstance(value, torch.nn.Module) and is_built(value):
        held |= {**value._parameters, **value._buffers, **value._modules}
    return list(held.items())


def _tensors_in(value: Any, is_opened: bool) -> Iterator[torch.Tensor]:
    """All tensors of models and containers; of other objects (``is_opened``) those that they hold themselves."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module) and is_built(value):
        yield from itertools.chain(value.parameters(), value.buffers())
        for module in value.modules():
            yield from (one for one in vars(module).values() if isinstance(one, torch.Tensor))
    elif isinstance(value, (dict, list, tuple, set, deque)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item, False)
    elif isinstance(value, torch.optim.Optimizer) and is_built(value):
        yield from optimizer_state(value)
    elif isinstance(value, DataLoader):  # accelerate's moves batches, not data
        yield from _tensors_in(value.dataset, is_opened) if not hasattr(value, "device") else ()
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
