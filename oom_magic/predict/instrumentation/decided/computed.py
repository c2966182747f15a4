"""Expressions that only compute: what they gave without a GPU, and give with one.

They have no side effects and take no time, so they can be evaluated again inside a dry run, where the pretend GPU
answers their questions.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeGuard

import torch

from oom_magic.user_code import is_users_file

# Functions by which code finds out whether there is a GPU.
QUESTIONS = frozenset(
    {
        "is_available", "device_count", "current_accelerator", "is_bf16_supported", "get_device_capability",
        "get_device_properties", "get_device_name", "mem_get_info", "is_torch_cuda_available", "is_cuda_available",
        "GradScaler",  # off without a GPU
    }
)  # fmt: skip
_COMPUTING = frozenset({"bool", "dict", "float", "getattr", "int", "len", "list", "max", "min", "str", "tuple"})
_MAKING = frozenset({"SimpleNamespace", "Namespace", "nullcontext", "autocast", "signature"})  # only new objects
_EXPRESSIONS = (
    ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.IfExp, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare,
    ast.JoinedStr, ast.FormattedValue, ast.Dict, ast.List, ast.Tuple, ast.Set, ast.Call, ast.keyword, ast.Starred,
    ast.Slice, ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop,
)  # fmt: skip
_OBJECTS = (contextlib.nullcontext, torch.autocast, torch.amp.GradScaler)  # compared by their attributes
_ABSENT = object()


@dataclass(frozen=True, eq=False)
class Computed:
    """An expression over names of a module that depends on there being a GPU, and its value without one.

    With a ``test``, code would have assigned it only with a GPU, in place of whatever is there.
    """

    node: ast.expr
    names: Mapping[str, Any]
    before: Any
    test: ast.expr | None = None

    @classmethod
    def of(cls, node: ast.expr, names: Mapping[str, Any], test: ast.expr | None = None) -> Computed | None:
        """None for an expression that does more than compute, or cannot be evaluated."""
        if not is_pure(node, names):
            return None
        try:
            return cls(node, names, _evaluated(node, names), test)
        except Exception:
            return None

    def with_gpu(self, held: Any) -> Any:
        """Inside a dry run: what a value is with a GPU; itself where it is not what was computed."""
        if self.test is not None or is_same(self.before, held):
            with contextlib.suppress(Exception):
                if self.test is None or _evaluated(self.test, self.names):
                    now = _evaluated(self.node, self.names)
                    return held if is_same(now, held) else now
        return held


def _evaluated(node: ast.expr, names: Mapping[str, Any]) -> Any:
    code = compile(ast.fix_missing_locations(ast.Expression(node)), "<decided>", "eval", dont_inherit=True)
    with unwarned():
        return eval(code, scope(names))


_TEXT = "'cuda' if torch.cuda.is_available() else 'cpu'"


class Closing(ast.NodeTransformer):
    """Puts expressions in place of the names of a level; there is none for other names in ``level``.

    ``own`` has what names were computed from, ``place`` tells which name the GPU.
    """

    def __init__(self, own: Mapping[str, ast.expr], level: Mapping[str, Any], place: Callable[[ast.expr], Any]) -> None:
        self._own = own
        self._level = level
        self._place = place
        self._is_closed = True

    def closed(self, node: ast.expr) -> ast.expr | None:
        """A copy of an expression with them; None if it reads another local name."""
        made = self.visit(copy.deepcopy(node))
        return made if self._is_closed else None

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Of an object what it was computed from, of a device's that of a device."""
        if not is_path(node):
            self.generic_visit(node)
            return node
        found = self._place(node)
        if isinstance(found, Computed):
            return found.node
        if _names_device(self._place(node.value)) and self._is_local(node.value):
            return ast.Attribute(_device(f"torch.device({_TEXT})"), node.attr, ast.Load())
        if _names_device(found) and self._is_local(node):
            return _device(_TEXT)
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The expression that a local name was computed from."""
        place = self._level.get(node.id)
        if isinstance(place, Computed):
            return place.node
        if node.id in self._own:
            return self._own[node.id]
        if place is not None and _names_device(place):
            return _device(_TEXT)
        if place is not None:
            self._is_closed = False
        return node

    def _is_local(self, node: ast.expr) -> bool:
        """Whether a name, or the object of an attribute, is one of the level that has no expression."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self._level and node.id not in self._own


def is_path(node: ast.AST) -> TypeGuard[ast.expr]:
    """Whether code is a name, or an attribute of one: looking at it costs nothing."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _names_device(place: Any) -> bool:
    return getattr(place, "value", None) == "device"


def _device(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


@contextlib.contextmanager
def unwarned() -> Iterator[None]:
    """The user has seen the warnings of what is evaluated again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def scope(names: Mapping[str, Any]) -> dict[str, Any]:
    """The names that an expression of a module sees."""
    return {"__builtins__": builtins, "torch": torch, **names}


def is_question(call: ast.expr) -> bool:
    """Whether a function that is called tells whether there is a GPU."""
    return (call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")) in QUESTIONS


def asking_function(call: ast.expr, namespace: Mapping[str, Any]) -> FunctionType | None:
    """The function of the user's that is called and asks; None for others."""
    found = namespace.get(call.id) if isinstance(call, ast.Name) else None
    if isinstance(found, FunctionType) and is_users_file(found.__code__.co_filename):
        return found if QUESTIONS & set(found.__code__.co_names) else None
    return None


def is_pure(expression: ast.expr, namespace: Mapping[str, Any]) -> bool:
    """Whether an expression only computes a value."""
    return all(
        isinstance(node, _EXPRESSIONS) and (not isinstance(node, ast.Call) or _is_computing(node.func, namespace))
        for node in ast.walk(expression)
    )


def _is_computing(call: ast.expr, namespace: Mapping[str, Any]) -> bool:
    """Whether a call has no side effects: a query, a device, a string, a record."""
    if is_question(call) or asking_function(call, namespace) is not None:
        return True
    if isinstance(call, ast.Attribute):
        return call.attr in ("device", "format", "lower", "get", *_MAKING)
    return isinstance(call, ast.Name) and (
        namespace.get(call.id) is torch.device
        or call.id in _MAKING
        or (call.id in _COMPUTING and namespace.get(call.id, _ABSENT) is _ABSENT)
    )


def is_same(one: Any, other: Any) -> bool:
    """Whether a value is what was computed."""
    try:
        if isinstance(one, _OBJECTS):
            now = vars(other)
            return type(one) is type(other) and all(now[name] == value for name, value in vars(one).items())
        return type(one) is type(other) and bool(one == other)
    except Exception:
        return False
