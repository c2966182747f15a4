"""From the Python frames of an allocation to the user's line, the operator and the phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from oom_magic.memory.timeline import Phase, SourceLine
from oom_magic.user_code import cell_name, is_users_file, source_text

_GENERIC_NAMES = frozenset({"forward", "__init__", "__call__", "step", "convert", "<lambda>", "wrapper"})
_RECOMPUTING = frozenset({"unpack_hook", "backward", "recompute_fn"})  # of torch/utils/checkpoint.py
_MAKING_PARAMETERS = frozenset({"__init__", "_apply"})  # of torch/nn/modules


class Frame(NamedTuple):
    """One Python frame of an allocation, as torch's memory history gives it."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the code that allocates.

    ``line`` is the innermost line of the user's own code (None: none in the stack). ``phase`` is None where
    the frames alone do not tell. ``calls_backward`` marks the stacks below ``loss.backward()``.
    """

    line: SourceLine | None = None
    operator: str = ""
    phase: Phase | None = None
    makes_parameters: bool = False
    calls_backward: bool = False


AUTOGRAD_SITE = Site(phase=Phase.BACKWARD)  # autograd's threads run no Python: their stacks are empty


def site_of(frames: Sequence[Frame]) -> Site:
    """What a stack, innermost frame first, says about the allocation made there."""
    if not frames:
        return AUTOGRAD_SITE
    users = next((frame for frame in frames if is_users_file(frame.file)), None)
    return Site(
        line=None if users is None else source_line(users.file, users.line),
        operator=_operator(frames[0]),
        phase=_phase(frames),
        makes_parameters=any(map(_makes_parameters, frames)),
        calls_backward=any(map(_starts_backward, frames)),
    )


def source_line(file: str, line: int) -> SourceLine:
    """The line with its text; a notebook's cell is named as in its tracebacks, ``Cell In[3]``."""
    return SourceLine(cell_name(file), line, source_text(file, line))


def _is_in(frame: Frame, part: str) -> bool:
    """Whether the frame is in ``part`` (a folder or a file) of torch."""
    return f"/torch/{part}" in frame.file.replace("\\", "/")


def _recomputes(frame: Frame) -> bool:
    return frame.function in _RECOMPUTING and _is_in(frame, "utils/checkpoint.py")


def _makes_parameters(frame: Frame) -> bool:
    return frame.function in _MAKING_PARAMETERS and _is_in(frame, "nn/modules/")


def _starts_backward(frame: Frame) -> bool:
    return frame.function in ("backward", "_engine_run_backward", "grad") and (
        _is_in(frame, "autograd/__init__.py") or _is_in(frame, "autograd/graph.py")
    )


def _phase(frames: Sequence[Frame]) -> Phase | None:
    """The innermost call that tells decides, but all that autograd's own thread runs is backward."""
    if any(map(_recomputes, frames)) or _is_in(frames[-1], "autograd/"):
        return Phase.BACKWARD
    for frame in frames:
        if _is_in(frame, "optim/"):
            return Phase.OPTIMIZER
        if _starts_backward(frame):
            return Phase.BACKWARD
        if frame.function == "_call_impl" and _is_in(frame, "nn/modules/module.py"):
            return Phase.FORWARD
        if _is_in(frame, "nn/functional.py"):
            return Phase.FORWARD
    return None


def _operator(frame: Frame) -> str:
    """The library function that allocated; C++ operators called by the user's own line have no name here."""
    if is_users_file(frame.file):
        return ""
    if frame.function in _GENERIC_NAMES:
        return f"{Path(frame.file).stem}.{frame.function}"
    return frame.function
