"""State of the user's objects besides tensors that a dry run may change: attributes, classes, arrays, tables, caches.

Objects are found from the user's names and modules, but not from the closure of the function itself: rehearsed code may
return something to its caller that way. Of iterators the run has copies (``copies``); what is taken
from one that cannot be copied, such as a generator, is gone, and said.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import functools
import gc
import logging
import operator
import re
import sys
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, compress
from typing import Any

import torch

from oom_magic.language import _
from oom_magic.predict.isolation.live_objects import LiveObjects
from oom_magic.predict.isolation.objects.copies import FUNCTIONS, Copies, has_copy, set_items
from oom_magic.predict.isolation.objects.iterators import Iterators, is_iterator
from oom_magic.predict.isolation.objects.members import (
    PLAIN,
    Notes,
    noted_function,
    noted_slots,
    of_class,
    restore_attribute,
    restore_class,
)
from oom_magic.predict.isolation.objects.restorations import restoration_of
from oom_magic.predict.isolation.reach import NOT_WALKED, is_users, is_users_class, is_users_module, users_modules
from oom_magic.predict.isolation.snapshot import Snapshot, by_identity, identities, is_unchanged, of_kind
from oom_magic.user_code import is_users_file

MOST_OBJECTS, _MOST_ITEMS = 25_000, 100
_AT_ONCE = 1_000  # this many stay in the processor's cache while several questions are asked about each
_OF_A_LEVEL = 20  # the least that a level takes of these, however little is in it
_MOST_COPIED_BYTES = 1 << 27
_NO_OBJECTS = (types.CodeType, types.FrameType, types.TracebackType)
_SINCE_3_11 = filter(None, [getattr(asyncio, "Barrier", None)])
_WALKED_ALL_THE_SAME = (
    threading.Event, threading.Semaphore, threading.BoundedSemaphore, threading.Condition, threading.Barrier,
    logging.Formatter, logging.PercentStyle, logging.Filter, logging.Handler, logging.LoggerAdapter,
    asyncio.Lock, asyncio.Event, asyncio.Condition, asyncio.Semaphore, asyncio.Queue, *_SINCE_3_11,
)  # fmt: skip
_OF_PYTHON = ("asyncio", "logging", "threading")
_OF_MODULES = frozenset(vars(torch.nn.Module()))  # noted with all modules that are alive
_NOT_WALKED = NOT_WALKED - {"matplotlib"}  # figures are the user's
_WITHOUT_OBJECTS = frozenset(("torch", "numpy", *NOT_WALKED))  # libraries whose modules have no objects to change
_CONTAINERS = (list, dict, set, deque, OrderedDict)
_SETTINGS = frozenset((str, int, float, bool, type(None)))  # most settings of libraries
_OF_EXCEPTIONS = ("__suppress_context__", "args", "__cause__", "__context__", "__traceback__")  # the last first
# ``torch.ops.aten`` and its like fill themselves. PyTorch's core refers to what it found there, and does not count it.
_OF_OPERATORS = "torch._ops"
_WALKED = frozenset((*_CONTAINERS, tuple, type, types.FunctionType, types.ModuleType))
_CODES: dict[type, str] = {
    types.GeneratorType: "gi_code",
    types.CoroutineType: "cr_code",
    types.AsyncGeneratorType: "ag_code",
}
_ALIKE = frozenset((*_CONTAINERS, defaultdict, tuple))


def note_users_objects(
    notes: Notes, roots: Sequence[Iterable[Any]], not_ours: set[int], copies: Copies, iterators: Iterators
) -> bool:
    """Note what each of ``roots`` leads to, but nothing with an identity in ``not_ours``; what holds an iterator gets
    a copy. However much one root leads to, the next is looked at. Whether all was noted."""
    walk = _Walk(notes, copies, set(not_ours), iterators)
    are_whole = [walk.go(list(root)) for root in roots]
    return all(are_whole)


class _Walk:
    """A breadth-first walk over references, many at once instead of one per Python step; long containers come last."""

    def __init__(self, notes: Notes, copies: Copies, seen: set[int], iterators: Iterators) -> None:
        self._notes = notes
        self._copies = copies
        self._iterators = iterators
        self._seen = seen
        self._room = _MOST_COPIED_BYTES
        self._long: list[Any] = []  # what long containers hold
        self._are_plain: dict[type, bool] = {}  # objects of the class have attributes, and nothing else

    def go(self, level: list[Any]) -> bool:
        """Record everything that a level leads to; returns whether that was all."""
        left = MOST_OBJECTS
        while level or self._long:
            if not level:
                level, self._long = self._long, []
            below: list[Any] = []
            enough = left - _OF_A_LEVEL
            for at in range(0, len(level), _AT_ONCE):
                new = self._new(level[at : at + _AT_ONCE])
                below += self._below(new[:left])
                if len(new) > left:
                    self._long = []
                    return False
                left -= len(new)
            left, level = max(min(left, enough), 0), below
        return True

    def _new(self, level: list[Any]) -> list[Any]:
        """The objects of a level that are new, and can be changed or lead to others."""
        level = list(compress(level, map(operator.not_, map(PLAIN.__contains__, map(type, level)))))
        ids = identities(level)
        num_seen = len(self._seen)
        if not self._seen.isdisjoint(ids):
            found = dict(zip(ids, level, strict=True))
            level = list(compress(found.values(), map(operator.not_, map(self._seen.__contains__, found))))
            self._seen.update(ids)
            return level
        self._seen.update(ids)
        return level if len(self._seen) == num_seen + len(ids) else list(dict(zip(ids, level, strict=True)).values())

    def _below(self, level: list[Any]) -> list[Any]:
        """Note the objects of a level; what they lead to."""
        below: list[Any] = []
        others = self._of_kinds(_ALIKE, level, below)
        kinds = set(map(type, others))
        plain = {kind for kind in kinds if self._is_plain(kind)}
        if plain:
            objects = list(compress(others, map(plain.__contains__, map(type, others))))
            below += map(vars, objects)
            self._notes.add_classes(objects)
        modules = {kind for kind in kinds if issubclass(kind, torch.nn.Module)}
        if modules:
            below += self._note_modules([one for one in others if type(one) in modules])
        for one in others if len(kinds) > len(plain) + len(modules) else ():
            if type(one) not in plain and type(one) not in modules:
                below += self._note_one(one)
        return below

    def _note_modules(self, modules: list[Any]) -> list[Any]:
        """What modules lead to: their attributes are noted with those of all modules that are alive."""
        for kind in dict.fromkeys(map(type, modules)):
            if _is_made_for_it(kind):
                self._notes.add_undo(functools.partial(restore_class, kind, of_class(kind), dict(vars(kind))))
        for one in filter(is_iterator, modules):
            self._iterators.watch(one)
        tables: list[dict[str, Any]] = [vars(one) for one in modules]
        for table in tables if _exchanges(chain.from_iterable(map(dict.values, tables))) else ():
            self._copies.give(table)
            self._copies.note_functions(table)
        below = [value for table in tables for name, value in list(table.items()) if name not in _OF_MODULES]
        below += chain.from_iterable(table.get("_modules", {}).values() for table in tables)
        return below

    def _of_kinds(self, alike: Collection[type], level: list[Any], below: list[Any]) -> list[Any]:
        """Note those of some kinds of containers; the others."""
        kinds = set(map(type, level))
        for kind in kinds.intersection(alike):
            some = level if len(kinds) == 1 else of_kind(kind, level)
            self._note_all(kind, some, below)
        return list(compress(level, map(operator.not_, map(alike.__contains__, map(type, level)))))

    def _note_all(self, kind: Any, containers: list[Any], below: list[Any]) -> None:
        """Note containers; ``below`` grows by what they hold, and iterators among it are exchanged."""
        if kind is not tuple:
            self._notes.add_all(kind, containers)
        if kind is defaultdict:
            made = [(one, one.default_factory) for one in containers]
            self._notes.add_undo(functools.partial(_restore_factories, made))
        short, long = containers, []
        if max(map(len, containers), default=0) > _MOST_ITEMS:
            short = [one for one in containers if len(one) <= _MOST_ITEMS]
            long = [one for one in containers if len(one) > _MOST_ITEMS]
        for some, found in ((short, below), (long, self._long)):
            begin = len(found)
            found += chain.from_iterable(map(kind.values, some) if issubclass(kind, dict) else some)
            for one in some if _exchanges(found[begin:]) else ():
                if kind is tuple:
                    self._notes.add_undo(functools.partial(set_items, one, list(one)))
                self._copies.give(one)
                self._copies.note_functions(one)

    def _note_one(self, one: Any) -> Iterable[Any]:
        if self._copies.has_made(one):
            return ()
        found = None if type(one) in _WALKED else restoration_of(one, self._room)
        if is_iterator(one):
            self._iterators.watch(one)
        if isinstance(one, threading.Condition):  # threads that wait now would wait for ever
            self._seen.add(id(one._waiters))  # type: ignore[attr-defined]
        if found is None:
            inner = list(_noted(self._notes, self._copies, one))
            if isinstance(one, types.ModuleType) and is_users_module(one):
                self._copies.give(vars(one))
            return inner
        self._notes.add_undo(found.undo)
        if found.differs is not None:
            self._notes.add_other(one, found.differs)
        if found.begin is not None:
            found.begin()
        self._room -= found.num_bytes
        return [*found.inner, *_noted_attributes(self._notes, self._copies, one)] if is_users(one) else found.inner

    def _is_plain(self, kind: type) -> bool:
        if kind not in self._are_plain:
            slots = (member for base in kind.__mro__ for member in vars(base).values())
            self._are_plain[kind] = (
                is_users_class(kind)
                and bool(kind.__dictoffset__)
                and all(base is object or is_users_class(base) for base in kind.__mro__)
                and not any(isinstance(member, types.MemberDescriptorType) for member in slots)
            )
        return self._are_plain[kind]


def _exchanges(values: Iterable[Any]) -> bool:
    """Whether some are of types of which the run may have others."""
    return any(kind in FUNCTIONS or has_copy(kind) for kind in set(map(type, values)))


def _noted(notes: Notes, copies: Copies, one: Any) -> Iterator[Any]:
    """Note an object that is no value by itself; what it leads to."""
    kind = type(one)
    if isinstance(one, threading.Thread):
        notes.add_undo(functools.partial(vars(one).update, {"_name": vars(one).get("_name")}))
        if isinstance(one, threading.Timer) and not one.is_alive():
            yield from (one.finished, one.args, one.kwargs)
    if isinstance(one, types.MappingProxyType) or _is_users_generator(one):  # its variables: it alone may hold them
        yield from gc.get_referents(one)
    elif isinstance(one, tuple):  # with names
        items = list(one)
        notes.add_undo(functools.partial(set_items, one, items))
        copies.give(one)
        yield from items
    elif isinstance(one, (types.MethodType, types.BuiltinMethodType)):
        yield one.__self__
    elif isinstance(one, types.FunctionType):
        yield from noted_function(notes, copies, one)
    elif isinstance(one, types.ModuleType):
        if kind.__module__ == _OF_OPERATORS:
            return
        if is_users_module(one) or _is_made(one):
            notes.add_plain(vars(one), 1)
            yield from [value for name, value in vars(one).items() if not name.startswith("__")]
        else:
            _note_library(notes, one)
            yield from kept_by(one)
    elif isinstance(one, type):
        if is_users_class(one):
            before = dict(vars(one))
            notes.add_undo(functools.partial(restore_class, one, of_class(one), before))
            notes.add_class(one, before)
            yield from before.values()
    elif not isinstance(one, _NO_OBJECTS) and (_is_walked(kind)):  # type: ignore[arg-type]
        yield from _noted_attributes(notes, copies, one)


def _is_users_generator(one: Any) -> bool:
    code = getattr(one, _CODES[type(one)]) if type(one) in _CODES else None
    return code is not None and is_users_file(code.co_filename)


def _is_walked(kind: type) -> bool:
    """Whether an object's attributes lead to what is the user's, and not everywhere."""
    home = str(kind.__module__).partition(".")[0]
    return home not in _NOT_WALKED or (home in _OF_PYTHON and issubclass(kind, _WALKED_ALL_THE_SAME))


def log_handlers() -> list[logging.Handler]:
    """The handlers that are alive: what they hold is the user's, even if no name leads to it."""
    references = getattr(logging, "_handlerList", ())
    return [one for one in (reference() for reference in references) if one is not None]


def _is_made_for_it(kind: type) -> bool:
    """Whether a module's class was made for it alone, as by parametrizations and ``torch.fx``: it may be changed."""
    home = sys.modules.get(kind.__module__)
    return home is not None and getattr(home, kind.__name__, None) is not kind


def _noted_attributes(notes: Notes, copies: Copies, one: Any) -> Iterator[Any]:
    if isinstance(one, functools.partial):
        copies.note_functions(one)
        yield from (one.func, one.args, one.keywords)
    elif isinstance(one, threading.local):  # of this thread
        yield vars(one)
    elif isinstance(one, BaseException):
        for name in _OF_EXCEPTIONS:
            notes.add_undo(functools.partial(restore_attribute, one, name, getattr(one, name)))
    own = None
    with contextlib.suppress(Exception):  # of the user's class, whose __getattr__ does not run
        own = object.__getattribute__(one, "__dict__")
    if type(own) is dict:
        yield own
    if is_users_class(type(one)) or any("__slots__" in vars(base) for base in type(one).__mro__):
        yield from noted_slots(notes, copies, one)


def _restore_factories(before: list[tuple[Any, Any]]) -> None:
    for one, factory in before:
        one.default_factory = factory


def _is_made(module: types.ModuleType) -> bool:
    """Whether a module was made by code, not imported; PyTorch's C code makes submodules."""
    name = str(getattr(module, "__name__", ""))
    is_found = "__file__" in vars(module) or vars(module).get("__spec__") is not None or "." in name
    return sys.modules.get(name) is not module or (type(module) is types.ModuleType and not is_found)


def _note_library(notes: Notes, module: types.ModuleType) -> None:
    """A library's functions, classes and settings, in place of which code may set its own (``json.dumps = mine``)."""
    kinds = [one for one in vars(module).values() if issubclass(type(one), type)]  # isinstance would consult a stand-in
    owners = [module, *(kind for kind in kinds if not is_users_class(kind))]
    for owner in owners:
        notes.add_undo(functools.partial(_restore_library, owner, dict(vars(owner))))


def kept_by(module: types.ModuleType) -> list[Any]:
    """A library's own objects that code changes through its module (``loguru.logger``)."""
    home = str(vars(module).get("__name__") or "").partition(".")[0]  # %run leaves modules without a name
    if not home or home in _WITHOUT_OBJECTS or home in sys.stdlib_module_names:
        return []
    values = list(vars(module).values())
    own = {kind for kind in set(map(type, values)) if _is_of(kind, home)}
    return [one for one in values if type(one) in own and hasattr(one, "__dict__") and not callable(one)]


def _is_of(kind: type, home: str) -> bool:
    return not issubclass(kind, (type, types.ModuleType)) and str(kind.__module__).partition(".")[0] == home


def _restore_library(owner: Any, before: dict[str, Any]) -> None:
    if is_unchanged(before, vars(owner)):
        return
    for name, value in list(vars(owner).items()):
        is_setting = name in before and not name.startswith("_") and {type(value), type(before[name])} <= _SETTINGS
        if before.get(name, before) is not value and (is_setting or is_users(value)):
            setattr(owner, name, before[name]) if name in before else delattr(owner, name)


# Names that Python and IPython set; they lead to all that was ever shown.
OF_SHELL = re.compile(r"__.*__|_+|_i*\d*|_(oh|dh|ih|exit_code)")


def note_state(
    snapshot: Snapshot,
    live: LiveObjects,
    namespaces: list[dict[str, Any]],
    copies: Copies,
    assume: Callable[[str], None],
    above: Sequence[dict[str, Any]],
    iterators: Iterators,
    own: Collection[int],
) -> None:
    """Record everything a dry run may change in the user's objects, with its depth; nothing of tensors with the
    identities ``own``, which would be kept."""
    for some in ([one for one in live.tensors if id(one) not in own], live.modules, live.tools):
        snapshot.add_classes(some)
    snapshot.add_attributes(live.modules, 2)
    for module in live.modules:
        if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
            _exchange_lazy(module)
    values = list(chain.from_iterable(map(dict.values, map(vars, live.modules))))
    kinds = {kind for kind in set(map(type, values)) if "config" in kind.__name__.lower() and kind.__dictoffset__}
    configs = list(compress(values, map(kinds.__contains__, map(type, values))))  # of Hugging Face's models
    snapshot.add_attributes(list(by_identity(configs).values()), 2)
    for tool in live.tools:
        snapshot.add(vars(tool), 4, tool)
    for namespace in namespaces:
        snapshot.add_plain(namespace, 1)
    named = [value for names in namespaces for name, value in list(names.items()) if not OF_SHELL.fullmatch(str(name))]
    for namespace in namespaces:
        copies.give(namespace)
    for names in above:
        copies.give_names(names)
        snapshot.add_undo(functools.partial(copies.take_back, names))
    are_noted = {id(one) for one in (*namespaces, vars(builtins))}
    roots = [named, users_modules(), log_handlers()]
    if not note_users_objects(snapshot, roots, are_noted.union(copies.others), copies, iterators):
        assume(
            _(
                "your variables refer to more objects than can be restored: changes that the run makes to the"
                " most deeply nested ones remain"
            )
        )


def _exchange_lazy(module: torch.nn.Module) -> None:
    """The first call of a lazy module changes its class and its parameters: the run has parameters of its own."""
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for table in tables:
        for name, tensor in table.items():
            if torch.nn.parameter.is_lazy(tensor):
                make: Any = type(tensor)
                table[name] = make(tensor.requires_grad, device=tensor.device, dtype=tensor.dtype)
