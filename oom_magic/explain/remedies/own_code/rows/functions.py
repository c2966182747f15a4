"""Rows of an argument that a function compares with others, such as points with centers, some rows at a time."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from oom_magic.explain.remedies.own_code.loops import Code
from oom_magic.explain.remedies.own_code.rows.pairs import met_by_all
from oom_magic.explain.remedies.own_code.rows.statements import parts_of_block
from oom_magic.explain.syntax import DEFINING, blocks_in, bound_by, bound_in, is_stored, read_before_bound, read_in

COUNTED = "_oom_magic_rows"  # what counts the rows in a rehearsed cell


def compared_rows(code: Code, names: Mapping[str, Any]) -> Iterator[str]:
    """The arguments of a function, or names of a cell, of which a statement compares each row with others, as some rows
    at a time can be."""
    given = [one.arg for one in code.args.args] if not isinstance(code, ast.Module) else sorted(read_in(code))
    yield from (name for name in given if compared_in_parts(code, names, name, 1) is not None)


def compared_in_parts(code: Code, names: Mapping[str, Any], rows: str, after: int) -> Code | None:
    """The code with rows compared ``after`` at a time; None where it has no such statements.

    With 0, the rows are counted by what the code sees as ``COUNTED``.
    """
    made = copy.deepcopy(code)
    for block in reversed(list(blocks_in(made, DEFINING))):  # the turns of inner loops take what does not fit often
        for start, stop in _stretches(block, rows):
            stretch, outside = block[start:stop], _read_outside(made, block[start:stop])
            outside |= bound_in(stretch[-1]) if isinstance(code, ast.Module) else set()  # for later cells
            used = [name for name in bound_by(stretch) if name in outside]
            parts = parts_of_block(stretch, names, rows, used, after or 1)
            if parts:
                counting = ast.parse(f"{COUNTED}({rows})").body
                block[start:stop] = parts if after else [*counting, *stretch]
                return ast.fix_missing_locations(made)
    return None


def _stretches(block: Sequence[ast.stmt], rows: str) -> Iterator[tuple[int, int]]:
    """The assignments from the first that compares the rows, the longest first, as far as all only bind names."""
    start = next((at for at, one in enumerate(block) if _compares(one, rows)), None)
    if start is None:
        return
    ends = (at for at in range(start, len(block)) if not _only_binds(block[at]))
    for stop in range(next(ends, len(block)), start, -1):
        inside = ast.Module(list(block[start:stop]), [])
        if rows not in bound_in(inside) and not read_before_bound(inside) & bound_in(inside):
            yield start, stop


def _compares(statement: ast.stmt, rows: str) -> bool:
    """Whether an assignment has the rows, or each of them, meet something else as a whole."""
    met = [one for node in ast.walk(statement) for one in met_by_all(node)]
    return (
        _only_binds(statement)
        and bool(met)
        and rows in read_in(statement)
        and not any(rows in read_in(one) for one in met)
    )


def _only_binds(statement: ast.stmt) -> bool:
    """Whether it assigns to names, and takes no rows that were chosen."""
    if not isinstance(statement, ast.Assign) or not all(isinstance(one, ast.Name) for one in statement.targets):
        return False
    taken = [node.slice for node in ast.walk(statement.value) if isinstance(node, ast.Subscript)]
    parts = [part for one in taken for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
    return all(isinstance(one, (ast.Slice, ast.Constant)) for one in parts)


def _read_outside(code: Code, stretch: Sequence[ast.stmt]) -> set[str]:
    inside = {id(node) for one in stretch for node in ast.walk(one)}
    nodes = (node for node in ast.walk(code) if isinstance(node, ast.Name) and not is_stored(node))
    return {node.id for node in nodes if id(node) not in inside}
