"""Where Python, IPython and its debugger keep the last error and the last results, and how to release them."""

from __future__ import annotations

import bdb
import cmd
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from oom_magic.garbage_collector import live_objects
from oom_magic.language import _
from oom_magic.measure.history.frames import source_line
from oom_magic.measure.holders.reach import module_of
from oom_magic.user_code import is_users_file

_GENERATORS = {types.GeneratorType: "gi_frame", types.CoroutineType: "cr_frame", types.AsyncGeneratorType: "ag_frame"}
_TRACEBACK = BaseException.__dict__["__traceback__"]  # read so, no code of the user's own exceptions runs
_OWN_REFERENCES = 3  # to a frame's copy of its variables: the frame's, a variable's and that of the call that counts


@dataclass(frozen=True, slots=True)
class ErrorFrames:
    """The dead frames that one error keeps alive. Drop it soon: it keeps them alive, too.

    ``is_of_error``: they belong to the error that the caller asked about, or to one of its causes.
    """

    title: str
    frames: tuple[types.FrameType, ...]
    is_of_error: bool = False


def find_error_frames() -> list[ErrorFrames]:
    """The dead frames, by the error that keeps them alive; a frame kept by several is with the first."""
    found = []
    live = live_objects(_may_keep_frames)
    seen = {id(frame) for frame in (*running_frames(), *_suspended_frames(live))}
    for name, trace in _tracebacks(live):
        mine = list(_frames_of(trace, seen))
        if mine:
            found.append(ErrorFrames(_title(name, mine), tuple(mine)))
    return found


def separate_error(frames: Iterable[ErrorFrames], error: BaseException | None) -> list[ErrorFrames]:
    """The same frames, with those of ``error`` and its causes apart from the others and last."""
    own: set[int] = set()
    while error is not None and id(error) not in own:  # two errors may have come from each other
        own.add(id(error))
        own |= {id(frame) for frame in _frames_of(_TRACEBACK.__get__(error), own)}
        error = error.__cause__ or error.__context__
    parts = [
        ErrorFrames(one.title, tuple(frame for frame in one.frames if (id(frame) in own) is is_of_error), is_of_error)
        for is_of_error in (False, True)
        for one in frames
    ]
    return [one for one in parts if one.frames]


def running_frames() -> Iterator[types.FrameType]:
    """The frames of all threads that run now."""
    for innermost in sys._current_frames().values():
        frame: types.FrameType | None = innermost
        while frame is not None:
            yield frame
            frame = frame.f_back


def clear(frames: Iterable[types.FrameType]) -> None:
    """Clear the variables of frames. A dictionary that the user got from ``locals()`` stays as it is."""
    for frame in frames:
        copied = frame.f_locals if frame.f_code.co_flags & inspect.CO_OPTIMIZED else None
        try:
            frame.clear()
        except RuntimeError:  # suspended by something that the interpreter does not show, such as a greenlet
            continue
        # up to Python 3.12 formatting a traceback leaves a copy of the variables in the frame
        if type(copied) is dict and sys.getrefcount(copied) <= _OWN_REFERENCES:
            copied.clear()


def _may_keep_frames(kind: type) -> bool:
    return kind in _GENERATORS or kind is types.TracebackType or issubclass(kind, BaseException)


def _suspended_frames(live: Iterable[Any]) -> Iterator[types.FrameType]:
    """Frames of suspended generators and coroutines: clearing them would end them."""
    for one in live:
        frame = getattr(one, _GENERATORS[type(one)]) if type(one) in _GENERATORS else None
        if frame is not None:
            yield frame


def _tracebacks(live: Iterable[Any]) -> Iterator[tuple[str, types.TracebackType]]:
    """All tracebacks: those of errors with the error's name, then those without an error."""
    for one in live:
        trace = _TRACEBACK.__get__(one) if issubclass(type(one), BaseException) else None
        if trace is not None:
            yield type(one).__name__, trace
    yield from (("an error", one) for one in live if type(one) is types.TracebackType)


def _frames_of(trace: types.TracebackType | None, seen: set[int]) -> Iterator[types.FrameType]:
    """The frames of a traceback and their callers, which a shortened one leaves out, except those already ``seen``."""
    while trace is not None and id(trace) not in seen:
        seen.add(id(trace))
        frame: types.FrameType | None = trace.tb_frame
        while frame is not None and id(frame) not in seen:
            seen.add(id(frame))
            yield frame
            frame = frame.f_back
        trace = trace.tb_next


def _title(error: str, frames: list[types.FrameType]) -> str:
    """The error and the innermost call of the user's that it ended."""
    users = [frame for frame in frames if is_users_file(frame.f_code.co_filename)]
    frame = (users or frames)[-1]
    name = frame.f_code.co_name
    place = source_line(frame.f_code.co_filename, frame.f_lineno)
    return f"{error} in {place}" if name == "<module>" else f"{error} in {name}, {place}"


_SYS_NAMES = ("last_type", "last_value", "last_traceback", "last_exc")
_FORMATTERS = ("IPython.core.ultratb", "IPython.core.doctb", "IPython.core.tbtools", "IPython.core.crashhandler")
_ERROR_TYPES = (BaseException, types.TracebackType, types.FrameType)
_DEBUGGER_STATE = {"stack": list, "curframe_locals": dict, "_chained_exceptions": tuple}


def forget_last_error(shell: Any) -> None:
    """Drop the last error wherever it is kept for ``%debug`` and ``%tb``, except in an open debugger."""
    if shell is not None and hasattr(sys, "last_traceback"):
        _explain_empty_debugger(shell)
    for name in _SYS_NAMES:
        vars(sys).pop(name, None)
    is_debugging = any(frame.f_code.co_filename in (bdb.__file__, cmd.__file__) for frame in running_frames())
    for holder in live_objects(lambda kind: module_of(kind) in _FORMATTERS or issubclass(kind, bdb.Bdb)):
        if not (is_debugging and issubclass(type(holder), bdb.Bdb)):
            _drop_errors(holder)
    result = getattr(shell, "last_execution_result", None)
    if result is not None:
        result.error_in_exec = result.error_before_exec = None


def _drop_errors(holder: Any) -> None:
    """Remove errors and frames from an object's attributes, and what a debugger derived from them."""
    for name, value in list(vars(holder).items()):
        if issubclass(type(value), _ERROR_TYPES):
            setattr(holder, name, None)
        elif name in _DEBUGGER_STATE:
            setattr(holder, name, type(value)())


def _explain_empty_debugger(shell: Any) -> None:
    """Make ``%debug`` explain why there is nothing to inspect, until the next error."""

    def debugger(force: bool = False) -> None:
        if hasattr(sys, "last_traceback"):
            vars(shell).pop("debugger", None)
            shell.debugger(force)
        else:
            print(_("Nothing to debug: the frames of the last error were released (%oom_free)."))

    vars(shell)["debugger"] = debugger


def running_shell() -> Any:
    """The ``InteractiveShell`` of this process, or None outside of IPython."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def users_names() -> MutableMapping[str, Any]:
    """The notebook's variables or, outside of one, the globals of the function that called this one's caller."""
    shell = running_shell()
    names: MutableMapping[str, Any] = sys._getframe(2).f_globals if shell is None else shell.user_ns
    return names


_LAST_RESULTS = ("_", "__", "___")
_NUMBERED_RESULT = re.compile(r"_\d+")


def drop_name(name: str, namespace: MutableMapping[str, Any], shell: Any) -> None:
    """Delete one variable, and IPython's references to the same object as a result."""
    value = namespace[name]
    del namespace[name]
    _drop_values(namespace, shell, lambda result: result is value)


def drop_results(namespace: MutableMapping[str, Any], shell: Any) -> None:
    """Drop all results that IPython keeps."""
    _drop_values(namespace, shell, lambda _: True)


def _drop_values(namespace: MutableMapping[str, Any], shell: Any, is_dropped: Callable[[Any], bool]) -> None:
    results = namespace.get("Out")
    if type(results) is dict:
        for number in [number for number, result in results.items() if is_dropped(result)]:
            del results[number]
    for names in (namespace, getattr(shell, "user_ns_hidden", {})):
        _drop_names(names, is_dropped)
    display = getattr(shell, "displayhook", None)
    for name in _LAST_RESULTS:
        if hasattr(display, name) and is_dropped(getattr(display, name)):
            setattr(display, name, "")
    last = getattr(shell, "last_execution_result", None)
    if last is not None and is_dropped(last.result):
        last.result = None


def _drop_names(names: MutableMapping[str, Any], is_dropped: Callable[[Any], bool]) -> None:
    for name in list(names):
        if name in _LAST_RESULTS and is_dropped(names[name]):
            names[name] = ""
        elif isinstance(name, str) and _NUMBERED_RESULT.fullmatch(name) and is_dropped(names[name]):
            del names[name]
