"""What a dry run may change in the user's objects besides tensors: attributes, classes, arrays, tables, caches.

All is looked for from the user's names and modules. What the function that is run keeps in its own closure is not: code
that is rehearsed may tell its caller something that way. Of iterators the run has copies (``copies``); what is taken
from one that cannot be copied, such as a generator, is gone, and said.
"""

from __future__ import annotations

import array
import contextlib
import functools
import gc
import io
import mmap
import operator
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from oom_magic.language import _
from oom_magic.predict.isolation.copies import Copies
from oom_magic.predict.isolation.reach import NOT_WALKED, is_users_class, is_users_module
from oom_magic.units import format_bytes
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
_COPIED_BYTES = 1 << 24  # of one object
_CACHED_FUNCTION = type(functools.lru_cache(len))


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


class LargeMapError(TypeError):
    """A writable map that is too large to be copied; IPython shows it in one line."""

    def _render_traceback_(self) -> list[str]:
        return [f"TypeError: {self}"]


@dataclass(frozen=True, slots=True)
class Restoration:
    """What puts an object back, how many bytes were copied, what it leads to, and what to do with it meanwhile."""

    undo: Callable[[], object]
    num_bytes: int = 0
    inner: list[Any] = field(default_factory=list)
    begin: Callable[[], object] | None = None


def kept(one: Any, room: int) -> Restoration | None:
    """How an object is put back, of which at most ``room`` bytes are copied; None where it is of no known kind."""
    if isinstance(one, np.ndarray):
        return _of_array(one, room)
    if isinstance(one, _CACHED_FUNCTION):
        return _of_cache(one)
    if isinstance(one, mmap.mmap):
        return _of_map(one, room)
    if isinstance(one, memoryview):
        return Restoration(_nothing, inner=[one.obj])
    if isinstance(one, ContextVar):  # what is set is of the run's context
        return Restoration(_nothing, inner=[one.get(None)])
    for kinds, read, write in _STATES:
        if isinstance(one, kinds):
            return Restoration(functools.partial(write, one, read(one)))
    for kind in (io.BytesIO, io.StringIO, bytearray, array.array):
        if isinstance(one, kind):
            return _of_buffer(one, room)
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(one, (pandas.DataFrame, pandas.Series)):
        return _of_table(one, room)
    return _of_subclass(one)


def _of_cache(one: Any) -> Restoration:
    """Of a function with a cache: the run's results are taken out of it, the user's stay.

    CPython keeps them in a dict, where there is a limit by way of links (``lru_cache_object`` in
    Modules/_functoolsmodule.c); a link that the dict lacks is dropped when it is the oldest.
    """
    held = gc.get_referents(one)
    table = next(each for each in held if type(each) is dict and each is not vars(one))
    return Restoration(functools.partial(_forget_results, one, table, dict(table), one.cache_info()), inner=held)


def _forget_results(one: Any, table: dict[Any, Any], before: dict[Any, Any], info: Any) -> None:
    if info.maxsize is not None and one.cache_info().misses - info.misses > info.maxsize - info.currsize:
        one.cache_clear()  # results were put out, and links used again
    for key in [key for key, entry in table.items() if before.get(key, table) is not entry]:
        del table[key]


def _set_bits(one: Any, before: Any) -> None:
    one.bit_generator.state = before


# Generators of random numbers, with what reads and writes their state.
_STATES: tuple[tuple[Any, Callable[[Any], Any], Callable[[Any, Any], Any]], ...] = (
    (np.random.Generator, lambda one: one.bit_generator.state, _set_bits),
    (np.random.RandomState, np.random.RandomState.get_state, np.random.RandomState.set_state),
    (random.SystemRandom, lambda one: None, lambda one, state: None),
    (random.Random, random.Random.getstate, random.Random.setstate),
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
)


def _of_array(one: Any, room: int) -> Restoration:
    """A large array can be read only meanwhile."""
    if one.dtype.hasobject:
        return Restoration(
            functools.partial(_restore_objects, one, one.copy()), 0, list(one.flat) if one.dtype == object else []
        )
    if not one.flags.writeable or isinstance(one, np.memmap):
        return Restoration(_nothing)
    if one.nbytes <= min(_COPIED_BYTES, room):
        return Restoration(functools.partial(_restore_array, one, one.copy(order="K")), int(one.nbytes))
    return Restoration(functools.partial(one.setflags, write=True), begin=functools.partial(one.setflags, write=False))


def _nothing() -> None:
    """Cannot be changed, or not by us."""


def _restore_array(one: Any, before: Any) -> None:
    if one.shape == before.shape and one.tobytes() != before.tobytes():  # a NaN is not equal to itself
        one[...] = before


def _restore_objects(one: Any, before: Any) -> None:
    if one.shape == before.shape and one.flags.writeable and not all(map(operator.is_, one.flat, before.flat)):
        one[...] = before


def _of_map(one: mmap.mmap, room: int) -> Restoration:
    """A map that is lent cannot be closed, nor get another size; a large one that can be written to ends the run."""
    try:
        place, lent = one.tell(), memoryview(one)
    except ValueError:  # closed
        return Restoration(_nothing)
    size = 0 if lent.readonly else len(one)
    if size > min(_COPIED_BYTES, room):
        lent.release()
        raise LargeMapError(
            _(
                "A writable mmap of yours has {size}: more than a dry run copies. Open it with"
                " access=mmap.ACCESS_READ or ACCESS_COPY, or delete its name.",
                size=format_bytes(size),
            )
        )
    return Restoration(functools.partial(_restore_map, one, bytes(lent) if size else b"", place, lent), size)


def _restore_map(one: mmap.mmap, before: bytes, place: int, lent: memoryview) -> None:
    if before and one[:] != before:
        one[:] = before
    one.seek(place)
    lent.release()


def _of_buffer(one: Any, room: int) -> Restoration:
    """Text and bytes in memory. Above the limit only the place in it is kept."""
    if not isinstance(one, (io.BytesIO, io.StringIO)):
        size = len(one) * getattr(one, "itemsize", 1)
        return (
            Restoration(functools.partial(_restore_items, one, one[:]), size) if size <= room else Restoration(_nothing)
        )
    if one.closed:
        return Restoration(_nothing)
    place = one.tell()
    size = one.seek(0, io.SEEK_END)
    one.seek(place)
    if size > min(_COPIED_BYTES, room):
        return Restoration(functools.partial(one.seek, place))
    return Restoration(functools.partial(_restore_buffer, one, one.getvalue(), place), size)


def _restore_items(one: Any, before: Any) -> None:
    if one != before:
        one[:] = before


def _restore_buffer(one: Any, before: Any, place: int) -> None:
    if one.closed:
        return
    if one.getvalue() != before:
        one.seek(0)
        one.truncate()
        one.write(before)
    one.seek(place)


def _of_table(one: Any, room: int) -> Restoration:
    """pandas': what it holds is in a manager of blocks, which is exchanged (``NDFrame._mgr``)."""
    size = int(np.sum(one.memory_usage()))
    is_copied = size <= min(_COPIED_BYTES, room)  # of others the columns: those that are set or dropped
    undo = functools.partial(_restore_table, one, one._mgr, one.copy(deep=is_copied))
    return Restoration(undo, size if is_copied else 0)


def _restore_table(one: Any, manager: Any, before: Any) -> None:
    if one._mgr is not manager or not one.equals(before):
        object.__setattr__(one, "_mgr", before._mgr)
        getattr(one, "_item_cache", {}).clear()


def _of_subclass(one: Any) -> Restoration | None:
    """Of a class made from a container: what that holds, and the object's attributes."""
    base: Any = next((base for base in (OrderedDict, dict, list, set, deque) if isinstance(one, base)), None)
    if base is None or type(one) is base:
        return None
    before = dict(base.items(one)) if issubclass(base, dict) else base.copy(one)
    own = dict(getattr(one, "__dict__", {}))
    inner = [*(before.values() if isinstance(before, dict) else before), *own.values()]
    return Restoration(functools.partial(_restore_subclass, one, base, before, own), inner=inner)


def _restore_subclass(one: Any, base: Any, before: Any, own: dict[str, Any]) -> None:
    now = getattr(one, "__dict__", own)
    if not _are_same(list(now.items()), list(own.items())):
        now.clear()
        now.update(own)
    if isinstance(before, dict):
        is_same = _are_same(list(base.items(one)), list(before.items()))
    else:
        is_same = base.__eq__(one, before) if base is set else _are_same(list(one), list(before))
    if not is_same:
        base.clear(one)
        (base.extend if base in (list, deque) else base.update)(one, before)


def _are_same(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists hold the very objects, or pairs of them."""
    if len(now) != len(before):
        return False
    pairs = zip(now, before, strict=True)
    return all(
        all(map(operator.is_, *both)) if type(both[0]) is tuple is type(both[1]) else both[0] is both[1]
        for both in pairs
    )
