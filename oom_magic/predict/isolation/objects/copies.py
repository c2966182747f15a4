"""Objects whose state can be copied but not restored, such as iterators and databases: the run gets copies instead."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import csv
import ctypes
import dis
import functools
import gc
import inspect
import io
import itertools
import os
import select
import sqlite3
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import dataloader

from oom_magic.language import _
from oom_magic.predict.isolation.objects.databases import copied_database
from oom_magic.predict.isolation.reach import variables_of

_EMPTY: tuple[Any, ...] = ([], (), range(0), range(1 << 70), "", "é", b"", bytearray(), set(), deque())
_DICTS: tuple[Any, ...] = ({}, OrderedDict())
_TABLES: tuple[Any, ...] = tuple(view for one in _DICTS for view in (one, one.items(), one.values()))
_REVERSIBLE: tuple[Any, ...] = ([], (), range(0), deque(), *_TABLES)
_OF_CONTAINERS = (*map(type, map(iter, (*_EMPTY, *_TABLES))), *map(type, map(reversed, _REVERSIBLE)))
_ROWS: tuple[type[Iterator[Any]], ...] = (type(iter([])), type(iter(())))
_OF_OTHERS = (
    zip, map, filter, enumerate,
    *(kind for kind in vars(itertools).values() if isinstance(kind, type) and hasattr(kind, "__next__")),
)  # fmt: skip
_EPOLL: Any = getattr(select, "epoll", None)
_CSV = type(csv.reader([]))
with os.scandir() as _entries:
    _REFUSING = (type(_entries), type(iter(int, 0)))  # they show nothing of what was taken from them
_ITERATORS = frozenset(
    (
        *_OF_CONTAINERS, *_OF_OTHERS, *_REFUSING, dataloader._SingleProcessDataLoaderIter,
        types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType,
    )
)  # fmt: skip
_EXCHANGED = frozenset(
    (
        *_ITERATORS, _EPOLL, torch.Stream, torch.Event,
        sqlite3.Connection, sqlite3.Cursor, contextvars.Context, np.nditer, np.flatiter, _CSV,
    )
)  # fmt: skip
_PREFIXES = {types.GeneratorType: "gi", types.CoroutineType: "cr", types.AsyncGeneratorType: "ag"}  # of attributes
FUNCTIONS = frozenset((types.FunctionType, types.BuiltinFunctionType, type))
_DEEP = 8  # an iterator over another one's values over ...


class Copies:
    """The copies by their original. Whatever holds an object is noted before it gets the copy.

    What other threads use, objects with the identities ``others``, is not exchanged: they would find the copies, too.
    ``stand_ins``: for some types functions that make what stands for an object in a dry run. ``users``: identities of
    the user's own iterators among the names of earlier dry runs, if the run goes on with theirs; None if not.
    """

    def __init__(
        self,
        others: Collection[int] = frozenset(),
        stand_ins: Mapping[type, Callable[[Any], Any]] | None = None,
        users: Collection[int] | None = None,
    ) -> None:
        self.others = others
        self._stand_ins = stand_ins or {}
        self._users = users
        self.taken_back: set[int] = set()  # the identities of originals that names have again
        self._made: dict[int, tuple[Any, Any]] = {}
        self._originals: dict[int, Any] = {}  # by the identity of the copy
        self._begun: list[_Anew] = []
        self.functions: list[tuple[Any, Callable[[Any], object]]] = []  # that objects hold; each with what sets another

    def note_functions(self, container: Any) -> None:
        """Where a container, or a partial, holds functions and classes: some have a stand-in while a run lasts."""
        if isinstance(container, functools.partial):
            self.functions.append((container.func, functools.partial(_set_function, container)))
        elif isinstance(container, (dict, list, deque, tuple)):
            self.functions += (
                (value, functools.partial(put, key))
                for put, key, value in _items(container)
                if type(value) in FUNCTIONS
            )

    def give(self, container: Any) -> None:
        """Exchange what a dict, a list, a deque or a tuple holds."""
        if isinstance(container, (dict, list, deque, tuple)) and id(container) not in self.others:
            for put, key, value in _items(container):
                found = self.of(value)
                if key == "gen" and isinstance(found, _Anew):  # of a context that was entered: the run cannot leave it
                    found = _Refusing(type(value))
                if found is not None:
                    put(key, found)

    def give_names(self, names: dict[str, Any]) -> None:
        """Exchange what names of earlier dry runs hold, but what those made: the run goes on with it."""
        held = {name: one for name, one in names.items() if not self._is_of_runs(one)}
        self.give(held)
        names.update(held)

    def _is_of_runs(self, one: Any) -> bool:
        is_known = self._users is None or id(one) in self._users or id(one) in self._made
        return type(one) in _ITERATORS and not is_known

    def take_back(self, names: dict[str, Any]) -> None:
        """Put the originals in place of the copies."""
        for name, value in list(names.items()):
            if id(value) in self._originals:
                names[name] = self._originals[id(value)]
                self.taken_back.add(id(names[name]))

    def of(self, one: Any) -> Any:
        """The copy of an object; None where it is not exchanged, or is a copy itself."""
        kind: Any = type(one)
        if not has_copy(kind) or self.has_made(one) or id(one) in self.others:
            return None
        if id(one) not in self._made:
            make = self._new_cursor if kind is sqlite3.Cursor else self._stand_ins.get(kind)
            made = make(one) if make is not None else _copied(one, _DEEP, self._begun)
            self._made[id(one)] = one, made
            if made is not None:
                self._originals[id(made)] = one
        return self._made[id(one)][1]

    def end(self, taken_bytes: Callable[[], int]) -> dict[str, int]:
        """Close the run's generators, inside the run: what they do at their end is part of it. How much of what is
        ``taken`` on the cards that frees, by their names."""
        freed: dict[str, int] = {}
        for made in (*(made for _original, made in self._made.values()), *self._begun):
            before = taken_bytes()
            with contextlib.suppress(Exception):  # of the user's code
                if isinstance(made, (types.AsyncGeneratorType, _AnewAsync)):
                    made.aclose().send(None)
                elif isinstance(made, (types.GeneratorType, types.CoroutineType, _Anew)):
                    made.close()
            if taken_bytes() < before:
                name = str(getattr(made, "name", None) or made.__qualname__)
                freed[name] = freed.get(name, 0) + before - taken_bytes()
        return freed

    def tell(self, assume: Callable[[str], None]) -> None:
        """Say of which generators the run took the items from new ones."""
        for name in dict.fromkeys(one.name for one in self._begun if one.is_used):
            assume(
                _(
                    "`{name}` is a generator of yours that had begun: the dry run took items from a new one, which"
                    " begins anew",
                    name=name,
                )
            )

    def has_made(self, one: Any) -> bool:
        """Whether an object is such a copy, which ends with the run."""
        return id(one) in self._originals

    def original(self, one: Any) -> Any:
        """What a copy was made of; anything else itself."""
        return self._originals.get(id(one), one)

    def pairs(self) -> list[tuple[Any, Any]]:
        """The originals of which there is a copy, each with it."""
        return [pair for pair in self._made.values() if pair[1] is not None]

    def _new_cursor(self, one: sqlite3.Cursor) -> Any:
        """A cursor of the connection's copy; rows that the user's has not yet given are not in it."""
        connection = self.of(one.connection)
        return None if connection is None else connection.cursor()


def set_items(one: tuple[Any, ...], items: list[Any]) -> None:
    """Give a tuple other items where they differ."""
    for at, item in enumerate(items):
        if one[at] is not item:
            _set_item(one, at, item)


def _items(container: Any) -> list[tuple[Callable[[Any, Any], object], Any, Any]]:
    """What a dict, a list, a deque or a tuple holds: what sets an item, its key, the item."""
    put = functools.partial(_set_item, container) if isinstance(container, tuple) else container.__setitem__
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return [(put, key, value) for key, value in list(items)]


def _set_function(one: functools.partial[Any], function: Any) -> None:
    one.__setstate__((function, one.args, one.keywords, vars(one)))  # type: ignore[attr-defined]


def _set_item(one: tuple[Any, ...], at: int, item: Any) -> None:
    """Tuples cannot be changed, and those who hold one are not known: so the item itself is set. It lies behind what
    all tuples begin with (``PyTupleObject`` in Include/cpython/tupleobject.h)."""
    place = ctypes.c_void_p.from_address(id(one) + tuple.__basicsize__ + at * ctypes.sizeof(ctypes.c_void_p))
    before = one[at]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))
    place.value = id(item)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(before))


def has_copy(kind: type) -> bool:
    """Whether objects of the type are exchanged for copies."""
    return not _EXCHANGED.isdisjoint(kind.__mro__) or _is_digest(kind) or _is_compressor(kind)


def _is_digest(kind: type) -> bool:
    """Hashes, and compression on its way."""
    home = str(kind.__module__)  # Cython's types have none
    is_known = home == "zlib" or home.startswith(("_hashlib", "_md5", "_sha", "_blake2"))
    return is_known and hasattr(kind, "copy")


def _is_compressor(kind: type) -> bool:
    """Compression that cannot be copied: the run's begins anew, and what it makes is discarded with the run's files."""
    return (kind.__module__, kind.__name__) in (("_bz2", "BZ2Compressor"), ("_lzma", "LZMACompressor"))


def _copied(one: Any, depth: int, begun: list[_Anew]) -> Any:
    """An independent copy; None where none can be made. ``begun`` grows by what stands for generators that have."""
    kind = type(one)
    if _is_digest(kind) or kind is contextvars.Context:
        with contextlib.suppress(ValueError):  # decompression that has ended
            return one.copy()
        return None
    if _is_compressor(kind):
        return kind()
    if kind in _OF_CONTAINERS:
        return copy.copy(one)
    if kind in _REFUSING:
        return _Refusing(kind)
    if kind in (np.nditer, np.flatiter):
        return one.copy() if kind is np.nditer else itertools.islice(one.base.flat, one.index, None)
    if kind is _EPOLL:  # what it waits for is the same, and is put back; the run can close its own
        return None if one.closed else kind.fromfd(os.dup(one.fileno()))
    if isinstance(one, dataloader._SingleProcessDataLoaderIter):
        return _copied_batches(one)
    if kind is sqlite3.Connection:
        return copied_database(one)
    with contextlib.suppress(_NoCopyError):
        if kind in _PREFIXES:
            return _begun_anew(one, depth, begun)
        if kind is _CSV:
            return _read_on(one, depth, begun)
        if kind in _OF_OTHERS and depth > 0:
            return _reduced(one, depth, begun)
    return None


def _reduced(one: Any, depth: int, begun: list[_Anew]) -> Any:
    """A copy as ``copy.copy`` makes it, of what the iterator takes its items from, too."""
    with warnings.catch_warnings(), contextlib.suppress(TypeError):
        warnings.simplefilter("ignore")  # itertools' could be copied up to Python 3.13
        make, args, *state = one.__reduce__()
        made = make(*(_part(each, depth, begun) for each in args))
        if state and state[0] is not None:  # ``accumulate``, before the first
            made.__setstate__(_part(state[0], depth, begun))
        return made
    return None


def _read_on(one: Any, depth: int, begun: list[_Anew]) -> Any:
    """Another reader of ``csv`` on the same lines; of files the run has its own."""
    [lines] = (each for each in gc.get_referents(one) if hasattr(type(each), "__next__"))
    own: Any = lines if isinstance(lines, io.IOBase) else _part(lines, depth, begun)
    return csv.reader(own, one.dialect)


class _NoCopyError(Exception):
    """An iterator inside another one cannot be copied: a generator, say."""


def _part(one: Any, depth: int, begun: list[_Anew]) -> Any:
    if type(one) is tuple:
        return tuple(_part(each, depth, begun) for each in one)
    if type(one) is list:  # what ``cycle`` has seen
        return list(one)
    if not hasattr(type(one), "__next__"):
        return one
    if depth <= 0:
        raise _NoCopyError
    if isinstance(one, _ROWS):  # of ``chain``, whose items are iterated over
        rest = [*copy.copy(one)]
        if any(hasattr(type(item), "__next__") for item in rest):
            return iter([_part(item, depth - 1, begun) for item in rest])
    made = _copied(one, depth - 1, begun)
    if made is None:
        raise _NoCopyError
    return made


class _Refusing:
    """In place of an open ``os.scandir``, and of what calls a function for each item, as ``re.finditer`` does."""

    def __init__(self, kind: type) -> None:
        self._kind = kind.__name__

    def __iter__(self) -> _Refusing:
        return self

    def _refuse(self, *_given: Any) -> Any:
        raise RuntimeError(_words_of_refusal(self._kind))

    __aiter__, __next__, __anext__ = __iter__, _refuse, _refuse
    send = throw = asend = athrow = _refuse

    def __enter__(self) -> _Refusing:
        return self

    def __exit__(self, *_error: object) -> None:
        """The user's stays open."""

    close = __exit__


def _words_of_refusal(kind: str) -> str:
    return _(
        "A dry run cannot take items from a {kind} that was made before it without taking them from you: make it in"
        " the cell, or make a list of it.",
        kind=kind,
    )


class _Anew:
    """In place of a generator that has begun: what it would do next cannot be copied, so ``make`` makes a new one of
    the same function and arguments when the run takes the first item."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name = name
        self._make = make
        self._made: Any = None

    @property
    def is_used(self) -> bool:
        """Whether the run took items from it."""
        return self._made is not None

    def __iter__(self) -> _Anew:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        """The next item; a value is for a place in the code where a new one is not yet."""
        return self._begun(value).send(value)

    def _begun(self, value: Any) -> Any:
        if self._made is None and value is not None:
            self.throw()
        self._made = self._make() if self._made is None else self._made
        return self._made

    def throw(self, *_error: Any) -> Any:
        """Refused, as the user's goes on from another place."""
        raise RuntimeError(_words_of_refusal("generator"))

    def close(self) -> None:
        """The user's stays open."""
        if self._made is not None:
            self._made.close()


class _AnewAsync(_Anew):
    """The same for an async generator."""

    def __aiter__(self) -> _AnewAsync:
        return self

    def __anext__(self) -> Any:
        return self.asend(None)

    def asend(self, value: Any) -> Any:
        """The next item, to be awaited."""
        return self._begun(value).asend(value)

    def athrow(self, *_error: Any) -> Any:
        """Refused."""
        raise RuntimeError(_words_of_refusal("async_generator"))

    async def aclose(self) -> None:
        """The user's stays open."""
        if self._made is not None:
            await self._made.aclose()


def state_of(one: Any) -> str:
    """``CREATED``, ``SUSPENDED``, ``RUNNING`` or ``CLOSED``: how far a generator or coroutine is."""
    if type(one) is types.GeneratorType:
        state: str = inspect.getgeneratorstate(one)
    elif type(one) is types.CoroutineType:
        state = inspect.getcoroutinestate(one)
    else:
        state = getattr(inspect, "getasyncgenstate", _state_of_async)(one)
    return state.rpartition("_")[2]


def _state_of_async(one: types.AsyncGeneratorType[Any, Any]) -> str:
    """What ``inspect.getasyncgenstate`` says since Python 3.12."""
    frame = one.ag_frame
    if one.ag_running or frame is None:
        return "AGEN_RUNNING" if one.ag_running else "AGEN_CLOSED"
    has_begun = frame.f_lasti >= 0 and dis.opname[frame.f_code.co_code[frame.f_lasti]] != "RETURN_GENERATOR"
    return "AGEN_SUSPENDED" if has_begun else "AGEN_CREATED"


def _begun_anew(one: Any, depth: int, begun: list[_Anew]) -> Any:
    """A generator or coroutine of the same function and arguments; its frame refers to the function.

    An expression with one loop goes on where it is: the loop's iterator is its argument.
    """
    state, prefix = state_of(one), _PREFIXES[type(one)]
    has_begun = state == "SUSPENDED"
    if depth == 0 or not (state == "CREATED" or has_begun):
        return None
    frame, code = getattr(one, f"{prefix}_frame"), getattr(one, f"{prefix}_code")
    functions = [each for each in gc.get_referents(one) if isinstance(each, types.FunctionType)]
    made_by = [each for each in functions if _origin(each.__code__) == _origin(code)]  # loops are compiled anew
    if not made_by:  # before Python 3.11
        return None
    changed = {each.argval for each in dis.get_instructions(code) if each.opname.startswith(("STORE_", "DELETE_"))}
    if has_begun and changed.intersection(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]):
        return _Refusing(type(one))  # what it was called with is gone
    make = functools.partial(made_by[0], *_positional(frame, depth, begun), **_by_name(frame, depth, begun))
    if not has_begun or _has_one_loop(code):
        return make()
    begun.append((_AnewAsync if prefix == "ag" else _Anew)(one.__qualname__, make))
    return begun[-1]


def _positional(frame: types.FrameType, depth: int, begun: list[_Anew]) -> list[Any]:
    """The arguments that a function which has just been called was given by position."""
    given, code = variables_of(frame), frame.f_code
    more = (
        given[code.co_varnames[code.co_argcount + code.co_kwonlyargcount]] if code.co_flags & inspect.CO_VARARGS else ()
    )
    return [*(_part(given[name], depth, begun) for name in code.co_varnames[: code.co_argcount]), *more]


def _by_name(frame: types.FrameType, depth: int, begun: list[_Anew]) -> dict[str, Any]:
    """Those that it was given by name."""
    given, code = variables_of(frame), frame.f_code
    end = code.co_argcount + code.co_kwonlyargcount
    others = (
        code.co_varnames[end + bool(code.co_flags & inspect.CO_VARARGS)]
        if code.co_flags & inspect.CO_VARKEYWORDS
        else ""
    )
    own = {name: _part(given[name], depth, begun) for name in code.co_varnames[code.co_argcount : end]}
    return own | (given[others] if others else {})


def _has_one_loop(code: types.CodeType) -> bool:
    """Whether code is a generator expression over one iterator."""
    loops = [each for each in dis.get_instructions(code) if each.opname == "FOR_ITER"]
    return code.co_name == "<genexpr>" and len(loops) == 1


def _origin(code: types.CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_name


def _copied_batches(one: Any) -> Any:
    """Of a data loader without workers: what the run takes of the sampler's numbers the user's iterator gets, too."""
    if one._dataset_kind != dataloader._DatasetKind.Map:
        return None
    made = object.__new__(type(one))
    one._sampler_iter, ours = itertools.tee(one._sampler_iter)
    made.__dict__.update(one.__dict__, _sampler_iter=ours)
    return made
