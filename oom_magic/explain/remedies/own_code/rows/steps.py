"""The user's own step on a whole data set at once, taken in parts: the gradients of all parts add up before it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from oom_magic.explain.live.called import called_in, object_of
from oom_magic.explain.remedies.own_code.accumulation import divide
from oom_magic.explain.remedies.own_code.loops import Code, backwards, copied, exchanged, is_update
from oom_magic.explain.syntax import blocks_in, blocks_of, bound_by, bound_in, names_in, read_before_bound, read_in

_FIRST = "_oom_magic_first_rows"  # what cuts rows in a rehearsed cell


def rows_read(tree: ast.Module, names: Mapping[str, Any], number: int) -> tuple[str, ...]:
    """The tensors of earlier cells with so many rows that a cell or what it runs reads by name, and as a whole; not
    what only follows its steps."""
    taken = list(_of_steps(tree.body))
    by_piece = {id(node.value) for node in taken if isinstance(node, ast.Subscript) and _is_piece(node.slice)}
    whole = {one.id for one in taken if isinstance(one, ast.Name) and id(one) not in by_piece}
    read = dict.fromkeys(sorted(read_before_bound(tree) & whole))
    for one in called_in(tree, names):
        nodes = [node for node in ast.walk(one.definition) if isinstance(node, ast.Name)]
        read |= {node.id: None for node in nodes if one.names.get(node.id) is names.get(node.id)}
    return tuple(name for name in read if _has_rows(names.get(name), number))


def _of_steps(block: list[ast.stmt]) -> Iterator[ast.AST]:
    """The nodes of a block but for what follows a backward, or a statement with one in it, without one of its own."""
    is_behind = False
    for statement in block:
        has_backward = any(True for one in (*blocks_in(statement), [statement]) for _ in backwards(one))
        if is_behind and not has_backward:
            continue
        is_behind = is_behind or (has_backward and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)))
        yield statement
        for node in ast.iter_child_nodes(statement):
            if not isinstance(node, ast.stmt):
                yield from ast.walk(node)
        for block in blocks_of(statement):
            yield from _of_steps(block)


def _is_piece(index: ast.expr) -> bool:
    """Whether an index takes other rows each time: ``[i:i + 8]``, ``[chosen]``, but not ``[:, i:]``."""
    first = index.elts[0] if isinstance(index, ast.Tuple) and index.elts else index
    bounds = [first.lower, first.upper] if isinstance(first, ast.Slice) else [first]
    return any(isinstance(node, ast.Name) for one in bounds if one is not None for node in ast.walk(one))


def _has_rows(value: Any, number: int) -> bool:
    return type(value).__name__ == "Tensor" and tuple(value.shape[:1]) == (number,)


@contextmanager
def first_rows(rows: Collection[str], names: dict[str, Any], number: int) -> Iterator[None]:
    """The first of the rows in place of all, for a while."""
    before = {name: names[name] for name in rows}
    names.update({name: value[:number] for name, value in before.items()})
    try:
        yield
    finally:
        names.update(before)


def made_rows(code: Code) -> Mapping[int, list[str]]:
    """The places of the statements of a cell or function that bind, before the one that holds its backward, what its
    step then reads as a whole, each with these names; none where there is no backward."""
    holds = (at for at, one in enumerate(code.body) for block in (*blocks_in(one), [one]) if any(backwards(block)))
    end = next(holds, 0)
    read = read_in(ast.Module(code.body[: end + 1], [])) - bound_in(code.body[end])
    binding = ((at, one) for at, one in enumerate(code.body[:end]) if isinstance(one, ast.Assign))
    last = {name: at for at, one in binding for target in one.targets for name in names_in(target) if name in read}
    return {at: [name for name in last if last[name] == at] for at in last.values()}


@contextmanager
def first_made_rows(
    code: Code, number: int, found: list[str], _tree: ast.Module, names: dict[str, Any], after: int
) -> Iterator[None]:
    """The first of ``number`` rows in place of all, for a while, in what the code makes for its step (``made_rows``),
    and of those of earlier cells that are ``found``; adds the names to these."""
    of_earlier_cells = [name for name in found if _has_rows(names.get(name), number)]
    before, made = code.body, made_rows(code)

    def first(name: str, value: Any) -> Any:
        if not _has_rows(value, number):
            return value
        found.extend({name}.difference(found))
        return value[:after]

    code.body = []
    for at, statement in enumerate(before):
        cut = [ast.parse(f"{name} = {_FIRST}({name!r}, {name})").body[0] for name in made.get(at, ())]
        code.body += [statement, *(ast.fix_missing_locations(ast.copy_location(one, statement)) for one in cut)]
    names[_FIRST] = first
    try:
        with first_rows(of_earlier_cells, names, after):
            yield
    finally:
        code.body = before
        del names[_FIRST]


def in_parts(tree: Code, rows: Collection[str], after: int, number: int) -> str:
    """The statement of a cell or function that holds the one backward of tensors ``rows``, with that backward for
    ``number`` parts of ``after`` rows each; "" where it has no known form."""
    made: Any = ast.parse(ast.unparse(tree)).body
    blocks = [(one, block) for one in made for block in blocks_in(one) if any(True for _ in backwards(block))]
    if isinstance(tree, ast.Module):
        blocks += [(None, made)] if any(True for _ in backwards(made)) else []
    if len(blocks) != 1:
        return ""
    statement, block = blocks[0]
    before = list(map(ast.unparse, block))
    if not _take_parts(block, rows, after, number):
        return ""
    if statement is not None:
        return ast.unparse(ast.fix_missing_locations(statement))
    return exchanged(before, [ast.unparse(ast.fix_missing_locations(one)) for one in block])


def _take_parts(block: list[ast.stmt], rows: Collection[str], after: int, number: int) -> bool:
    """Change the block; whether that was possible."""
    read = [name for name in rows if _reads(block, {name})]
    backward, *more = backwards(block)
    start = next((at for at, one in enumerate(block) if not is_update(one) and _reads([one], read)), None)
    end = block.index(backward)
    if more or start is None or start > end:
        return False
    parts = {name: f"{name}_part" for name in read}
    inside = [copied(one) for one in block[start : end + 1] if not is_update(one)]
    bound = set(bound_by(inside))
    if read_before_bound(ast.Module(inside, [])) & bound:  # what one batch hands on to the next is of the same rows
        return False
    loss = _loss(backward, bound)
    behind = block[end + 1 :]
    used = {node.id for one in behind for node in ast.walk(one) if isinstance(node, ast.Name)} & (bound | set(rows))
    if used - {loss} or (used and loss is None):
        return False
    (divided,) = backwards(inside)
    divide(divided, str(number))
    for one in inside:
        for node in ast.walk(one):
            if isinstance(node, ast.Name) and node.id in parts:
                node.id = parts[node.id]
    before = [*block[:start], *(one for one in block[start:end] if is_update(one))]
    if used:
        before += ast.parse("total = 0").body
        inside += ast.parse(f"total += {loss}.detach() / {number}").body
        behind = [_Renamed(loss or "").visit(one) for one in behind]
    block[:] = [*before, _loop(parts, after, inside), *behind]
    return True


def _loop(parts: Mapping[str, str], after: int, inside: list[ast.stmt]) -> ast.For:
    split = [f"{name}.split({after})" for name in parts]
    source = split[0] if len(split) == 1 else f"zip({', '.join(split)})"
    loop = ast.parse(f"for {', '.join(parts.values())} in {source}:\n    pass").body[0]
    assert isinstance(loop, ast.For)
    loop.body = inside
    return loop


def _loss(backward: ast.Expr, bound: Collection[str]) -> str | None:
    """The one name that a backward begins from, of those that the step binds."""
    found = set(names_in(backward)) & set(bound)
    return found.pop() if len(found) == 1 else None


class _Renamed(ast.NodeTransformer):
    """The loss of all parts in place of that of one."""

    def __init__(self, loss: str) -> None:
        self._loss = loss

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """``loss`` becomes ``total``."""
        return ast.Name("total", node.ctx) if node.id == self._loss else node


def _reads(statements: list[ast.stmt], names: Collection[str]) -> bool:
    return any(not read_in(one).isdisjoint(names) for one in statements)


def given_rows(tree: ast.Module, names: Mapping[str, Any], rows: Collection[str]) -> Mapping[str, str]:
    """The arguments of the user's functions that a cell gives ``rows`` to, by name, each with the tensor's name."""
    found: dict[str, str] = {}
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        function = object_of(call.func, names)
        if inspect.isfunction(getattr(function, "__func__", function)):  # others, a tensor's too, may tell no arguments
            given = dict(zip(inspect.signature(function).parameters, call.args, strict=False))
            given |= {one.arg: one.value for one in call.keywords if one.arg}
            found |= {name: one.id for name, one in given.items() if isinstance(one, ast.Name) and one.id in rows}
    return found
