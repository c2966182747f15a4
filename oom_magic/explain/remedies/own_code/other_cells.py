"""The other cells of a notebook: what those that ran before say of a cell, and what a later one will run."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oom_magic.explain.live.called import called_in
from oom_magic.explain.live.later_backward import is_backward, walks_back_unmade
from oom_magic.explain.remedies.own_code.loops import is_module, own_arguments, own_inline_arguments
from oom_magic.explain.syntax import bound_in, is_stored, names_in, read_in
from oom_magic.predict.caught_failures import goes_on

_MAGIC = "run_cell_magic"  # of IPython, in a cell's text as it was executed
_LOSS = re.compile(r"loss|(?<![a-z])nll", re.IGNORECASE)
EVALUATES = re.compile(r"eval|valid|test|predict|generate|no_grad|inference_mode", re.IGNORECASE)
# Not what is called after the training, such as train_loader or X_train.
_SPEAKS_OF_TRAINING = re.compile(r"backward|(?<!no_)grad\(|\.step\(|fit\(|train\w*\(", re.IGNORECASE)
_WALKS_BACK = re.compile(r"backward|autograd\.grad\(|\.step\(|fit\(|train\w*\(\w")
# Of accelerate, Lightning and transformers: each tries batches until one fits.
_SEARCHES = re.compile(
    r"find_executable_batch_size|(?:auto_)?scale_batch_size|BatchSizeFinder|auto_find_batch_size(?!=False)"
)
_DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def earlier_cells(names: Mapping[str, Any]) -> list[ast.Module]:
    """The cells that IPython has executed, the newest first; none elsewhere."""
    texts = names.get("In")
    found = [_parsed(text) for text in texts if isinstance(text, str)] if isinstance(texts, list) else []
    return [tree for tree in reversed(found) if tree.body]


def _parsed(text: str) -> ast.Module:
    """A cell's statements, without those of a magic that runs the cell."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])
    match tree.body:
        case [ast.Expr(value=ast.Call(func=ast.Attribute(attr=name), args=[*_, ast.Constant(value=str() as inner)]))]:
            return _parsed(inner) if name == _MAGIC else tree
    return tree


def arguments_of_earlier_cells(tree: ast.Module, names: Mapping[str, Any], code: str) -> str:
    """The ``TrainingArguments(...)`` of an earlier cell, with what ``code`` sets, and the statement that made the
    trainer of this cell with them; "" where there are none."""
    cells = earlier_cells(names)
    read = read_in(tree)
    statements = [one for cell in cells for one in reversed(cell.body) if isinstance(one, ast.Assign)]
    for makes in [one for one in statements if bound_in(one) & read]:
        inline = own_inline_arguments(makes, code)
        if inline:
            return inline
        for own in (own_arguments(cell, code) for cell in cells):
            if _is_given(makes, _assigned_name(own)):
                first, gap, others = own.partition("\n\n")
                return f"{first}\n{ast.unparse(makes)}{gap}{others}"
    return ""


def _assigned_name(code: str) -> str:
    return next((name for one in ast.parse(code).body if isinstance(one, ast.Assign) for name in bound_in(one)), "")


def _is_given(statement: ast.Assign, name: str) -> bool:
    """Whether it assigns what a call returns that is given ``name``."""
    call = statement.value
    if not isinstance(call, ast.Call):
        return False
    given = [*call.args, *(one.value for one in call.keywords)]
    return any(isinstance(one, ast.Name) and one.id == name for one in given)


@dataclass(frozen=True)
class LaterBackward:
    """A backward that a later cell is to run from ``name``, with the steps of the ``optimizers`` by their names."""

    name: str
    optimizers: tuple[str, ...]

    def followed(self, execute: Callable[[ast.Module, dict[str, Any]], Any]) -> Callable[..., None]:
        """``execute``, with both after it; twice, where the optimizer's state is there the second time."""

        from oom_magic.predict.what_if.later_backward import walk_back  # loads torch

        def run(tree: ast.Module, names: dict[str, Any]) -> None:
            for _unused in range(2 if self.optimizers else 1):
                execute(tree, names)
                walk_back(names.get(self.name))
                for optimizer in self.optimizers:
                    names[optimizer].step()
                    names[optimizer].zero_grad()

        return run


def later_backward(tree: ast.Module, names: Mapping[str, Any]) -> LaterBackward | None:
    """The backward that a later cell is to run from what this cell makes; None where this one trains, or evaluates.

    An earlier execution of that later cell tells, or else a model in training mode and an optimizer, or a loss's name,
    where no earlier cell trains as a whole.
    """
    from oom_magic.predict.what_if.later_backward import names_of_optimizers  # loads torch

    if any(_WALKS_BACK.search(ast.unparse(code)) for code in _codes(tree, names)):
        return None
    results = _results(tree)
    cells = earlier_cells(names)
    walked = [name for name in results if any(walks_back_unmade(cell.body, name) for cell in cells)]
    if not walked and (EVALUATES.search(ast.unparse(tree)) or any(map(_trains, cells))):
        return None
    optimizers = names_of_optimizers(names)
    losses = [name for name in results if _LOSS.search(name)]
    is_trained = _has_training_model(tree, names)
    if walked or (losses and (optimizers or is_trained)) or (results and optimizers and is_trained):
        return LaterBackward((walked or losses or results)[-1], optimizers)
    return None


def handler_of_out_of_memory(tree: ast.Module, names: Mapping[str, Any]) -> str:
    """What the cell, or a function of the user's that it runs, goes on with where memory runs out, as a search for a
    batch size does: the line that catches it, or the name of what searches; "" where there is none."""
    codes = list(_codes(tree, names))
    handlers = (one for code in codes for one in ast.walk(code) if isinstance(one, ast.ExceptHandler))
    for one in filter(goes_on, handlers):
        return "except" if one.type is None else f"except {ast.unparse(one.type)}"
    read = (names.get(node.id) for node in ast.walk(tree) if isinstance(node, ast.Name))
    texts = [*map(ast.unparse, codes), *(str(getattr(one, "__qualname__", "")) for one in read)]
    found = next(filter(None, map(_SEARCHES.search, texts)), None)
    return "" if found is None else found.group()


def speaks_of_training(tree: ast.Module, names: Mapping[str, Any]) -> bool:
    """Whether the cell, or a function of the user's that it runs, calls something that is named after training."""
    return any(_SPEAKS_OF_TRAINING.search(ast.unparse(code)) for code in _codes(tree, names))


def _codes(tree: ast.Module, names: Mapping[str, Any]) -> Iterator[ast.AST]:
    yield tree
    yield from (one.definition for one in called_in(tree, names))


def _results(tree: ast.Module) -> Sequence[str]:
    """The names that the cell binds and does not read again."""
    found: dict[str, None] = {}
    for statement in tree.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and not is_stored(node):
                found.pop(node.id, None)
        if not isinstance(statement, _DEFINING):
            found |= dict.fromkeys(bound_in(statement))
    return list(found)


def _trains(cell: ast.Module) -> bool:
    """Whether a cell runs, or defines, a whole step of training."""
    return any(map(is_backward, ast.walk(cell)))


def _has_training_model(tree: ast.Module, names: Mapping[str, Any]) -> bool:
    """Whether a model that the cell names is in training mode and has weights to train."""
    read = names_in(tree)
    models: list[Any] = [names[name] for name in read if is_module(names.get(name))]
    return any(one.training and any(part.requires_grad for part in one.parameters()) for one in models)
