"""Code that goes on where memory runs out: a search for a batch size, a loop that leaves out what is too large."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from types import CodeType, FrameType

from oom_magic.user_code import is_own_file, is_users_file

_SPEAKS_OF_MEMORY = re.compile(r"out.?of.?memory|(?<![a-z])oom(?![a-z])|reduce_batch_size", re.IGNORECASE)
_ALL_ERRORS = frozenset({"", "BaseException", "Exception", "RuntimeError"})


def goes_on(handler: ast.ExceptHandler, is_users: bool = True) -> bool:
    """Whether a handler catches running out of memory and does not raise it again: by its type, by what it speaks of,
    or, where it is the user's, because it catches whatever comes."""
    if isinstance(handler.body[-1], ast.Raise):
        return False
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {"" if kind is None else ast.unparse(kind) for kind in kinds}
    if any("OutOfMemory" in name for name in names):
        return True
    text = "\n".join(map(ast.unparse, handler.body))
    raises = any(isinstance(node, ast.Raise) for one in handler.body for node in ast.walk(one))
    return not names.isdisjoint(_ALL_ERRORS) and bool(_SPEAKS_OF_MEMORY.search(text) or (is_users and not raises))


def is_caught(frame: FrameType | None, outermost: CodeType, cell: ast.Module) -> bool:
    """Whether a frame, or one that called it from within ``outermost``, goes on where memory runs out. ``cell`` is what
    runs of a cell whose code has no source."""
    while frame is not None and frame.f_code is not outermost:
        if _catches(frame.f_code, frame.f_lineno, cell):
            return True
        frame = frame.f_back
    return False


def _catches(code: CodeType, line: int, cell: ast.Module) -> bool:
    file = code.co_filename
    if is_own_file(file) or "/torch/" in file.replace("\\", "/"):
        return False
    tree, first = cell, 1
    try:
        lines, first = inspect.getsourcelines(code)
        if not any("except" in one for one in lines):
            return False
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, IndexError):
        if code.co_name != "<module>":
            return False
    at = line - max(first, 1) + 1
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.Try))
    within = (one for one in blocks if one.body[0].lineno <= at <= (one.body[-1].end_lineno or 0))
    return any(goes_on(handler, is_users_file(file)) for one in within for handler in one.handlers)
