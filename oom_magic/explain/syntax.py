"""What a syntax tree tells of code: the names that it binds and reads, and the blocks that lead to a statement."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import TypeGuard

DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_BODIES = ("body", "orelse", "finalbody")
_PARTS = ("handlers", "cases")  # of statements, each with a body of its own

Path = list[tuple[list[ast.stmt], int]]  # blocks, each with a place in it


def expression(text: str) -> ast.expr:
    """The tree of an expression."""
    return ast.parse(text, mode="eval").body


def is_stored(node: ast.AST) -> TypeGuard[ast.Name]:
    """Whether a name is bound there."""
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def names_in(tree: ast.AST) -> list[str]:
    """All names, each once, what is outside first."""
    return list(dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)))


def bound_in(tree: ast.AST) -> set[str]:
    """The names that code binds."""
    return set(bound_by([tree]))


def bound_by(statements: Iterable[ast.AST]) -> list[str]:
    """The names that statements bind one after another, each once."""
    return list(dict.fromkeys(node.id for one in statements for node in ast.walk(one) if is_stored(node)))


def read_in(tree: ast.AST) -> set[str]:
    """The names that code reads."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not is_stored(node)}


def read_before_bound(tree: ast.Module) -> set[str]:
    """The names that code reads before a statement of it binds them."""
    read, bound = set[str](), set[str]()
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    for statement in sorted(statements, key=lambda one: one.lineno):
        parts = (part for part in ast.iter_child_nodes(statement) if not isinstance(part, ast.stmt))
        names = [node for part in parts for node in ast.walk(part) if isinstance(node, ast.Name)]
        read |= {one.id for one in names if isinstance(one.ctx, ast.Load)} - bound
        bound |= {one.id for one in names if isinstance(one.ctx, ast.Store)}
    return read


def blocks_of(statement: ast.AST) -> Iterator[list[ast.stmt]]:
    """The blocks of statements that stand directly in one."""
    yield from (block for field in _BODIES if isinstance(block := getattr(statement, field, None), list))
    yield from (part.body for field in _PARTS for part in getattr(statement, field, ()))


def blocks_in(tree: ast.AST, closed: tuple[type[ast.stmt], ...] = ()) -> Iterator[list[ast.stmt]]:
    """All blocks of statements in a tree, outer ones first, but for those in inner statements that are ``closed``."""
    waiting = [tree]
    for one in waiting:
        blocks = list(blocks_of(one))
        waiting += [inner for block in blocks for inner in block if not isinstance(inner, closed)]
        yield from blocks


def statements_in(body: Iterable[ast.stmt], closed: tuple[type[ast.stmt], ...] = DEFINING) -> Iterator[ast.stmt]:
    """The statements of a block, each before those of the blocks in it, but for those in statements that are
    ``closed``."""
    for statement in body:
        yield statement
        if not isinstance(statement, closed):
            yield from (one for block in blocks_of(statement) for one in statements_in(block, closed))


def path_to(tree: ast.AST, leads: Callable[[ast.stmt], bool]) -> Path:
    """The blocks that lead to the innermost statement of which ``leads`` holds, as it does of those around it: from the
    outermost, each with the place where it goes on."""
    path: Path = []
    inner: ast.AST | None = tree
    while inner is not None:
        places = ((block, at) for block in blocks_of(inner) for at, one in enumerate(block) if leads(one))
        found = next(places, None)
        inner = None if found is None else found[0][found[1]]
        path += [] if found is None else [found]
    return path


def path_to_line(tree: ast.AST, line: int) -> Path:
    """The blocks that lead to the innermost statement that a line is in."""
    return path_to(tree, lambda one: one.lineno <= line <= (one.end_lineno or one.lineno))


def flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a block, of the blocks in it instead of those that hold some, without definitions."""
    for statement in body:
        inner = [one for block in blocks_of(statement) for one in block]
        if not isinstance(statement, DEFINING):
            yield from flat(inner) if inner else (statement,)
