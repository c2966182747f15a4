"""Whether what a loop adds to is walked back after the loop: then its graphs are of one step, and kept for a reason.

A recurrence over time, a sum of losses over the parts of a batch, a list of outputs that a loss compares.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

from oom_magic.explain.live.called import parsed
from oom_magic.explain.syntax import DEFINING, Path, bound_by, flat, is_stored, path_to_line
from oom_magic.user_code import is_users_file

MODULE_CALL = "_call_impl"  # of torch/nn/modules/module.py
_PLACES = (ast.Name, ast.Attribute, ast.Subscript)
_LOOPS = (ast.For, ast.While)
_REPEATING = (*_LOOPS, ast.ListComp, ast.GeneratorExp)

Frames = Sequence[tuple[FrameType, TracebackType]]  # innermost first


def calls_are_of_one_graph(error: BaseException | None) -> bool:
    """Whether the user's line that failed is in or behind a loop that makes what a backward after it begins from, or in
    one without a backward whose turns go on from each other's graph, as one that samples does."""
    if error is None or error.__traceback__ is None or "torch" not in sys.modules:
        return False
    from oom_magic.explain.live.frames import deepest_frames  # loads torch

    frames = deepest_frames(error)
    called = [at for at, (frame, _) in enumerate(frames) if frame.f_code.co_name == MODULE_CALL]
    outside = range(max(called, default=-1) + 1, len(frames))
    first = next((at for at in outside if is_users_file(frames[at][0].f_code.co_filename)), None)
    if first is None:
        return False
    frame, trace = frames[first]
    path = path_in_function(frame.f_code.co_filename, frame.f_globals, trace.tb_lineno)
    loops = [body[at] for body, at in path if isinstance(body[at], _LOOPS)]
    before = [one for body, at in path[-1:] for one in body[: at + 1]]
    repeating = [node for one in (*before, *loops[-1:]) for node in ast.walk(one) if isinstance(node, _REPEATING)]
    makes_many = any(not any(map(is_backward, ast.walk(node))) for node in repeating)
    names = {name for body, at in path[-1:] for name in _targets(body[at])}
    return makes_many and (
        is_walked_back_later(names, trace.tb_lineno, frames[first:]) or _goes_on_from_graph(trace.tb_lineno, frame)
    )


def is_walked_back_later(names: Iterable[str], line: int, frames: Frames) -> bool:
    """Whether a backward after the loops around a line, in its function or in those that called it, begins from what
    the line adds to ``names``. The first of the frames is that of the line.
    """
    derived = set(names)
    for number, (frame, trace) in enumerate(frames):
        code = frame.f_code
        if not is_users_file(code.co_filename):
            continue
        path = path_in_function(code.co_filename, frame.f_globals, trace.tb_lineno if number else line)
        if not path:
            return False
        if number:  # the line that called the function: what it makes comes from what was returned
            body, at = path[-1]
            if _begins_from(body[at], None):
                return True
            derived = set(_targets(body[at]))
        for body, at in reversed(path):
            if isinstance(body[at], _LOOPS) and any(map(is_backward, ast.walk(body[at]))):
                return False
            if any(_follow(one, derived) for one in flat(body[at + 1 :])):
                return True
        if not any(_reads(one, derived) for one in _returned(path[0][0])):
            return False
    return False


def walks_back_unmade(body: Iterable[ast.stmt], name: str) -> bool:
    """Whether statements begin a backward from what another cell has bound to a name, and they do not bind."""
    statements = list(flat(body))
    derived = {name}.difference(bound_by(body))
    return any(_follow(one, derived) for one in statements)


def carried_names(line: int, frame: FrameType) -> list[str]:
    """The names by which a turn of the innermost loop around a line goes on from the turn before: they are read in it
    before they are bound."""
    loop = _innermost_loop(line, frame)
    bound: set[str] = set()
    read: set[str] = set()
    for statement in flat(getattr(loop, "body", [])):
        nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        read |= {node.id for node in nodes if not is_stored(node)} - bound
        bound |= {node.id for node in nodes if is_stored(node)}
    return sorted(read & bound)


def _goes_on_from_graph(line: int, frame: FrameType) -> bool:
    """Whether the innermost loop around a line has no backward, and a turn begins from a result of the turn before."""
    loop = _innermost_loop(line, frame)
    if loop is None or any(map(is_backward, ast.walk(loop))):
        return False
    values = [frame.f_locals.get(name) for name in carried_names(line, frame)]
    parts = [part for one in values for part in (one if isinstance(one, (tuple, list)) else (one,))]
    return any(isinstance(one, sys.modules["torch"].Tensor) and one.grad_fn is not None for one in parts)


def _innermost_loop(line: int, frame: FrameType) -> ast.stmt | None:
    path = path_in_function(frame.f_code.co_filename, frame.f_globals, line)
    return next((body[at] for body, at in reversed(path) if isinstance(body[at], _LOOPS)), None)


def path_in_function(file: str, variables: dict[str, Any], line: int) -> Path:
    """The blocks of the function that a line is in, outermost first, each with the place of the line in it."""
    path = path_to_line(parsed(file, variables), line)
    inside = [number for number, (block, at) in enumerate(path) if isinstance(block[at], DEFINING)]
    return path[max(inside, default=-1) + 1 :]


def _follow(statement: ast.stmt, derived: set[str]) -> bool:
    """Whether a backward begins there from what is ``derived``; else what the statement derives is added."""
    if _begins_from(statement, derived):
        return True
    if _reads(statement, derived):
        derived.update(_targets(statement))
    return False


def _targets(statement: ast.stmt) -> Iterator[str]:
    """What a statement binds, or what it adds to with a method."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr="append" | "extend"))):
            yield ast.unparse(owner)
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    for target in targets:
        yield from map(ast.unparse, target.elts if isinstance(target, ast.Tuple) else [target] if target else [])


def is_backward(node: ast.AST) -> bool:
    """Whether it is a call that begins a backward."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].endswith("backward")


def _begins_from(statement: ast.stmt, derived: set[str] | None) -> bool:
    """Whether a statement begins a backward from what is ``derived``; None: from anything."""
    return any(is_backward(node) and (derived is None or _reads(node, derived)) for node in ast.walk(statement))


def _reads(tree: ast.AST, derived: set[str]) -> bool:
    return any(isinstance(node, _PLACES) and ast.unparse(node) in derived for node in ast.walk(tree))


def _returned(body: list[ast.stmt]) -> list[ast.expr]:
    return [one.value for one in flat(body) if isinstance(one, ast.Return) and one.value is not None]
