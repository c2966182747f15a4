"""SQLite in a dry run: a database is a private copy. SQLite opens its files itself, below Python's functions."""

from __future__ import annotations

import functools
import os
import shutil
import sqlite3
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote

from oom_magic.predict.isolation.files.file_tree import FileTree
from oom_magic.predict.isolation.scope import Scope

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
    """SQLite asks before each statement: ATTACH would open another file of the user's."""
    is_attached = action == sqlite3.SQLITE_ATTACH and first not in (None, "", ":memory:")
    return sqlite3.SQLITE_DENY if is_attached and not tree.is_private(str(first)) else sqlite3.SQLITE_OK
