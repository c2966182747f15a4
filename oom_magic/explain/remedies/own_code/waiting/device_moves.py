"""What code moves to the device: calls, the names bound to what they give, and the same without the device."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from oom_magic.explain.live.called import NOTHING, called_in, object_of
from oom_magic.explain.syntax import DEFINING

BUILDS = ("append", "extend")
_OF_DEVICE = re.compile(r"cuda|dev(?:ice)?\b", re.IGNORECASE)


@dataclass(frozen=True)
class Moves:
    """Tells which calls move something to the device; ``names`` are what the code sees."""

    names: Mapping[str, Any]

    def is_move(self, call: ast.Call) -> bool:
        """``x.cuda()``, ``x.to(device)`` or ``torch.zeros(n, device=device)``."""
        if any(one.arg == "device" and self.is_device(one.value) for one in call.keywords):
            return True
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        return method == "cuda" or (method == "to" and bool(call.args) and self.is_device(call.args[0]))

    def is_device(self, node: ast.expr) -> bool:
        """Whether an expression is a device that is not the CPU, or is called so."""
        value = object_of(node, self.names)
        told = ast.unparse(node) if value is NOTHING else str(value)
        return _OF_DEVICE.search(told) is not None


def bindings(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """The names that a statement binds, each with what; also a list with what is appended."""
    match statement:
        case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
            pairs = zip(targets, values, strict=True)
            yield from ((one.id, value) for one, value in pairs if isinstance(one, ast.Name))
        case ast.Assign([ast.Tuple(targets)], value):
            yield from ((one.id, value) for one in targets if isinstance(one, ast.Name))
        case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), value=ast.expr() as value):
            yield name, value
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), attr), [value])) if attr in BUILDS:
            yield name, ast.List([value])


def moved_attributes(kind: Any, moves: Moves) -> list[str]:
    """The attributes that a data set of the user's own moves to the device when it is made."""
    torch = sys.modules["torch"]
    if not (isinstance(kind, type) and issubclass(kind, torch.utils.data.Dataset) and "__init__" in vars(kind)):
        return []
    made = ast.parse(f"{kind.__name__}.__init__(0)").body[0]
    found = []
    for one in called_in(made, {kind.__name__: kind}):
        for statement in one.definition.body if one.function is vars(kind)["__init__"] else ():
            value = statement.value if isinstance(statement, ast.Assign) else None
            calls = [node for node in ast.walk(value) if isinstance(node, ast.Call)] if value is not None else []
            if isinstance(statement, ast.Assign) and any(map(moves.is_move, calls)):
                targets = [target for target in statement.targets if isinstance(target, ast.Attribute)]
                found += [target.attr for target in targets if ast.unparse(target.value) == "self"]
    return found


class Left(ast.NodeTransformer):
    """Leaves what the names are bound to where it is: ``x.to(device)`` becomes ``x``."""

    def __init__(self, names: set[str], moves: Moves) -> None:
        self._names, self._moves = names, moves
        self._is_inside = False

    def visit(self, node: ast.AST) -> Any:
        """Statements that bind one of the names are changed."""
        if isinstance(node, DEFINING):
            return node
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
        ):
            for target, at in zip(node.targets[0].elts, range(len(node.value.elts)), strict=False):
                if ast.unparse(target) in self._names:
                    node.value.elts[at] = self._left(node.value.elts[at])
            return node
        if isinstance(node, ast.stmt) and self._names & {target for target, _ in bindings(node)}:
            return self._left(node)
        return super().visit(node)

    def _left(self, node: Any) -> Any:
        before, self._is_inside = self._is_inside, True
        try:
            return self.generic_visit(node) if isinstance(node, ast.stmt) else self.visit(node)
        finally:
            self._is_inside = before

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """The call without the device; what it is called of, where nothing else is asked of it."""
        self.generic_visit(node)
        if not self._is_inside or not self._moves.is_move(node):
            return node
        node.keywords = [one for one in node.keywords if one.arg != "device"]
        is_to = isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "cuda")
        if is_to and node.args and self._moves.is_device(node.args[0]):
            del node.args[0]
        elif is_to and node.args:
            return node
        others = [one for one in node.keywords if one.arg not in ("non_blocking", "copy")]
        return node.func.value if is_to and not node.args and not others else node  # type: ignore[attr-defined]
