"""How the user's cell calls things, so that code to paste can be written in its words."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from oom_magic.explain.own_code import is_module

_LOADS = ("from_pretrained", "from_config")
_WRAPPERS = ("DistributedDataParallel", "DataParallel")
_NO_MODELS = ("Tokenizer", "Config", "Processor", "FeatureExtractor")


def own_names(tree: ast.Module, names: Mapping[str, Any]) -> Mapping[str, str]:
    """The words of ``remedy_code``'s templates that a cell shows: ``loader`` loads ``source`` as ``model``.

    Of ``names``, those that the cell sees, the one model that it calls tells ``inner``, what a wrapper for several GPUs
    has inside, and the ``layers`` that it repeats, of the attribute ``blocks``.
    """
    return {**_of_the_model(tree, names), **_of_the_load(tree)}


def _of_the_model(tree: ast.Module, names: Mapping[str, Any]) -> dict[str, str]:
    used = dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    models = [name for name in used if is_module(names.get(name)) and any(True for _ in names[name].parameters())]
    if len(models) != 1:
        return {}
    name, model = models[0], names[models[0]]
    inner = name
    if type(model).__name__ in _WRAPPERS:
        inner, model = f"{name}.module", model.module
    found = {"model": name, "inner": inner}
    if type(model).__module__.startswith("transformers."):
        found["loader"] = type(model).__name__
    from oom_magic.predict.changes.models import path_of_blocks  # loads torch

    path = path_of_blocks(model)
    return {**found, "layers": f"{inner}.{path}", "blocks": path.rpartition(".")[2]} if path else found


def _of_the_load(tree: ast.Module) -> dict[str, str]:
    for target, call in _loads(tree):
        found = {"loader": ast.unparse(call.func.value)}  # type: ignore[attr-defined]
        if target:
            found["model"] = target
        if call.func.attr == "from_pretrained" and call.args:  # type: ignore[attr-defined]
            found["source"] = ast.unparse(call.args[0]).replace("'", '"')
        return found
    return {}


def _loads(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """The calls that load a model, each with the name that the statement assigns."""
    for statement in ast.walk(tree):
        if not isinstance(statement, (ast.Assign, ast.Expr)):
            continue
        named = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        target = ast.unparse(statement.targets[0]) if named else ""  # type: ignore[union-attr]
        for node in ast.walk(statement.value):
            is_load = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOADS
            if is_load and not ast.unparse(node.func.value).endswith(_NO_MODELS):  # type: ignore[attr-defined]
                yield target, node  # type: ignore[misc]
