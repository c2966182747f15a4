"""The side of square pictures: what sets it, as one number or as a pair, and the smaller ones that networks take."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

NAME = re.compile(
    r"(img|image|pic|picture|input|crop|patch|resize|target|frame)_?(size|sz|dim|res|resolution|side)?$|resolution|resize"
    r"|crop|^(size|res|side|pixels|dim)$",
    re.IGNORECASE,
)
_LEAST = 64  # less are no photographs: digits, patches, maps of features
_LEAST_SHARE = 4  # of the side: a sixteenth of the pixels
_DEEPEST = 4  # dataset.transform.transforms[0]
_PAIRS = (tuple, list)


def side_of(shape: tuple[int, ...], is_integer: bool) -> int | None:
    """The side of square pictures (samples, channels, height, width); None of other inputs."""
    is_square = len(shape) == 4 and shape[2] == shape[3] >= _LEAST > shape[1]
    return shape[2] if is_square and not is_integer else None


def smaller_sides(before: int) -> list[int]:
    """Smaller sides, ascending, that a network can halve as often as it would the usual ones."""
    grain = 32 if before >= 256 else 16 if before >= 128 else 8
    return list(range(-(-before // _LEAST_SHARE // grain) * grain, before, grain))


def squares(tree: ast.Module, value: int) -> list[ast.Constant]:
    """A side that the cell writes twice in a row, ``(3, 512, 512)``, with all others that are the same number."""
    same = [one for one in ast.walk(tree) if isinstance(one, ast.Constant) and _is(one, value)]
    is_pair = any(_is(one, value) and _is(other, value) for row in _rows(tree) for one, other in pairwise(row))
    return same if is_pair else []


def _rows(tree: ast.Module) -> Iterator[list[ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Tuple, ast.List)):
            yield node.elts
        elif isinstance(node, ast.Call):
            yield node.args


def _is(node: ast.expr, value: int) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value == value


def pairs_held(names: Mapping[str, Any], value: int) -> Iterator[tuple[str, Any, Any]]:
    """Where the side stands as a pair: in a variable, in settings, or in what resizes a data set's pictures; the
    expression, what holds it and under which key."""
    seen: set[int] = set()
    for name, one in list(names.items()):
        if not name.startswith("_") and not inspect.ismodule(one) and not inspect.isclass(one):
            yield from _pairs(name, names, name, one, value, _DEEPEST, seen)


def _pairs(
    path: str, holder: Any, key: Any, one: Any, value: int, depth: int, seen: set[int]
) -> Iterator[tuple[str, Any, Any]]:
    if type(one) in _PAIRS and len(one) == 2 and all(type(each) is int and each == value for each in one):
        yield from ((path, holder, key),) if _is_size(path) else ()
    elif depth and id(one) not in seen:
        seen.add(id(one))
        for part, inside_key, inside in _inside(one):
            yield from _pairs(f"{path}{part}", one, inside_key, inside, value, depth - 1, seen)


def _is_size(path: str) -> bool:
    return NAME.search(re.split(r"\W+", path.rstrip("']"))[-1]) is not None


def _inside(one: Any) -> Iterator[tuple[str, Any, Any]]:
    """What settings, data sets and transformations hold, and how each part is written; not the data."""
    if type(one) is dict:
        yield from ((f"[{key!r}]", key, each) for key, each in list(one.items()) if isinstance(key, str))
    elif type(one) is list and len(one) < _LEAST:
        yield from ((f"[{at}]", at, each) for at, each in enumerate(one) if hasattr(each, "__dict__"))
    elif hasattr(one, "__dict__") and not callable(getattr(one, "parameters", None)):
        held = ((key, each) for key, each in list(vars(one).items()) if not key.startswith("_"))
        yield from ((f".{key}", key, each) for key, each in held)
