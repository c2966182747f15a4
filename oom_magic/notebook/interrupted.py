"""Interrupts (the stop button, Ctrl-C) of what this package runs: one line in place of hundreds of a traceback."""

from __future__ import annotations

import traceback
from types import TracebackType

from IPython import get_ipython

from oom_magic.language import _, choose_language
from oom_magic.user_code import cell_name, is_users_file


class Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt that IPython shows as one line."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows (``InteractiveShell.showtraceback``)."""
        shown = getattr(get_ipython(), "InteractiveTB", None)
        if shown is not None:
            shown.tb = None  # the error before this one and its tensors, which IPython drops where it renders itself
        return [f"KeyboardInterrupt: {self}"]


class InOneLine:
    """Lets an interrupt inside end with the catalogue's sentence for ``key``, which may name the line (``where``).

    Nothing of what was interrupted is kept: its frames would hold its tensors.
    """

    def __init__(self, key: str) -> None:
        self._key = key

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not isinstance(error, KeyboardInterrupt) or isinstance(error, Interrupted):
            return
        from oom_magic.explain.sentences.catalogue import translate

        interrupted = Interrupted(translate(self._key, choose_language(), where=_where(error)))
        del kind, error, tb
        try:
            raise interrupted
        finally:
            interrupted.__context__ = None


def _where(error: BaseException) -> str:
    """The user's innermost line on the way to the interrupt."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users_file(frame.filename):
            return f"{cell_name(frame.filename)}:{frame.lineno}"
    return _("its beginning")
