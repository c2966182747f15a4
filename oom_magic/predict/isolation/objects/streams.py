"""Streams that lie over others in memory: text and buffers over bytes, over a compressed file.

What lies over a file on the disk itself is seen to in ``files.open_files``; what lies under a stream is put back
before it.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from typing import Any

_OF_TEXT = ("encoding", "errors", "line_buffering", "write_through")
_GONE = (OSError, ValueError, AttributeError)  # closed, detached, or of a kind that has no place


def stream_noted(one: Any) -> tuple[Callable[[], None] | None, list[Any]]:
    """How a stream is put back, None where nothing is to be done, and the inner objects that are noted, too."""
    below = under(one)
    if below is None or is_over_file(one) or one.closed:
        return None, [vars(one)] if hasattr(one, "__dict__") else []
    options = {name: getattr(one, name) for name in _OF_TEXT} if isinstance(one, io.TextIOWrapper) else {}
    place = None
    with contextlib.suppress(*_GONE):
        place = one.tell() if one.seekable() else None
    return partial(_put_back, one, partial(one.__init__, below, **options), place), [below]


def under(one: Any) -> Any:
    """What a stream lies over; None for one that shows nothing of it, or was detached."""
    with contextlib.suppress(*_GONE):
        return getattr(one, "buffer", None) or getattr(one, "raw", None)
    return None


def is_over_file(one: Any) -> bool:
    """Whether a stream lies over a file on the disk, uncompressed."""
    while one is not None and not isinstance(one, io.FileIO):
        one = under(one)
    return one is not None


def _put_back(one: Any, open_again: Callable[[], None], place: Any) -> None:
    """To its place; seeking to the end first discards what was read ahead. One that the run closed has lost its buffer:
    it is made anew."""
    if one.closed or place is None:
        return
    try:
        one.seek(0, io.SEEK_END)
    except ValueError:
        open_again()
        _go(one, 0, io.SEEK_END)
    except OSError:  # what is being compressed goes forward only, and is where it was
        pass
    _go(one, place)


def _go(one: Any, *place: Any) -> None:
    with contextlib.suppress(*_GONE):
        one.seek(*place)
