"""Functions exchanged where modules hold them by name, for a while."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import compress
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from oom_magic.predict.isolation.patching import replaced_in_modules
from oom_magic.predict.isolation.reach import is_users_class, users_modules
from oom_magic.predict.isolation.snapshot import identities

_HOLDING_IN_DEFAULTS = (
    "tempfile",
    "pathlib",
    "pathlib._local",
    "pathlib._os",
    "glob",
    "multiprocessing.connection",
    "subprocess",
)
_NUMPYS_OPENERS: dict[Any, Any] = np.lib._datasource._file_openers._file_openers  # type: ignore[attr-defined]
_SETS = ("os",)  # its supports_dir_fd and the like are sets of functions
_TORCHS = "torch."  # thousands of classes, without any of the functions
# By the functions searched for, of modules of libraries, by identity: the number of names of those that hold none of
# them, and of others with the classes that do. The user's are searched each time: a name of theirs can be bound anew.
_without: dict[frozenset[int], dict[int, int]] = {}
_with: dict[frozenset[int], dict[int, tuple[int, list[type]]]] = {}


@contextmanager
def substituted(functions: Sequence[tuple[Any, Any]], namespaces: Sequence[dict[str, Any]] = ()) -> Iterator[None]:
    """Replace each first function by the second in all modules of the process and in ``namespaces``.

    Modules imported meanwhile get the first back at the end, too.
    """
    by_identity = {id(usual): stand_in for usual, stand_in in functions}
    namespaces = [*namespaces, _NUMPYS_OPENERS]
    undo: list[Callable[[], None]] = []
    known = set(sys.modules)
    try:
        holding = list(_holding(by_identity))
        for names in (*(names for names, _classes in holding), *namespaces):
            for name, value in _bound_to(by_identity, names):
                undo.append(partial(names.__setitem__, name, value))
                names[name] = by_identity[id(value)]
        serving = [vars(sys.modules[name]) for name in _HOLDING_IN_DEFAULTS if name in sys.modules]
        for classes in (*(classes for _names, classes in holding), *map(_classes_in, serving)):
            _exchange_in_classes(classes, by_identity, undo)
        _exchange_in_sets(by_identity, functions, undo)
        yield
    finally:
        for step in reversed(undo):
            step()
        back = {id(stand_in): usual for usual, stand_in in functions}
        new = [vars(one) for one in map(sys.modules.get, sys.modules.keys() - known) if isinstance(one, ModuleType)]
        for names in (*new, *namespaces):
            for name, value in _bound_to(back, names):
                names[name] = back[id(value)]


@contextmanager
def imported_names_followed(
    namespaces: Sequence[dict[str, Any]], held: Sequence[tuple[Any, Callable[[Any], object]]] = ()
) -> Iterator[None]:
    """What the user imported by name before (``from torch.cuda import synchronize``) is what stands in its module now.

    In ``namespaces``, the user's modules, their classes, defaults of their functions, and among functions that are
    ``held`` by objects, each with what sets another.
    """
    replaced = replaced_in_modules()
    by_identity = {key: stand_in for key, (_usual, stand_in) in replaced.items()}
    undo: list[Callable[[], None]] = []
    try:
        for names in {id(one): one for one in (*namespaces, *map(vars, users_modules()))}.values():
            for name, value in _bound_to(by_identity, names):
                undo.append(partial(_give_back, names, name, by_identity[id(value)], value))
                names[name] = by_identity[id(value)]
            for value in list(names.values()):
                _exchange_in_defaults(value, by_identity, undo)
            _exchange_in_classes([one for one in _classes_in(names) if is_users_class(one)], by_identity, undo)
        for usual, put in held:
            if id(usual) in by_identity:
                undo.append(partial(_put, put, usual))
                put(by_identity[id(usual)])
        yield
    finally:
        for step in reversed(undo):
            step()


def _give_back(names: dict[str, Any], name: str, stand_in: Any, usual: Any) -> None:
    if names.get(name) is stand_in:
        names[name] = usual


def _put(put: Callable[[Any], object], usual: Any) -> None:
    with suppress(IndexError):  # the run took items out: the whole list is put back
        put(usual)


def _bound_to(wanted: Mapping[int, Any], names: dict[str, Any]) -> list[tuple[str, Any]]:
    """The names that hold one of the ``wanted`` functions, with it."""
    items = list(names.items())
    return list(compress(items, map(wanted.__contains__, identities([value for _name, value in items]))))


def _holding(wanted: Mapping[int, Any]) -> Iterator[tuple[dict[str, Any], list[type]]]:
    """The names, and the classes, of modules that hold one of the ``wanted`` functions."""
    functions = frozenset(wanted)
    without, found = _without.setdefault(functions, {}), _with.setdefault(functions, {})
    modules = [one.__dict__ for one in list(sys.modules.values()) if isinstance(one, ModuleType)]
    lengths = list(map(len, modules))
    users = {id(one.__dict__) for one in users_modules()}
    places = identities(modules)
    is_new = map(operator.ne, map(without.get, places), lengths)
    for at, names, length in list(compress(zip(places, modules, lengths, strict=True), is_new)):
        known_length, classes = found.get(at, (0, []))
        if known_length == length and at not in users:
            yield names, classes
            continue
        is_torchs = str(names.get("__name__")).startswith(_TORCHS)
        classes = [] if is_torchs else [one for one in _classes_in(names) if _holds(one, wanted)]
        if not classes and wanted.keys().isdisjoint(identities(list(names.values()))):
            if at not in users:
                without[at] = length
        else:
            found[at] = length, classes
            yield names, classes


def _classes_in(names: dict[str, Any]) -> list[type]:
    return [one for one in list(names.values()) if issubclass(type(one), type)]


def _holds(kind: type, wanted: Mapping[int, Any]) -> bool:
    values = list(vars(kind).values())
    values += [one.__func__ for one in values if type(one) is staticmethod]
    return not wanted.keys().isdisjoint(identities(values))


def _exchange_in_classes(
    classes: Sequence[type], by_identity: Mapping[int, Any], undo: list[Callable[[], None]]
) -> None:
    """In attributes of classes (``scandir = staticmethod(os.scandir)``) and in defaults of their functions."""
    for owner in classes:
        for name, value in list(vars(owner).items()):
            function = value.__func__ if isinstance(value, staticmethod) else value
            if id(function) in by_identity:
                undo.append(partial(setattr, owner, name, value))
                setattr(owner, name, staticmethod(by_identity[id(function)]))
            else:
                _exchange_in_defaults(value, by_identity, undo)


def _exchange_in_defaults(value: Any, by_identity: Mapping[int, Any], undo: list[Callable[[], None]]) -> None:
    if isinstance(value, FunctionType) and any(id(one) in by_identity for one in value.__defaults__ or ()):
        defaults = value.__defaults__ or ()
        undo.append(partial(setattr, value, "__defaults__", defaults))
        value.__defaults__ = tuple(by_identity.get(id(one), one) for one in defaults)


def _exchange_in_sets(
    by_identity: Mapping[int, Any], functions: Sequence[tuple[Any, Any]], undo: list[Callable[[], None]]
) -> None:
    for module in _SETS:
        for value in list(vars(sys.modules[module]).values()):
            if isinstance(value, set):
                added = {stand_in for usual, stand_in in functions if usual in value}
                value |= added
                undo.append(partial(value.difference_update, added))
