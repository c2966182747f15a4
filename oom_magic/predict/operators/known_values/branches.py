"""Answers to unknown conditions that let the run go on: checks pass, and loops end.

Choices by unknown values, such as ``argmax``, ``topk`` and ``multinomial``, are assumed to select all possibilities
equally often. So a router sends to each expert the same number of tokens. The first choice is in the middle, because
special tokens, such as the one that ends a sequence, are at an end of the vocabulary.
"""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.user_code import is_own_file

_TORCH = Path(torch.__file__).parent
_OPTIMIZERS = str(_TORCH / "optim")
_BETWEEN = tuple(
    str(_TORCH / name) for name in ("_tensor.py", "_compile.py", "_dynamo", "overrides.py", "_ops.py", "utils/_")
)


def answer_that_goes_on(frame: FrameType | None, answered: dict[tuple[str, int], bool]) -> bool | None:
    """The value of a condition that lets the run go on; None if both values do.

    An assertion holds, and an ``if`` that only raises is skipped. What an adaptive solver tries is accepted (``if
    accept_step``): it would try for ever. A ``while`` loop runs once: the last answer to its condition is in
    ``answered``, by line. An optimizer of PyTorch does what it has a condition for (LBFGS keeps a step
    in its history) unless that ends its step.
    """
    while frame is not None and _is_between(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    file, number = frame.f_code.co_filename, frame.f_lineno
    statement = _branches("".join(linecache.getlines(file, frame.f_globals))).get(number)
    if statement is None:
        return None
    is_negated = isinstance(statement.test, ast.UnaryOp) and isinstance(statement.test.op, ast.Not)
    if isinstance(statement, ast.Assert):
        return not is_negated
    if isinstance(statement, ast.If):
        if file.startswith(_OPTIMIZERS):
            return is_negated == isinstance(statement.body[0], (ast.Raise, ast.Break, ast.Return))
        if isinstance(statement.body[0], ast.Raise):
            return is_negated
        return not is_negated if "accept" in ast.unparse(statement.test).lower() else None
    answer = answered[file, number] = not answered.get((file, number), is_negated)
    return answer


def _is_between(file: str) -> bool:
    return is_own_file(file) or file.startswith(_BETWEEN)


@lru_cache(maxsize=64)
def _branches(source: str) -> dict[int, ast.If | ast.While | ast.Assert]:
    """The branching statement on whose condition each line is."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a cell with magics in it
        return {}
    found: dict[int, ast.If | ast.While | ast.Assert] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.While, ast.Assert)):
            found.update(dict.fromkeys(range(node.test.lineno, (node.test.end_lineno or node.test.lineno) + 1), node))
    return found


aten = torch.ops.aten
_ARGUMENTS = {aten.argmax.default, aten.argmin.default, aten.argmax.out}  # which multinomial is made of
_WITH_INDICES = {
    aten.max.dim: 1,
    aten.min.dim: 1,
    aten.topk.default: 2,
    aten.topk.values: 2,
}  # at which position is the dimension
CHOOSING = frozenset([*_ARGUMENTS, *_WITH_INDICES])


def spread_choices(func: OpOverload, args: tuple[Any, ...], out: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The tensor of indices among an operator's results, and what they are taken to be; None for other operators."""
    position = 1 if func in _ARGUMENTS else _WITH_INDICES.get(func)
    if position is None:
        return None
    tensor, indices = args[0], out if func in _ARGUMENTS else out[1]
    dim = args[position] if len(args) > position else None if func in _ARGUMENTS else -1
    if dim is None or not tensor.dim():
        return indices, torch.full_like(indices, tensor.numel() // 2, device="cpu")
    number = tensor.shape[dim]
    if indices.dim() < tensor.dim():
        return indices, _spread(indices.unsqueeze(dim).shape, dim, number).squeeze(dim)
    return indices, _spread(indices.shape, dim, number)


def _spread(shape: torch.Size, dim: int, number: int) -> torch.Tensor:
    """Along ``dim`` different numbers below ``number``, which begin one later for each next position in the others."""
    others = list(shape)
    num_chosen = others.pop(dim)
    rows = torch.arange(torch.Size(others).numel(), device="cpu").view(others)
    along = [1] * len(shape)
    along[dim] = num_chosen
    return (rows.unsqueeze(dim) + torch.arange(num_chosen, device="cpu").view(along) + number // 2) % max(number, 1)
