"""What a dry run may change in the user's objects besides tensors: attributes, classes, arrays, tables, caches.

All is looked for from the user's names and modules. What the function that is run keeps in its own closure is not: code
that is rehearsed may tell its caller something that way. Of iterators the run has copies (``copies``); what is taken
from one that cannot be copied, such as a generator, is gone, and said.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from oom_magic.language import _
from oom_magic.predict.isolation.reach import NOT_WALKED, is_users_class, is_users_module
from oom_magic.predict.isolation.restored.copies import Copies
from oom_magic.predict.isolation.restored.values_kept import kept
from oom_magic.user_code import is_users_file

_MOST_OBJECTS, _MOST_ITEMS, _DEPTH = 10_000, 1_000, 20
_MOST_COPIED_BYTES = 1 << 27
_ITERATORS_DEEP = 4  # an iterator over another one's values over ...
_PLAIN = frozenset((str, int, float, bool, bytes, complex, type(None)))
_NO_OBJECTS = (torch.Tensor, torch.nn.Module, types.CodeType, types.FrameType, types.TracebackType)
_NOT_WALKED = NOT_WALKED - {"matplotlib"}  # figures are the user's
_CONTAINERS = (list, dict, set, deque, OrderedDict)
_FRAMES = {
    types.GeneratorType: "gi_frame",
    types.CoroutineType: "cr_frame",
    types.AsyncGeneratorType: "ag_frame",
}
_AWAITED = (types.CoroutineType, types.AsyncGeneratorType)
_CELL_CONTENTS = vars(types.CellType)["cell_contents"]
_WALKED = frozenset((*_CONTAINERS, tuple, type, types.FunctionType, types.ModuleType))


class Notes(Protocol):
    """Where it is noted what to put back."""

    def add_plain(self, container: Any, depth: int) -> None:
        """A container's contents."""

    def add_undo(self, undo: Callable[[], object]) -> None:
        """Anything else: what puts it back."""


def note_users_objects(notes: Notes, roots: Sequence[Iterable[Any]], not_ours: set[int], copies: Copies) -> None:
    """Note what each of ``roots`` leads to, but nothing with an identity in ``not_ours``; what holds an iterator gets
    a copy. However much one root leads to, the next is looked at."""
    seen, room = set(not_ours), _MOST_COPIED_BYTES
    for root in roots:
        room = _note_from(notes, list(root), seen, room, copies)


def _note_from(notes: Notes, level: list[Any], seen: set[int], room: int, copies: Copies) -> int:
    """Note what a level leads to, nearest first; the bytes that may still be copied."""
    most = len(seen) + _MOST_OBJECTS
    for _unused in range(_DEPTH):
        below: list[Any] = []
        for one in level:
            if type(one) in _PLAIN or id(one) in seen:
                continue
            seen.add(id(one))
            found = None if type(one) in _WALKED else kept(one, room)
            if found is None:
                below += _noted(notes, one, copies)
            else:
                notes.add_undo(found.undo)
                if found.begin is not None:
                    found.begin()
                room -= found.num_bytes
                below += found.inner
            if len(seen) > most:
                return room
        level = below
    return room


def _noted(notes: Notes, one: Any, copies: Copies) -> Iterator[Any]:
    """Note an object that is no value by itself; what it leads to."""
    kind = type(one)
    if kind in _CONTAINERS or isinstance(one, (tuple, types.MappingProxyType)):
        if kind in _CONTAINERS:
            notes.add_plain(one, 1)
        if len(one) <= _MOST_ITEMS:
            yield from list(one.values()) if isinstance(one, (dict, types.MappingProxyType)) else list(one)
            copies.give(one)
    elif isinstance(one, types.FunctionType):
        yield from _noted_function(notes, one, copies)
    elif isinstance(one, types.ModuleType):
        if is_users_module(one):
            notes.add_plain(vars(one), 1)
            yield from [value for name, value in vars(one).items() if not name.startswith("__")]
        else:
            _note_library(notes, one)
    elif isinstance(one, type):
        if is_users_class(one):
            before = dict(vars(one))
            notes.add_undo(functools.partial(_restore_class, one, before))
            yield from before.values()
    elif not isinstance(one, _NO_OBJECTS) and str(kind.__module__).partition(".")[0] not in _NOT_WALKED:
        own = getattr(one, "__dict__", None)
        if type(own) is dict:
            notes.add_plain(own, 1)
            yield from list(own.values())
            copies.give(own)
        if is_users_class(kind):
            yield from _noted_slots(notes, one)


def _noted_function(notes: Notes, function: types.FunctionType, copies: Copies) -> Iterator[Any]:
    if not is_users_file(function.__code__.co_filename):
        return
    notes.add_plain(function.__dict__, 1)
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *function.__dict__.values())
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # nothing yet
            continue
        notes.add_undo(functools.partial(_restore_member, _CELL_CONTENTS, cell, value))
        yield value


def _noted_slots(notes: Notes, one: Any) -> Iterator[Any]:
    for base in type(one).__mro__:
        for member in vars(base).values():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    value = member.__get__(one)
                except AttributeError:  # nothing yet
                    continue
                notes.add_undo(functools.partial(_restore_member, member, one, value))
                yield value


def _restore_member(member: Any, one: Any, value: Any) -> None:
    """By the slot itself: a subclass may have a property of the same name before it."""
    now = one
    with contextlib.suppress(AttributeError, ValueError):  # nothing in it
        now = member.__get__(one)
    if now is not value:
        member.__set__(one, value)


def _restore_class(kind: type, before: dict[str, Any]) -> None:
    now = dict(vars(kind))
    for name in now.keys() - before.keys():
        delattr(kind, name)
    for name, value in before.items():
        if now.get(name, before) is not value:
            setattr(kind, name, value)


def _note_library(notes: Notes, module: types.ModuleType) -> None:
    """A library's functions and classes, in place of which the user's code may set its own (``json.dumps = mine``)."""
    kinds = [one for one in vars(module).values() if issubclass(type(one), type)]  # isinstance would ask a stand-in
    owners = [module, *(kind for kind in kinds if not is_users_class(kind))]
    for owner in owners:
        notes.add_undo(functools.partial(_restore_library, owner, dict(vars(owner))))


def _restore_library(owner: Any, before: dict[str, Any]) -> None:
    for name, value in list(vars(owner).items()):
        if before.get(name, before) is not value and _is_users(value):
            setattr(owner, name, before[name]) if name in before else delattr(owner, name)


def _is_users(value: Any) -> bool:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    if isinstance(value, types.FunctionType):
        return is_users_file(value.__code__.co_filename)
    return isinstance(value, type) and is_users_class(value)


def iterators_watched(namespaces: Sequence[dict[str, Any]], assume: Callable[[str], None]) -> Callable[[], None]:
    """To be called after a run: ``assume`` is told the names of iterators from which something was taken since now."""
    before = [(name, one, _place(one)) for names in namespaces for name, one in _iterators(names)]

    def tell() -> None:
        for name, one, place in before:
            if _place(one) == place:
                continue
            if isinstance(one, _AWAITED):
                assume(_("`{name}` is a coroutine of yours: what the dry run awaited of it is done", name=name))
            else:
                assume(_("`{name}` is an iterator of yours: what the dry run took from it is gone", name=name))

    return tell


def _iterators(names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, one in list(names.items()):
        if (
            (hasattr(type(one), "__next__") or isinstance(one, _AWAITED))
            and not isinstance(one, io.IOBase)
            and not name.startswith("_")
        ):
            yield name, one


def _place(one: Any, depth: int = _ITERATORS_DEEP) -> tuple[Any, ...]:
    """What differs once something was taken: of a loader's a number, of others what they refer to and have left."""
    number = vars(one).get("_num_yielded") if hasattr(one, "__dict__") else None
    if number is not None:
        return (number,)
    frame = getattr(one, _FRAMES[type(one)]) if type(one) in _FRAMES else None  # made when it is first asked for
    held = gc.get_referents(one)
    own = (frame is not None and frame.f_lasti, *map(id, held)) if type(one) in _FRAMES else ()
    inner = [
        _place(each, depth - 1) for each in held if hasattr(type(each), "__next__") or type(each) is tuple if depth
    ]
    left = -1
    with contextlib.suppress(Exception):  # of the user's class
        left = operator.length_hint(one, -1)
    return (left, own, inner)
