"""The text of what is to be explained: an exception's traceback, a log file, or a text as it is."""

from __future__ import annotations

import ast
import linecache
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from oom_magic.explain.text_files import is_path, read_text
from oom_magic.language import _
from oom_magic.user_code import is_machinery, is_users_file

_GRADIENTS_OFF = ("no_grad", "inference_mode", "set_grad_enabled(False)")


def last_failure() -> BaseException:
    """The last exception of this interpreter, as ``%debug`` finds it. Raises ValueError if there is none."""
    last = getattr(sys, "last_value", None)
    if not isinstance(last, BaseException):
        raise ValueError(_("Nothing has failed in this session yet; pass an exception, a text or a path."))
    return last


def text_of(problem: BaseException | str | Path) -> str:
    """The text of a problem: an exception's traceback, the end of a file, or the text itself. TypeError for others."""
    if isinstance(problem, BaseException):
        return _formatted(problem)
    if not isinstance(problem, (str, Path)):
        raise TypeError(_("{problem!r} cannot be explained; pass an exception, a text or a path.", problem=problem))
    if isinstance(problem, Path) or is_path(problem):
        return read_text(Path(problem))
    return problem


def _formatted(error: BaseException) -> str:
    """The traceback as Python prints it, without frames of this package, and with lines that switch gradients off."""
    whole = traceback.TracebackException(type(error), error, error.__traceback__)
    for part in _chain(whole):
        shown: list[traceback.FrameSummary] = []
        for frame in part.stack:
            if not is_machinery(frame.filename):
                shown += [*_gradient_switches(frame), frame]
        part.stack = traceback.StackSummary.from_list(shown)
    return "".join(whole.format())


def _gradient_switches(frame: traceback.FrameSummary) -> Iterator[traceback.FrameSummary]:
    """The ``with`` lines around a line of the user's, and its function's decorators, that switch gradients off."""
    if not is_users_file(frame.filename) or frame.lineno is None:
        return
    try:
        tree = ast.parse("".join(linecache.getlines(frame.filename)))
    except (SyntaxError, ValueError):  # a cell with magics in it
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and node.lineno < frame.lineno <= (node.end_lineno or 0):
            switches: list[ast.expr] = [item.context_expr for item in node.items]
        elif isinstance(node, ast.FunctionDef) and node.lineno <= frame.lineno <= (node.end_lineno or 0):
            switches = node.decorator_list
        else:
            continue
        for switch in switches:
            if any(word in ast.unparse(switch) for word in _GRADIENTS_OFF):
                yield traceback.FrameSummary(frame.filename, switch.lineno, frame.name)


def _chain(part: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    yield part
    for origin in (part.__cause__, part.__context__):
        if origin is not None:
            yield from _chain(origin)
