"""Interrupts (the stop button, Ctrl-C) of what this package runs: one line in place of hundreds of a traceback."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt that IPython shows as one line."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows (``InteractiveShell.showtraceback``)."""
        return [f"KeyboardInterrupt: {self}"]


@contextmanager
def in_one_line(key: str) -> Iterator[None]:
    """Let an interrupt inside end with the catalogue's sentence for ``key``, which may name the line (``where``)."""
    try:
        yield
        return
    except Interrupted:
        raise
    except KeyboardInterrupt as error:
        where = _where(error)
    from oom_magic.explain.language import choose_language, translate

    interrupted = Interrupted(translate(key, choose_language(), where=where))
    try:
        raise interrupted
    finally:
        interrupted.__context__ = None  # it would keep the frames of what was interrupted, and their tensors


def _where(error: BaseException) -> str:
    """The user's innermost line on the way to the interrupt."""
    from oom_magic.predict.instrumentation.attribution import cell_name, is_users_file

    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users_file(frame.filename):
            return f"{cell_name(frame.filename)}:{frame.lineno}"
    return "its beginning"
