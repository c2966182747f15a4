"""What an unknown condition is answered with, so that the run goes on: checks pass, and loops end."""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache
from pathlib import Path
from types import FrameType

import torch

_PACKAGE = str(Path(__file__).resolve().parents[2])
_TORCH = Path(torch.__file__).parent
_BETWEEN = (
    _PACKAGE,
    *(str(_TORCH / name) for name in ("_tensor.py", "_compile.py", "_dynamo", "overrides.py", "_ops.py", "utils/_")),
)


def answer_that_goes_on(frame: FrameType | None, answered: dict[tuple[str, int], bool]) -> bool | None:
    """What a condition should be for its statement to let the run go on; None: either way does.

    An assertion holds, an ``if`` with nothing but an error in it is passed by. A ``while`` loop runs once: what its
    condition was read as last is in ``answered``, by line.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    if frame is None:
        return None
    file, number = frame.f_code.co_filename, frame.f_lineno
    statement = _branches("".join(linecache.getlines(file, frame.f_globals))).get(number)
    if statement is None:
        return None
    is_negated = isinstance(statement.test, ast.UnaryOp) and isinstance(statement.test.op, ast.Not)
    if isinstance(statement, ast.Assert):
        return not is_negated
    if isinstance(statement, ast.If):
        return is_negated if isinstance(statement.body[0], ast.Raise) else None
    answer = answered[file, number] = not answered.get((file, number), is_negated)
    return answer


@lru_cache(maxsize=64)
def _branches(source: str) -> dict[int, ast.If | ast.While | ast.Assert]:
    """The branching statement on whose condition each line is."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a cell with magics in it
        return {}
    found: dict[int, ast.If | ast.While | ast.Assert] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.While, ast.Assert)):
            found.update(dict.fromkeys(range(node.test.lineno, (node.test.end_lineno or node.test.lineno) + 1), node))
    return found
