"""The user's own statements that compute in float64, in float32 instead."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from oom_magic.explain.remedies.own_code.loops import is_module
from oom_magic.user_code import read_before_bound

_WIDE = {"float64": "float32", "double": "float"}


def in_single_precision(tree: ast.Module, names: Mapping[str, Any]) -> str:
    """The statements of a cell that name float64 with float32 in its place, behind those that cast what it reads of
    ``names``: the default type, modules, tensors; "" where there is nothing of either."""
    changed = [made for made in map(_narrowed, tree.body) if made]
    return "\n".join([*_casts(tree, names), *changed])


@contextmanager
def single_precision(tree: ast.Module, names: Mapping[str, Any]) -> Iterator[None]:
    """The same written into the cell, for a while."""
    before = list(tree.body)
    casts = ast.parse("\n".join(_casts(tree, names))).body
    narrowed = [ast.parse(_narrowed(one)).body or [one] for one in before]
    tree.body[:] = [ast.copy_location(one, before[0]) for one in casts]
    for old, new in zip(before, narrowed, strict=True):
        tree.body += [one if one is old else ast.copy_location(one, old) for one in new]
    ast.fix_missing_locations(tree)
    try:
        yield
    finally:
        tree.body[:] = before


def _casts(tree: ast.Module, names: Mapping[str, Any]) -> list[str]:
    """The statements that cast what earlier cells made and the cell reads."""
    torch = sys.modules["torch"]
    read = read_before_bound(tree)
    sees = {name: value for name, value in names.items() if name in read}
    modules = [name for name, value in sees.items() if is_module(value) and _is_wide(value.parameters())]
    tensors = [name for name, value in sees.items() if isinstance(value, torch.Tensor) and _is_wide([value])]
    before = [f"{name} = {name}.float()   # before the optimizer is created" for name in modules]
    if tensors:
        before.append(f"{', '.join(tensors)} = {', '.join(f'{name}.float()' for name in tensors)}")
    if torch.get_default_dtype() is torch.float64:
        before.insert(0, "torch.set_default_dtype(torch.float32)")
    return before


def _is_wide(tensors: Any) -> bool:
    return any(one.dtype is sys.modules["torch"].float64 for one in tensors)


def _narrowed(statement: ast.stmt) -> str:
    """A statement with float32 in place of float64; "" where it names none."""
    made = ast.parse(ast.unparse(statement)).body[0]
    found = False
    for node in ast.walk(made):
        if isinstance(node, ast.Attribute) and node.attr in _WIDE:
            node.attr, found = _WIDE[node.attr], True
    return ast.unparse(made) if found else ""
