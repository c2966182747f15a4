"""Objects that hold values of their own, and how each is put back: arrays, tables, generators, buffers, caches."""

from __future__ import annotations

import _multiprocessing  # type: ignore[import-not-found]
import array
import contextlib
import ctypes
import decimal
import functools
import gc
import io
import mmap
import operator
import pickle
import queue
import random
import select
import sqlite3
import ssl
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch

from oom_magic.language import _
from oom_magic.predict.isolation.objects.function_caches import CACHED_FUNCTION, cache_noted, results_of
from oom_magic.predict.isolation.objects.of_libraries import COPIED_BYTES, Restoration, library_restoration_of, nothing
from oom_magic.predict.isolation.objects.streams import stream_noted
from oom_magic.predict.isolation.snapshot import fill, is_unchanged
from oom_magic.units import format_bytes

_OF_DATABASES = ("isolation_level", "row_factory", "text_factory")
_OF_CONNECTIONS = ("options", "verify_flags", "minimum_version", "maximum_version", "verify_mode", "check_hostname")
_POLL: Any = type(select.poll()) if hasattr(select, "poll") else ()
_WRITEABLE = 0x400  # NPY_ARRAY_WRITEABLE


class LargeMapError(TypeError):
    """A writable map that is too large to be copied; IPython shows it in one line."""

    def _render_traceback_(self) -> list[str]:
        return [f"TypeError: {self}"]


def restoration_of(one: Any, room: int) -> Restoration | None:
    """The restoration of an object, of which at most ``room`` bytes are copied; None for other kinds of objects."""
    if isinstance(one, np.ndarray):
        return _of_array(one, room)
    if isinstance(one, CACHED_FUNCTION):
        undo, inner = cache_noted(one)
        before = results_of(one)
        return Restoration(undo, inner=inner, differs=lambda: not is_unchanged(before, results_of(one)))
    if isinstance(one, mmap.mmap):
        return _of_map(one, room)
    if isinstance(one, memoryview):
        return Restoration(nothing, inner=[one.obj])
    if isinstance(one, ContextVar):  # the run sets it in its own context
        return Restoration(nothing, inner=[one.get(None)])
    for kinds, read, write in _STATES:
        if isinstance(one, kinds):
            state = read(one)
            return Restoration(functools.partial(write, one, state), inner=[state] if type(state) is tuple else [])
    for kind in (io.BytesIO, io.StringIO, bytearray, array.array):
        if isinstance(one, kind):
            return _of_buffer(one, room)
    if isinstance(one, (io.BufferedIOBase, io.TextIOWrapper)):
        return _of_stream(one)
    if isinstance(one, _DATA_OF_C):
        return _of_memory(one, room)
    if isinstance(one, queue.SimpleQueue):
        return _of_queue(one)
    if isinstance(one, torch.UntypedStorage):
        return _of_storage(one, room)
    if isinstance(one, torch.fx.Graph):
        return _of_graph(one)
    if isinstance(one, torch.fx.Node):
        return Restoration(nothing, inner=[one.graph])
    return library_restoration_of(one, room) or _of_subclass(one)


def _set_bits(one: Any, before: tuple[Any, Any]) -> None:
    one.state = before[0]


def set_context(one: decimal.Context, before: decimal.Context) -> None:
    """Give a context of decimal numbers the values of another one."""
    for name in ("prec", "rounding", "Emin", "Emax", "capitals", "clamp"):
        setattr(one, name, getattr(before, name))
    one.flags.update(before.flags)
    one.traps.update(before.traps)


def _set_locked(one: Any, was: bool) -> None:
    if one.locked() and not was:
        one.release()
    elif was and not one.locked():
        one.acquire(blocking=False)


def _num_owned(one: Any) -> int:
    """How often this thread has acquired a lock that it can acquire again: only its text says so."""
    return int(repr(one).partition("count=")[2].split()[0]) if one._is_owned() else 0


def _set_owned(one: Any, before: int) -> None:
    while _num_owned(one) > before:
        one.release()
    while _num_owned(one) < before and one.acquire(blocking=False):
        pass


def _database(one: sqlite3.Connection) -> list[Any]:
    with contextlib.suppress(sqlite3.ProgrammingError):  # closed
        return [one.in_transaction, *(getattr(one, name) for name in _OF_DATABASES)]
    return []


def _set_database(one: sqlite3.Connection, before: list[Any]) -> None:
    if before and one.in_transaction and not before[0]:
        one.rollback()
    for name, value in zip(_OF_DATABASES, before[1:], strict=False):
        if getattr(one, name) != value:
            setattr(one, name, value)


def _set_connections(one: ssl.SSLContext, before: tuple[Any, ...]) -> None:
    one.check_hostname = False  # else some values are refused
    for name, value in zip(_OF_CONNECTIONS, before, strict=True):
        if getattr(one, name) != value:
            setattr(one, name, value)


def _counted(one: Any) -> int | None:
    """How often this process has acquired a lock of ``multiprocessing``; None while another of its threads holds it.

    Its value is not looked at: other processes, such as a data loader's workers, change it meanwhile.
    """
    return None if one._count() > 0 and not one._is_mine() else one._count()


def _set_counted(one: Any, before: int | None) -> None:
    while before is not None and one._count() > before:
        one.release()
    while before is not None and one._count() < before and one.acquire(False):
        pass


def _pickled(one: Any) -> tuple[Any, ...]:
    """What a pickler or unpickler has seen, and what else it holds, such as methods of its file."""
    return (one.memo.copy(), *gc.get_referents(one))


def _set_pickled(one: Any, before: tuple[Any, ...]) -> None:
    one.memo = before[0]


def _set_fields(one: np.dtype[Any], before: tuple[str, ...] | None) -> None:
    if one.names != before:
        one.names = before


def _element(one: ElementTree.Element) -> tuple[Any, ...]:
    return one.tag, one.text, one.tail, one.attrib, list(one)


def _set_element(one: ElementTree.Element, before: tuple[Any, ...]) -> None:
    one.tag, one.text, one.tail, one.attrib, one[:] = before


def _polled(one: Any) -> dict[int, int]:
    """What an epoll object waits for, according to Linux: events by file descriptor, proc(5)."""
    if one.closed:
        return {}
    lines = Path(f"/proc/self/fdinfo/{one.fileno()}").read_text(encoding="ascii").splitlines()
    words = [line.split() for line in lines if line.startswith("tfd:")]
    return {int(line[1]): int(line[3], 16) for line in words}


def _polled_by_number(one: Any) -> dict[int, int]:
    """What a poll object waits for: the first thing in it, ``dict`` of ``pollObject`` in Modules/selectmodule.c."""
    return dict(ctypes.py_object.from_address(id(one) + object.__basicsize__).value)  # type: ignore[call-overload]


def _set_polled(polled: Callable[[Any], dict[int, int]], one: Any, before: dict[int, int]) -> None:
    now = polled(one)
    if getattr(one, "closed", False) or now == before:
        return
    for number in now:
        one.unregister(number)
    for number, events in before.items():
        one.register(number, events)


# Generators of random numbers and others, with what reads and writes their state.
_STATES: tuple[tuple[Any, Callable[[Any], Any], Callable[[Any, Any], Any]], ...] = (
    (np.random.BitGenerator, lambda one: (one.state, getattr(one, "seed_seq", None)), _set_bits),
    (np.random.Generator, lambda one: (one.bit_generator,), lambda one, state: None),
    (np.random.SeedSequence, lambda one: one.__reduce__()[2], lambda one, state: one.__setstate_cython__(state)),
    (np.random.RandomState, lambda one: one.get_state(legacy=False), np.random.RandomState.set_state),
    (random.SystemRandom, lambda one: None, lambda one, state: None),
    (random.Random, random.Random.getstate, random.Random.setstate),
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    (decimal.Context, decimal.Context.copy, set_context),
    (ElementTree.Element, _element, _set_element),
    (type(threading.Lock()), lambda one: one.locked(), _set_locked),
    (type(threading.RLock()), _num_owned, _set_owned),
    (_multiprocessing.SemLock, _counted, _set_counted),
    (ssl.SSLContext, operator.attrgetter(*_OF_CONNECTIONS), _set_connections),
    (getattr(select, "epoll", ()), _polled, functools.partial(_set_polled, _polled)),
    (_POLL, _polled_by_number, functools.partial(_set_polled, _polled_by_number)),
    (np.dtype, operator.attrgetter("names"), _set_fields),
    (sqlite3.Connection, _database, _set_database),
    ((pickle.Pickler, pickle.Unpickler), _pickled, _set_pickled),
)
_DATA_OF_C = (ctypes.Structure, ctypes.Union, ctypes.Array, ctypes._SimpleCData)


def _of_array(one: Any, room: int) -> Restoration:
    """A large array can be read only meanwhile."""
    partial, inner = functools.partial, [one.dtype] if one.dtype.names else []
    if type(one) is not np.ndarray and hasattr(one, "__dict__"):
        inner.append(vars(one))
    if one.dtype.hasobject:
        inner += one.flat if one.dtype == object else []
        before = one.copy()
        return Restoration(
            partial(_restore_objects, one, before), 0, inner, differs=partial(_objects_differ, one, before)
        )
    if isinstance(one, np.memmap) and one.mode != "c":  # copied on write, so no file holds what is set
        return Restoration(nothing, 0, inner)
    is_own = one.flags.writeable or one.flags.owndata  # of another one's memory a flag cannot be set without it
    if is_own and one.nbytes <= min(COPIED_BYTES, room):
        before = one.copy(order="K")
        undo = partial(_restore_array, one, before, one.flags.writeable)
        return Restoration(undo, int(one.nbytes), inner, differs=partial(_array_differs, one, before))
    if not one.flags.writeable:
        return Restoration(partial(one.setflags, write=False), 0, inner)
    return Restoration(partial(_make_writeable, one), 0, inner, begin=partial(one.setflags, write=False))


def _make_writeable(one: Any) -> None:
    """NumPy refuses to where a tensor lent the memory, or an array that is not writeable yet: so the flag itself is
    set, after six words of ``PyArrayObject_fields`` in numpy/_core/include/numpy/ndarraytypes.h."""
    if not one.flags.writeable:
        at = id(one) + object.__basicsize__ + 6 * ctypes.sizeof(ctypes.c_void_p)
        ctypes.c_int.from_address(at).value |= _WRITEABLE


def _restore_array(one: Any, before: Any, was_writeable: bool) -> None:
    _make_writeable(one)
    if one.size != before.size:
        one.resize(before.shape, refcheck=False)
    if one.shape != before.shape:
        with warnings.catch_warnings():  # NumPy 2.5 wants a new array instead; this one is the user's
            warnings.simplefilter("ignore", DeprecationWarning)
            one.shape = before.shape
    if one.shape == before.shape and _array_differs(one, before):
        one[...] = before
    if not was_writeable:
        one.setflags(write=False)


def _array_differs(one: Any, before: Any) -> bool:
    """By bytes: a NaN is not equal to itself."""
    return one.shape != before.shape or one.tobytes() != before.tobytes()


def _restore_objects(one: Any, before: Any) -> None:
    if one.size != before.size:
        one.resize(before.shape, refcheck=False)
    if one.shape == before.shape and one.flags.writeable and _objects_differ(one, before):
        one[...] = before


def _objects_differ(one: Any, before: Any) -> bool:
    return one.shape != before.shape or not all(map(operator.is_, one.flat, before.flat))


def _of_stream(one: Any) -> Restoration:
    undo, inner = stream_noted(one)
    return Restoration(undo or nothing, inner=inner)


def _of_memory(one: Any, room: int) -> Restoration:
    """Restores data of ctypes that owns its memory; other memory may be gone."""
    size = ctypes.sizeof(one)
    if not one._b_needsfree_:  # in a map, say, which multiprocessing's values name
        return Restoration(nothing, inner=[vars(one)] if hasattr(one, "__dict__") else [])
    if size > min(COPIED_BYTES, room):
        return Restoration(nothing)
    at = ctypes.addressof(one)
    return Restoration(functools.partial(ctypes.memmove, at, ctypes.string_at(at, size), size), size, [one._objects])


def _of_queue(one: Any) -> Restoration:
    """The contents of a queue are only known once they were taken out."""
    items: list[Any] = []
    _take_out(one, items)

    def undo() -> None:
        _take_out(one, [])
        for item in items:
            one.put(item)

    undo()
    return Restoration(undo, inner=items)


def _take_out(one: Any, items: list[Any]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            items.append(one.get_nowait())


def _of_storage(one: torch.UntypedStorage, room: int) -> Restoration:
    size = one.nbytes()
    if one.device.type != "cpu" or size > min(COPIED_BYTES, room):
        return Restoration(nothing)
    return Restoration(functools.partial(one.copy_, one.clone()), size)


def _of_graph(one: torch.fx.Graph) -> Restoration:
    """Its nodes refer to one another by attributes that only the node itself shows."""
    nodes = [(node, node.__getstate__()) for node in (one._root, *one.nodes)]
    tables = [(table, dict(table)) for _node, state in nodes for table in state.values() if type(table) is dict]
    return Restoration(functools.partial(_restore_graph, nodes, tables), inner=[vars(one)])


def _restore_graph(nodes: list[tuple[Any, dict[str, Any]]], tables: list[tuple[Any, Any]]) -> None:
    for node, state in nodes:
        for name, value in state.items():
            object.__setattr__(node, name, value)  # its own tells the graph
    for table, before in tables:
        fill(table, before)


def _of_map(one: mmap.mmap, room: int) -> Restoration:
    """An exported map can be neither closed nor resized; a large writable one ends the run."""
    try:
        place, lent = one.tell(), memoryview(one)
    except ValueError:  # closed
        return Restoration(nothing)
    size = 0 if lent.readonly else len(one)
    if size > min(COPIED_BYTES, room):
        lent.release()
        raise LargeMapError(
            _(
                "A writable mmap of yours has {size}: more than a dry run copies. Open it with"
                " access=mmap.ACCESS_READ or ACCESS_COPY, or delete the variable.",
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
        if size > room:
            return Restoration(nothing)
        before = one[:]
        differs = functools.partial(operator.ne, one, before)
        return Restoration(functools.partial(_restore_items, one, before), size, differs=differs)
    if one.closed:
        return Restoration(nothing)
    place = one.tell()
    size = one.seek(0, io.SEEK_END)
    one.seek(place)
    if size > min(COPIED_BYTES, room):
        return Restoration(functools.partial(one.seek, place))
    before = one.getvalue()
    differs = functools.partial(_buffer_differs, one, before)
    return Restoration(functools.partial(_restore_buffer, one, before, place), size, differs=differs)


def _restore_items(one: Any, before: Any) -> None:
    if one != before:
        one[:] = before


def _buffer_differs(one: Any, before: Any) -> bool:
    return not one.closed and one.getvalue() != before


def _restore_buffer(one: Any, before: Any, place: int) -> None:
    if one.closed:
        return
    if _buffer_differs(one, before):
        one.seek(0)
        one.truncate()
        one.write(before)
    one.seek(place)


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
        items, were = (list(base.__iter__(each)) for each in (one, before))  # not the user's own method
        is_same = base.__eq__(one, before) if base is set else _are_same(items, were)
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
