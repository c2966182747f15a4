"""Errors that need no traceback, or less of one: an interrupt (stop button, Ctrl-C) and a missing PyTorch are shown as
one line, an argument that this package refuses at the user's own line."""

from __future__ import annotations

import sys
import traceback
from dis import opmap
from types import TracebackType
from typing import Any

from oom_magic.language import Sentences, _, translated
from oom_magic.user_code import cell_name, is_machinery, is_own_file, is_users_file

_INTERRUPTED: Sentences = {
    "dry run": "interrupted at {where}. This was a dry run: none of your variables or files changed.",
    "cell": "interrupted at {where}.",
    "explanation": "interrupted before the explanation was complete; %oom_explain --fast skips the dry runs.",
    "function": "interrupted at {where} during a dry run of the function; none of your variables or files changed.",
    "release": "interrupted before everything was released; run it again for the rest.",
    "before a cell": "interrupted before the cell began; it did not run.",
    "after a cell": "interrupted after the cell had run.",
    "other": "interrupted; none of your variables or files changed.",
}


class ShownAsOneLine:
    """Mixin for an exception that IPython shows without a traceback, under the name ``shown_as``."""

    shown_as: str

    def _render_traceback_(self) -> list[str]:
        """The lines to show; called by ``InteractiveShell.showtraceback``."""
        ipython = sys.modules.get("IPython")
        formatter = getattr(ipython.get_ipython() if ipython is not None else None, "InteractiveTB", None)
        if formatter is not None:
            formatter.tb = None  # drop the previous error and its tensors, as IPython's own rendering does
        return [f"{self.shown_as}: {self}"]


class Interrupted(ShownAsOneLine, KeyboardInterrupt):
    """A KeyboardInterrupt that IPython shows as one line."""

    shown_as = "KeyboardInterrupt"


class PyTorchMissingError(ShownAsOneLine, ImportError):
    """PyTorch is not installed, or too old for a dry run; an ImportError that IPython shows as one line."""

    shown_as = "ImportError"


class OneLineErrors:
    """Context manager that replaces a KeyboardInterrupt, or a missing PyTorch, by an error of one line.

    IPython shows what this package refuses (``_is_refusal``) without the frames of this package.
    ``task`` is what was interrupted, a key of ``_INTERRUPTED``. The new exception has no context: the frames of the
    interrupted code would keep its tensors alive.
    """

    def __init__(self, task: str) -> None:
        self._task = task

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        replacement: BaseException
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
            replacement = Interrupted(translated(_INTERRUPTED[self._task], where=_interrupted_line(error)))
        elif isinstance(error, ModuleNotFoundError) and error.name == "torch":
            replacement = PyTorchMissingError(
                _("PyTorch is not installed; without it, only pasted texts can be explained: pip install torch.")
            )
        else:
            if isinstance(error, (ValueError, TypeError)) and _is_refusal(tb):
                _hide_own_frames(error)
            return
        del kind, error, tb
        try:
            raise replacement
        finally:
            replacement.__context__ = None


def _interrupted_line(error: BaseException) -> str:
    """The user's innermost line in the traceback, as ``"Cell In[3]:5"``.

    Frames without source text are skipped: compiled libraries name files that do not exist.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users_file(frame.filename) and frame.line:
            return f"{cell_name(frame.filename)}:{frame.lineno}"
    return _("the beginning")


def _is_refusal(tb: TracebackType | None) -> bool:
    """Whether an error was raised on purpose by this package, with no code of others in between."""
    frames = _frames(tb)
    if not frames or not all(is_own_file(one.tb_frame.f_code.co_filename) for one in frames):
        return False
    last = frames[-1]
    return last.tb_frame.f_code.co_code[last.tb_lasti] == opmap["RAISE_VARARGS"]  # else an operation failed


def _hide_own_frames(error: BaseException) -> None:
    """Let IPython show an error at the line of the user's that called this package."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        return

    def _render_traceback_() -> list[str]:
        shown: TracebackType | None = None
        for frame in reversed(_frames(error.__traceback__)):
            if not is_machinery(frame.tb_frame.f_code.co_filename):
                shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, shown, tb_offset=0)
        return lines

    error._render_traceback_ = _render_traceback_  # type: ignore[attr-defined]


def _frames(tb: TracebackType | None) -> list[TracebackType]:
    frames = []
    while tb is not None:
        frames.append(tb)
        tb = tb.tb_next
    return frames
