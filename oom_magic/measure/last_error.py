"""Where Python, IPython and its debugger keep the last error; and forgetting it."""

from __future__ import annotations

import bdb
import cmd
import sys
import types
from typing import Any

from oom_magic.measure.dead_frames import running_frames
from oom_magic.measure.live_objects import live_objects
from oom_magic.measure.reach import module_of

_PYTHONS = ("last_type", "last_value", "last_traceback", "last_exc")
_FORMATTERS = ("IPython.core.ultratb", "IPython.core.doctb", "IPython.core.tbtools", "IPython.core.crashhandler")
_ERRORS = (BaseException, types.TracebackType, types.FrameType)
_OF_DEBUGGERS = {"stack": list, "curframe_locals": dict, "_chained_exceptions": tuple}


def forget_last_error(shell: Any) -> None:
    """Drop the last error wherever it is kept for ``%debug`` and ``%tb``. An open debugger keeps what it shows."""
    if shell is not None and hasattr(sys, "last_traceback"):
        _say_so_under_debug(shell)
    for name in _PYTHONS:
        vars(sys).pop(name, None)
    is_debugging = any(frame.f_code.co_filename in (bdb.__file__, cmd.__file__) for frame in running_frames())
    for keeper in live_objects(lambda kind: module_of(kind) in _FORMATTERS or issubclass(kind, bdb.Bdb)):
        if not (is_debugging and issubclass(type(keeper), bdb.Bdb)):
            _forget(keeper)
    result = getattr(shell, "last_execution_result", None)
    if result is not None:
        result.error_in_exec = result.error_before_exec = None


def _forget(keeper: Any) -> None:
    """Drop errors and frames from an object's attributes, and what a debugger made of them."""
    for name, value in list(vars(keeper).items()):
        if issubclass(type(value), _ERRORS):
            setattr(keeper, name, None)
        elif name in _OF_DEBUGGERS:
            setattr(keeper, name, type(value)())


def _say_so_under_debug(shell: Any) -> None:
    """Let ``%debug`` say why there is nothing to look at, until another error comes."""

    def debugger(force: bool = False) -> None:
        if hasattr(sys, "last_traceback"):
            vars(shell).pop("debugger", None)
            shell.debugger(force)
        else:
            print("Nothing to debug: the frames of the last error were released (%oom_free).")

    vars(shell)["debugger"] = debugger
