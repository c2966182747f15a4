"""Calls of models, and of functions that run one, on some rows of their arguments at a time, and the results joined.

No graph is kept there: such calls evaluate.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from oom_magic.explain.live.called import NOTHING, called_in, object_of
from oom_magic.explain.remedies.own_code.loops import copied, is_module
from oom_magic.explain.remedies.own_code.rows.apart import keeps_rows, stay_apart
from oom_magic.explain.remedies.own_code.rows.pairs import AT
from oom_magic.explain.syntax import expression, names_in

# Methods of models that compute rows by themselves, as calling the model does.
_OF_ROWS = re.compile(r"^(generate|encode|forward|embed|predict|sample|decode|infer|transform)|_features$|^__call__$")


def model_calls(tree: ast.Module, names: Mapping[str, Any]) -> Iterator[tuple[Any, Any, ast.expr]]:
    """The calls of models in the cell, each with what is taken of its result, and the place where it stands: a list or
    a dictionary of fields, and the key there."""
    inside: set[int] = set()
    for node in ast.walk(tree):  # what is outside comes first
        for key, value in list(vars(node).items()):
            places = enumerate(value) if isinstance(value, list) else [(key, value)]
            for at, one in places:
                call = _call_of(one, names) if at != "func" else None  # a method is taken with its call
                if call is not None and id(call) not in inside:
                    inside.add(id(call))
                    yield (value if isinstance(value, list) else vars(node)), at, one


def _call_of(taken: Any, names: Mapping[str, Any]) -> ast.Call | None:
    """The call of a model of which an attribute, or the same of each row, is taken: ``model(x).logits[:, -1]``,
    ``model(x).argmax(1)``."""
    while True:
        match taken:
            case (
                ast.Attribute(value=value)
                | ast.Subscript(value=value, slice=ast.Tuple(elts=[ast.Slice(None, None, None), *_]))
            ):
                taken = value
            case ast.Call() if _is_of_model(taken, names):
                return taken
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=args) if keeps_rows(taken) and (
                name not in ("view", "reshape") or ast.unparse(args[0]) == "-1"  # not a number of all rows
            ):
                taken = value
            case _:
                return None


def in_rows(taken: ast.expr, names: Mapping[str, Any], bound: Collection[str], number: int, after: int) -> str:
    """What is taken of a model's call on ``number`` rows, of calls on ``after`` rows each and joined; "" where it is
    not known what of its arguments has the rows. Names ``bound`` by the code are taken to have them."""
    part = copied(taken)
    call = _call_of(part, names)
    if call is None or any(isinstance(one, ast.Starred) for one in call.args):
        return ""
    rows = _Rows(names, bound, number, after)
    call.args = [rows.visit(one) for one in call.args]
    for one in call.keywords:
        one.value = rows.of_all(one.value) if one.arg is None else rows.visit(one.value)
    if not rows.length:
        return ""
    each, steps = ast.unparse(part), f"range(0, {rows.length}, {after})"
    rows_of_all = f"[row for {AT} in {steps} for row in {each}]"
    if ast.unparse(call.func).endswith(".generate"):
        return f"torch.nn.utils.rnn.pad_sequence({rows_of_all}, batch_first=True{_padding(call, names)})"
    kinds = _kinds_returned(call, names) if call is part else {"tensor"}
    if kinds == {"list"}:
        return rows_of_all
    joining = {"tensor": "torch.cat", "array": _name_of_numpy(names)}.get(kinds.pop(), "") if len(kinds) == 1 else ""
    return f"{joining}([{each} for {AT} in {steps}])" if joining else ""


def _kinds_returned(call: ast.Call, names: Mapping[str, Any]) -> set[str]:
    """What a model or a function of the user's returns: "tensor", "array" of NumPy's, "list" of one for each row."""
    function = object_of(call.func, names)
    own = getattr(function, "__func__", function)
    found = [one.definition for one in called_in(call, names) if one.function is own]
    if is_module(function) or not found:
        return {"tensor"}
    assigned = [node for node in ast.walk(found[0]) if isinstance(node, ast.Assign)]
    made = {ast.unparse(target): node.value for node in assigned for target in node.targets}
    returned = [node.value for node in ast.walk(found[0]) if isinstance(node, ast.Return)]
    values = [made.get(ast.unparse(one), one) for one in returned if one is not None]
    return {_kind(one) for one in values}


def _kind(made: ast.expr) -> str:
    match made:
        case ast.ListComp() | ast.Call(func=ast.Attribute(attr="tolist" | "batch_decode")):
            return "list"
        case ast.Call(func=ast.Attribute(attr="numpy")):
            return "array"
    return "tensor"


def _name_of_numpy(names: Mapping[str, Any]) -> str:
    """The function that joins arrays, as the code may call it; "" where NumPy has no name there."""
    numpy = sys.modules.get("numpy")
    return next((f"{name}.concatenate" for name, one in names.items() if one is numpy and one is not None), "")


def _padding(call: ast.Call, names: Mapping[str, Any]) -> str:
    """What a call of ``generate`` fills shorter rows up with, as an argument; "" for zeros."""
    for one in call.keywords:
        if one.arg == "pad_token_id":
            return f", padding_value={ast.unparse(one.value)}"
        settings = object_of(one.value, names) if one.arg is None else None
        if isinstance(settings, Mapping) and "pad_token_id" in settings:
            return f", padding_value={ast.unparse(one.value)}['pad_token_id']"
    model = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    config = getattr(object_of(model, names), "generation_config", None)
    for name in ("pad_token_id", "eos_token_id"):  # as transformers chooses it
        if isinstance(getattr(config, name, None), int):
            return f", padding_value={ast.unparse(model)}.generation_config.{name}"
    return ""


def _is_of_model(call: ast.Call, names: Mapping[str, Any]) -> bool:
    return _calls_model(call, names) or _is_of_rows(call, names)


def _is_of_rows(call: ast.Call, names: Mapping[str, Any]) -> bool:
    """Whether a call of a function of the user's has a model compute each row of its arguments by itself."""
    if not isinstance(object_of(call.func, names), (FunctionType, MethodType)):
        return False
    called = [one for one in called_in(call, names) if not is_module(one.owner)]
    runs = ((node, one.names) for one in called for node in ast.walk(one.definition) if isinstance(node, ast.Call))
    are_apart = stay_apart(call, set(names_in(call)), [one.definition for one in called])
    return are_apart and any(_calls_model(node, seen) for node, seen in runs)


def _calls_model(call: ast.Call, names: Mapping[str, Any]) -> bool:
    """Whether it calls a module, or a method of one that computes rows."""
    if is_module(object_of(call.func, names)):
        return True
    is_method = isinstance(call.func, ast.Attribute) and is_module(object_of(call.func.value, names))
    return is_method and bool(_OF_ROWS.search(vars(call.func)["attr"]))


class _Rows(ast.NodeTransformer):
    """Some rows in place of what has all of them; ``length`` is how many those are."""

    def __init__(self, names: Mapping[str, Any], bound: Collection[str], number: int, after: int) -> None:
        self._names, self._bound, self._number, self._after = names, bound, number, after
        self.length = ""

    def of_all(self, mapping: ast.expr) -> ast.expr:
        """Some rows of all that a mapping has: ``**inputs``; itself where it has none: ``**settings``."""
        value = self._known(mapping)
        if isinstance(value, Mapping) and not any(self._has_rows(one) for one in value.values()):
            return mapping
        text = ast.unparse(mapping)
        self.length = self.length or f"len(next(iter({text}.values())))"
        return expression(f"{{name: value[{AT}:{AT} + {self._after}] for name, value in {text}.items()}}")

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Not the function itself."""
        if isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)
        node.args = [self.visit(one) for one in node.args]
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """A name of rows."""
        return self._of_rows(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """An entry that is rows."""
        return self._of_rows(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """An attribute that is rows."""
        return self._of_rows(node)

    def _of_rows(self, node: ast.expr) -> ast.expr:
        value = self._known(node)
        if value is not NOTHING and not self._has_rows(value):
            return node
        text = ast.unparse(node)
        self.length = self.length or f"len({text})"
        return expression(f"{text}[{AT}:{AT} + {self._after}]")

    def _known(self, node: ast.expr) -> Any:
        """What an expression is before the code runs; NOTHING of what the code binds."""
        root = node
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            root = root.value
        return NOTHING if isinstance(root, ast.Name) and root.id in self._bound else object_of(node, self._names)

    def _has_rows(self, value: Any) -> bool:
        is_list = isinstance(value, list) and len(value) == self._number  # such as texts
        return is_list or tuple(getattr(value, "shape", ()))[:1] == (self._number,)
