"""Which turns of a loop that is left out do what none of its first turns did: conditions on its counter say so."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from inspect import CO_OPTIMIZED
from itertools import islice
from operator import length_hint
from types import CodeType, FrameType
from typing import Any, NamedTuple, cast

_MOST_LOOKED_AT = 1_000_000
_FEW = 20
_SIMPLE = (
    ast.Name, ast.Load, ast.Constant, ast.Attribute, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop, ast.BoolOp,
    ast.boolop, ast.Compare, ast.cmpop,
)  # fmt: skip


Outcomes = tuple[bool | None, ...]


class Condition(NamedTuple):
    """An ``if`` in a loop. ``test`` is its source where other turns can be asked; ``matters``: it may take memory."""

    line: int
    test: str
    matters: bool


def can_be_asked(test: ast.expr, counter: str) -> bool:
    """Whether a condition depends on the counter of its loop, and looking at it changes nothing."""
    nodes = list(ast.walk(test))
    is_simple = all(
        isinstance(node, _SIMPLE) or (isinstance(node, ast.Call) and ast.unparse(node.func) == "len") for node in nodes
    )
    return is_simple and any(isinstance(node, ast.Name) and node.id == counter for node in nodes)


def turns_to_see(
    iterated: Any,
    num_turns: int,
    counter: str,
    conditions: tuple[Condition, ...],
    seen: set[Outcomes],
    frame: FrameType,
) -> Iterator[Any]:
    """Of the items that a loop has left those in whose turns its conditions come out together as they never did.

    Of a short list of numbers or names those that did not come yet. What comes out so is added to ``seen``.
    """
    if isinstance(iterated, (list, tuple)) and len(iterated) <= _FEW:  # of sizes or names: each differs from the others
        values = [value for value in iterated if isinstance(value, (int, float, str))]
        if len(values) == len(iterated):
            return iter([value for value in dict.fromkeys(values) if value not in values[:num_turns]])
    tests = [compile(one.test, "<condition>", "eval") for one in conditions if one.test]
    if not tests:
        return iter(())
    before, later, item = _counted(iterated, num_turns)
    names = frame.f_locals
    try:
        outcomes = _Outcomes(tests, counter, frame.f_globals, names)
        seen.update(map(outcomes.of, before))
        chosen = list(islice((count for count in later if outcomes.are_new(count, seen)), _FEW))
        del outcomes
    finally:
        if frame.f_code.co_flags & CO_OPTIMIZED and sys.version_info < (3, 13):
            names.clear()  # a copy of a function's variables, which would keep tensors alive
    return map(item, chosen)


class _Outcomes:
    """What conditions on a counter come out as, in a turn with these names."""

    def __init__(
        self, tests: list[CodeType], counter: str, global_names: dict[str, Any], local_names: Mapping[str, Any]
    ) -> None:
        self._tests = tests
        self._counter = counter
        self._globals = global_names
        self._names = dict(local_names)

    def of(self, count: Any) -> Outcomes:
        """True or False for each; None where one cannot be asked, for a name that is not there yet."""
        self._names[self._counter] = count
        return tuple(map(self._outcome, self._tests))

    def _outcome(self, test: CodeType) -> bool | None:
        with suppress(Exception):
            return bool(eval(test, self._globals, self._names))
        return None

    def are_new(self, count: Any, seen: set[Outcomes]) -> bool:
        """Whether they were never so together; from now on they were."""
        outcomes, num_before = self.of(count), len(seen)
        seen.add(outcomes)
        return len(seen) > num_before


def _counted(iterated: Any, num_turns: int) -> tuple[Iterable[Any], Iterable[Any], Callable[[Any], Any]]:
    """What the counter was, what it will be in the turns that are left, and what gives a turn's item for it."""
    with suppress(AttributeError):
        if type(iterated).__module__.startswith("tqdm"):
            iterated = iterated.iterable
    if isinstance(iterated, (range, list, tuple)):
        return iterated[:num_turns], islice(iterated, num_turns, _MOST_LOOKED_AT), lambda value: value
    if isinstance(iterated, enumerate):
        inner, count = cast("tuple[Iterator[Any], int]", iterated.__reduce__()[1])
        later = range(count, count + min(_num_left(inner, num_turns), _MOST_LOOKED_AT))
        return range(count - num_turns, count), later, lambda number: (number, next(inner))
    return (), (), lambda value: value


def _num_left(iterator: Iterator[Any], num_turns: int) -> int:
    """How many items an iterator has left; 0 where it does not say. A bar is a generator, of a method of its own."""
    owner = getattr(getattr(iterator, "gi_frame", None), "f_locals", {}).get("self")
    with suppress(TypeError):
        if owner is not None:
            return len(owner) - num_turns
    return length_hint(iterator, 0)
