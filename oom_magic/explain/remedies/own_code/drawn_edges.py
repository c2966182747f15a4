"""A graph network's call with some of the edges, drawn anew in each step."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from oom_magic.explain.live.called import object_of
from oom_magic.explain.remedies.own_code.loops import Code, is_module


def with_edges_drawn(tree: Code, names: Mapping[str, Any], parts: int) -> str:
    """The statement of a cell or function that calls a graph network, with one edge in ``parts``; "" where it has none,
    or several."""
    made = [
        one for one in ast.walk(ast.parse(ast.unparse(tree))) if isinstance(one, (ast.Assign, ast.Expr, ast.Return))
    ]
    found = [code for one in made if (code := _drawn(one, names, parts))]
    return found[0] if len(found) == 1 else ""


def _drawn(statement: ast.stmt, names: Mapping[str, Any], parts: int) -> str:
    from oom_magic.predict.what_if.loop_changes import edge_arguments  # loads torch

    edges = ""
    for call in (one for one in ast.walk(statement) if isinstance(one, ast.Call)):
        model = object_of(call.func, names)
        places = edge_arguments(model) if is_module(model) else {}
        given: list[Any] = [keyword for keyword in call.keywords if keyword.arg in places]
        for argument in [call.args[at] for at in places.values() if at < len(call.args)] + [one.value for one in given]:
            text = ast.unparse(argument)
            new = ast.parse(f"{text}[drawn]" if edges else f"{text}[:, drawn]", mode="eval").body
            edges = edges or text
            call.args = [new if one is argument else one for one in call.args]
            for keyword in given:
                keyword.value = new if keyword.value is argument else keyword.value
    number = f"{edges}.shape[1]"
    return edges and f"drawn = torch.randperm({number})[:{number} // {parts}]\n{ast.unparse(statement)}"
