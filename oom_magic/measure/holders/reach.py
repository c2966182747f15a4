"""Which storages an object reaches: through modules, optimizers, containers, closures, generators, caches, graphs.

References are read as the garbage collector reads them, so none of the user's code runs: objects whose
properties, ``__eq__`` or ``__repr__`` raise or allocate do no harm; the walk is iterative, so depth is no limit.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from oom_magic.measure.history.attribution import Storage, inner_tensors
from oom_magic.user_code import is_own_file


def referrers(objects: Sequence[Any]) -> dict[int, set[str]]:
    """For each object, by identity, descriptions of what refers to it; one pass over all objects of the process."""
    modules = namespaces_of_modules()
    found = _referrers_of({id(one) for one in objects}, skipped=objects)
    dicts = {id(one): one for holders in found.values() for one in holders if type(one) is dict}
    owners = _referrers_of(set(dicts) - set(modules), skipped=list(dicts.values())) if dicts else {}
    words: dict[int, set[str]] = {}
    for identity, holders in found.items():
        words[identity] = set()
        for holder in holders:
            if id(holder) in modules:
                words[identity].add(f"module {modules[id(holder)]}")
            else:
                words[identity] |= {_description(owner) for owner in owners.get(id(holder), ())} or {
                    _description(holder)
                }
    return words


def _referrers_of(sought: set[int], skipped: Any) -> dict[int, list[Any]]:
    """The objects that refer to objects of these identities, except this package's own frames."""
    found: dict[int, list[Any]] = defaultdict(list)
    for one in gc.get_objects():
        if one is skipped or (type(one) is types.FrameType and is_own_file(one.f_code.co_filename)):
            continue
        for identity in sought.intersection(map(id, gc.get_referents(one))):
            found[identity].append(one)
    return found


def _description(holder: Any) -> str:
    kind = type(holder)
    if kind is types.FrameType:
        return f"{holder.f_code.co_name}()"
    if kind is types.CellType:
        return "closure"
    module = module_of(kind)
    return kind.__name__ if module in ("builtins", "__main__", "") else f"{module}.{kind.__name__}"


Locate = Callable[[torch.Tensor], Storage | None]
Storages = dict[int, int]
"""Bytes by address: numbers, as a million objects more would be looked at by each collection."""

_MACHINERY = frozenset({"IPython", "ipykernel", "traitlets", "oom_magic"})  # they refer to all of the user's names
_RAW_SAVED = "_raw_saved_"


@dataclass(slots=True)
class Reached:
    """Bytes by address: of the tensors themselves, of their gradients, and of what autograd saved for them."""

    objects: set[int] = field(default_factory=set)  # by identity
    own: Storages = field(default_factory=dict)
    gradients: Storages = field(default_factory=dict)
    graph: Storages = field(default_factory=dict)

    def everything(self) -> Storages:
        """All storages."""
        return self.graph | self.gradients | self.own


def reach(roots: Iterable[Any], locate: Locate, borders: Collection[int] = frozenset()) -> Reached:
    """The storages that can be reached from ``roots``, without entering objects whose identities are in ``borders``."""
    walk = _Walk(locate, borders)
    with DisableTorchFunctionSubclass():
        walk.enter(roots)
    return walk.finish()


def without(storages: Storages, others: Collection[int]) -> Storages:
    """The storages that are not in ``others``."""
    return {address: num_bytes for address, num_bytes in storages.items() if address not in others}


def namespaces_of_modules() -> dict[int, str]:
    """Names of modules by the identity of their ``__dict__``. Who refers to a module does not hold what is in it."""
    modules = [(name, one) for name, one in list(sys.modules.items()) if issubclass(type(one), types.ModuleType)]
    return {id(object.__getattribute__(module, "__dict__")): name for name, module in modules}


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor, by its type; ``isinstance`` would ask a proxy, which answers for another object."""
    return issubclass(type(value), torch.Tensor)


def referents(value: Any) -> Iterable[Any]:
    """What an object refers to, without the global variables of a function and the callers of a frame."""
    kind = type(value)
    if kind is types.FunctionType:
        return [*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__, value.__dict__]
    if issubclass(kind, type):
        return _of_class(value)
    if kind is types.FrameType:
        around = {id(one) for one in (value.f_back, value.f_globals, value.f_builtins)}
        return [one for one in gc.get_referents(value) if id(one) not in around]
    return gc.get_referents(value)


def module_of(kind: type) -> str:
    """The name of the module that a class says it is from, without running a metaclass's code."""
    name = type.__dict__["__module__"].__get__(kind)
    return name if type(name) is str else ""


def _of_class(kind: type) -> list[Any]:
    """Class variables of the user's own classes; those of libraries refer to almost everything."""
    return list(type.__dict__["__dict__"].__get__(kind).values()) if module_of(kind) == "__main__" else []


class _Walk:
    """Visits each object once."""

    def __init__(self, locate: Locate, borders: Collection[int]) -> None:
        self.reached = Reached()
        self._locate = locate
        self._borders = borders
        self._seen: dict[int, Any] = {}  # with the objects: an identity is unique as long as they live
        self._visitors: dict[type, Callable[[_Walk, Any], Iterable[Any]]] = {}  # unbound: no reference cycle

    def enter(self, roots: Iterable[Any]) -> None:
        """Visit all objects that can be reached from the roots, breadth first."""
        step = self._unseen(roots)
        while step:
            self._seen |= step
            found: list[Any] = []
            for value in step.values():
                kind = type(value)
                visit = self._visitors.get(kind) or self._visitors.setdefault(kind, _visitor_of(kind))
                found.extend(visit(self, value))
            step = self._unseen(found)

    def _unseen(self, values: Iterable[Any]) -> dict[int, Any]:
        """Objects not visited yet, by identity. Objects that the garbage collector does not track hold nothing."""
        seen, borders = self._seen, self._borders
        return {id(one): one for one in values if id(one) not in seen and gc.is_tracked(one) and id(one) not in borders}

    def finish(self) -> Reached:
        """The storages reached, with all objects visited."""
        self.reached.objects.update(self._seen)
        return self.reached

    def of_tensor(self, tensor: torch.Tensor) -> list[Any]:
        """Note a tensor's storages; returns the Python objects that it refers to."""
        self._note(tensor, self.reached.own)
        with torch._C.DisableTorchFunction():
            node = tensor.grad_fn
            gradient = tensor.grad if node is None else None
        if node is not None:
            return [*gc.get_referents(tensor), *self._of_graph(node)]
        if gradient is not None:
            self.reached.objects.add(id(gradient))
            self._note(gradient, self.reached.gradients)
        return gc.get_referents(tensor)

    def _note(self, tensor: torch.Tensor, found: Storages) -> None:
        for part in inner_tensors(tensor):
            place = self._locate(part)
            if place is not None:
                found[place[0]] = place[1]

    def _of_graph(self, last: Any) -> list[Any]:
        """Note the tensors saved in a result's graph; returns what hooks on saved tensors keep in place of tensors."""
        others: list[Any] = []
        pending = [last]
        while pending:
            node = pending.pop()
            if node is None or id(node) in self._seen:
                continue
            self._seen[id(node)] = node
            pending.extend(before for before, _ in node.next_functions)
            others.extend(gc.get_referents(node))
            for saved in (*_saved_values(node), getattr(node, "variable", None)):
                if is_tensor(saved):
                    self.reached.objects.add(id(saved))
                    self._note(saved, self.reached.graph)
                else:
                    others.append(saved)
        return others


def _nothing(_walk: _Walk, _value: Any) -> Iterable[Any]:
    return ()


def _visitor_of(kind: type) -> Callable[[_Walk, Any], Iterable[Any]]:
    """The function that returns the objects to visit after one of this type."""
    if issubclass(kind, torch.Tensor):
        return _Walk.of_tensor
    if issubclass(kind, types.ModuleType) or module_of(kind).partition(".")[0] in _MACHINERY:
        return _nothing
    return lambda _, value: referents(value)


def _saved_values(node: Any) -> Iterator[Any]:
    """What a node saved, packed: unpacking would call the user's hooks, and recompute under checkpointing."""
    for name in dir(type(node)):
        if name.startswith(_RAW_SAVED):
            try:
                raw = getattr(node, name)
            except RuntimeError:  # some nodes (cuDNN's RNNs) have lost even the names after a backward
                continue
            for saved in raw if isinstance(raw, (tuple, list)) else (raw,):
                yield getattr(saved, "data", None)  # torch 2.6 does not say
