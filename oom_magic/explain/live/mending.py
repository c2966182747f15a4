"""The lines that keep too much as they are fixed: in the cell and in the user's functions, for a while."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import CodeType
from typing import Any

from oom_magic.explain.live.called import called_in
from oom_magic.explain.live.growth import Growth
from oom_magic.explain.syntax import blocks_in
from oom_magic.user_code import is_users_file


def is_in(growth: Growth, tree: ast.Module, names: Mapping[str, Any]) -> bool:
    """Whether the line is in a cell, or in a function of the user's among ``names``."""
    return any(True for _ in _places(growth, tree)) or bool(_mended_functions(growth, tree, names))


@contextmanager
def mended(growth: Growth, tree: ast.Module, names: Mapping[str, Any]) -> Iterator[None]:
    """The fixed line in the cell and in the user's functions, for a while."""
    functions = [(function, function.__code__, code) for function, code in _mended_functions(growth, tree, names)]
    before = _mend(growth, tree)
    for function, _, code in functions:
        function.__code__ = code
    try:
        yield
    finally:
        for function, code, _ in functions:
            function.__code__ = code
        for body, statements in before:
            body[:] = statements


def _mend(growth: Growth, tree: ast.Module) -> list[tuple[list[ast.stmt], list[ast.stmt]]]:
    """Put the fixed lines into a tree. Returns the blocks with what they held before."""
    places = list(_places(growth, tree))
    before = [(body, list(body)) for body, _ in places]
    for body, at in reversed(places):
        run, fixed = next((run, new) for run, new in _runs(growth) if _stands(run, body, at))
        made = ast.parse(fixed).body
        body[at : at + len(run)] = [ast.copy_location(one, body[at]) for one in made]
    return before


def _mended_functions(growth: Growth, tree: ast.Module, names: Mapping[str, Any]) -> list[tuple[Any, CodeType]]:
    """The user's functions that contain the line, of those in ``names`` and those that the cell runs, hooks too, each
    with its code in which the line is fixed."""
    found = {}
    for value in list(names.values()):
        owners = vars(value).values() if inspect.isclass(value) and value.__module__ == "__main__" else (value,)
        for function in map(inspect.unwrap, filter(inspect.isfunction, owners)):
            found[id(function)] = function
    found |= {id(one.function): one.function for one in called_in(tree, names)}
    codes = ((one, _mended_code(growth, one)) for one in found.values() if inspect.isfunction(one))
    return [(function, code) for function, code in codes if code is not None]


def _mended_code(growth: Growth, function: Any) -> CodeType | None:
    code: CodeType = function.__code__
    if not is_users_file(code.co_filename):
        return None
    with suppress(OSError, TypeError, SyntaxError):
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        if not isinstance(tree.body[0], (ast.FunctionDef, ast.AsyncFunctionDef)) or not _mend(growth, tree):
            return None
        ast.increment_lineno(tree, code.co_firstlineno - 1)
        return code_of_definition(function, tree)
    return None


def code_of_definition(function: Any, tree: ast.Module) -> CodeType | None:
    """The code for a function whose definition, changed, is all of a tree; None where its variables are others."""
    code: CodeType = function.__code__
    definition: Any = tree.body[0]
    definition.decorator_list = []
    if code.co_freevars:  # a function around it has the variables that it closes over
        around: Any = ast.parse(f"def around({', '.join(code.co_freevars)}): pass").body[0]
        around.body = tree.body
        tree = ast.Module([around], [])
    made = compile(ast.fix_missing_locations(tree), code.co_filename, "exec", dont_inherit=True)
    found = (one for one in _codes_in(made) if one.co_name == code.co_name)
    return next((one for one in found if one.co_freevars == code.co_freevars), None)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from _codes_in(one)


def _places(growth: Growth, tree: ast.Module) -> Iterator[tuple[list[ast.stmt], int]]:
    """Where the lines stand: lists of statements and positions in them."""
    runs = [run for run, _ in _runs(growth)]
    for block in blocks_in(tree):
        yield from ((block, at) for at in range(len(block)) if any(_stands(run, block, at) for run in runs))


def _runs(growth: Growth) -> Iterator[tuple[list[str], str]]:
    """The statements that are fixed together, each run of them with what stands in its place."""
    for code, fixed in growth.fixes.items():
        yield [ast.unparse(one) for one in ast.parse(code).body], fixed


def _stands(run: list[str], body: list[ast.stmt], at: int) -> bool:
    """Whether a block has a run of statements at a place."""
    return [ast.unparse(one) for one in body[at : at + len(run)]] == run
