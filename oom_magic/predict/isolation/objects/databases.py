"""Databases that the user has open: the run has copies."""

from __future__ import annotations

import sqlite3
from typing import Any
from urllib.parse import quote

MOST_COPIED_BYTES = 1 << 24  # of one database


class DatabaseCopy(sqlite3.Connection):
    """A copy that ends with the run."""


def copied_database(one: sqlite3.Connection) -> DatabaseCopy | None:
    """In memory; of a large one another connection that only reads. None for one of another thread, or without file."""
    try:
        [[pages]], [[page_bytes]] = (one.execute(f"PRAGMA {name}").fetchall() for name in ("page_count", "page_size"))
        if pages * page_bytes > MOST_COPIED_BYTES:
            made = _reading(one)
        else:
            made = DatabaseCopy(":memory:", isolation_level=one.isolation_level)
            if not one.in_transaction:
                one.backup(made)
            elif hasattr(one, "serialize"):  # which does not wait for the end of a transaction, as a backup does
                made.deserialize(one.serialize())
            else:  # before Python 3.11
                made = _reading(one)
    except sqlite3.Error:  # closed, say
        return None
    if made is not None:
        for name in ("row_factory", "text_factory"):
            setattr(made, name, getattr(one, name))
        made.set_authorizer(_allow_in_memory)
    return made


def _reading(one: sqlite3.Connection) -> DatabaseCopy | None:
    """Another connection to the same file, which the run may close."""
    files = {name: file for _unused, name, file in one.execute("PRAGMA database_list")}
    if not files.get("main"):
        return None
    return DatabaseCopy(f"file:{quote(files['main'])}?mode=ro", uri=True, isolation_level=one.isolation_level)


def _allow_in_memory(action: int, first: Any, *_: Any) -> int:
    """SQLite asks before each statement: ATTACH would open a file. Of a parameter's name it says None."""
    is_attached = action == sqlite3.SQLITE_ATTACH and first not in ("", ":memory:")
    return sqlite3.SQLITE_DENY if is_attached else sqlite3.SQLITE_OK
