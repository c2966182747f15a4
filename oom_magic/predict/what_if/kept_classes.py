"""Transformers' Trainer keeps the classes that logits stand for, where its metrics are computed from those alone."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from oom_magic.predict.isolation.patching import all_patched
from oom_magic.predict.what_if.change import Change
from oom_magic.predict.what_if.loop_changes import around_evaluations

_OF_CLASSES = ("-1", "1", "2")  # the dimension of the classes


class KeptClasses(Change):
    """A Trainer gets ``preprocess_logits_for_metrics``, and metrics that read its classes."""

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """Set both during evaluations."""

        def looping(trainer: Any, loop: Callable[[], Any]) -> Any:
            before = trainer.preprocess_logits_for_metrics, trainer.compute_metrics
            made = metrics_of_classes(trainer)
            if made is not None:
                trainer.preprocess_logits_for_metrics = _largest
                trainer.compute_metrics = _compiled(made, trainer.compute_metrics)
            try:
                return loop()
            finally:
                trainer.preprocess_logits_for_metrics, trainer.compute_metrics = before

        with all_patched(around_evaluations(looping)):
            yield


def _largest(logits: Any, _labels: Any) -> Any:
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def metrics_of_classes(trainer: Any) -> ast.FunctionDef | None:
    """The definition of a trainer's metrics, in which the classes stand where those of the logits were; None where they
    read the logits otherwise, or something is made of the logits already."""
    function = trainer.compute_metrics
    is_plain = isinstance(function, FunctionType) and not function.__code__.co_freevars
    if trainer.preprocess_logits_for_metrics is not None or not is_plain:
        return None
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError):
        return None
    found = [node for node in ast.walk(definition) if _is_of_classes(node)]
    if not isinstance(definition, ast.FunctionDef) or len(found) != 1 or _is_read_beside(definition, found[0]):
        return None
    definition.decorator_list = []
    made = _Replaced(found[0]).visit(definition)
    return made if isinstance(made, ast.FunctionDef) else None


def _is_of_classes(node: ast.AST) -> bool:
    """Whether it is ``logits.argmax(-1)`` or ``np.argmax(logits, axis=-1)``."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "argmax"):
        return False
    given = [*node.args, *(one.value for one in node.keywords)]
    return ast.unparse(given[-1]) in _OF_CLASSES if given else False


def _logits_of(call: ast.AST) -> ast.expr:
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    return call.args[0] if len([*call.args, *call.keywords]) == 2 else call.func.value


def _is_read_beside(definition: ast.FunctionDef, call: ast.AST) -> bool:
    """Whether logits are read elsewhere, but for a name that then stands for the classes."""
    logits = ast.unparse(_logits_of(call))
    loads = (node for node in ast.walk(definition) if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)))
    read = [node for node in loads if isinstance(node.ctx, ast.Load) and ast.unparse(node) == logits]
    binds = [one for one in ast.walk(definition) if isinstance(one, ast.Assign) and one.value is call]
    is_rebound = any(ast.unparse(target) == logits for one in binds for target in one.targets)
    return any(node.lineno <= call.lineno for node in read[1:]) if is_rebound else len(read) != 1  # type: ignore[attr-defined]


class _Replaced(ast.NodeTransformer):
    """Puts its logits in place of a call."""

    def __init__(self, call: ast.AST) -> None:
        self._call = call

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """The logits, where it is the call."""
        if node is self._call:
            return _logits_of(node)
        self.generic_visit(node)
        return node


def _compiled(definition: ast.FunctionDef, function: FunctionType) -> Any:
    code = compile(ast.fix_missing_locations(ast.Module([definition], [])), function.__code__.co_filename, "exec")
    names: dict[str, Any] = {}
    exec(code, function.__globals__, names)
    return names[definition.name]
