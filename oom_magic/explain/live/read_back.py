"""Lines that read what a loop collects: as tensors or as numbers; and, once it is kept on the host, with what they read
moved back to the device."""

from __future__ import annotations

import ast
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from oom_magic.explain.live.called import object_of
from oom_magic.explain.remedies.own_code.loops import copied
from oom_magic.explain.syntax import expression

_DRAWING = ("sample", "choices")  # of the module random: entries of a list
_OF_NUMBERS = ("tensor", "as_tensor", "FloatTensor")  # functions of torch that take numbers as well


def is_read_as_tensors(tree: ast.AST, name: str, names: Mapping[str, Any]) -> bool:
    """Whether code reads what is collected under ``name``, a list or a sum, by functions of torch or as a tensor's
    methods do: numbers in its place would fail there."""
    return any(
        _is_given_to_torch(node, name, names) or _is_asked(node, name) or _are_asked(node, name)
        for node in ast.walk(tree)
    )


def _is_given_to_torch(node: ast.AST, name: str, names: Mapping[str, Any]) -> bool:
    """``torch.stack(losses)``, ``torch.exp(sum(losses) / n)``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr in _OF_NUMBERS:
        return False
    module = object_of(node.func.value, names)
    of_torch = isinstance(module, ModuleType) and module.__name__.partition(".")[0] == "torch"
    return of_torch and any(_mentions(argument, name) for argument in node.args)


def _is_asked(node: ast.AST, name: str) -> bool:
    """``total.item()`` of a running sum."""
    if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != name:
        return False
    return not hasattr(list, node.attr) and _is_of_tensors(node.attr)


def _are_asked(node: ast.AST, name: str) -> bool:
    """``[loss.item() for loss in losses]``, and loops like it."""
    parts: Sequence[ast.AST]
    if isinstance(node, ast.For):
        parts, places = node.body, [(node.target, node.iter)]
    elif isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        parts, places = [node.elt], [(one.target, one.iter) for one in node.generators]
    else:
        return False
    each = {target.id for target, whole in places if isinstance(target, ast.Name) and ast.unparse(whole) == name}
    asked = (one for part in parts for one in ast.walk(part) if isinstance(one, ast.Attribute))
    return any(ast.unparse(one.value) in each and _is_of_tensors(one.attr) for one in asked)


def _is_of_tensors(attr: str) -> bool:
    return hasattr(sys.modules["torch"].Tensor, attr) and not hasattr(float, attr)


def _mentions(tree: ast.AST, name: str) -> bool:
    return any(isinstance(one, (ast.Name, ast.Attribute)) and ast.unparse(one) == name for one in ast.walk(tree))


def moved_back(statement: ast.stmt, container: Any, names: Mapping[str, Any]) -> str | None:
    """The statement with the entries of ``container`` that it reads on the device; None where it reads none.

    Of a statement that holds others nothing is known here.
    """
    entry = _any_entry(container)
    if entry is None or hasattr(statement, "body"):
        return None
    new = _MovedBack(container, entry, names).visit(copied(statement))
    text = ast.unparse(ast.fix_missing_locations(new))
    return None if text == ast.unparse(statement) else text


def _any_entry(container: Any) -> Any:
    if isinstance(container, dict):
        return next(iter(dict.values(container)), None)
    return container[0] if isinstance(container, (list, deque)) and container else None


class _MovedBack(ast.NodeTransformer):
    """Wraps the expressions that read entries like ``entry`` of ``container``."""

    def __init__(self, container: Any, entry: Any, names: Mapping[str, Any]) -> None:
        self._container, self._entry, self._names = container, entry, names

    def _is_it(self, node: ast.expr) -> bool:
        is_entry = isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant)
        return not is_entry and object_of(node, self._names) is self._container

    def _wrapped(self, node: ast.expr, is_one: bool = False) -> ast.expr:
        whole = ast.unparse(node)
        each = _moved(whole if is_one else "one", self._entry)
        made = each if is_one or each is None else f"[{each} for one in {whole}]"
        return node if made is None else expression(made)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """``random.sample(kept, 32)``."""
        draws = ast.unparse(node.func).rpartition(".")[2] in _DRAWING
        return self._wrapped(node) if draws and node.args and self._is_it(node.args[0]) else self.generic_visit(node)

    def visit_Starred(self, node: ast.Starred) -> ast.AST:
        """``zip(*kept)``."""
        return ast.Starred(self._wrapped(node.value)) if self._is_it(node.value) else self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        """``for one in kept``."""
        if self._is_it(node.iter):
            node.iter = self._wrapped(node.iter)
            return node
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """``kept[i]``, ``kept[-8:]``."""
        if isinstance(node.ctx, ast.Load) and self._is_it(node.value):
            return self._wrapped(node, is_one=not isinstance(node.slice, ast.Slice))
        return self.generic_visit(node)


def _moved(name: str, value: Any) -> str | None:
    """The code that moves the tensors in ``name``, which is like ``value``, to the device; None where none are seen."""
    tensor = sys.modules["torch"].Tensor
    if isinstance(value, tensor):
        return f"{name}.cuda()"
    if not isinstance(value, (dict, list, tuple)):
        return None
    parts = list(dict.values(value)) if isinstance(value, dict) else list(value)
    if not any(isinstance(part, tensor) for part in parts):
        return None
    each = "part.cuda()" if all(isinstance(part, tensor) for part in parts) else (
        'part.cuda() if hasattr(part, "cuda") else part'
    )  # fmt: skip
    if isinstance(value, dict):
        return f"{{key: {each} for key, part in {name}.items()}}"
    return f"{name}._make({each} for part in {name})" if hasattr(value, "_fields") else f"[{each} for part in {name}]"
