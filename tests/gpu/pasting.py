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
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from oom_magic.explain.syntax import names_in
from oom_magic.predict.session import DrySession
from oom_magic.predict.silence import silenced
from tests.gpu import closed_loop
from tests.gpu.notebooks.failing_notebooks import NOTEBOOKS
from tests.gpu.notebooks.notebook_cases import CARD_MIB, Notebook

# Code over what it stands for: one statement, or those from one to another.
_PAIR = re.compile(r"((?:(?!#).+\n)+)# instead of (.+?)(?: \.\.\. (.+))?\n")
# Where code belongs whose model is made by a function, or by the cell itself.
_PLACE = re.compile(r"# (?:in (\w+), )?after the line that makes (\w+):\n")
_WITHIN = re.compile(r"\s*# in (?:\w+\.)*(\w+):\n")
# What is written behind the making of model and optimizer: the price is of both made anew.
LOADED_SO = frozenset({"lora", "qlora", "half_weights"})


def pasted(cells: list[str], code: str) -> list[str]:
    """The cells with the statements of ``code`` in place of those that do the same, or in the last cell, behind what they use."""
    trees = [ast.parse(cell) for cell in cells]
    place = _PLACE.search(code)
    if place:
        _put_after(trees, *place.groups(), ast.parse(code).body)
        return [ast.unparse(ast.fix_missing_locations(tree)) for tree in trees]
    pairs = _PAIR.findall(f"{code}\n")
    if pairs and all(_exchanged(trees, first, last, new) for new, first, last in pairs):
        start = next(_PAIR.finditer(f"{code}\n")).start()
        before = ast.parse(code[:start]).body  # but for definitions, it is what is run once
        made = [ast.unparse(one) for one in before if isinstance(one, (ast.FunctionDef, ast.ClassDef))]
        code = "\n\n".join([*made, _PAIR.sub("", code[start:] + "\n")])
    added: list[ast.stmt] = []
    statements = [one for one in ast.parse(code).body if not _put_behind_what_it_changes(trees, one)]
    imports = [one for one in statements if isinstance(one, (ast.Import, ast.ImportFrom))]
    trees[0].body[:0] = imports
    statements = [one for one in statements if one not in imports]
    parts = _parts(trees, code, statements)
    for number, statement in enumerate(statements, 1):
        following = next(iter(statements[number:]), None)
        place = max(_places(parts, statement), key=partial(_alike, new=statement), default=None)
        before = None if place or not isinstance(following, ast.For) else next(_places(parts, following), None)
        if place is not None:
            body, at = place
            body[at] = statement
        elif before is not None and isinstance(statement, ast.Assign):
            body, at = before
            body.insert(at, statement)  # what the loop counts with
        elif not _exchanged_whole(trees, statement):
            added.append(statement)
    work = trees[-1].body
    for statement in added:
        used = set(names_in(statement)) - _own(statement)
        at = max((at + 1 for at, one in enumerate(work) if used & _made(one)), default=0)
        work.insert(at, statement)
    return [ast.unparse(ast.fix_missing_locations(tree)) for tree in trees]


def _put_behind_what_it_changes(trees: list[ast.Module], statement: ast.stmt) -> bool:
    """Put ``model = model.to(...)`` behind the first statement that makes the model, or in place of the same call of the
    user's, as ``accelerator.prepare``; whether it is such a statement."""
    names = sorted(_made(statement) if isinstance(statement, ast.Assign) else ())
    read = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if not names or not read.issuperset(names):
        return False
    same = next(((body, at) for body, at in _places(trees, statement) if _calls_alike(body[at], statement)), None)
    if same is None:
        _put_after(trees, None, names[0], [statement])
    else:
        body, at = same
        body[at] = statement
    return True


def _calls_alike(old: ast.stmt, new: ast.stmt) -> bool:
    calls = [getattr(one, "value", None) for one in (old, new)]
    first, second = (ast.unparse(one.func) if isinstance(one, ast.Call) else "" for one in calls)
    return first == second != ""


def _parts(trees: list[ast.Module], code: str, new: list[ast.stmt]) -> Sequence[ast.AST]:
    """Where ``code`` belongs: the function that its first line names, unless it is that function; else any cell."""
    within = _WITHIN.match(code)
    nodes = (node for tree in reversed(trees) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    found = [node for node in nodes if within and node.name == within[1]]
    return found[:1] if found and not any(isinstance(one, ast.FunctionDef) for one in new) else trees


def _put_after(trees: list[ast.Module], function: str | None, model: str, code: list[ast.stmt]) -> None:
    """Put ``code`` behind the first statement of a function, or of a cell, that makes ``model``."""
    nodes = [
        node for tree in reversed(trees) for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.FunctionDef))
    ]
    bodies = [node.body for node in nodes if function is None or getattr(node, "name", "") == function]
    body, at = next((body, at) for body in bodies for at, one in enumerate(body) if model in _made(one))
    body[at + 1 : at + 1] = code


def _exchanged(trees: list[ast.Module], first: str, last: str, code: str) -> bool:
    """Put ``code`` in place of the statement ``first``, or of those to ``last``; whether they are there."""
    bodies = (getattr(node, "body", None) for tree in reversed(trees) for node in ast.walk(tree))
    for body in (one for one in bodies if isinstance(one, list)):
        texts = [ast.unparse(one) for one in body]
        starts = [at for at, text in enumerate(texts) if text.splitlines()[0] == first]
        end = next(
            (
                at
                for at, text in enumerate(texts)
                if starts and at >= starts[0] and (text if last == "" else text.splitlines()[0]) == (last or first)
            ),
            None,
        )
        if end is not None:
            body[starts[0] : end + 1] = ast.parse(code).body
            return True
    return False


def _made(statement: ast.stmt) -> set[str]:
    """The names that a statement binds: what uses them is pasted behind it."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(one.asname or one.name).partition(".")[0] for one in statement.names}
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    nodes = (node for target in targets for node in ast.walk(target))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _own(statement: ast.stmt) -> set[str]:
    """The names that a function binds in itself."""
    nodes = ast.walk(statement) if isinstance(statement, ast.FunctionDef) else ()
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _exchanged_whole(trees: list[ast.Module], new: ast.stmt) -> bool:
    """Put a ``with`` in place of the statements that it has in it; whether they are there."""
    inside = new.body if isinstance(new, ast.With) else []
    for body in (getattr(node, "body", None) for tree in reversed(trees) for node in ast.walk(tree)):
        for at in range(len(body) - len(inside) + 1 if isinstance(body, list) and inside else 0):
            old = body[at : at + len(inside)]
            if all(
                ast.unparse(one) == ast.unparse(other) or _does(one, other)
                for one, other in zip(old, inside, strict=True)
            ):
                body[at : at + len(inside)] = [new]
                return True
    return False


def _places(trees: Sequence[ast.AST], new: ast.stmt) -> Iterator[tuple[list[ast.stmt], int]]:
    """Where a statement stands that ``new`` is meant for, the last cell first: in classes and functions, too."""
    for tree in reversed(trees):
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                yield from ((body, at) for at, old in enumerate(body) if _does(old, new))


def _alike(place: tuple[list[ast.stmt], int], new: ast.stmt) -> int:
    """How many lines the statement at a place has in common with ``new``."""
    body, at = place
    lines = {line.strip() for line in ast.unparse(new).split("\n")}
    return sum(line.strip() in lines for line in ast.unparse(body[at]).split("\n"))


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
    return ast.unparse(node).replace(" * accumulation", "")


def peak_of(cells: list[str]) -> int:
    """What the last of the cells takes on the pretend GPU, followed as far as a rehearsal is."""
    names: dict[str, Any] = {"__name__": "__main__"}
    session = DrySession("RTX 3060", f"{CARD_MIB}MiB", is_limited=False, has_bar=False, stop_after_steps=2)
    for number, cell in enumerate(cells):
        code = compile(cell, f"<ipython-input-{number}>", "exec")
        with silenced():
            session.run(lambda code=code: exec(code, names))
    assert session.report is not None
    return session.report.peak_allocated_bytes


def main(name: str) -> None:
    """Print what each piece of code takes."""
    notebook: Notebook = NOTEBOOKS[name]
    cells = [closed_loop.filled(cell, notebook.values) for cell in notebook.cells]
    found = []
    with contextlib.redirect_stdout(io.StringIO()):
        said = closed_loop.explained(notebook, notebook.values, is_fake=True)
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
