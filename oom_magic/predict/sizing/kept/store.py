"""Sizes that were found before, kept in the user's cache folder: the second time they are there at once.

What decides sizes is in a file's name. So a file is never out of date; it only falls out of use.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp
from typing import Any, TypeVar

import platformdirs

from oom_magic.predict.sizing.kept.surroundings import surroundings

_MOST_BYTES = 200 * 2**20  # of all files; the longest unused go
_ENDING = ".sizes"
is_on = True  # False: nothing is read from the folder or written to it

_T = TypeVar("_T")


def folder() -> Path:
    """Where the files are."""
    return Path(platformdirs.user_cache_dir("oom_magic", appauthor=False))


def kept(what: Callable[[], Any], make: Callable[[], _T]) -> _T:
    """What ``make`` returns, from the folder if it was made before for the same ``what()``, whose ``repr`` says all.

    None of ``what`` is not known. What is another, or in other surroundings, when it was made is not kept.
    """
    file = _file(what())
    found = None if file is None else _read(file)
    if found is None:
        found = (make(),)
        if file is not None and _file(what()) == file:
            _write(file, found)
    made: _T = found[0]
    return made


def recalled(what: Any) -> Any:
    """What ``kept`` has in the folder for the same ``what``; None for nothing."""
    file = _file(what)
    found = None if file is None else _read(file)
    return None if found is None else found[0]


def _file(what: Any) -> Path | None:
    around = surroundings() if is_on and what is not None else None
    if around is None:
        return None
    return folder() / (hashlib.sha256(repr((what, around)).encode()).hexdigest() + _ENDING)


def _read(file: Path) -> tuple[Any] | None:
    """What is in a file of the user's own; None if there is none, or none that can be read."""
    try:
        if hasattr(os, "getuid") and file.stat().st_uid != os.getuid():
            return None
        found: tuple[Any] = pickle.loads(zlib.decompress(file.read_bytes()))
    except Exception:  # a damaged pickle raises anything
        return None
    with suppress(OSError):
        os.utime(file)  # used now
    return found


def _write(file: Path, found: tuple[Any]) -> None:
    """Write a file as a whole or not at all; a full disk or what cannot be pickled only costs time later."""
    with suppress(OSError, RecursionError, pickle.PicklingError, TypeError, AttributeError):
        text = zlib.compress(pickle.dumps(found, protocol=5), 1)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, name = mkstemp(dir=file.parent)
        try:
            with os.fdopen(number, "wb") as new:
                new.write(text)
            Path(name).replace(file)
        finally:
            Path(name).unlink(missing_ok=True)
        _forget_unused(file.parent)


def _forget_unused(where: Path) -> None:
    """Others' unfinished files among them, when they are old."""
    files = sorted(where.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
    total = 0
    for file in files:
        total += file.stat().st_size
        if total > _MOST_BYTES:
            file.unlink(missing_ok=True)
