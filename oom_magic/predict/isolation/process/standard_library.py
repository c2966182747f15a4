"""The contents of the modules of Python's own library: names, attributes of classes, tables, objects with settings.

Any code can change them (``calendar.setfirstweekday``, ``mimetypes.add_type``, ``string.Template.delimiter``), and no
function returns all of it. So everything is recorded, and restored where it has changed. Modules imported meanwhile
stay, and so do their entries here. The origin of plain values cannot be told: new ones stay if the run imports a module
that is not Python's, unless only the user's code has their name. Caches stay, too, and whatever serves threads and
imports.
"""

from __future__ import annotations

import _abc  # type: ignore[import-not-found]
import abc
import builtins
import codecs
import encodings
import enum
import functools
import gc
import operator
import os
import re
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, compress
from pathlib import Path
from typing import Any

from oom_magic.predict.isolation.patching import patched, undone_at_the_end
from oom_magic.predict.isolation.process.users_words import users_words, words_of
from oom_magic.predict.isolation.reach import is_users, is_users_module
from oom_magic.predict.isolation.snapshot import Alike, addresses_in, by_identity, fill, identities, is_unchanged

_chain = chain.from_iterable
_NAMES = sys.stdlib_module_names
_DEEP = 4  # a table in a table in ...
_SERVING = frozenset(  # of these modules only the names
    (
        "abc asyncio atexit builtins concurrent ctypes enum gc importlib inspect linecache logging multiprocessing "
        "queue selectors signal site subprocess sys threading typing warnings weakref zipimport"
    ).split()
)
_DICTS = (dict, OrderedDict, defaultdict)
_TABLES = frozenset((*_DICTS, list, set))
_LEADING = _TABLES | {tuple}
_PLAIN = _LEADING | {str, bytes, int, float, bool, type(None)}
_LEADING_NOWHERE = frozenset((*(_PLAIN - _LEADING), types.FunctionType, types.BuiltinFunctionType))
_NAMED_BY_PYTHON = ("__ann", "__doc__", "__abstractmethods__", "__builtins__")  # on first use
_WRAPPING: dict[type, tuple[str, ...]] = {
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
    functools.partial: ("func",),
    functools.partialmethod: ("func",),
    functools.singledispatchmethod: ("func",),
    types.MethodType: ("__func__",),
}
_MADE_BY_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE: attributes of other classes cannot be set


def standard_library_noted() -> Callable[[], None]:
    """A function that restores the present state."""
    found = list(map(sys.modules.get, filter(_is_pythons_module, list(sys.modules))))
    modules = [one for one in found if isinstance(one, types.ModuleType)]
    names = Alike.of(dict, list(map(vars, modules)))
    noted = _library.noted(modules, names)
    return functools.partial(_restore, noted, _library.owners, frozenset(sys.modules), list(_SEARCH_FUNCTIONS))


@functools.cache
def _is_pythons_module(name: str) -> bool:
    return name.partition(".")[0] in _NAMES


class _Library:
    """Classes and tables of Python's own modules, searched for anew where names or tables hold something else."""

    def __init__(self) -> None:
        self._names = self._inside = b""
        self._classes: list[type] = []
        self._tables: dict[type, list[Any]] = {}
        self.owners: dict[int, Any] = {}

    def noted(self, modules: list[types.ModuleType], names: Alike) -> list[Alike]:
        """What the modules' ``names``, classes and tables hold."""
        held = _held([names])
        are_known = self._names == held
        if not are_known:
            self._classes = _classes(names.values)
        attributes = list(map(vars, self._classes))
        owned = identities([*names.containers, *attributes])
        self.owners = dict(zip(owned, [*modules, *self._classes], strict=True))
        tables = self._noted_tables()
        if not are_known or self._inside != _held(tables):
            of_classes = _chain(map(_tables_of_class, self._classes))
            self._tables = defaultdict(list)
            for table in _tables([vars(one) for one in modules if _is_walked(one)], of_classes):
                self._tables[type(table)].append(table)
            tables = self._noted_tables()
            self._names, self._inside = held, _held(tables)
        return [names, Alike.of(types.MappingProxyType, attributes), *tables]

    def _noted_tables(self) -> list[Alike]:
        return [Alike.of(kind, tables) for kind, tables in self._tables.items()]


_library = _Library()


def _held(noted: list[Alike]) -> bytes:
    """Which objects that lead to others some containers hold, and of what types: another may have the address of one
    that is gone."""
    values = list(_chain(_chain((some.items, some.values) for some in noted)))
    leading = list(compress(values, map(operator.not_, map(_LEADING_NOWHERE.__contains__, map(type, values)))))
    return addresses_in(leading) + addresses_in(list(map(type, leading)))


def _is_walked(module: types.ModuleType) -> bool:
    return module.__name__.partition(".")[0] not in _SERVING


def _classes(values: list[Any]) -> list[type]:
    """The library's own among values of its modules, but for old names that warn when they are compared (in typing)."""
    kinds = {kind for kind in set(map(type, values)) if issubclass(kind, type) and kind.__eq__ is type.__eq__}
    found = compress(values, map(kinds.__contains__, map(type, values)))
    return [one for one in dict.fromkeys(found) if _is_own(one)]


def _is_own(kind: type) -> bool:
    """Whether it is a class of the library with settable attributes, and no list of constants."""
    is_library = str(kind.__module__).partition(".")[0] in sys.stdlib_module_names
    return is_library and bool(kind.__flags__ & _MADE_BY_PYTHON) and not issubclass(kind, enum.Enum)


@functools.lru_cache(maxsize=8192)
def _tables_of_class(kind: type) -> list[Any]:
    """Such as that of functions with which ``pickle`` and ``pprint`` take objects apart."""
    if kind.__module__.partition(".")[0] in _SERVING:
        return []
    return [value for name, value in vars(kind).items() if type(value) in _LEADING and not name.startswith("__")]


def _tables(modules: list[dict[str, Any]], others: Iterable[Any]) -> list[Any]:
    """The tables that names of modules and ``others`` lead to, and the attributes of their objects."""
    names, values = list(_chain(modules)), list(_chain(map(dict.values, modules)))
    kinds = {kind for kind in set(map(type, values)) if kind in _LEADING or _has_settings(kind)}
    chosen = compress(zip(names, values, strict=True), map(kinds.__contains__, map(type, values)))
    level = [
        value if type(value) in _LEADING else vars(value)
        for name, value in chosen
        if "cache" not in name and name != "__builtins__"
    ]
    level += others
    found: dict[int, Any] = {}
    for _ in range(_DEEP):
        every = by_identity(level)
        new = {known: one for known, one in every.items() if known not in found}
        found |= new
        dicts = [one for one in new.values() if isinstance(one, dict)]
        others = [one for one in new.values() if not isinstance(one, dict)]
        values = [*_chain(map(dict.values, dicts)), *_chain(others)]
        level = list(compress(values, map(_LEADING.__contains__, map(type, values))))
    return [_ERROR_HANDLERS, *(one for one in found.values() if type(one) is not tuple)]


def _has_settings(kind: type) -> bool:
    """Whether objects of a class have attributes in a dict, and are not what serves something else."""
    home = str(kind.__module__).partition(".")[0]
    is_serving = home in _SERVING or issubclass(kind, (type, types.ModuleType, types.FunctionType))
    return _is_own(kind) and bool(kind.__dictoffset__) and not is_serving


def _restore(noted: list[Alike], owners: dict[int, Any], known: Collection[str], search_functions: list[Any]) -> None:
    staying = Staying(known)
    for some in noted:
        for now, before in [] if some.are_unchanged() else some.pairs():
            if not is_unchanged(before, now):
                owner = owners.get(id(now))
                are_pythons = owner is sys or owner is builtins  # plain ones mean something: sys.tracebacklimit
                restore_one(now, before, owner, staying.is_entry if are_pythons else staying.may_be_entry)
    for function in list(_SEARCH_FUNCTIONS):
        if function not in search_functions and not staying.is_importeds(function):
            codecs.unregister(function)


def restore_one(now: Any, before: Any, owner: Any, stays: Callable[[Any, Any], bool]) -> None:
    """Put back what a table held; ``owner`` has it as its attributes. Of what is new stays what ``stays`` says of its
    name and itself."""
    if owner is not None:
        put, drop = functools.partial(setattr, owner), functools.partial(delattr, owner)
        _restore_names(now, before, put, drop, stays)
    elif isinstance(now, dict):
        _restore_names(now, before, now.__setitem__, now.__delitem__, stays)
    else:
        old = set(map(id, before))
        fill(now, [*before, *(one for one in now if id(one) not in old and stays(one, one))])


@contextmanager
def subclasses_taken_out() -> Iterator[None]:
    """At the end no class of the user's is registered with an abstract one (``Number.register(Mine)``)."""
    usual, done = abc.ABCMeta.register, []

    def register(kind: abc.ABCMeta, subclass: type) -> type:
        if any(map(is_users, (kind, subclass))) and not issubclass(subclass, kind):
            done.append(functools.partial(_unregister, kind, subclass))
        return usual(kind, subclass)

    def undo() -> None:
        for one in reversed(done):
            one()

    with undone_at_the_end([undo]), patched(abc.ABCMeta, {"register": register}):
        yield


def _unregister(kind: abc.ABCMeta, subclass: type) -> None:
    registered = [reference() for reference in _abc._get_dump(kind)[0]]
    _abc._reset_registry(kind)
    for one in registered:
        if one is not None and one is not subclass:
            _abc._abc_register(kind, one)
    for base in kind.__mro__:
        if isinstance(base, abc.ABCMeta):
            _abc._reset_caches(base)


class Staying:
    """Which new entries stay: those of modules that were imported meanwhile."""

    def __init__(self, known: Collection[str]) -> None:
        self._known = known

    @functools.cached_property
    def has_imported(self) -> bool:
        """Whether a library was imported meanwhile."""
        return any(name.partition(".")[0] not in _NAMES for name in sys.modules.keys() - self._known)

    def is_importeds(self, value: Any) -> bool:
        """Whether something is a module that was imported meanwhile, or belongs to one."""
        if isinstance(value, types.ModuleType):
            return sys.modules.get(getattr(value, "__name__", "")) is value  # %run empties its own
        home = home_of(value)
        return isinstance(home, str) and home in sys.modules and home not in self._known

    def is_entry(self, name: Any, value: Any) -> bool:
        """Whether the entry of a table is such a module's."""
        return self.is_importeds(value)

    def may_be_entry(self, name: Any, value: Any) -> bool:
        """Whether it may be: any plain value, if a library was imported, unless only the user's code has its name."""
        if type(value) in _PLAIN and self.has_imported:
            return not self.is_users_name(name)
        return self.is_importeds(value)

    def is_users_name(self, name: Any) -> bool:
        """Whether a name is in the user's code, and in no library's that was imported meanwhile."""
        words = words_of(name) if type(name) is str else set()
        return bool(words) and words <= self._words and not self.is_importeds_name(name)

    def is_importeds_name(self, name: str) -> bool:
        """Whether a name is in the code of a library that was imported meanwhile."""
        sought = name.encode(errors="replace")
        entire = re.compile(rb"(?<!\w)%s(?!\w)" % re.escape(sought))
        return any(sought in text and entire.search(text) for text in self._imported)  # the former is a hundredth

    @functools.cached_property
    def _words(self) -> set[str]:
        return users_words()

    @functools.cached_property
    def _imported(self) -> list[bytes]:
        """The files of the libraries' modules that were imported meanwhile, and those modules' names."""
        names = [name for name in sys.modules.keys() - self._known if name.partition(".")[0] not in _NAMES]
        modules = [sys.modules[name] for name in names if not is_users_module(sys.modules[name])]
        files = {str(getattr(module, "__file__", None)) for module in modules}
        return [" ".join(names).encode(), *(Path(file).read_bytes() for file in files if os.path.isfile(file))]


def home_of(value: Any) -> Any:
    """The module that something belongs to; a wrapper of a function, such as a cache or a property, belongs to the
    function's."""
    for name in _WRAPPING.get(type(value), ()):
        if getattr(value, name) is not None:
            return home_of(getattr(value, name))
    if isinstance(value, types.BuiltinMethodType) and value.__module__ is None:  # a list's, say
        return type(value.__self__).__module__
    has_home = isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType))
    own = None if has_home or type(value).__dictoffset__ == 0 else object.__getattribute__(value, "__dict__")
    return own["__module__"] if own and "__module__" in own else (value if has_home else type(value)).__module__


def is_pythons(function: Any) -> bool:
    """Whether a function is of Python's own library."""
    return str(home_of(function)).partition(".")[0] in _NAMES


def _restore_names(
    now: Any,
    before: Any,
    put: Callable[[Any, Any], object],
    drop: Callable[[Any], object],
    stays: Callable[[Any, Any], bool],
) -> None:
    for name, value in list(now.items()):
        if before.get(name, now) is value or (isinstance(name, str) and name.startswith(_NAMED_BY_PYTHON)):
            continue
        if name not in before and not stays(name, value):
            drop(name)
        elif name in before and (type(value) in _PLAIN or not stays(name, value)):
            put(name, before[name])
    for name in before.keys() - now.keys():
        put(name, before[name])


# -- what only the collector shows ----------------------------------------------


def _containers_of(one: Any, kind: type) -> Iterator[Any]:
    """The containers that hold an object, except frozen ones, which the collector does not show."""
    return (container for container in gc.get_referrers(one) if type(container) is kind)


def _found_error_handlers() -> dict[str, Any]:
    """The table that ``codecs.register_error`` fills, ``codec_error_registry`` in CPython's Python/codecs.c."""
    tables = _containers_of(codecs.strict_errors, dict)
    return next((one for one in tables if one.get("strict") is codecs.strict_errors), {})


def _found_search_functions() -> list[Callable[..., Any]]:
    """The list that ``codecs.register`` fills, ``codec_search_path``."""
    lists = _containers_of(encodings.search_function, list)
    return next((one for one in lists if one and all(map(callable, one))), [])


_ERROR_HANDLERS = _found_error_handlers()
_SEARCH_FUNCTIONS = _found_search_functions()
