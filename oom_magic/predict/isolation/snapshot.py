"""Contents of the user's containers, recorded to be restored in place."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import itertools
import operator
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

_DICTS = (dict, OrderedDict, defaultdict)
_CONTAINERS = frozenset((*_DICTS, list, set, deque))
_WORD = ctypes.sizeof(ctypes.c_size_t)


@dataclass(frozen=True, slots=True)
class _Change:
    """The difference in a container of an object after a run: new contents, and missing keys."""

    owner: weakref.ref[Any]
    changed: Any  # for a dict only what differs, since more would keep the user's objects alive
    lacking: frozenset[Any] = frozenset()

    def apply(self, container: Any) -> None:
        """Put the noted values back."""
        if isinstance(container, dict):
            for key in self.lacking:
                container.pop(key, None)
            container.update(self.changed)
        else:
            fill(container, self.changed)


@dataclass(frozen=True, slots=True)
class Alike:
    """The contents of many containers of one type in one list: separate copies would take twice as long."""

    kind: Any
    containers: list[Any]
    lengths: list[int]
    items: list[Any]  # of dicts the keys
    values: list[Any]  # of dicts only

    @classmethod
    def of(cls, kind: Any, containers: list[Any]) -> Alike:
        """Their contents at one moment, although another thread may be filling them."""
        while True:
            lengths = list(map(len, containers))
            items, values = _items_and_values(kind, containers)
            if len(items) == sum(lengths) and lengths == list(map(len, containers)):
                return cls(kind, containers, lengths, items, values)

    def are_unchanged(self) -> bool:
        """Whether each holds the very objects that it held, in the same order."""
        if self.lengths != list(map(len, self.containers)):
            return False
        items, values = _items_and_values(self.kind, self.containers)
        return addresses_in(self.items) == addresses_in(items) and addresses_in(self.values) == addresses_in(values)

    def changed(self) -> list[tuple[Any, Any]]:
        """The containers that hold something else now, each with what it held; none while another thread fills some."""
        if self.are_unchanged():
            return []
        lengths = list(map(len, self.containers))
        items, values = _items_and_values(self.kind, self.containers)
        if len(items) != sum(lengths):
            return []
        before, after = np.array(self.lengths), np.array(lengths)
        alike = before == after
        found = ~alike
        owners = np.repeat(np.flatnonzero(alike), before[alike])
        for old, new in ((self.items, items), (self.values, values)):
            if old and new:
                differ = _addresses(old)[np.repeat(alike, before)] != _addresses(new)[np.repeat(alike, after)]
                found[owners[differ]] = True
        return list(itertools.compress(self.pairs(), found.tolist()))

    def num_references(self, address: int) -> int:
        """How often an object is referred to from here."""
        return sum(int((_addresses(some) == address).sum()) for some in (self.containers, self.items, self.values))

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """The containers, each with what it held."""
        items, values = iter(self.items), iter(self.values)
        for container, length in zip(self.containers, self.lengths, strict=True):
            own = list(itertools.islice(items, length))
            yield (
                container,
                dict(zip(own, itertools.islice(values, length), strict=True)) if _is_dict(self.kind) else own,
            )


def _items_and_values(kind: Any, containers: list[Any]) -> tuple[list[Any], list[Any]]:
    """In lists: a tuple that grows must be in no list of all objects, which another thread may be making."""
    items = list(itertools.chain.from_iterable(containers))
    return items, list(itertools.chain.from_iterable(map(kind.values, containers))) if _is_dict(kind) else []


def _addresses(items: list[Any]) -> np.ndarray[Any, np.dtype[np.uintp]]:
    return np.frombuffer(addresses_in(items), np.uintp) if items else np.zeros(0, np.uintp)


def references_among(lists: Iterable[Any], known: Collection[int]) -> Counter[int]:
    """How often some lists, each counted once, refer to each of the objects with these identities."""
    each = {id(one): one for one in lists}.values()
    addresses = np.concatenate([_addresses([]), *(_addresses(one if type(one) is list else list(one)) for one in each)])
    return Counter(addresses[np.isin(addresses, np.fromiter(known, np.uintp))].tolist())


def _is_dict(kind: Any) -> bool:
    return issubclass(kind, (dict, MappingProxyType))


@dataclass(frozen=True, slots=True)
class _Parts:
    """Containers that are parts of objects, with those in them, level by level."""

    owners: Sequence[Any]
    roots: Sequence[Any]  # a container of each owner
    levels: list[list[Alike]]

    def each(self) -> Iterator[tuple[Any, tuple[Hashable, ...], Any, Any]]:
        """The object, a path in it, the container there, and what it held; each container where it is found first."""
        noted = [{id(one): (one, held) for alike in level for one, held in alike.pairs()} for level in self.levels]
        level: list[tuple[Any, tuple[Hashable, ...], Any]]
        level = [(owner, (), root) for owner, root in zip(self.owners, self.roots, strict=True)]
        for contents in noted:
            below: list[tuple[Any, tuple[Hashable, ...], Any]] = []
            for owner, path, container in level:
                if (known := contents.pop(id(container), None)) is None:
                    continue
                yield owner, path, *known
                below += (
                    (owner, (*path, key if type(key) in (str, int) else id(key)), item)
                    for key, item in (known[1].items() if isinstance(known[1], dict) else enumerate(known[1]))
                    if type(item) in _CONTAINERS
                )
            level = below


Changes = dict[tuple[int, tuple[Hashable, ...]], _Change]  # by the identity of the owner, and the path in it


class Snapshot:
    """What some containers hold, nested ones included, to be put back in place."""

    def __init__(self, but: Collection[int] = ()) -> None:
        self._parts: list[_Parts] = []
        self._plain: list[tuple[Any, Any]] = []  # containers without an owner, and their contents
        self._alike: list[Alike] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []  # with what each held
        self._others: list[tuple[Any, Callable[[], bool]]] = []  # with what tells whether each has changed
        self._undo: list[Callable[[], object]] = []
        self._seen: set[int] = {id(vars(builtins)), *but}  # every module's globals lead there

    def add_plain(self, container: Any, depth: int) -> None:
        """Note a container that is part of no object, and those in it, ``depth`` levels deep."""
        level = [container]
        for _ in range(depth):
            inner: list[Any] = []
            for one in level:
                if id(one) not in self._seen:
                    self._seen.add(id(one))
                    contents = one.copy()
                    self._plain.append((one, contents))
                    items = contents.values() if isinstance(contents, dict) else contents
                    inner += [item for item in items if type(item) in _CONTAINERS]
            level = inner

    def add_all(self, kind: Any, containers: list[Any]) -> None:
        """Note many containers of one type, none of them twice. If one was changed, each is looked at."""
        self._alike.append(Alike.of(kind, containers))

    def add_classes(self, objects: Sequence[Any]) -> None:
        """Note of what class each object is: code may change it, as ``torch.nn.utils.parametrize`` does."""
        self._undo.append(functools.partial(_restore_classes, objects, list(map(type, objects))))

    def add_class(self, kind: type, before: dict[str, Any]) -> None:
        """Note what a class holds, which something else puts back."""
        self._classes.append((kind, before))

    def add_other(self, one: Any, differs: Callable[[], bool]) -> None:
        """Note an object that something else puts back, and what tells whether there is something to put back."""
        self._others.append((one, differs))

    def add_undo(self, undo: Callable[[], object]) -> None:
        """Note what puts something else back; it can be called again."""
        self._undo.append(undo)

    def add(self, container: Any, depth: int, owner: Any = None) -> None:
        """Note ``container`` and the containers in it, ``depth`` levels deep. ``owner`` is the object it is part of."""
        self._add([owner], [container], depth)

    def add_attributes(self, owners: Sequence[Any], depth: int) -> None:
        """Note the attributes of many objects, and the containers in them."""
        self._add(owners, list(map(vars, owners)), depth)

    def _add(self, owners: Sequence[Any], roots: list[Any], depth: int) -> None:
        levels: list[list[Alike]] = []
        self._parts.append(_Parts(owners, roots, levels))
        level = roots
        for _ in range(depth):
            level = list(itertools.compress(level, map(_CONTAINERS.__contains__, map(type, level))))
            known = by_identity(level)
            are_new = map(operator.not_, map(self._seen.__contains__, known))
            level = list(itertools.compress(known.values(), are_new))
            self._seen.update(known)
            kinds = dict.fromkeys(map(type, level))
            levels.append([Alike.of(kind, of_kind(kind, level) if len(kinds) > 1 else level) for kind in kinds])
            held = ((one.values or one.items) for one in levels[-1])
            level = list(itertools.chain.from_iterable(held))

    def changes(self) -> Changes:
        """The changes since, of containers with an owner. The owners are not kept alive."""
        found = {}
        for owner, path, container, contents in itertools.chain.from_iterable(map(_Parts.each, self._parts)):
            change = _change(owner, container, contents) if owner is not None else None
            if change is not None:
                found[id(owner), path] = change
        return found

    def apply(self, changes: Changes) -> None:
        """Make changes that were found between two other moments."""
        for owner, path, container, _held in (one for parts in self._parts if changes for one in parts.each()):
            change = changes.get((id(owner), path))
            if change is not None and change.owner() is owner:
                change.apply(container)

    @property
    def num_items(self) -> int:
        """How many objects all the containers hold."""
        return sum(len(one.items) for one in self._each_alike())

    def changed(self) -> list[tuple[Any, Any]]:
        """The containers that hold something else now, each with what it held."""
        found = [pair for alike in self._each_alike() for pair in alike.changed()]
        return found + [(one, before) for one, before in self._plain if not is_unchanged(before, one)]

    def contents_changed(self) -> list[tuple[Any, Any]]:
        """Those that are part of no noted object, and classes, that hold something else now; each with what it held."""
        alike = [pair for some in self._alike for pair in some.changed()]
        plain = [(one, before) for one, before in self._plain if not is_unchanged(before, one)]
        return alike + plain + [(one, before) for one, before in self._classes if not is_unchanged(before, vars(one))]

    def others_changed(self) -> list[Any]:
        """Objects such as arrays and functions that hold something else now."""
        return [one for one, differs in self._others if differs()]

    def noted(self) -> set[int]:
        """The identities of containers that are part of no noted object, and of classes."""
        containers = [one for some in self._alike for one in some.containers]
        return set(map(id, containers)) | {id(one) for one, _held in (*self._plain, *self._classes)}

    def num_references(self, one: Any) -> int:
        """How often this refers to an object, of what changes nothing when it is put back."""
        noted = sum(alike.num_references(id(one)) for alike in self._each_alike())
        plain = ((container, *contents_of(before)) for container, before in self._plain)
        arguments = (undo.args for undo in self._undo if isinstance(undo, functools.partial))
        return noted + sum(item is one for item in itertools.chain.from_iterable(itertools.chain(plain, arguments)))

    def references_to(self, known: Collection[int]) -> Counter[int]:
        """How often this refers to each of the objects with these identities, its parts and their owners included."""
        alike = ((one.containers, one.items, one.values) for one in self._each_alike())
        parts = ((one.owners, one.roots) for one in self._parts)
        plain = ([container, *contents_of(before)] for container, before in self._plain)
        arguments = [list(undo.args) for undo in self._undo if isinstance(undo, functools.partial)]
        inner = [one for args in arguments for one in args if type(one) is list]
        pairs = (one for some in inner for one in some if type(one) is tuple)
        return references_among(itertools.chain(*alike, *parts, plain, arguments, inner, pairs), known)

    def restore_one(self, one: Any) -> None:
        """Restore what a container held that changed since."""
        for container, before in self.changed():
            if container is one:
                fill(one, before)

    def _each_alike(self) -> Iterator[Alike]:
        return itertools.chain(self._alike, (one for parts in self._parts for level in parts.levels for one in level))

    def restore(self) -> None:
        """Restore the recorded contents where they differ now; at the end raise the last error there was.

        Parts that were noted last, and may hold copies of the run's, come first.
        """
        parts = (one for parts in reversed(self._parts) for level in parts.levels for one in level)
        alike = (*parts, *self._alike)
        changed = (pair for some in alike if not some.are_unchanged() for pair in some.pairs())
        for container, contents in itertools.chain(changed, self._plain):
            if not is_unchanged(contents, container):
                fill(container, contents)
        with contextlib.ExitStack() as stack:  # what lies over something else last, and none is left out for an error
            for undo in self._undo:
                stack.callback(undo)


def of_kind(kind: Any, containers: list[Any]) -> list[Any]:
    """Those that are of this type itself."""
    return list(itertools.compress(containers, map(operator.is_, map(type, containers), itertools.repeat(kind))))


def _restore_classes(objects: Sequence[Any], before: list[type]) -> None:
    if not all(map(operator.is_, map(type, objects), before)):
        for one, kind in zip(objects, before, strict=True):
            if type(one) is not kind:
                one.__class__ = kind


def addresses_in(items: list[Any]) -> bytes:
    """Which objects a list holds: CPython keeps their addresses one after the other, in a place that the last field
    but one of the list names (``PyListObject``)."""
    at = ctypes.c_size_t.from_address(id(items) + list.__basicsize__ - 2 * _WORD).value
    return ctypes.string_at(at, len(items) * _WORD)


def identities(items: list[Any]) -> list[int]:
    """``id`` of each, without the audit event that is raised by each call of it, and that takes ten times as long."""
    return memoryview(addresses_in(items)).cast("P").tolist()


def by_identity(items: list[Any]) -> dict[int, Any]:
    """Each object once, by its identity, in their order."""
    return dict(zip(identities(items), items, strict=True))


def contents_of(container: Any) -> Iterable[Any]:
    """The items of a container; of a dict its values."""
    return container.values() if isinstance(container, dict) else container


def is_unchanged(before: Any, now: Any) -> bool:
    """Whether a container holds the very objects that it held, in the same order."""
    if len(before) != len(now):
        return False
    if type(now) is set:
        return bool(now == set(before))
    if isinstance(now, (dict, MappingProxyType)):
        return all(map(operator.is_, before, now)) and all(map(operator.is_, before.values(), now.values()))
    return all(map(operator.is_, before, now))


def fill(container: Any, contents: Any) -> None:
    """Set a container's contents. Entries that stay are never missing meanwhile, as other threads may read them."""
    if isinstance(container, list):
        container[:] = contents
    elif isinstance(container, deque):
        container.clear()
        container.extend(contents)
    elif isinstance(container, set):
        container.intersection_update(contents)
        container.update(contents)
    else:
        for key in container.keys() - contents.keys():
            del container[key]
        container.update(contents)
        if not all(map(operator.is_, container, contents)):
            for key, value in contents.items():
                del container[key]
                container[key] = value


def _change(owner: Any, now: Any, before: Any) -> _Change | None:
    if isinstance(now, dict):
        changed = {key: value for key, value in now.items() if key not in before or before[key] is not value}
        lacking = frozenset(before.keys() - now.keys())
        return _Change(weakref.ref(owner), changed, lacking) if changed or lacking else None
    contents = list(now)
    is_same = len(contents) == len(before) and all(map(operator.is_, contents, before))
    return None if is_same else _Change(weakref.ref(owner), contents)
