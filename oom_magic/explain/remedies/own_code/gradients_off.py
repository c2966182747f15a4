"""What evaluates in the user's code, put under ``no_grad``: the cell, loops, single lines, a teacher in a step."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from oom_magic.explain.live.called import called_in, object_of
from oom_magic.explain.remedies.own_code.loops import (
    Code,
    arguments_of,
    called_alone,
    copied,
    is_module,
    runs_model,
    training_block,
)
from oom_magic.explain.syntax import blocks_of, is_stored, names_in, path_to_line

_DEFINING = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_MOST_STATEMENTS = 12
_EVALUATED = re.compile(r"(?:\b|_)(?:val|valid\w*|eval\w*|test)(?:\b|_)", re.IGNORECASE)


def without_gradients(tree: ast.Module) -> str:
    """The cell's statements under ``no_grad``; "" where they are long."""
    body = [one for one in tree.body if not isinstance(one, _DEFINING) and not _only_shows(one)]
    if not body or len(body) > _MOST_STATEMENTS:
        return ""
    return ast.unparse(_under_no_grad(body))


def _only_shows(statement: ast.stmt) -> bool:
    """Whether it is a value that a cell ends with, to be seen."""
    nodes = ast.walk(statement) if isinstance(statement, ast.Expr) else ()
    return isinstance(statement, ast.Expr) and not any(isinstance(one, (ast.Call, ast.Await)) for one in nodes)


def _under_no_grad(body: list[ast.stmt]) -> ast.With:
    context = ast.parse("with torch.no_grad():\n    pass").body[0]
    assert isinstance(context, ast.With)
    context.body = body
    return context


def evaluations_without_gradients(tree: Code, models: set[str]) -> str:
    """What evaluates one of the ``models`` in code, under ``no_grad``: loops, and calls behind ``eval()``;
    "" if it has none.

    A loop whose losses are walked back behind it is none: ``eval()`` comes before it, or its data have such a name.
    """
    return "\n".join(map(_without_gradients, _evaluating(tree.body, models | arguments_of(tree))))


def _without_gradients(statement: ast.stmt) -> str:
    if not isinstance(statement, ast.For):
        return ast.unparse(_under_no_grad([statement]))
    loop = copied(statement)
    loop.body = [_under_no_grad(loop.body)]
    return ast.unparse(loop)


def lines_without_gradients(tree: Code, lines: Collection[int]) -> str:
    """The outermost statements of code around those at ``lines``, with these under ``no_grad``; "" where a line is no
    statement by itself."""
    paths = [path_to_line(tree, line) for line in sorted(lines)]
    if any(not path or list(blocks_of(path[-1][0][path[-1][1]])) for path in paths):
        return ""
    with ExitStack() as stack:
        for block, at in (path[-1] for path in paths):
            stack.callback(block.__setitem__, at, block[at])
            block[at] = _under_no_grad([block[at]])
        outermost = dict.fromkeys(block[at] for (block, at), *_ in paths)
        return "\n".join(map(ast.unparse, outermost))


def frozen_without_gradients(tree: Code, names: Mapping[str, Any]) -> str:
    """The training loop with ``no_grad`` around the calls of models in evaluation mode, such as a teacher's; or else a
    function that it calls. "" if neither has any that stand alone and take nothing that a trained model made."""
    found = training_block(tree)
    if found is None:
        return ""
    loop, trained, modes = copied(found), set[str](), _modes_set(tree)
    if _frozen_under_no_grad(loop.body, names, modes, trained):
        return ast.unparse(ast.fix_missing_locations(loop))
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
    for one in called_in(loop, names):
        its = [call for call in calls if object_of(call.func, names) is one.function]
        made = ast.parse(ast.unparse(one.definition)).body[0]
        if not its or not isinstance(made, ast.FunctionDef):
            continue
        if _frozen_under_no_grad(made.body, one.names, modes, _given_by(its, made, trained)):
            return f"# in {made.name}:\n{ast.unparse(ast.fix_missing_locations(made))}"
    return ""


def frozen_in_function(tree: Code, names: Mapping[str, Any]) -> str:
    """A function that a library calls for a step's loss, with ``no_grad`` around the calls of models in evaluation
    mode; "" for others. What its arguments make is trained."""
    if isinstance(tree, ast.Module):
        return ""
    made = ast.parse(ast.unparse(tree))
    given = arguments_of(tree) - names.keys()
    is_any = _frozen_under_no_grad(vars(made.body[0])["body"], names, {}, set(), given)
    return ast.unparse(ast.fix_missing_locations(made)) if is_any else ""


def _frozen_under_no_grad(
    body: list[ast.stmt],
    names: Mapping[str, Any],
    modes: Mapping[str, bool],
    trained: set[str],
    given: Collection[str] = (),
) -> bool:
    """Put the statements of a body that only call models in evaluation mode under ``no_grad``; whether there are any.

    What is made from names that are ``trained``, of outputs with a graph, is added to them. ``given``: as
    ``runs_model`` has it. ``modes``: of models that are put in one, by name; others are in that of their object.
    """
    is_any = False
    for at, statement in enumerate(body):
        called = _modes_called(statement, names, modes)
        nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        if (
            any(called)
            or any(node.id in trained for node in nodes)
            or (not called and runs_model(statement, names, given))
        ):
            trained |= {node.id for node in nodes if is_stored(node)}
        elif called and isinstance(statement, ast.Assign):
            body[at], is_any = _under_no_grad([statement]), True
    return is_any


def _given_by(calls: list[ast.Call], definition: ast.FunctionDef, trained: Collection[str]) -> set[str]:
    """The arguments of a function that ``calls`` give something made from the names that are ``trained``."""
    arguments = [one.arg for one in definition.args.args]
    given = [pair for call in calls for pair in zip(arguments, call.args, strict=False)]
    given += [(one.arg or "", one.value) for call in calls for one in call.keywords]
    reads = {name: set(names_in(value)) for name, value in given}
    are_told = not any(isinstance(one, ast.Starred) for call in calls for one in call.args) and "" not in reads
    return {name for name, used in reads.items() if used & set(trained)} if are_told else set(arguments)


def _modes_called(statement: ast.stmt, names: Mapping[str, Any], modes: Mapping[str, bool]) -> list[bool]:
    """Whether each model that a statement calls, alone or of several in turn, is in training mode."""
    names = {**names, **dict(_in_turn(statement, names))}
    functions = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    called = [(ast.unparse(one), object_of(one, names)) for one in functions]
    return [modes.get(name, one.training) for name, one in called if is_module(one)]


def _in_turn(statement: ast.stmt, names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What names stand for that go through several models in an expression, all in one mode:
    ``sum(one(x) for one in teachers)``."""
    for through in [each for node in ast.walk(statement) for each in getattr(node, "generators", ())]:
        several = object_of(through.iter, names)
        is_list = isinstance(several, (list, tuple)) or (is_module(several) and hasattr(type(several), "__iter__"))
        models = list(several) if is_list else []
        is_alike = all(map(is_module, models)) and len({one.training for one in models}) == 1
        if isinstance(through.target, ast.Name) and is_alike:
            yield through.target.id, models[0]


def _modes_set(tree: Code) -> dict[str, bool]:
    """The models that statements put into training (True) or evaluation mode, by name; what a dry cell sets is gone."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and not node.args and not node.keywords]
    of_modes = [one.func for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr in ("train", "eval")]
    modes = {ast.unparse(one.value): one.attr == "train" for one in of_modes}
    both = {ast.unparse(one.value) for one in of_modes if (one.attr == "train") != modes[ast.unparse(one.value)]}
    return {name: is_training for name, is_training in modes.items() if name not in both}


def _evaluating(body: list[ast.stmt], models: set[str]) -> Iterator[ast.stmt]:
    is_told = False
    for at, statement in enumerate(body):
        is_told = (is_told or called_alone(statement) == "eval") and called_alone(statement) != "train"
        text = ast.unparse(statement)
        if isinstance(statement, _DEFINING) or (isinstance(statement, ast.With) and "no_grad" in text):
            continue
        if isinstance(statement, ast.For) and ".backward(" not in text and _calls(statement, models):
            if is_told or _EVALUATED.search(ast.unparse(statement.iter)):
                yield statement
        elif isinstance(statement, (ast.Assign, ast.Expr)):
            follows = any(".backward(" in ast.unparse(one) for one in body[at:])
            if is_told and not follows and _calls(statement, models):
                yield statement
        else:
            for name in ("body", "orelse"):
                yield from _evaluating(getattr(statement, name, []), models)


def _calls(statement: ast.stmt, models: set[str]) -> bool:
    calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
    return any(isinstance(call.func, ast.Name) and call.func.id in models for call in calls)
