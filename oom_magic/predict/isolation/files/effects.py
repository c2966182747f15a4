"""What keeps a dry run from having effects outside itself: on files, processes, connections.

``isolated`` is all that others need. Writes go to a private layer (``file_tree``) by way of Python's own functions
(``file_calls``), which are exchanged wherever modules hold them (``substitution``), and of libc's, where C libraries
open files themselves (``c_calls``); what leaves the process is answered or refused (``boundary``); files and databases
that are open already are in ``open_files``, numbers and sockets in ``descriptors``.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any
from urllib.parse import quote, unquote

from oom_magic.predict.isolation.files.boundary import Boundary
from oom_magic.predict.isolation.files.c_calls import c_calls_answered
from oom_magic.predict.isolation.files.descriptors import Descriptors
from oom_magic.predict.isolation.files.file_calls import FileCalls
from oom_magic.predict.isolation.files.file_tree import FileTree
from oom_magic.predict.isolation.files.open_files import open_files_restored
from oom_magic.predict.isolation.files.substitution import substituted
from oom_magic.predict.isolation.live_objects import find_live_objects
from oom_magic.predict.isolation.objects.users_objects import log_handlers
from oom_magic.predict.isolation.patching import Patches, all_patched
from oom_magic.predict.isolation.run_threads import Scope


@dataclass(frozen=True)
class Isolation:
    """What other modules use: the layer with what the run wrote, and the scope that tells whose calls go there."""

    files: FileTree
    scope: Scope


@contextmanager
def isolated(
    assume: Callable[[str], None], namespaces: Sequence[dict[str, Any]] = (), function: Any = None
) -> Iterator[Isolation]:
    """While a dry run of ``function`` in this thread lasts, it has no effect on files, processes and connections.

    ``assume`` is told what was not done.
    """
    scope = Scope()

    def note(text: str) -> None:
        with scope.outside():
            assume(text)

    tree = FileTree(note)
    numbers = Descriptors(tree, scope, note)
    calls, boundary = FileCalls(tree, scope, numbers), Boundary(tree, scope, note)
    stand_ins = calls.replacements()
    functions = [  # each with what is called in its place
        *calls.substitutes(stand_ins),
        (sqlite3.connect, connect(sqlite3.connect, tree, scope)),
        *numbers.replacements(),
        *boundary.replacements(),
    ]
    table: Patches = [
        (sys, {"dont_write_bytecode": True}),
        (resource_tracker, {name: _untracked(name, scope) for name in ("register", "unregister")}),
        *scope.patches(),
        *numbers.patches(),
        *boundary.patches(),
    ]
    live = find_live_objects()
    with ExitStack() as stack:
        stack.callback(tree.discard)
        stack.enter_context(numbers.closed_at_the_end())
        stack.enter_context(open_files_restored(live.files, tree, scope, note, namespaces, function))
        stack.enter_context(substituted(functions, [*namespaces, *_names_of_handlers()]))
        stack.enter_context(scope.entered())
        stack.enter_context(all_patched(table))
        stack.enter_context(boundary.closed())
        stack.enter_context(c_calls_answered(live.functions, tree, scope, numbers, stand_ins, note))
        for found in (live.files, live.functions):
            found.clear()  # the lists are held by frames that live as long as the run
        del live
        yield Isolation(tree, scope)


def _untracked(name: str, scope: Scope) -> Callable[[str, str], None]:
    """Shared memory of the run is a file of the layer: the process that cleans up knows that of the user."""
    usual = getattr(resource_tracker, name)

    @functools.wraps(usual)
    def track(path: str, kind: str) -> None:
        if kind != "shared_memory" or not scope.applies():
            usual(path, kind)

    return track


def _names_of_handlers() -> list[dict[str, Any]]:
    """The attributes of log handlers that hold ``open`` itself."""
    return [vars(one) for one in log_handlers() if isinstance(one, logging.FileHandler)]


_BESIDE = ("-wal", "-journal")  # files of a database with what is not in it yet, sqlite.org/tempfiles.html


def connect(usual: Callable[..., Any], tree: FileTree, scope: Scope) -> Callable[..., Any]:
    """What stands in for ``sqlite3.connect``."""

    @functools.wraps(usual)
    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        if not scope.applies():
            return usual(database, *args, **kwargs)
        is_uri = kwargs.get("uri", args[6] if len(args) > 6 else False)
        with scope.outside():
            name = os.fsdecode(database)
            private = _private_uri(tree, name) if is_uri and name.startswith("file:") else _private(tree, name)
            connection = usual(private, *args, **kwargs)
        connection.set_authorizer(functools.partial(_allow, tree))
        return connection

    return connect


def _private_uri(tree: FileTree, name: str) -> str:
    path, mark, options = name.removeprefix("file:").partition("?")
    if "mode=memory" in options:
        return name
    path = "/" + path.lstrip("/") if path.startswith("//") else path
    return f"file:{quote(_private(tree, unquote(path)))}{mark}{options}"


def _private(tree: FileTree, path: str) -> str:
    if path in ("", ":memory:"):
        return path
    was_private = tree.is_private(tree.real_path(path))
    beside = {ending: tree.real_path(path + ending) for ending in _BESIDE}
    private = tree.promise(path)
    for ending, file in beside.items():
        if not was_private and os.path.exists(file):
            shutil.copyfile(file, private + ending)
    return private


def _allow(tree: FileTree, action: int, first: Any, *_: Any) -> int:
    """SQLite asks before each statement: ATTACH would open another file of the user's. Of a parameter's name it says
    None."""
    is_attached = action == sqlite3.SQLITE_ATTACH and first not in ("", ":memory:")
    return sqlite3.SQLITE_DENY if is_attached and not tree.is_private(str(first)) else sqlite3.SQLITE_OK
