"""What the panel shows when the function cannot be followed: the error and the user's line."""

from __future__ import annotations

import linecache
import traceback

from oom_magic.description import Block, Code, Sentence
from oom_magic.memory.report_description import place
from oom_magic.memory.timeline import SourceLine


def error_blocks(error: BaseException) -> tuple[Block, ...]:
    """The error in a sentence; the line of the user's code that raised it, if one did."""
    line = _users_line(error)
    if line is None:
        return (Sentence(str(error) or type(error).__name__, "bad"),)
    return (Sentence(f"{error} ({place(line)})", "bad"), Code(line.text.strip()))


def _users_line(error: BaseException) -> SourceLine | None:
    """The innermost line of the user's on the way to the error that all others follow from."""
    from oom_magic.predict.following.attribution import cell_name, is_users_file

    while error.__cause__ is not None:
        error = error.__cause__
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users_file(frame.filename) and frame.lineno is not None:
            text = linecache.getline(frame.filename, frame.lineno)
            return SourceLine(cell_name(frame.filename), frame.lineno, text)
    return None
