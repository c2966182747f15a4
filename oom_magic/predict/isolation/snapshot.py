"""Contents of the user's containers, recorded to be restored in place."""

from __future__ import annotations

import builtins
import contextlib
import functools
import itertools
import operator
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_DICTS = (dict, OrderedDict, defaultdict)
_CONTAINERS = (*_DICTS, list, set, deque)
_AT_ONCE = 500  # containers that are compared in one step


@dataclass(frozen=True, slots=True)
class _Noted:
    """A container, its owner and path, and its contents."""

    owner: Any
    path: tuple[Hashable, ...]
    container: Any
    contents: Any


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
            items, values = map(list, _items_and_values(kind, containers))
            if len(items) == sum(lengths) and all(map(operator.eq, lengths, map(len, containers))):
                return cls(kind, containers, lengths, items, values)

    def are_unchanged(self) -> bool:
        """Whether each holds the very objects that it held, in the same order."""
        items, values = _items_and_values(self.kind, self.containers)
        return (
            all(map(operator.eq, self.lengths, map(len, self.containers)))
            and all(map(operator.is_, self.items, items))
            and all(map(operator.is_, self.values, values))
        )

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """The containers, each with what it held."""
        items, values = iter(self.items), iter(self.values)
        for container, length in zip(self.containers, self.lengths, strict=True):
            own = list(itertools.islice(items, length))
            yield (
                container,
                dict(zip(own, itertools.islice(values, length), strict=True)) if _is_dict(self.kind) else own,
            )


def _items_and_values(kind: Any, containers: list[Any]) -> tuple[Iterator[Any], Iterator[Any]]:
    chain = itertools.chain.from_iterable
    return chain(containers), chain(map(kind.values, containers)) if _is_dict(kind) else iter(())


def _is_dict(kind: Any) -> bool:
    return issubclass(kind, (dict, MappingProxyType))


Changes = dict[tuple[int, tuple[Hashable, ...]], _Change]  # by the identity of the owner, and the path in it


class Snapshot:
    """What some containers hold, nested ones included, to be put back in place."""

    def __init__(self, but: Collection[int] = ()) -> None:
        self._entries: list[_Noted] = []
        self._plain: list[tuple[Any, Any]] = []  # containers without an owner, and their contents
        self._alike: list[Alike] = []
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

    def add_undo(self, undo: Callable[[], object]) -> None:
        """Note what puts something else back; it can be called again."""
        self._undo.append(undo)

    def add(self, container: Any, depth: int, owner: Any = None, path: tuple[Hashable, ...] = ()) -> None:
        """Note ``container`` and the containers in it, ``depth`` levels deep. ``owner`` is the object it is part of."""
        if depth == 0 or type(container) not in _CONTAINERS or id(container) in self._seen:
            return
        self._seen.add(id(container))
        contents = dict(container) if isinstance(container, dict) else list(container)
        self._entries.append(_Noted(owner, path, container, contents))
        for key, item in contents.items() if isinstance(contents, dict) else enumerate(contents):
            if type(item) in _CONTAINERS:
                self.add(item, depth - 1, owner, (*path, key if type(key) in (str, int) else id(key)))

    def changes(self) -> Changes:
        """The changes since, of containers with an owner. The owners are not kept alive."""
        found = {}
        for one in self._entries:
            change = _change(one) if one.owner is not None else None
            if change is not None:
                found[id(one.owner), one.path] = change
        return found

    def apply(self, changes: Changes) -> None:
        """Make changes that were found between two other moments."""
        for one in self._entries if changes else ():
            change = changes.get((id(one.owner), one.path))
            if change is not None and change.owner() is one.owner:
                change.apply(one.container)

    def restore(self) -> None:
        """Restore the recorded contents where they differ now; at the end raise the last error there was."""
        changed = (pair for some in self._alike if not some.are_unchanged() for pair in some.pairs())
        chunks = (self._entries[at : at + _AT_ONCE] for at in range(0, len(self._entries), _AT_ONCE))
        noted = ((one.container, one.contents) for some in chunks if not _are_unchanged(some) for one in some)
        for container, contents in itertools.chain(self._plain, changed, noted):
            if not is_unchanged(contents, container):
                fill(container, contents)
        with contextlib.ExitStack() as stack:  # what lies over something else last, and none is left out for an error
            for undo in self._undo:
                stack.callback(undo)


def _are_unchanged(some: list[_Noted]) -> bool:
    """Whether each of some containers holds the very objects that it held; no step is Python's own for each."""
    containers, contents = [one.container for one in some], [one.contents for one in some]
    values = [[one.values() for one in all_of if isinstance(one, dict)] for all_of in (containers, contents)]
    chain = itertools.chain.from_iterable
    return (
        list(map(len, containers)) == list(map(len, contents))
        and all(map(operator.is_, chain(containers), chain(contents)))
        and all(map(operator.is_, *map(chain, values)))
    )


def _restore_classes(objects: Sequence[Any], before: list[type]) -> None:
    if not all(map(operator.is_, map(type, objects), before)):
        for one, kind in zip(objects, before, strict=True):
            if type(one) is not kind:
                one.__class__ = kind


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


def _change(noted: _Noted) -> _Change | None:
    before, now = noted.contents, noted.container
    if isinstance(now, dict):
        changed = {key: value for key, value in now.items() if key not in before or before[key] is not value}
        lacking = frozenset(before.keys() - now.keys())
        return _Change(weakref.ref(noted.owner), changed, lacking) if changed or lacking else None
    contents = list(now)
    is_same = len(contents) == len(before) and all(map(operator.is_, contents, before))
    return None if is_same else _Change(weakref.ref(noted.owner), contents)
