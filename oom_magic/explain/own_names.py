"""How the user's cell calls things, so that code to paste can be written in its words."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

_LOADS = ("from_pretrained", "from_config")
_NO_MODELS = ("Tokenizer", "Config", "Processor", "FeatureExtractor")


def own_names(tree: ast.Module) -> Mapping[str, str]:
    """The words of ``remedy_code``'s templates that a cell shows: ``loader`` loads ``source`` as ``model``."""
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
