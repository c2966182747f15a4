"""An interrupt (the stop button, Ctrl-C) of what this package runs, or a missing PyTorch: one line, not a traceback."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from oom_magic.language import Sentences, _, translated
from oom_magic.user_code import cell_name, is_users_file

_SAID: Sentences = {
    "dry run": "interrupted at {where}. It was a dry run: nothing of yours was changed.",
    "cell": "interrupted at {where}.",
    "explanation": "interrupted before the explanation was complete; %oom_explain --fast rehearses nothing.",
    "function": "interrupted at {where}, while the function was dry-run; nothing of yours was changed.",
    "callback": "interrupted before or after a cell; a cell that runs is stopped by another interrupt.",
    "other": "interrupted; nothing of yours was changed.",
}


class _ShownAsOneLine:
    shown_as: str

    def _render_traceback_(self) -> list[str]:
        """What IPython shows (``InteractiveShell.showtraceback``)."""
        ipython = sys.modules.get("IPython")
        shown = getattr(ipython.get_ipython() if ipython is not None else None, "InteractiveTB", None)
        if shown is not None:
            shown.tb = None  # drop the previous error and its tensors, as IPython's own rendering does
        return [f"{self.shown_as}: {self}"]


class Interrupted(_ShownAsOneLine, KeyboardInterrupt):
    """A KeyboardInterrupt that IPython shows as one line."""

    shown_as = "KeyboardInterrupt"


class PyTorchMissingError(_ShownAsOneLine, ImportError):
    """PyTorch is not installed, or lacks what a dry run rests on; an ImportError that IPython shows as one line."""

    shown_as = "ImportError"


class InOneLine:
    """Turns an interrupt inside the block into one sentence about ``what`` was interrupted, which may name the line.

    No frame of the interrupted code is kept: it would hold tensors. Where PyTorch is missing, the sentence says so.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        said: BaseException
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
            said = Interrupted(translated(_SAID[self._what], where=_where(error)))
        elif isinstance(error, ModuleNotFoundError) and error.name == "torch":
            said = PyTorchMissingError(
                _("PyTorch is not installed; without it only texts are explained: pip install torch.")
            )
        else:
            return
        del kind, error, tb
        try:
            raise said
        finally:
            said.__context__ = None


def _where(error: BaseException) -> str:
    """The user's innermost line on the way to the interrupt; compiled libraries name files that are not there."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users_file(frame.filename) and frame.line:
            return f"{cell_name(frame.filename)}:{frame.lineno}"
    return _("its beginning")
