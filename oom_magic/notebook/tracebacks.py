"""Tracebacks without the machinery's frames: the user's lines and PyTorch's, as on a real GPU."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

_OURS = str(Path(__file__).parents[1])
# around functions that follow a dispatch mode, and operators called from Python
_WRAPPERS = ("/torch/_dynamo/", "/torch/_compile.py", "/torch/_ops.py")


def trimmed(error: BaseException) -> BaseException:
    """``error`` with a traceback that passes over this package and what wraps it."""
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        if not _is_machinery(traceback.tb_frame.f_code.co_filename):
            frames.append(traceback)
        traceback = traceback.tb_next
    kept: TracebackType | None = None
    for frame in reversed(frames):
        kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return error.with_traceback(kept)


def _is_machinery(file: str) -> bool:
    path = file.replace("\\", "/")
    return file.startswith(_OURS) or any(part in path for part in _WRAPPERS)
