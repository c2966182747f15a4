"""Code that was shown for a notebook, pasted into it by itself and executed on the pretend GPU.

    python tests/gpu/pasting.py NAME

The last line of the output is JSON: for each remedy with a price and code what was promised, of the batch alone and with
gradients accumulated, and what the code takes.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from typing import Any

import closed_loop
from failing_notebooks import NOTEBOOKS
from notebook_cases import CARD_MIB, Notebook

from oom_magic.predict.session import DrySession
from oom_magic.predict.silence import in_silence

# What is written behind the making of model and optimizer: the price is of both made anew.
LOADED_SO = frozenset({"lora", "qlora", "half_weights"})


def pasted(cells: list[str], code: str) -> list[str]:
    """The cells with the statements of ``code`` in place of those that do the same, or before the last cell's work."""
    trees = [ast.parse(cell) for cell in cells]
    added: list[ast.stmt] = []
    for statement in ast.parse(code).body:
        place = next(_places(trees, statement), None)
        if place is None:
            added.append(statement)
        else:
            body, at = place
            body[at] = statement
    work = trees[-1].body
    at = next((at for at, one in enumerate(work) if not _prepares(one)), len(work))
    work[at:at] = [one for one in added if not isinstance(one, (ast.Import, ast.ImportFrom))]
    work[:0] = [one for one in added if isinstance(one, (ast.Import, ast.ImportFrom))]
    return [ast.unparse(ast.fix_missing_locations(tree)) for tree in trees]


def _prepares(statement: ast.stmt) -> bool:
    """Whether a statement makes something that the work then uses."""
    return isinstance(statement, (ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef, ast.ClassDef))


def _places(trees: list[ast.Module], new: ast.stmt) -> Iterator[tuple[list[ast.stmt], int]]:
    """Where a statement stands that ``new`` is meant for, the last cell first: in classes and functions, too."""
    for tree in reversed(trees):
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                yield from ((body, at) for at, old in enumerate(body) if _does(old, new))


def _does(old: ast.stmt, new: ast.stmt) -> bool:
    match old, new:
        case ast.FunctionDef() | ast.ClassDef(), ast.FunctionDef() | ast.ClassDef():
            return old.name == new.name
        case ast.Assign(), ast.Assign():
            return ast.unparse(old.targets[0]) == ast.unparse(new.targets[0])
        case ast.For(), ast.For():
            return _source(old) == _source(new)
        case ast.Expr(value=ast.Call() as call), ast.Expr(value=ast.Call() as other):
            return ast.unparse(call.func) == ast.unparse(other.func)
        case ast.With(), ast.With():
            return ast.unparse(old.items[0]) == ast.unparse(new.items[0])
    return False


def _source(loop: ast.For) -> str:
    """What a loop goes over, without the counting that accumulation adds."""
    node = loop.iter
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "enumerate":
        node = node.args[0]
    return ast.unparse(node)


def peak_of(cells: list[str]) -> int:
    """What the last of the cells takes on the pretend GPU, followed as far as a rehearsal is."""
    names: dict[str, Any] = {"__name__": "__main__"}
    session = DrySession("RTX 3060", f"{CARD_MIB}MiB", is_limited=False, has_bar=False, stop_after_steps=2)
    for number, cell in enumerate(cells):
        code = compile(cell, f"<ipython-input-{number}>", "exec")
        with in_silence():
            session.run(lambda code=code: exec(code, names))
    assert session.report is not None
    return session.report.peak_allocated_bytes


def main(name: str) -> None:
    """Print what each piece of code takes."""
    notebook: Notebook = NOTEBOOKS[name]
    cells = [closed_loop.filled(cell, notebook.values) for cell in notebook.cells]
    found = []
    with contextlib.redirect_stdout(io.StringIO()):
        said = closed_loop.explained(notebook, notebook.values, is_pretended=True)
        for remedy in said["remedies"]:
            code = "\n".join(line for line in remedy["code"].splitlines() if not line.startswith("%oom_free"))
            if remedy["peak"] is None or not code or remedy["key"] in {*LOADED_SO, "expandable_segments", "fsdp"}:
                continue
            try:
                peak: Any = peak_of(pasted(cells, code))
            except Exception as error:
                peak = f"{type(error).__name__}: {error}"
            promised = [remedy["peak"], remedy["accumulated"]]
            found.append({"key": remedy["key"], "promised": promised, "peak": peak, "code": code})
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
