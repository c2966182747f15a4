"""Who holds device memory: the user's variables, results that IPython keeps, and objects that no variable reaches."""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from oom_magic.garbage_collector import gc_disabled, live_objects
from oom_magic.measure.history.attribution import inner_tensors, tensors_in
from oom_magic.measure.holders.reach import Locate, Reached, Storages, namespaces_of_modules, reach, referrers, without
from oom_magic.memory.report import NamedHolder


@dataclass(frozen=True, slots=True)
class HolderSize:
    """The tensors that a value holds. ``num_bytes`` leaves out the weights of known models.

    ``num_entries``: the length of a container whose entries are objects that hold tensors of their own; else 0.
    ``are_numbers``: each tensor has one element.
    """

    num_tensors: int
    num_entries: int
    num_bytes: int
    has_graph: bool
    are_numbers: bool


_MOST_SHARED = 1.5  # times what a container holds, if each entry held as much as the first


def _first_entry(value: Any) -> Any:
    entries = list(dict.values(value)) if isinstance(value, dict) else value
    return entries[0] if isinstance(entries, (list, deque)) and entries else None


def measure_holder(value: Any, locate: Locate, around: Iterable[Any] = ()) -> HolderSize:
    """The memory that a value holds, except weights of models in ``around`` that its autograd graphs refer to."""
    with gc_disabled(), torch._C.DisableTorchFunction():
        tensors = list(tensors_in(value))
        models = [one for one in around if issubclass(type(one), torch.nn.Module)]  # not what their hooks keep
        weights = reach([weight for one in models for weight in _weights_of(one) if weight is not value], locate)
        num_bytes, first = (
            sum(without(reach([one], locate).everything(), weights.everything()).values())
            for one in (value, _first_entry(value))
        )
        is_shared = not first or first * len(value) > _MOST_SHARED * num_bytes
        return HolderSize(
            len(tensors),
            0 if tensors or is_shared else len(value),
            num_bytes,
            any(tensor.grad_fn is not None for tensor in tensors),
            bool(tensors) and all(tensor.numel() == 1 for tensor in tensors),
        )


def _weights_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from torch.nn.Module.parameters(model)
    yield from torch.nn.Module.buffers(model)


_NOT_THE_USERS = re.compile(r"_{1,3}|_i{1,3}|_i?\d+|_[iod]h|__\w+__")
_MOST_KINDS = 3


@dataclass(frozen=True, slots=True)
class MemoryHolder:
    """Bytes that a variable holds and that no other MemoryHolder counts; the variables ``also`` share some of them.

    ``what`` is the kind of object. A holder without a name is reached from no variable of the notebook.
    """

    name: str
    what: str
    num_bytes: int
    also: tuple[str, ...] = ()


def holders_in(
    namespace: Mapping[str, Any], locate: Locate, *, among: Collection[int] | None = None
) -> tuple[NamedHolder, ...]:
    """The names whose values hold memory, largest first; what two names share counts for both.

    ``among``: only storages at these addresses count. Entries of ``Out`` are named ``Out[3]``; IPython's ``_``, ``__``
    and so on, which are the same objects, are left out.
    """
    sizes: Counter[str] = Counter()
    for (name, _), storages in storages_by_holder(namespace, locate).rows.items():
        sizes[name] += sum(num_bytes for address, num_bytes in storages.items() if among is None or address in among)
    return tuple(NamedHolder(name, num_bytes) for name, num_bytes in sizes.most_common() if num_bytes)


@dataclass(slots=True)
class HolderStorages:
    """Storages by the name that holds them and the kind of object; and the identities of all objects reached."""

    rows: dict[tuple[str, str], Storages] = field(default_factory=dict)
    objects: set[int] = field(default_factory=set)

    def without(self, names: Collection[str]) -> HolderStorages:
        """What the other names hold."""
        return HolderStorages(
            {key: storages for key, storages in self.rows.items() if key[0] not in names}, self.objects
        )

    def storages(self) -> Storages:
        """All that is held."""
        found: Storages = {}
        for storages in self.rows.values():
            found |= storages
        return found


def storages_by_holder(
    namespace: Mapping[str, Any], locate: Locate, borders: Collection[int] = frozenset()
) -> HolderStorages:
    """What each name holds; objects with the identities ``borders`` are not entered.

    Names that share come in this order: modules, tensors, optimizers, others, kept results.
    """
    around = {id(namespace), *namespaces_of_modules(), *borders}
    by_holder = HolderStorages()
    for name, value in sorted(named_values(namespace), key=_precedence):
        reached = reach([value], locate, around)
        by_holder.rows.update(
            {(name, what): storages for what, storages in _storages_by_kind(name, value, reached) if storages}
        )
        by_holder.objects |= reached.objects
    return by_holder


def find_memory_holders(by_holder: HolderStorages, locate: Locate) -> tuple[MemoryHolder, ...]:
    """Who holds the tensors that Python can see, each byte counted once (for the first holder), largest first."""
    found = [*_exclusive_holders(by_holder.rows), *_unnamed_holders(by_holder, locate)]
    return tuple(sorted(found, key=lambda holder: -holder.num_bytes))


def named_holders(by_holder: HolderStorages) -> tuple[MemoryHolder, ...]:
    """``find_memory_holders`` without the holders that have no name, whose search takes most of the time."""
    return tuple(sorted(_exclusive_holders(by_holder.rows), key=lambda holder: -holder.num_bytes))


def named_values(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The user's names and the entries of ``Out``, with their values."""
    for name, value in list(namespace.items()):
        if name == "Out" and issubclass(type(value), dict):
            yield from ((f"Out[{number}]", result) for number, result in list(value.items()))
        elif isinstance(name, str) and not _NOT_THE_USERS.fullmatch(name):  # globals()[1] = ... is no name
            yield name, value


def _precedence(item: tuple[str, Any]) -> int:
    name, value = item
    if name.startswith("Out["):
        return 4
    kinds = torch.nn.Module, torch.Tensor, torch.optim.Optimizer
    return next((at for at, kind in enumerate(kinds) if issubclass(type(value), kind)), 3)


def _storages_by_kind(name: str, value: Any, reached: Reached) -> Iterator[tuple[str, Storages]]:
    """The storages that an object holds, by kind: its own, its gradients, its autograd graph."""
    kind = type(value)
    what = "shown result" if name.startswith("Out[") else kind.__name__
    if kind is functools._lru_cache_wrapper:
        what = "functools cache"
    if issubclass(kind, torch.nn.Module):
        what = f"module {kind.__name__}"
    elif issubclass(kind, torch.optim.Optimizer):
        what = f"optimizer {kind.__name__}, its state"
    yield what, reached.own
    yield "gradients", without(reached.gradients, reached.own)
    yield "autograd graph", without(reached.graph, reached.own | reached.gradients)


def _exclusive_holders(rows: Mapping[tuple[str, str], Storages]) -> list[MemoryHolder]:
    """A holder for each row that is the first to hold some storage."""
    owners: dict[int, tuple[str, str]] = {}
    own_bytes: dict[tuple[str, str], int] = {}
    others: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for key, storages in rows.items():
        for owner in {owners[address] for address in storages.keys() & owners.keys()}:
            if owner[0] != key[0]:
                others[owner][key[0]] = None
        own = without(storages, owners)
        if own:
            own_bytes[key] = sum(own.values())
            owners.update(zip(own, repeat(key)))
    return [MemoryHolder(*key, num_bytes, tuple(others[key])) for key, num_bytes in own_bytes.items()]


def _unnamed_holders(by_holder: HolderStorages, locate: Locate) -> list[MemoryHolder]:
    """Live tensors that no name reaches, grouped by what refers to them."""
    known = by_holder.storages()
    storages: dict[int, Storages] = {}
    unnamed = []
    for tensor in live_objects(lambda kind: issubclass(kind, torch.Tensor)):
        if id(tensor) in by_holder.objects:
            continue
        with DisableTorchFunctionSubclass():
            parts = without(dict(filter(None, map(locate, inner_tensors(tensor)))), known)
        if parts:
            storages[id(tensor)] = parts
            unnamed.append(tensor)
    kinds = referrers(unnamed) if unnamed else {}
    rows: dict[tuple[str, str], Storages] = defaultdict(dict)
    for tensor in unnamed:
        words = ", ".join(sorted(kinds.get(id(tensor), ()))[:_MOST_KINDS])
        rows["", words or "a running function, or C++"] |= storages[id(tensor)]
    return _exclusive_holders(rows)
