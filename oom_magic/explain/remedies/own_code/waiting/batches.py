"""Batches of data that stay in the host's memory, moved to the device where a cell or function takes them."""

from __future__ import annotations

import ast
import re
from typing import Any, TypeAlias

from oom_magic.explain.remedies.own_code.waiting.device_moves import Moves
from oom_magic.explain.syntax import bound_in, names_in

Scope: TypeAlias = "ast.Module | ast.FunctionDef | ast.AsyncFunctionDef"
HOLDS = re.compile(r"(?:Dataset|Loader|Subset|random_split|zip|list|tuple)$")  # what is made of data and yields them
GOES_THROUGH = ("enumerate", "tqdm", "trange", "iter", "list", "zip", "reversed", "track")
SPLITS = ("split", "chunk")


def all_called(names: list[str], call: str) -> str:
    """``x, y = x.cpu(), y.cpu()``."""
    return f"{', '.join(names)} = {', '.join(f'{one}{call}' for one in names)}"


def moved_in(scope: Scope, tensors: set[str], holders: set[str], moves: Moves, call: str) -> bool:
    """Move batches with ``call`` where a cell or function takes them; whether it takes any."""
    pieces = _Pieces(tensors, call, _indices_on_device(scope, moves))
    for one in scope.body:
        pieces.visit_top(one, is_function=not isinstance(scope, ast.Module))
    loops = [node for node in ast.walk(scope) if isinstance(node, ast.For) and _is_over(node.iter, tensors, holders)]
    moved = [_move_targets(loop, moves, call) for loop in loops]
    return pieces.are_found or any(moved)


def _indices_on_device(scope: ast.AST, moves: Moves) -> set[str]:
    """The names that are made on the device in a scope, and what is taken of them."""
    found: set[str] = set()
    assigns = [node for node in ast.walk(scope) if isinstance(node, ast.Assign)]
    for _unused in range(2):
        for one in assigns:
            calls = [node for node in ast.walk(one.value) if isinstance(node, ast.Call)]
            if any(map(moves.is_move, calls)) or found & set(names_in(one.value)):
                found |= bound_in(one)
    return found


class _Pieces(ast.NodeTransformer):
    """Moves each piece of tensors: ``x[i:j]`` becomes ``x[i:j].to(device)``."""

    def __init__(self, tensors: set[str], move: str, on_device: set[str]) -> None:
        self._tensors, self._move, self._on_device = tensors, move, on_device
        self.are_found = False

    def visit_top(self, statement: ast.stmt, is_function: bool) -> None:
        """A statement of a cell, which splits data where it stands outside any loop, or of a function."""
        if is_function or hasattr(statement, "body"):
            self.visit(statement)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A piece that is moved already stays."""
        match node.func:
            case ast.Attribute(ast.Subscript(ast.Name(name)), "to" | "cuda") if name in self._tensors:
                self.are_found = True
                return node
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """A piece, moved; an index on the device is taken back for it."""
        self.generic_visit(node)
        is_piece = isinstance(node.value, ast.Name) and node.value.id in self._tensors
        if not is_piece or not isinstance(node.ctx, ast.Load):
            return node
        self.are_found = True
        if isinstance(node.slice, ast.Name) and node.slice.id in self._on_device:
            node.slice = _called(node.slice, ".cpu()")
        return _called(node, self._move)


def _called(node: ast.expr, call: str) -> ast.expr:
    made: Any = ast.parse(f"x{call}", mode="eval").body
    made.func.value = node
    found: ast.expr = ast.fix_missing_locations(ast.copy_location(made, node))
    return found


def _is_over(iterated: ast.expr, tensors: set[str], holders: set[str]) -> bool:
    """Whether a loop takes what holders yield, or parts of tensors."""
    match iterated:
        case ast.Name(name):
            return name in holders
        case ast.Call(ast.Attribute(ast.Name(name), attr)) if attr in SPLITS:
            return name in tensors
        case ast.Call(function, [first, *_]) if ast.unparse(function).rpartition(".")[2] in GOES_THROUGH:
            return _is_over(first, tensors, holders)
        case ast.Call(function, [first, *_]) if HOLDS.search(ast.unparse(function)):  # made for the loop alone
            return _is_over(first, tensors, holders) or bool({*tensors, *holders} & set(names_in(first)))
    return False


def _move_targets(loop: ast.For, moves: Moves, call: str) -> bool:
    """Move what a loop takes at its beginning, or behind the statement that takes it apart; whether there is any."""
    target = loop.target
    is_counted = isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "enumerate"
    if is_counted and isinstance(target, ast.Tuple) and len(target.elts) == 2:
        target = target.elts[1]
    at = 0
    if isinstance(target, ast.Name):
        match loop.body[0]:
            case ast.Assign([ast.Tuple() as parts], ast.Name(name)) if name == target.id:
                target, at = parts, 1
    if isinstance(target, ast.Tuple):
        names = [one.id for one in target.elts if isinstance(one, ast.Name)]
        names = [one for one in names if not _is_moved(one, loop, moves)]
        made = all_called(names, call) if names else ""
    else:
        made = "" if _is_moved(ast.unparse(target), loop, moves) else _batch_moved(ast.unparse(target), loop, call)
    loop.body[at:at] = [ast.copy_location(one, loop.body[0]) for one in ast.parse(made).body]
    ast.fix_missing_locations(loop)
    return True


def _batch_moved(name: str, loop: ast.For, move: str) -> str:
    """The statement that moves a batch which the loop uses as a dictionary, a list or a tensor."""
    keys = [
        node.slice for node in ast.walk(loop) if isinstance(node, ast.Subscript) and ast.unparse(node.value) == name
    ]
    if any(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in keys):
        return f"{name} = {{key: value{move} for key, value in {name}.items()}}"
    if any(isinstance(one, ast.Constant) for one in keys):
        return f"{name} = [one{move} for one in {name}]"
    return f"{name} = {name}{move}"


def _is_moved(name: str, loop: ast.For, moves: Moves) -> bool:
    """Whether a loop moves what has this name, or a part of it."""
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call) and moves.is_move(node)]
    return any(name in names_in(one) for one in calls)
