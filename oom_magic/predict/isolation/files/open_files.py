"""Files that were open before a dry run: the run uses private copies, and their positions are restored afterwards.

Only files that the run's code can reach are exchanged, not those of other threads. The descriptor is replaced
(``dup2``), not the file object, so that whatever refers to the object (a ``csv.writer``, say) uses the copy.
"""

from __future__ import annotations

import functools
import gc
import gzip
import io
import logging
import operator
import os
import shutil
import sqlite3
import stat
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np

from oom_magic.language import _
from oom_magic.predict.isolation.files.file_tree import FileTree
from oom_magic.predict.isolation.live_objects import FILES, find_live_objects
from oom_magic.predict.isolation.objects.databases import DatabaseCopy
from oom_magic.predict.isolation.objects.streams import is_over_file, under
from oom_magic.predict.isolation.objects.users_objects import kept_by, log_handlers
from oom_magic.predict.isolation.patching import patched
from oom_magic.predict.isolation.process.notebook_shell import history_connections
from oom_magic.predict.isolation.reach import NOT_WALKED
from oom_magic.predict.isolation.run_threads import Scope

_CLOSED_IN = (type, types.ModuleType, types.CodeType, types.FrameType, logging.Handler)  # not looked into
_OF_LIBRARIES = NOT_WALKED - {"oom_magic"}  # the notebook's go on as before
_MOST_OBJECTS = 200_000


@contextmanager
def open_files_restored(
    known: Sequence[Any],
    tree: FileTree,
    scope: Scope,
    assume: Callable[[str], None],
    namespaces: Sequence[dict[str, Any]],
    function: Any,
) -> Iterator[None]:
    """While a dry run of ``function`` lasts, the ``known`` files that it can reach are private copies. A file that
    cannot be exchanged can only be read meanwhile.
    """
    with ExitStack() as stack, scope.outside():
        for one in _reachable(known, namespaces, function, assume):
            if isinstance(one, FILES):
                stack.enter_context(_file_restored(one, tree, assume))
            elif isinstance(one, np.memmap) and one.flags.writeable and one.mode != "c":
                one.flags.writeable = False
                stack.callback(one.setflags, write=True)
            elif isinstance(one, sqlite3.Connection) and not isinstance(one, DatabaseCopy):
                stack.enter_context(_database_restored(one, assume))
        stack.enter_context(_logs_restored(scope))
        with scope.inside(), _refusals_explained():
            yield


@contextmanager
def _refusals_explained() -> Iterator[None]:
    """The errors of what can only be read meanwhile say why, and what to do."""
    try:
        yield
    except (sqlite3.OperationalError, ValueError) as error:
        text = str(error)
        if "readonly database" in text:
            why = _(
                "A dry run cannot write to a database that was opened before it and is larger than 16 MiB (before"
                " Python 3.11 also: has an open transaction): connect to it in the cell."
            )
            error.args = (f"{text}. {why}",)
        elif "is read-only" in text:
            why = _(
                "A dry run cannot write to memory maps or arrays larger than 16 MiB that were created before it:"
                " let the cell write to a copy."
            )
            error.args = (f"{text}. {why}",)
        raise


def compressed_written_out() -> Callable[[], None]:
    """Let streams over compressed files hand on what they buffer, now and when the returned function is called.

    What is in their buffer, in C, cannot be restored; what lies under them can be. (gzip's own is in C since Python
    3.12.)
    """
    kind = getattr(gzip, "_WriteBufferStream", ())
    found = [
        one
        for one in find_live_objects().files
        if isinstance(under(one), kind) or (isinstance(one, io.TextIOWrapper) and not is_over_file(one))
    ]

    def write_out() -> None:
        for one in found:
            with suppress(OSError, ValueError, RuntimeError):  # closed, or its stream is gone
                one.flush()

    write_out()
    return write_out


def _reachable(
    known: Sequence[Any], namespaces: Sequence[dict[str, Any]], function: Any, assume: Callable[[str], None]
) -> list[Any]:
    """Files, memory maps and databases that names of the user or the function lead to."""
    wanted = {id(one): one for one in known if not isinstance(one, FILES) or _layers(one) is not None}
    found: dict[int, Any] = {}
    streams = [one.stream for one in log_handlers() if type(one) is logging.StreamHandler]
    values = [value for names in namespaces for value in list(names.values())]
    named = set(map(id, values))
    for one in history_connections():  # nothing else leads to IPython's own, which would be looked for everywhere
        if id(one) not in named:
            wanted.pop(id(one), None)
    kept = [kept_by(one) for one in values if isinstance(one, types.ModuleType)]
    level: list[Any] = [*namespaces, function, streams, *kept]
    seen = set(map(id, level))
    while level and wanted and len(seen) < _MOST_OBJECTS:
        level = _walked(gc.get_referents(*level))
        met = dict(zip(map(id, level), level, strict=True))
        level = list(compress(met.values(), map(operator.not_, map(seen.__contains__, met))))
        seen.update(met)
        for key in wanted.keys() & met.keys():
            found[key] = wanted.pop(key)
        level = [one for one in level if not isinstance(one, FILES) or not is_over_file(one)]  # with their parts
    if level and wanted:
        assume(
            _(
                "your variables refer to very many objects: files held by the most deeply nested ones may have"
                " been missed"
            )
        )
    return list(found.values())


def _walked(parts: list[Any]) -> list[Any]:
    """Without values that lead to no file, or to everything: names of modules, objects that the user's code does not
    hold."""
    parts = list(compress(parts, map(gc.is_tracked, parts)))
    kinds = set(map(type, parts))
    left_out = {
        kind
        for kind in kinds
        if issubclass(kind, _CLOSED_IN) or str(kind.__module__).partition(".")[0] in _OF_LIBRARIES
    }
    parts = list(compress(parts, map(operator.not_, map(left_out.__contains__, map(type, parts)))))
    return [one for one in parts if type(one) is not dict or "__builtins__" not in one]


@dataclass(slots=True)
class _Layers:
    """A file object's parts: text above bytes above the descriptor."""

    text: Any
    buffer: Any
    raw: Any

    @classmethod
    def of(cls, file: Any) -> _Layers | None:
        """None for a closed file, a device, or a stream that the process prints to."""
        text = file if isinstance(file, io.TextIOWrapper) else None
        buffer = text.buffer if text is not None else file if not isinstance(file, io.FileIO) else None
        raw: Any = getattr(buffer, "raw", None) if buffer is not None else file
        if not isinstance(raw, io.FileIO) or raw.closed:
            return None
        is_terminal = stat.S_ISCHR(os.fstat(raw.fileno()).st_mode)
        return None if is_terminal or is_output(raw.fileno()) else cls(text, buffer, raw)

    @property
    def outer(self) -> Any:
        """What the user holds."""
        return self.text or self.buffer or self.raw

    def reopen(self, number: int, state: tuple[Any, ...]) -> None:
        """Open what the run closed again, as it was."""
        name, mode, options = state
        vars(self.raw).pop("__IOBase_closed", None)  # CPython's mark, Modules/_io/iobase.c
        self.raw.__init__(number, mode.replace("x", "w"))
        self.raw.name = name
        if self.buffer is not None:
            self.buffer.__init__(self.raw)
        if self.text is not None:
            self.text.__init__(self.buffer, **options)

    def state(self) -> tuple[Any, ...]:
        """What ``reopen`` needs."""
        names = ("encoding", "errors", "line_buffering", "write_through")
        options = {name: getattr(self.text, name) for name in names} if self.text is not None else {}
        return self.raw.name, self.raw.mode, options


def _layers(file: Any) -> _Layers | None:
    """A file object's parts; None where there is nothing to restore."""
    try:
        return _Layers.of(file)
    except (OSError, ValueError, AttributeError):  # closed, or detached from its layers
        return None


def is_output(number: int) -> bool:
    """Whether the process prints to this descriptor."""
    state = os.fstat(number)
    for output in (1, 2, *map(_number, (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))):
        with suppress(OSError):
            if output >= 0 and os.path.samestat(os.fstat(output), state):
                return True
    return False


def can_write(number: int) -> bool:
    """Whether a descriptor was opened for writing."""
    import fcntl  # not on Windows, where no number is looked at, and that of a map is that of a copy

    return fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY


def _number(file: Any) -> int:
    try:
        return int(file.fileno())
    except Exception:
        return -1


@contextmanager
def _file_restored(file: Any, tree: FileTree, assume: Callable[[str], None]) -> Iterator[None]:
    layers = _layers(file)
    if layers is None:
        yield
        return
    outer, number, state = layers.outer, layers.raw.fileno(), layers.state()
    position = _position(outer)
    is_on_disk = stat.S_ISREG(os.fstat(number).st_mode)
    if not is_on_disk:
        assume(_("pipe {name!r}, opened before the dry run: nothing is written to it or read from it", name=state[0]))
    elif position is None:
        text = _(
            "file {name!r} is being read line by line: the lines that the dry run reads are consumed", name=state[0]
        )
        assume(text)
    saved, is_inherited = os.dup(number), os.get_inheritable(number)
    try:
        if layers.raw.writable():
            outer.flush()
        if layers.raw.writable() or not is_on_disk:
            _exchange(layers.raw, tree)
        yield
    finally:
        if outer.closed:
            layers.reopen(_open_again(saved, number, is_inherited), state)
        else:
            if layers.raw.writable():
                with suppress(OSError, ValueError):
                    outer.flush()
            os.dup2(saved, number, is_inherited)
        os.close(saved)
        if position is not None:
            outer.seek(position)


def _position(file: Any) -> Any:
    try:
        return file.tell()
    except (OSError, ValueError):
        return None


def _exchange(raw: io.FileIO, tree: FileTree) -> None:
    """Let the descriptor be that of a private copy, or of the null device in place of a pipe."""
    number = raw.fileno()
    is_file = stat.S_ISREG(os.fstat(number).st_mode)
    copy = private_copy(number, str(raw.name), tree) if is_file else os.open(os.devnull, os.O_RDWR)
    os.dup2(copy, number, os.get_inheritable(number))
    os.close(copy)


def private_copy(number: int, name: str, tree: FileTree) -> int:
    """A descriptor of the layer's copy of an open file, in the same mode and at the same position."""
    import fcntl  # not on Windows, where no number is looked at

    tree.begin()
    here = f"/proc/self/fd/{number}"
    path = os.readlink(here) if os.path.lexists(here) else os.path.abspath(name)
    found = tree.find(path)
    flags = fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
    is_read = flags == os.O_RDONLY
    if found.node is not None and os.path.samestat(os.stat(found.node.backing), os.fstat(number)):
        private = found.node.backing if is_read else tree.writable(found.node)
    elif is_read:
        private = here
    else:  # it has no name any more
        private = tree.new_name("")
        shutil.copyfile(here, private)
    copy = os.open(private, flags)
    os.lseek(copy, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
    return copy


@contextmanager
def _database_restored(connection: Any, assume: Callable[[str], None]) -> Iterator[None]:
    """An open SQLite connection can be read only, for a while."""
    try:
        (before,) = connection.execute("PRAGMA query_only").fetchone()
        connection.execute("PRAGMA query_only = 1")
    except Exception:  # closed, or another thread's
        yield
        return
    assume(_("a SQLite connection opened before the dry run is read-only in it"))
    try:
        yield
    finally:
        with suppress(Exception):
            connection.execute(f"PRAGMA query_only = {before}")


@contextmanager
def _logs_restored(scope: Scope) -> Iterator[None]:
    """Log handlers that were set up before the run write to the layer's copies of their files during it."""
    handlers = [one for one in log_handlers() if isinstance(one, logging.FileHandler)]
    before = set(map(id, handlers))
    if not before:
        yield
        return
    handle = logging.Handler.handle

    @functools.wraps(handle)
    def diverted(handler: logging.Handler, record: logging.LogRecord) -> Any:
        if id(handler) not in before or not scope.applies():
            return handle(handler, record)
        if handler.filter(record):
            _log_privately(handler, record)
        return True

    with ExitStack() as stack:
        for handler in handlers:
            stack.enter_context(_kept_open(handler.stream))
        stack.enter_context(patched(logging.Handler, {"handle": diverted}))
        yield


@contextmanager
def _kept_open(file: Any) -> Iterator[None]:
    """A file that other threads go on to write is open at the end, if it was."""
    layers = _layers(file)
    if layers is None:
        yield
        return
    state, number = layers.state(), layers.raw.fileno()
    saved, is_inherited = os.dup(number), os.get_inheritable(number)
    try:
        yield
    finally:
        if layers.outer.closed:
            layers.reopen(_open_again(saved, number, is_inherited), state)
        os.close(saved)


def _open_again(saved: int, number: int, is_inherited: bool) -> int:
    """The descriptor of a file that the run closed: its old number, unless another file has that by now."""
    try:
        is_open = os.path.samestat(os.fstat(number), os.fstat(saved))  # what the run closed was a copy
    except OSError:
        return os.dup2(saved, number, is_inherited)
    return number if is_open else os.dup(saved)


def _log_privately(handler: Any, record: logging.LogRecord) -> None:
    with handler.lock, open(handler.baseFilename, "a", encoding=handler.encoding, errors=handler.errors) as file:
        file.write(handler.format(record) + handler.terminator)
