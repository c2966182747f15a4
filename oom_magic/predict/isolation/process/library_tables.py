"""What the run registers with libraries: entries of their tables, names in their modules, methods of their classes.

``register_pytree_node`` refuses a class that it knows, so the run's registration would end the user's own. Libraries
fill tables of their own as well, which they must find again. So only the user's entries are removed: their classes,
functions and objects, and entries whose names are in their code (``ACT2FN["mine"] = nn.ReLU``), but in no module that
the run imports. Tensors are removed, too: they are on the pretend GPU.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

from oom_magic.predict.isolation.process.standard_library import Staying
from oom_magic.predict.isolation.process.users_words import users_words
from oom_magic.predict.isolation.reach import NOT_WALKED, is_users, is_users_module
from oom_magic.predict.isolation.snapshot import Alike, addresses_in, identities, is_unchanged

_KEPT = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx.experimental")  # by compiling
_OF_BACKENDS = "torch._dynamo.backends.registry"
_SERVING = (sys.stdlib_module_names | NOT_WALKED) - {"matplotlib"}  # of Python's ``standard_library`` sees to more
_TABLES = (dict, OrderedDict, defaultdict, list, set)
_PLAIN = (*_TABLES, types.MappingProxyType)
_AT_ONCE = 100  # how many tables are compared one by one once one of them has changed
_MADE_BY_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE: attributes of other classes cannot be set


def registrations_noted() -> Callable[[], None]:
    """A function that removes what was registered since."""
    words = _libraries.look()
    named = words & _libraries.classes.keys()
    classes = list({*_pytorchs_classes(), *(kind for name in named for kind in _libraries.classes[name])})
    attributes = list(map(vars, classes))
    noted = [Alike.of(kind, some) for kind, some in _libraries.tables]
    noted += [Alike.of(types.MappingProxyType, some) for some in _in_parts(attributes)]
    others = [(one, _items(one)) for one in _libraries.others]
    members = [(one, set(one.data)) for one in _libraries.weak]
    owners = dict(zip(identities(attributes), classes, strict=True))
    return functools.partial(_restore, noted, others, members, owners, frozenset(sys.modules))


class _Libraries:
    """Tables and classes of PyTorch and of those libraries that the user's code names.

    They are gathered anew where modules were imported or have more names.
    """

    def __init__(self) -> None:
        self._addresses = b""  # of all modules
        self._by_package: dict[str, list[types.ModuleType]] = {}
        self._lengths: list[int] = []
        self._modules: list[types.ModuleType] = []
        self.tables: list[tuple[Any, list[Any]]] = []  # by type, some at once
        self.others: list[Any] = []  # of types made from these
        self.weak: list[Any] = []  # WeakSets, such as the one that knows tqdm's open bars
        self.classes: dict[str, list[type]] = {}  # by name

    def look(self) -> set[str]:
        """Update the tables; returns the words of the user's code."""
        everything = list(sys.modules.values())
        addresses = addresses_in(everything)
        if addresses != self._addresses:
            self._addresses = addresses
            self._by_package = {}
            for module in filter(_is_librarys, everything):
                self._by_package.setdefault(_package(module), []).append(module)
        words = users_words()
        packages = sorted(words & self._by_package.keys() | {"torch"})
        modules = list(chain.from_iterable(map(self._by_package.__getitem__, packages)))
        lengths = list(map(len, map(vars, modules)))
        if modules != self._modules or lengths != self._lengths:
            self._modules, self._lengths = modules, lengths
            self._gather()
        return words

    def _gather(self) -> None:
        names = list(map(vars, self._modules))
        found = {id(one): one for one in chain(names, [linecache.cache], *map(_tables_of, self._modules))}
        by_kind = [(kind, [one for one in found.values() if type(one) is kind]) for kind in _TABLES]
        self.tables = [(kind, part) for kind, some in by_kind for part in _in_parts(some)]
        self.others = [one for one in found.values() if type(one) not in (*_TABLES, weakref.WeakSet)]
        self.weak = [one for one in found.values() if type(one) is weakref.WeakSet]
        self.classes = {}
        for kind in chain.from_iterable(map(_classes_of, self._modules)):
            self.classes.setdefault(kind.__name__, []).append(kind)


_libraries = _Libraries()


def _in_parts(some: list[Any]) -> Iterator[list[Any]]:
    return (some[at : at + _AT_ONCE] for at in range(0, len(some), _AT_ONCE))


def _is_librarys(module: Any) -> bool:
    """Whether it is a library's module, and none that serves the notebook. Anything can stand among the modules."""
    if not issubclass(type(module), types.ModuleType):
        return False
    return _package(module) not in _SERVING and not is_users_module(module)


@functools.cache
def _pytorchs_classes() -> list[type]:
    """PyTorch's classes that users know, of those that are made by Python."""
    homes = (torch, torch.nn, torch.optim, torch.optim.lr_scheduler, torch.utils.data)
    classes = {one for home in homes for one in vars(home).values() if isinstance(one, type)}
    return [one for one in classes if _package(one) == "torch" and one.__flags__ & _MADE_BY_PYTHON]


def _classes_of(module: types.ModuleType) -> list[type]:
    """The classes that a module defines."""
    kinds = [one for one in list(vars(module).values()) if issubclass(type(one), type)]
    return [one for one in kinds if one.__module__ == module.__name__ and one.__flags__ & _MADE_BY_PYTHON]


def _tables_of(module: types.ModuleType) -> Iterator[Any]:
    """A module's dicts, lists and sets, and those in its objects and classes."""
    if module.__name__.startswith(_KEPT) and module.__name__ != _OF_BACKENDS:
        return
    for name, value in list(vars(module).items()):
        kind = type(value)
        if issubclass(kind, (dict, list, set)) and name[:2] != "__":
            yield value
        if issubclass(kind, threading.local):  # settings of this thread
            yield from (one for one in (vars(value), *vars(value).values()) if type(one) in _TABLES)
        home = str(kind.__module__).partition(".")[0]
        if kind.__dictoffset__ and home not in _SERVING and not issubclass(kind, (type, types.ModuleType)):
            with contextlib.suppress(AttributeError):
                own = object.__getattribute__(value, "__dict__")
                yield from (one for one in own.values() if type(one) in _TABLES)
    for one in _classes_of(module):
        some = (*_TABLES, weakref.WeakSet)
        yield from (value for name, value in vars(one).items() if type(value) in some and name[:2] != "__")


def _items(table: Any) -> Any:
    """What a table holds, read past its own class's methods."""
    if isinstance(table, (dict, types.MappingProxyType)):
        base: Any = type(table) if type(table) in _PLAIN else dict
        return dict(zip(base.keys(table), base.values(table), strict=True))
    return list((list if isinstance(table, list) else set).__iter__(table))


def _restore(
    noted: list[Alike],
    others: list[tuple[Any, Any]],
    members: list[tuple[Any, set[weakref.ref[Any]]]],
    owners: dict[int, type],
    known: frozenset[str],
) -> None:
    for weak, before in members:
        weak.data ^= {one for one in weak.data ^ before if one() is not None}
    users = _Users(known)
    changed = (pair for some in noted if not some.are_unchanged() for pair in some.pairs())
    for now, before in chain(changed, others):
        items = _items(now)
        if is_unchanged(before, items):
            continue
        if isinstance(items, dict):
            _restore_names(now, items, before, owners.get(id(now)), users)
        else:
            old = set(map(id, before))
            for one in [one for one in items if id(one) not in old and users.have_put(one, one)]:
                now.remove(one)


def _restore_names(now: Any, items: dict[Any, Any], before: dict[Any, Any], owner: Any, users: _Users) -> None:
    base = OrderedDict if isinstance(now, OrderedDict) else dict
    put: Any = functools.partial(base.__setitem__, now) if owner is None else functools.partial(setattr, owner)
    drop: Any = functools.partial(base.__delitem__, now) if owner is None else functools.partial(delattr, owner)
    for name, value in items.items():
        is_new = name not in before
        if (not is_new and before[name] is value) or _is_hooked(value, before.get(name)):
            continue
        if users.have_put(name, value) or (not is_new and users.have_replaced(before[name], value)):
            drop(name) if is_new else put(name, before[name])


def _is_hooked(value: Any, before: Any) -> bool:
    """Whether it is the optimizers' step of ``before`` inside PyTorch's hooks, which the first one that is made puts
    there for all (``Optimizer._patch_step_function``)."""
    if not isinstance(value, types.FunctionType) or vars(value).get("hooked") is not True or is_users(value):
        return False
    return before is None or vars(value).get("__wrapped__") is before


class _Users:
    """Recognizes what the user's code has put into libraries."""

    def __init__(self, known: frozenset[str]) -> None:
        self._staying = Staying(known)

    def have_put(self, name: Any, value: Any) -> bool:
        """Whether the user's code put ``value`` there, under ``name``."""
        names, values = ((one if type(one) is tuple else (one,)) for one in (name, value))
        if any(is_users(one) or isinstance(one, torch.Tensor) for one in (*names, *values)):
            return True
        if isinstance(value, types.ModuleType) or self._staying.is_importeds(value):
            return False
        return any(map(self._staying.is_users_name, names))

    def have_replaced(self, before: Any, value: Any) -> bool:
        """Whether something stands in place of a function or class of a library that is not of the same one.

        DeepSpeed does so with ``F.linear``. What PyTorch itself replaces, on first use, stays.
        """
        home = _package(before)
        is_others = callable(before) and (_package(value) or home) != home
        return is_others and (home == "torch" or not self._staying.is_importeds(value))


def _package(one: Any) -> str:
    """The package of a module, or of something in one."""
    name = vars(one).get("__name__") if issubclass(type(one), types.ModuleType) else getattr(one, "__module__", None)
    return str(name or "").partition(".")[0]
