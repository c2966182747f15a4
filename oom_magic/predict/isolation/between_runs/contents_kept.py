"""What a dry run leaves in the user's containers, objects and classes, for the session's next run.

Numbers, words and the like are there again (``cfg.batch_size = 64``), but only where nothing else has changed under the
same variables: an object of which a part is as the run left it may be one that cannot be, such as a buffer that counts
what it no longer holds. Other changes are not kept, and are told where a later run reads the variable.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from oom_magic.language import _
from oom_magic.predict.isolation.objects.copies import FUNCTIONS, Copies
from oom_magic.predict.isolation.objects.members import PLAIN
from oom_magic.predict.isolation.objects.users_objects import OF_SHELL
from oom_magic.predict.isolation.reach import is_users_class
from oom_magic.predict.isolation.snapshot import Snapshot, fill, is_unchanged

_ABSENT = object()
_DEEPEST, _MOST = 4, 2_000  # how far, and how much, is looked through under a variable
_DICTS = (dict, OrderedDict, defaultdict)
_ROWS = (list, tuple, set, deque)
_KEPT_OTHERWISE = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.Tensor)


@dataclass(frozen=True, slots=True)
class _Difference:
    """What has changed in a container or class: by key; of a list, a set or a deque all that it held and holds."""

    container: Any
    before: Any
    now: Any
    is_variable: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether only numbers, words and the like have changed."""
        if isinstance(self.now, dict):
            changed: Iterable[Any] = itertools.chain(self.before.values(), self.now.values())
            return all(one is _ABSENT or type(one) in PLAIN for one in changed)
        before, now = ({id(one): one for one in some} for some in (self.before, self.now))
        return all(type(one) in PLAIN for key, one in (before | now).items() if not (key in before and key in now))

    @property
    def is_as_before(self) -> bool:
        """Whether the user has not changed it since then."""
        if not isinstance(self.now, dict):
            return is_unchanged(self.before, self.container)
        contents = vars(self.container) if isinstance(self.container, type) else self.container
        return all(contents.get(key, _ABSENT) is value for key, value in self.before.items())

    @classmethod
    def of_other(cls, one: Any) -> _Difference:
        """Of an object that is not kept, such as an array: what it holds is not looked at."""
        return cls(one, [_ABSENT], [one])

    def by_variable(self) -> dict[str, _Difference]:
        """What has changed in a namespace, each variable alone."""
        return {
            name: _Difference(self.container, {name: self.before[name]}, {name: value}, True)
            for name, value in self.now.items()
            if not OF_SHELL.fullmatch(name)
        }

    def written(self, where: str) -> str:
        """How code writes what has changed, in what it writes as ``where``."""
        if not isinstance(self.now, dict):
            return where
        key = next(key for key, value in self.now.items() if not {type(value), type(self.before[key])} <= PLAIN)
        return f"{where}{key}" if where.endswith(".") or self.is_variable else f"{where}[{key!r}]"

    def make(self) -> None:
        """Change the container as the run did."""
        if not isinstance(self.now, dict):
            fill(self.container, self.now)
            return
        for key, value in self.now.items():
            if isinstance(self.container, type):
                setattr(self.container, key, value) if value is not _ABSENT else delattr(self.container, key)
            elif value is _ABSENT:
                self.container.pop(key, None)
            else:
                self.container[key] = value


class ContentsKept:
    """What the last run of a session left, and what this one began with."""

    def __init__(self, origin: ContentsKept | None = None) -> None:
        self._left: list[_Difference] = [] if origin is None else origin._begun
        self._begun: list[_Difference] = []
        self._lost: dict[str, tuple[int, str]] = {}  # by variable: its value's identity, and what changed in it
        self.names_read: frozenset[str] = frozenset()  # by the code of the run that is to come

    def begin(self, snapshot: Snapshot, above: Collection[dict[str, Any]]) -> None:
        """Make again what the last run left, of what this snapshot is going to put back; of variables also in the
        dictionaries ``above``, which the code sees."""
        noted = snapshot.noted() if self._left else set()
        self._begun = [one for one in self._left if id(one.container) in noted and one.is_as_before]
        for one in self._begun:
            one.make()
            for names in above if one.is_variable else ():
                replace(one, container=names).make()

    def end(
        self,
        snapshot: Snapshot,
        namespaces: Collection[dict[str, Any]],
        copies: Copies,
        ahead: Collection[Any],
        assume: Callable[[str], None],
        is_whole: bool,
    ) -> None:
        """Note what the run leaves, unless it failed: it may be tried again. ``ahead`` are those of its ``copies`` of
        iterators from which it took something.

        What earlier ones changed in what it has read is told where it is not kept.
        """
        under = _under(namespaces, snapshot, copies.has_made, ahead)
        lost = {name for name, some in under.items() if not all(one.is_plain for one, _where in some)}
        mixed = {id(one) for name in lost for one, _where in under[name]}
        named = {id(one): one for some in under.values() for one, _where in some}
        self._left = [one for key, one in named.items() if key not in mixed] if is_whole else self._begun
        values = {name: id(copies.original(value)) for names in namespaces for name, value in names.items()}
        taken = set(map(id, ahead))  # as an earlier run did: where that began, and not where it ended
        again = {name for name, some in under.items() if any(id(one.container) not in taken for one, _where in some)}
        earlier = {name: seen for name, seen in self._lost.items() if values.get(name) == seen[0] and name not in again}
        self._tell(earlier, assume)
        self._lost = earlier | {name: (values[name], _first_lost(under[name])) for name in lost if name in values}

    def _tell(self, lost: Mapping[str, tuple[int, str]], assume: Callable[[str], None]) -> None:
        for name in sorted(self.names_read.intersection(lost)):
            assume(
                _(
                    "`{part}` is as your notebook has it: what an earlier dry run changed there is not kept; do it in"
                    " this cell, too",
                    part=lost[name][1],
                )
            )


def _first_lost(found: list[tuple[_Difference, str]]) -> str:
    return next(one.written(where) for one, where in found if not one.is_plain)


def _difference(container: Any, before: Any, has_made: Callable[[Any], bool]) -> _Difference | None:
    """What has changed, but for what stands in for the user's iterators and functions while a run lasts."""
    if isinstance(container, (dict, type)):
        contents = vars(container) if isinstance(container, type) else container
        now = {key: contents.get(key, _ABSENT) for key in {**before, **contents}}
        changed = {
            key: value
            for key, value in now.items()
            if before.get(key, _ABSENT) is not value and not has_made(value) and not _is_hidden(key, value)
        }
        return _Difference(container, {key: before.get(key, _ABSENT) for key in changed}, changed) if changed else None
    items = list(container)
    if any(map(has_made, items)) or is_unchanged(list(before), items):
        return None
    return _Difference(container, list(before), items)


def _is_hidden(key: Any, value: Any) -> bool:
    """Python's own attributes, and functions, which have a stand-in while a run lasts."""
    return (type(key) is str and key.startswith("__")) or type(value) in FUNCTIONS


def _under(
    namespaces: Collection[dict[str, Any]],
    snapshot: Snapshot,
    has_made: Callable[[Any], bool],
    ahead: Collection[Any],
) -> dict[str, list[tuple[_Difference, str]]]:
    """What has changed under each variable, with how it is written."""
    differences = (_difference(*pair, has_made) for pair in snapshot.contents_changed())
    others = map(_Difference.of_other, itertools.chain(snapshot.others_changed(), ahead))
    changed = {id(one.container): one for one in itertools.chain(differences, others) if one is not None}
    own = [changed.pop(id(names)) for names in namespaces if id(names) in changed]
    found: dict[str, list[tuple[_Difference, str]]] = {}
    for name, one in (item for some in own for item in some.by_variable().items()):
        found.setdefault(name, []).append((one, ""))
    for name, value in itertools.chain.from_iterable(list(names.items()) for names in namespaces if changed):
        if not OF_SHELL.fullmatch(str(name)):
            some = [(changed[key], where) for key, where in _containers_under(value, name) if key in changed]
            if some:
                found.setdefault(name, []).extend(some)
    return found


def _containers_under(root: Any, name: str) -> Iterator[tuple[int, str]]:
    """The identities of the containers and classes that a value leads to, each with how it is written."""
    seen: set[int] = set()
    level = [(root, name)]
    for _depth in range(_DEEPEST):
        below: list[tuple[Any, str]] = []
        for one, where in level:
            if len(seen) > _MOST:
                return
            is_leaf = type(one) in PLAIN or id(one) in seen or issubclass(type(one), _KEPT_OTHERWISE)
            if is_leaf or _is_of_shell(type(one)):
                continue
            seen.add(id(one))
            yield id(one), f"{where}." if issubclass(type(one), type) else where
            attributes = _attributes(one)
            yield id(attributes), f"{where}."
            below += _items(one, where)
            below += ((value, f"{where}.{key}") for key, value in list(attributes.items()))
            if is_users_class(type(one)):
                below.append((type(one), type(one).__name__))
        level = below


def _is_of_shell(kind: type) -> bool:
    """Such as ``exit``, which leads to all variables."""
    return str(kind.__module__).startswith("IPython.")


def _items(one: Any, where: str) -> list[tuple[Any, str]]:
    if type(one) in _DICTS:
        return [(value, f"{where}[{key!r}]" if type(key) in (str, int) else where) for key, value in list(one.items())]
    return [(item, f"{where}[{at}]") for at, item in enumerate(list(one))] if type(one) in _ROWS else []


def _attributes(one: Any) -> dict[str, Any]:
    """An object's attributes, without running code of its class; of a class and a module none."""
    found = None
    with contextlib.suppress(AttributeError):
        found = object.__getattribute__(one, "__dict__")
    return found if type(found) is dict and not issubclass(type(one), ModuleType) else {}
