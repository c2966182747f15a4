"""A graph network's call with some of the edges, drawn anew in each step."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oom_magic.explain.live.called import object_of
from oom_magic.explain.remedies.own_code.loops import Code, is_module
from oom_magic.explain.syntax import expression

if TYPE_CHECKING:
    from oom_magic.predict.what_if.loop_changes import EdgesGiven


def with_edges_drawn(tree: Code, names: Mapping[str, Any], parts: int, edges: EdgesGiven | None) -> str:
    """The statement of a cell or function that calls a graph network, with one edge in ``parts``; "" where it has none,
    or several, or is given no ``edges``."""
    if edges is None:
        return ""
    made = [
        one for one in ast.walk(ast.parse(ast.unparse(tree))) if isinstance(one, (ast.Assign, ast.Expr, ast.Return))
    ]
    found = [code for one in made if (code := _drawn(one, names, parts, edges))]
    return found[0] if len(found) == 1 else ""


def _drawn(statement: ast.stmt, names: Mapping[str, Any], parts: int, edges: EdgesGiven) -> str:
    for call in (one for one in ast.walk(statement) if isinstance(one, ast.Call)):
        model = object_of(call.func, names)
        given = _arguments(call, model) if is_module(model) else {}
        if edges.place not in given:
            continue
        text = ast.unparse(given[edges.place])
        pairs = f"{text}.indices()" if edges.is_matrix else text
        number = f"{pairs}.shape[1]"
        lines = [f"drawn = torch.randperm({number})[:{number} // {parts}]{'.sort().values' if edges.is_matrix else ''}"]
        new = {id(one): f"{ast.unparse(one)}[drawn]" for name, one in given.items() if str(name).startswith("edge")}
        new[id(given[edges.place])] = f"{pairs}[:, drawn]"
        if edges.is_matrix:
            new[id(given[edges.place])] = "some_edges"
            entries = f"{pairs}[:, drawn], {text}.values()[drawn], {text}.shape"
            lines.append(f"some_edges = torch.sparse_coo_tensor({entries}, is_coalesced=True)")
        call.args = [_replaced(one, new) for one in call.args]
        for keyword in call.keywords:
            keyword.value = _replaced(keyword.value, new)
        return "\n".join([*lines, ast.unparse(statement)])
    return ""


def _arguments(call: ast.Call, model: Any) -> dict[int | str, ast.expr]:
    """What a model is called with, by its place and by its name."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    given: dict[int | str, ast.expr] = {**dict(enumerate(call.args)), **dict(zip(names, call.args, strict=False))}
    return given | {one.arg: one.value for one in call.keywords if one.arg}


def _replaced(argument: ast.expr, new: Mapping[int, str]) -> ast.expr:
    return expression(new[id(argument)]) if id(argument) in new else argument
