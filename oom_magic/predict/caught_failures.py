"""Code that goes on where memory runs out: a search for a batch size, a loop that leaves out what is too large."""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from oom_magic.user_code import is_own_file, is_users_file

if TYPE_CHECKING:
    from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU

_SPEAKS_OF_MEMORY = re.compile(r"out.?of.?memory|(?<![a-z])oom(?![a-z])|reduce_batch_size", re.IGNORECASE)
_ALL_ERRORS = frozenset({"", "BaseException", "Exception", "RuntimeError"})


class CaughtFailures:
    """Lets the cards of a run run out of memory only where its code goes on after it.

    ``capacity_bytes`` is what PyTorch can use of each, ``cell`` are the statements that run. Memory runs out ``most``
    times at most (None: as often as it does); ``begin_anew`` lets the report begin after the last time.
    """

    def __init__(
        self, fake_gpu: FakeGPU, begin_anew: Callable[[], None], capacity_bytes: int, cell: ast.Module, most: int | None
    ) -> None:
        self.num = 0
        self._fake_gpu, self._begin_anew, self._cell = fake_gpu, begin_anew, cell
        self._most = math.inf if most is None else most
        self._resize(capacity_bytes)

    def goes_on(self, outermost: CodeType) -> bool:
        """Whether the code, called from within ``outermost``, goes on after the allocation that fails now; if not, it
        shall not fail, nor any later one."""
        if self.num < self._most and is_caught(sys._getframe(), outermost, self._cell):
            self.num += 1
            self._fake_gpu.releases.append(self._begin_after_failure)
            return True
        self._resize(None)
        return False

    def _resize(self, capacity_bytes: int | None) -> None:
        for recorder in self._fake_gpu.recorders:
            recorder.allocator.resize(capacity_bytes)

    def _begin_after_failure(self) -> None:
        """With the next allocation, what the failed part held is free."""
        self._fake_gpu.releases.remove(self._begin_after_failure)
        self._begin_anew()


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
