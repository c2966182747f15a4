"""The user's functions that a loop runs besides its own statements: those it calls, and hooks and forwards of modules.

The user's code is not run to find them: names are looked up, and attributes are read from dictionaries.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

from oom_magic.user_code import is_users_file

_MOST_FUNCTIONS = 200
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARTS = ("_modules", "_parameters", "_buffers")
NOTHING = object()


@dataclass(frozen=True)
class Called:
    """A function of the user's: its definition, and the names that it sees outside its body, its object included."""

    function: FunctionType
    definition: ast.FunctionDef | ast.AsyncFunctionDef
    file: str
    names: dict[str, Any]
    owner: Any = None  # what it is bound to

    @property
    def place(self) -> str:
        """Where a changed copy of it, or of statements of it, belongs: its class, if it has one, or itself."""
        return self.function.__qualname__.split(".<locals>.")[-1]

    def has_line(self, file: str, line: int) -> bool:
        """Whether a line of a file is one of its definition."""
        return file == self.file and self.definition.lineno <= line <= (self.definition.end_lineno or 0)


def called_in(loop: ast.AST, names: Mapping[str, Any]) -> Iterator[Called]:
    """The user's functions that a loop runs, and those that they run, each once."""
    waiting: list[tuple[ast.AST, Mapping[str, Any]]] = [(loop, names)]
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        tree, known = waiting.pop(0)
        for function, owner in _run_in(tree, known):
            code = function.__code__
            if (id(function), id(owner)) in seen or not is_users_file(code.co_filename):
                continue
            seen.add((id(function), id(owner)))
            definition = _definition(function)
            if definition is not None:
                outside = _names_outside(function, owner)
                waiting.append((definition, outside))
                yield Called(function, definition, code.co_filename, outside, owner)


def methods_given(tree: ast.AST, names: Mapping[str, Any]) -> Iterator[Called]:
    """The methods of the user's own objects that calls in a tree are given, as a trainer is given what it calls."""
    seen: set[type] = set()
    for call in ast.walk(tree):
        for node in [*call.args, *(one.value for one in call.keywords)] if isinstance(call, ast.Call) else ():
            value = object_of(node.func if isinstance(node, ast.Call) else node, names)
            kind = value if inspect.isclass(value) else type(value)
            if kind in seen:
                continue
            seen.add(kind)
            for function in [one for one in vars(kind).values() if isinstance(one, FunctionType)]:
                code = function.__code__
                definition = _definition(function) if is_users_file(code.co_filename) else None
                if definition is not None:
                    owner = None if value is kind else value
                    yield Called(function, definition, code.co_filename, _names_outside(function, owner), owner)


def _run_in(tree: ast.AST, names: Mapping[str, Any]) -> Iterator[tuple[FunctionType, Any]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _functions_of(object_of(node.func, names))
            if _registers_hook(node):  # what it is registered with may be as it was before the cell again
                yield from _functions_of(object_of(node.args[0], names))


def hooks_registered(statements: Iterable[ast.stmt], names: Mapping[str, Any]) -> Iterator[Called]:
    """The user's functions that statements register as hooks, and those that they run."""
    for call in (node for one in statements for node in ast.walk(one) if isinstance(node, ast.Call)):
        if _registers_hook(call):
            yield from called_in(ast.Call(call.args[0], [], []), names)


def _registers_hook(call: ast.Call) -> bool:
    """``module.register_forward_hook(hook)``, also of tensors and optimizers."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return name.startswith("register_") and name.endswith("_hook") and bool(call.args)


def object_of(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The object of a dotted name, or of an entry of a dictionary or list, also by ``get`` and ``setdefault``;
    ``NOTHING`` where it is not known.

    Methods are bound.
    """
    if isinstance(node, ast.Name):
        return names.get(node.id, NOTHING)
    if isinstance(node, ast.Subscript):
        return _entry(object_of(node.value, names), node.slice, names)
    match node:
        case ast.Call(func=ast.Attribute(value=container, attr="setdefault" | "get"), args=[key, *_]):
            return _entry(object_of(container, names), key, names)
    if not isinstance(node, ast.Attribute):
        return NOTHING
    owner = object_of(node.value, names)
    if isinstance(node.value, ast.Call):  # a method of an object that is made there
        owner = object_of(node.value.func, names)
        owner = owner if inspect.isclass(owner) else NOTHING
    found = inspect.getattr_static(owner, node.attr, NOTHING)
    if found is NOTHING:  # parts of modules are in dictionaries of their own
        own = getattr(owner, "__dict__", {})
        return next((own[table][node.attr] for table in _PARTS if node.attr in (own.get(table) or ())), NOTHING)
    is_bound = isinstance(found, FunctionType) and not inspect.isclass(owner) and not inspect.ismodule(owner)
    return MethodType(found, owner) if is_bound else found


def _entry(container: Any, key: ast.expr, names: Mapping[str, Any]) -> Any:
    """The entry under a constant key; the container itself if it is no dictionary or list."""
    at = key.value if isinstance(key, ast.Constant) else object_of(key, names)
    if isinstance(container, dict) and type(at) in (str, int):
        return dict.get(container, at, NOTHING)
    if isinstance(container, (list, tuple)) and type(at) is int and -len(container) <= at < len(container):
        return container[at]
    return container


def _functions_of(value: Any) -> Iterator[tuple[FunctionType, Any]]:
    """The functions that a call of ``value`` runs, each with what it is bound to."""
    if isinstance(value, functools.partial):
        yield from _functions_of(value.func)
    elif isinstance(value, MethodType):
        yield from _plain(value.__func__, value.__self__)
        yield from _called_back(value)
    elif isinstance(value, FunctionType):
        yield from _plain(value, None)
    elif isinstance(value, sys.modules["torch"].nn.Module):
        forwards: dict[type, list[FunctionType]] = {}  # a large model has thousands of modules, of a dozen kinds
        for module in value.modules():
            kind = type(module)
            if kind not in forwards:
                plain = (function for function, _ in _plain(kind.forward, None))
                forwards[kind] = [one for one in plain if is_users_file(one.__code__.co_filename)]
            yield from ((function, module) for function in forwards[kind])
            own = vars(module)
            for hook in [hook for name in _HOOKS if own[name] for hook in own[name].values()]:
                yield from _functions_of(hook)
    elif not inspect.isclass(value):
        yield from _plain(inspect.getattr_static(type(value), "__call__", None), value)


def _called_back(method: MethodType) -> Iterator[tuple[FunctionType, Any]]:
    """The methods of the user's that a library's method of the same object may run, as a trainer runs those of its
    subclass."""
    owner, code = method.__self__, getattr(method.__func__, "__code__", None)
    is_librarys = code is not None and not is_users_file(code.co_filename)
    if is_librarys and not isinstance(owner, (type, sys.modules["torch"].nn.Module)):
        own = [one for kind in type(owner).__mro__ for one in vars(kind).values() if isinstance(one, FunctionType)]
        yield from ((one, owner) for one in own if is_users_file(one.__code__.co_filename))


def _plain(function: Any, owner: Any) -> Iterator[tuple[FunctionType, Any]]:
    function = inspect.unwrap(function) if callable(function) else function
    if isinstance(function, FunctionType):
        yield function, owner


def _definition(function: FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    code = function.__code__
    for node in ast.walk(parsed(code.co_filename, function.__globals__)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def parsed(file: str, variables: dict[str, Any]) -> ast.Module:
    """The source of a file, or a cell, with the globals of its code; nothing where it has none."""
    try:
        return ast.parse("".join(linecache.getlines(file, variables)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return NOTHING


def _names_outside(function: FunctionType, owner: Any) -> dict[str, Any]:
    """The globals and closure cells of a function, without its locals except the object that it is bound to."""
    code = function.__code__
    names = {name: value for name, value in function.__globals__.items() if name not in code.co_varnames}
    names |= dict(zip(code.co_freevars, map(_content, function.__closure__ or ()), strict=True))
    if owner is not None and code.co_argcount:
        names[code.co_varnames[0]] = owner
    return names
