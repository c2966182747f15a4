"""Statements that compute something for each row of a tensor by itself, done for some of the rows at a time.

No graph is kept there: where a model runs, it evaluates.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from oom_magic.explain.live.called import called_in
from oom_magic.explain.remedies.own_code.loops import copied
from oom_magic.explain.remedies.own_code.rows.apart import derived_from, keeps_rows, stay_apart
from oom_magic.explain.remedies.own_code.rows.pairs import Parted, is_in_place, loop_over, parted
from oom_magic.explain.syntax import bound_by, bound_in, names_in, read_before_bound, read_in


def leading_rows(tree: ast.Module, names: Mapping[str, Any]) -> tuple[str, int] | None:
    """The tensor of an earlier cell, and its number of rows, that the cell may take some rows at a time; None: none."""
    read = sorted(
        (node for node in ast.walk(tree) if isinstance(node, ast.Name)), key=lambda one: (one.lineno, one.col_offset)
    )
    for name in dict.fromkeys(node.id for node in read):
        shape = tuple(getattr(names.get(name), "shape", ())) if _is_tensor(names.get(name)) else ()
        if len(shape) > 1 and shape[0] > 1 and computed_in_parts(tree, names, name, 1):
            return name, int(shape[0])
    return None


def _is_tensor(value: Any) -> bool:
    return type(value).__name__ == "Tensor"


def computed_in_parts(tree: ast.Module, names: Mapping[str, Any], rows: str, after: int) -> ast.Module | None:
    """The cell with the statements that compute something of ``rows`` done for ``after`` rows at a time, and the
    results joined; None where rows are not computed by themselves."""
    body = tree.body
    reads = [at for at, one in enumerate(body) if rows in read_in(one)]
    if not reads or any(rows in bound_in(one) for one in body):
        return None
    start, stop = _stretch(body, reads[0])
    block = ast.Module(body[start:stop], [])
    if {one.name for one in body if isinstance(one, ast.FunctionDef)} & set(names_in(block)) - names.keys():
        return None  # of what it defines itself, what it calls is not known yet
    used = _results(block.body, body[stop:])
    begun = read_before_bound(block) & bound_in(block)
    inside = _of_part(block.body, names, rows) if used and not begun and reads[-1] < stop else None
    made = [] if inside is None else _in_parts(inside, used, after)
    if not made:
        return None
    return ast.fix_missing_locations(ast.Module([*body[:start], *made, *body[stop:]], []))


def parts_of_block(
    block: Sequence[ast.stmt], names: Mapping[str, Any], rows: str, used: Sequence[str], after: int
) -> list[ast.stmt]:
    """A block for ``after`` of the ``rows`` at a time, and the results that are ``used`` behind it joined; nothing
    where it does not compute each row by itself."""
    inside = _of_part(block, names, rows) if used else None
    return [] if inside is None else _in_parts(inside, used, after)


def _in_parts(rows: Parted, used: Sequence[str], after: int) -> list[ast.stmt]:
    """The statements in a loop over parts of the rows, behind those that read none or all, and what is ``used`` of
    their results joined; nothing where none is used."""
    inside = rows.part
    derived = derived_from(ast.Module(list(inside), []), {f"{name}_part" for name in rows.split})
    results = [name for name in used if name in derived]
    if not results:
        return []
    alike = [one for one in inside if derived.isdisjoint(names_in(one)) and not bound_in(one) & _filled(inside)]
    looped = [one for one in inside if one not in alike]
    target, source = loop_over(rows, after)
    loop = ast.parse(f"for {target} in {source}:\n    pass").body[0]
    assert isinstance(loop, ast.For)
    together = results[0] if len(results) == 1 else f"({', '.join(results)})"
    passing = [name for name in _made_by(looped) if name not in used]  # what is left would be of the last part alone
    behind = f"parts.append({together})" + (f"\ndel {', '.join(passing)}" if passing else "")
    left = sorted(_made_in_loops(looped) - {*used, *passing})
    behind += f"\n{' = '.join(left)} = None" if left else ""
    loop.body = [*looped, *ast.parse(behind).body]
    joined = f"{results[0]} = torch.cat(parts)"
    if len(results) > 1:
        joined = f"{', '.join(results)} = map(torch.cat, zip(*parts))"
    return [*rows.all, *alike, *ast.parse("parts = []").body, loop, *ast.parse(joined).body]


def _filled(block: Sequence[ast.stmt]) -> set[str]:
    """The names of what a method or an item may be set in: ``kept.append(row)``, ``table[0] = row``."""
    nodes = [node for one in block for node in ast.walk(one)]
    called = [node.func.value for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    stored = [node.value for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    return {one.id for one in (*called, *stored) if isinstance(one, ast.Name)}


def _stretch(body: Sequence[ast.stmt], first: int) -> tuple[int, int]:
    """The statements from the first that reads the rows, and those before it that begin what it binds, to the last
    before one that only uses a result."""
    ends = (at for at in range(first, len(body)) if isinstance(body[at], ast.Expr) and not is_in_place(body[at]))
    stop = next(ends, len(body))
    bound = set(bound_by(body[first:stop]))
    start = next((at for at in range(first) if bound_in(body[at]) & bound), first)
    return start, stop


def _results(block: Sequence[ast.stmt], behind: Sequence[ast.stmt]) -> list[str]:
    """The names of the block that are read behind it, and those that its last statement binds, under ``with`` too."""
    last = block[-1]
    while isinstance(last, ast.With):
        last = last.body[-1]
    used = {name for one in behind for name in read_in(one)} | set(_made_by([last]))
    return [name for name in bound_by(block) if name in used]


def _made_by(block: Sequence[ast.stmt]) -> list[str]:
    """The names that assignments in the block, or under ``with`` in it, bind, but not those within loops."""
    inside = [_made_by(one.body) if isinstance(one, ast.With) else () for one in block]
    made = bound_by(one for one in block if isinstance(one, ast.Assign))
    return list(dict.fromkeys([*made, *(name for names in inside for name in names)]))


def _made_in_loops(block: Sequence[ast.stmt]) -> set[str]:
    """The names that assignments in loops bind, which may not run."""
    loops = (node for one in block for node in ast.walk(one) if isinstance(node, (ast.For, ast.While)))
    made = (node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Assign))
    return set(bound_by(made))


def _of_part(block: Sequence[ast.stmt], names: Mapping[str, Any], rows: str) -> Parted | None:
    """The statements for a part of the rows; None where they, or the user's functions that they call, do not compute
    each row by itself, or compare it with all, as far as can be seen."""
    module = ast.Module([copied(one) for one in block], [])
    if any(isinstance(node, (ast.AugAssign, ast.FunctionDef, ast.ClassDef)) for node in ast.walk(module)):
        return None
    called = [one.definition for one in called_in(module, names)]
    own = {one.name for one in called}
    for compares in (False, True):  # a function the rows of its first argument with those of the others
        made = ast.Module([copied(one) for one in block], [])
        calls = [node for node in ast.walk(made) if isinstance(node, ast.Call)] if compares else []
        met = [each for one in calls if ast.unparse(one.func).rpartition(".")[2] in own for each in one.args[1:]]
        found = parted(made.body, derived_from(made, {rows}), lambda node: not keeps_rows(node), met)
        inside = ast.Module(list(found.part), [])
        derived = derived_from(inside, {f"{name}_part" for name in found.split})
        if found.split and stay_apart(inside, derived, called):
            return found
    return None
