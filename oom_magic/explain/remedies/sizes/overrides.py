"""How a size is set to another value for a while: in the cell, in what it calls, or in what it reads."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from oom_magic.explain.syntax import expression

Override = Callable[[ast.Module, dict[str, Any], int], Any]


@contextmanager
def changed_cell(
    change: Callable[..., ast.Module | None], tree: ast.Module, names: dict[str, Any], value: int
) -> Iterator[None]:
    """The cell as ``change`` makes it for a value; unchanged where that is nothing."""
    before, made = tree.body, change(tree, names, after=value)
    tree.body = before if made is None else made.body
    try:
        yield
    finally:
        tree.body = before


def override_word(words: list[str], at: int, before_value: str) -> Override:
    """Sets a word of a command line, behind ``before_value``."""

    @contextmanager
    def override(_tree: ast.Module, _names: dict[str, Any], value: int) -> Iterator[None]:
        before, words[at] = words[at], f"{before_value}{value}"
        try:
            yield
        finally:
            words[at] = before

    return override


def assigning(statement: ast.AugAssign, tree: ast.Module, _names: Mapping[str, Any], after: int) -> ast.Module:
    """The cell with a size assigned that it computes from what that was."""
    made = ast.copy_location(ast.Assign([statement.target], ast.Constant(after)), statement)
    return ast.fix_missing_locations(ast.Module([made if one is statement else one for one in tree.body], []))


def override_assigned(statement: ast.Assign) -> Override:
    """Sets what a statement assigns."""

    @contextmanager
    def override(_tree: ast.Module, _names: dict[str, Any], value: int) -> Iterator[None]:
        before = statement.value
        statement.value = ast.copy_location(ast.Constant(value), before)
        try:
            yield
        finally:
            statement.value = before

    return override


@contextmanager
def defined_in(definition: ast.stmt, override: Override, cell: ast.Module, *given: Any) -> Iterator[None]:
    """Sets a size in a function of another cell, which the cell defines meanwhile."""
    cell.body.insert(0, definition)
    try:
        with override(cell, *given):
            yield
    finally:
        cell.body.remove(definition)


@contextmanager
def set_for_a_while(holder: Any, name: str, _tree: ast.Module, _names: dict[str, Any], value: int) -> Iterator[None]:
    """Sets an attribute of an object, a class or a node of the code."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def override_literals(constants: list[ast.Constant]) -> Override:
    """Sets numbers that the code has in several places."""

    @contextmanager
    def override(tree: ast.Module, names: dict[str, Any], value: int) -> Iterator[None]:
        with ExitStack() as stack:
            for constant in constants:
                stack.enter_context(set_for_a_while(constant, "value", tree, names, value))
            yield

    return override


def override_item(key: Any, holder: dict[Any, Any] | None = None) -> Override:
    """Sets an entry of a dictionary; of the names that the cell sees if ``holder`` is None."""

    @contextmanager
    def override(_tree: ast.Module, names: dict[str, Any], value: int) -> Iterator[None]:
        target = names if holder is None else holder
        before, target[key] = target[key], value
        try:
            yield
        finally:
            target[key] = before

    return override


def as_pair(override: Callable[..., Any], tree: ast.Module, names: dict[str, Any], value: int) -> Any:
    """Sets a height and a width at once."""
    return override(tree, names, (value, value))


def override_argument(call: ast.Call, argument: ast.expr) -> Override:
    """Sets an argument of a call."""

    @contextmanager
    def override(_tree: ast.Module, _names: dict[str, Any], value: int) -> Iterator[None]:
        before = call.args, [one.value for one in call.keywords]
        new = ast.copy_location(ast.Constant(value), argument)
        call.args = [new if one is argument else one for one in call.args]
        for one in call.keywords:
            one.value = new if one.value is argument else one.value
        try:
            yield
        finally:
            call.args = before[0]
            for one, old in zip(call.keywords, before[1], strict=True):
                one.value = old

    return override


def override_in_calls(calls: list[ast.Call], parameter: str) -> Override:
    """Sets an argument that calls leave at its default."""

    @contextmanager
    def override(_tree: ast.Module, _names: dict[str, Any], value: int) -> Iterator[None]:
        before = [call.keywords for call in calls]
        for call in calls:
            given = ast.copy_location(ast.keyword(parameter, ast.copy_location(ast.Constant(value), call)), call)
            call.keywords = [*call.keywords, given]
        try:
            yield
        finally:
            for call, keywords in zip(calls, before, strict=True):
                call.keywords = keywords

    return override


def override_default(function: Any, position: int) -> Override:
    """Sets the default of a function's argument."""

    @contextmanager
    def override(_tree: ast.Module, _names: dict[str, Any], value: int) -> Iterator[None]:
        before = function.__defaults__
        function.__defaults__ = (*before[:position], value, *before[position + 1 :])
        try:
            yield
        finally:
            function.__defaults__ = before

    return override


@contextmanager
def called_in_parts(
    holder: Any, key: Any, in_parts: Callable[[int], str], _tree: ast.Module, _names: dict[str, Any], value: int
) -> Iterator[None]:
    """Has a call of a model made on parts of its rows, each of ``value``."""
    before = holder[key]
    made = expression(in_parts(value))
    holder[key] = ast.fix_missing_locations(ast.copy_location(made, before))
    try:
        yield
    finally:
        holder[key] = before
