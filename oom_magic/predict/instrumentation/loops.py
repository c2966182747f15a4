"""Loops of the user's code in a dry run: after three like steps the rest of a loop is left out; what follows it runs.

Of the rest, only those iterations are followed in which a condition on the loop's counter, such as ``if step % 100 ==
0``, has an outcome that was not seen yet. The loops are those that ``loop_code`` made known; each run has its own
``Loops``.
"""

from __future__ import annotations

import ast
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import CO_OPTIMIZED
from itertools import count, islice, repeat, takewhile
from operator import length_hint
from types import CodeType, FrameType
from typing import Any, NamedTuple, cast

from oom_magic.computing_time import computing_seconds
from oom_magic.language import _
from oom_magic.memory.timeline import SourceLine
from oom_magic.predict.instrumentation.loop_state import count_kept, shapes_of
from oom_magic.predict.isolation.run_threads import is_of_run
from oom_magic.units import format_bytes
from oom_magic.user_code import cell_name, is_users_file, source_text

LIKE_STEPS = 3  # the first makes the optimizer's state, the second is like all others, and the third confirms it
LIKE_TURNS = 2  # of a loop around such loops: the second starts from what the first one left
LIKENESS = 100  # the share of a step's peak by which the next may differ
UNLIKE_SECONDS = 5  # of computing for steps that differ, or as long as the loop took so far
UNKNOWN_TURNS = 100  # of a loop that does not say how many are left

MOST_TURNS = 500  # iterations of a ``while`` loop whose condition depends on unknown values ...
MOST_SECONDS = 30  # ... and of computing
MOST_SECONDS_OF_LOOKING = 5  # of computing, at the batches that are left of an evaluation
_MOST_LOOKED_AT = 1_000_000
_FEW = 20
_SIMPLE = (
    ast.Name, ast.Load, ast.Constant, ast.Attribute, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop, ast.BoolOp,
    ast.boolop, ast.Compare, ast.cmpop,
)  # fmt: skip


Outcomes = tuple[bool | None, ...]


class Usage(NamedTuple):
    """Bytes in use after an optimizer step, their peak since the last step, and the sum of requests since then."""

    allocated_bytes: int
    peak_bytes: int
    requested_bytes: int


class Loop:
    """One execution of a ``for`` or ``while`` statement: its items, until enough iterations were alike."""

    __slots__ = (
        "__weakref__",
        "_begun",
        "_due",
        "_is_ending",
        "_is_whole",
        "_items",
        "_iterated",
        "_position",
        "_seen",
        "_shapes",
        "_usages",
        "calls",
        "conditions",
        "counter",
        "grown_bytes",
        "is_left",
        "kept",
        "line",
        "num_turns",
        "number",
        "steps",
    )  # fmt: skip

    def __init__(self, iterated: Iterable[Any], line: tuple[str, int], seen: set[Outcomes], number: int) -> None:
        self.number = number  # of the run's loops
        self._iterated = iterated
        self._items = iter(iterated)
        self.line = line
        self.counter = ""
        self.conditions: tuple[Condition, ...] = ()
        self._seen = seen
        self.num_turns = 0
        self.is_left = self._is_ending = self._is_whole = False
        self._shapes: set[Hashable] = set()  # of its items so far
        self.kept = 0  # in containers of the code around it
        self.grown_bytes = 0
        self._begun = computing_seconds()
        self._due = 0.0
        self._position = 0
        self._usages: dict[int, Usage] = {}  # by step of the last turn
        self.steps: Counter[Hashable] = Counter()  # by optimizer
        self.calls: dict[Hashable, tuple[int, Hashable]] = {}  # of models: the last call's turn, and its mode

    def __iter__(self) -> Loop:
        return self

    def __next__(self) -> Any:
        """The next item; of a loop that is left, of the turns that are still to be seen. Raises StopIteration."""
        if self.is_left and not self._is_ending:
            self._is_ending = True
            if self._is_whole and any(self._shapes):
                self._items = self._of_new_shapes(self._items)
            else:
                self._items = turns_to_see(
                    self._iterated, self.num_turns, self.counter, self.conditions, self._seen, sys._getframe(1)
                )
        self.num_turns += 1
        self._position = 0
        item = next(self._items)
        if not self.is_left:
            self.kept = count_kept(sys._getframe(1))
            self._shapes.add(shapes_of(item))
        return item

    def _of_new_shapes(self, items: Iterator[Any]) -> Iterator[Any]:
        """The remaining items whose tensors have shapes not seen before."""
        end = computing_seconds() + MOST_SECONDS_OF_LOOKING
        for item in takewhile(lambda _: computing_seconds() < end, items):
            shapes = shapes_of(item)
            if shapes not in self._shapes:
                self._shapes.add(shapes)
                yield item

    def is_like_before(self, usage: Usage) -> bool:
        """Whether an optimizer step uses as much memory as in the last iteration, and leaves no more allocated."""
        self._position += 1
        before = self._usages.get(self._position)
        self._usages[self._position] = usage
        if before is None:
            return False
        self.grown_bytes = usage.allocated_bytes - before.allocated_bytes
        limit = usage.peak_bytes // LIKENESS
        limit_each = limit // max(length_hint(self._items, UNKNOWN_TURNS), 1)
        return (
            abs(usage.peak_bytes - before.peak_bytes) <= limit
            and abs(usage.requested_bytes - before.requested_bytes) <= limit_each
            and -limit <= self.grown_bytes <= limit_each
        )

    @property
    def num_left(self) -> int | None:
        """How many turns are still to begin; None where that is not known."""
        return _num_left(self._items, self.num_turns)

    def is_due(self) -> bool:
        """Whether the steps have differed for so long that the loop is to be ended."""
        now = computing_seconds()
        self._due = self._due or now + max(UNLIKE_SECONDS, now - self._begun)
        return now > self._due

    def seems_endless(self) -> bool:
        """Whether a ``while`` loop has waited for an unknown value for too long."""
        if not isinstance(self._items, repeat):
            return False
        return self.num_turns > MOST_TURNS or computing_seconds() - self._begun > MOST_SECONDS

    def leave(self, is_whole: bool = False) -> bool:
        """End with the turn that runs; whether it would have gone on, as far as that can be told.

        ``is_whole``: it is an evaluation, of which later items are still looked at.
        """
        self.is_left, self._is_whole = True, is_whole
        return length_hint(self._items, 1) > 0


class Loops:
    """The loops of one dry run that are under way, by thread. ``tell`` is told why each was cut short, its line, and
    whether what was left out may take more.

    ``leaves_steps``: also loops that train are cut short.
    """

    def __init__(self, tell: Callable[[str, SourceLine, bool], None]) -> None:
        self._tell = tell
        self._numbers = count()
        self.leaves_steps = True
        self._active = threading.local()
        self._outcomes: dict[tuple[str, int], set[bool]] = {}  # of conditions in loops, by file and line
        self._seen: dict[tuple[str, int], set[Outcomes]] = {}  # of conditions on a loop's counter together, by its line
        self._shortened: dict[tuple[str, int], None] = {}  # conditions of loops that were left

    def enter(self, iterated: Iterable[Any], line: tuple[str, int]) -> Loop:
        """A loop begins."""
        loop = Loop(iterated, line, self._seen.setdefault(line, set()), next(self._numbers))
        self._active.loops = [*self._under_way(), weakref.ref(loop)]
        return loop

    def _under_way(self) -> list[weakref.ref[Loop]]:
        """The running loops, outermost first; loops that ended in any way are dropped."""
        return [known for known in getattr(self._active, "loops", ()) if known() is not None]

    def _inside_out(self) -> list[Loop]:
        return [loop for known in reversed(self._under_way()) if (loop := known()) is not None]

    @property
    def innermost(self) -> Loop | None:
        """The innermost loop that is under way."""
        return next(iter(self._inside_out()), None)

    def decide(self, place: tuple[str, int], outcome: bool) -> None:
        """Note the outcome of a condition in a loop."""
        self._outcomes.setdefault(place, set()).add(outcome)

    def end(self) -> None:
        """To be called at the end of the run: report conditions of shortened loops that were never true."""
        for file, number in self._shortened:
            if is_users_file(file) and self._outcomes.get((file, number)) == {False}:
                self._tell(
                    _(
                        "this condition was true in none of the iterations of its loop that were followed; the"
                        " code it guards is not seen (stop_after_steps=None or --steps all follows it)"
                    ),
                    SourceLine(cell_name(file), number, source_text(file, number)),
                    False,
                )

    def step(self, optimizer: Hashable, usage: Usage) -> bool:
        """Note an optimizer step; ends loops that were followed enough. Returns whether it was in a loop."""
        loops = self._inside_out()
        enough = LIKE_STEPS
        for loop in loops:
            loop.steps[optimizer] += 1
            is_like = loop.is_like_before(usage)
            if loop.steps[optimizer] >= enough:
                if is_like:
                    self._leave(loop)
                elif loop.is_due():
                    self._leave(loop, _about_unlike_steps(loop), is_part=True)
            if loop.steps[optimizer] > 1:  # else it is one of a step's parts
                enough *= LIKE_TURNS
        return bool(loops)

    @property
    def ends_with_turn(self) -> bool:
        """Whether this is the last iteration of the innermost loop before its rest is left out."""
        return any(loop.is_left for loop in self._inside_out()[:1])

    def call(self, model: Hashable, state: Hashable, is_enough: bool = True) -> bool:
        """A model is called that does not train; its loop ends when two turns after the first find the same state.

        Whether that is so; unless what was taken so far ``is_enough``, the loop goes on.
        """
        for loop in self._inside_out()[:1]:
            turn, before = loop.calls.get(model, (0, None))
            if turn == loop.num_turns:
                return False
            loop.calls[model] = loop.num_turns, (state, loop.kept)
            is_like = loop.num_turns >= LIKE_STEPS and turn > 1 and before == (state, loop.kept)
            if is_like and is_enough and not any(one.keeps for one in loop.conditions):
                self._leave(loop, _about_evaluation(), is_whole=True)
            return is_like
        return False

    def read(self) -> None:
        """Note that an unknown value was read: a ``while`` loop that waits for it forever is ended."""
        for loop in self._inside_out()[:1]:
            if loop.seems_endless():
                self._leave(
                    loop, _("this loop runs until a value that only the GPU knows ends it; the dry run left it early")
                )

    def _leave(self, loop: Loop, why: str = "", is_whole: bool = False, is_part: bool = False) -> None:
        if loop.is_left:
            return
        file = loop.line[0]
        self._shortened.update(dict.fromkeys((file, one.line) for one in loop.conditions if one.matters))
        if loop.leave(is_whole):
            why = why or _(
                "after three similar steps (two similar iterations for a loop around such loops), the rest of"
                " this loop is skipped and the code after it is followed; what only later iterations do is not"
                " seen (stop_after_steps=None or --steps all follows it)"
            )
            number = loop.line[1]
            self._tell(why, SourceLine(cell_name(file), number, source_text(file, number)), is_part)


def _about_evaluation() -> str:
    return _(
        "after three similar iterations, the rest of this loop, which neither trains nor keeps anything, is"
        " skipped except for batches of other shapes (stop_after_steps=None or --steps all follows it)"
    )


def _about_unlike_steps(loop: Loop) -> str:
    if loop.grown_bytes > 0:
        return _(
            "each iteration of this loop keeps more memory than the one before, the last {grown_bytes} more:"
            " {num_turns} iterations were followed and the rest skipped (stop_after_steps=None or --steps all"
            " follows them)",
            grown_bytes=format_bytes(loop.grown_bytes),
            num_turns=loop.num_turns,
        )
    return _(
        "the steps of this loop differ: {num_turns} iterations were followed and the rest skipped"
        " (stop_after_steps=None or --steps all follows them)",
        num_turns=loop.num_turns,
    )


class LoopsOfRun:
    """The interface for rewritten code: the loops of the current dry run, if there is one."""

    def __init__(self) -> None:
        self._running: list[Loops] = []
        self.turn: None = None  # what a ``while`` counts its turns with

    @property
    def leave_out(self) -> bool:
        """Whether rests of loops are left out: in a dry run without a given number of steps."""
        return self.are_known and self._running[-1].leaves_steps

    @property
    def are_known(self) -> bool:
        """Whether a dry run is running that shortens loops."""
        return bool(self._running)

    @property
    def ends_with_turn(self) -> bool:
        """Whether this is the last iteration of the innermost loop that is followed."""
        return bool(self._running) and is_of_run() and self._running[-1].ends_with_turn

    @contextmanager
    def followed(self, loops: Loops) -> Iterator[None]:
        """Use ``loops`` in the block, for one dry run."""
        self._running.append(loops)
        try:
            yield
        finally:
            self._running.pop()
            loops.end()

    def each(
        self, items: Iterable[Any], line: int, counter: str, conditions: tuple[tuple[int, str, bool, bool], ...]
    ) -> Iterator[Any]:
        """Called for ``for item in items`` on this line; ``counter`` is the name of its counter, if it has one."""
        if not self._running or not is_of_run():
            return iter(items)
        loop = self._running[-1].enter(items, (sys._getframe(1).f_code.co_filename, line))
        loop.counter, loop.conditions = counter, tuple(Condition(*one) for one in conditions)
        return loop

    def decided(self, value: Any, line: int) -> bool:
        """Called for ``if value`` in a loop, on this line."""
        outcome = bool(value)
        if self._running and is_of_run():
            self._running[-1].decide((sys._getframe(1).f_code.co_filename, line), outcome)
        return outcome

    def turns(self, line: int, conditions: tuple[tuple[int, str, bool, bool], ...]) -> Iterator[None]:
        """Called for a ``while`` on this line: an endless iterator."""
        endless = repeat(None)
        if not self._running or not is_of_run():
            return endless
        loop = self._running[-1].enter(endless, (sys._getframe(1).f_code.co_filename, line))
        loop.conditions = tuple(Condition(*one) for one in conditions)
        return loop


LOOPS = LoopsOfRun()


class Condition(NamedTuple):
    """An ``if`` in a loop. ``test`` is its source where other turns can be asked; ``matters``: it may take memory;
    ``keeps``: it may keep what other turns do not."""

    line: int
    test: str
    matters: bool
    keeps: bool


def can_be_asked(test: ast.expr, counter: str) -> bool:
    """Whether a condition depends on the counter of its loop and can be evaluated without side effects."""
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
    """The outcomes of conditions on a counter, evaluated with these names."""

    def __init__(
        self, tests: list[CodeType], counter: str, global_names: dict[str, Any], local_names: Mapping[str, Any]
    ) -> None:
        self._tests = tests
        self._counter = counter
        self._globals = global_names
        self._names = dict(local_names)

    def of(self, count: Any) -> Outcomes:
        """True or False for each; None if one cannot be evaluated, because a name does not exist yet."""
        self._names[self._counter] = count
        return tuple(map(self._outcome, self._tests))

    def _outcome(self, test: CodeType) -> bool | None:
        with suppress(Exception):
            return bool(eval(test, self._globals, self._names))
        return None

    def are_new(self, count: Any, seen: set[Outcomes]) -> bool:
        """Whether this combination of outcomes is new; it is noted."""
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
        later = range(count, count + min(_num_left(inner, num_turns) or 0, _MOST_LOOKED_AT))
        return range(count - num_turns, count), later, lambda number: (number, next(inner))
    return (), (), lambda value: value


def _num_left(iterator: Iterator[Any], num_turns: int) -> int | None:
    """How many items an iterator has left; None where it does not say. A bar is a generator, of a method of its own."""
    left: int | None
    if isinstance(iterator, (enumerate, zip)):
        inner = iterator.__reduce__()[1]
        parts = cast("tuple[Iterator[Any], ...]", inner[:1] if isinstance(iterator, enumerate) else inner)
        known = [left for one in parts if (left := _num_left(one, num_turns)) is not None]
        return min(known, default=None)
    whole = getattr(getattr(iterator, "gi_frame", None), "f_locals", {}).get("self", iterator)
    with suppress(TypeError):  # a data loader's iterator has the length of all its batches, too
        return max(len(whole) - num_turns, 0)
    left = length_hint(iterator, -1)
    return None if left < 0 else left
