"""Loops of the user's code in a dry run: after three like steps the rest of a loop is left out; what follows it runs.

The loops are those that ``loop_code`` made known; each run has its own ``Loops``.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from operator import length_hint
from typing import Any

from oom_magic.language import _
from oom_magic.memory.timeline import SourceLine
from oom_magic.predict.isolation.run_threads import is_of_run
from oom_magic.user_code import cell_name, source_text

LIKE_STEPS = 3  # the first makes the optimizer's state, the second is like all others, the third shows it
LIKE_TURNS = 2  # of a loop around such loops: the second finds what the first one left


MOST_TURNS = 500  # of a ``while`` that decides by values which nobody knows ...
MOST_SECONDS = 30  # ... and of computing


class Loop:
    """One run through a ``for`` or ``while`` statement: its items, until enough of its turns were alike."""

    __slots__ = ("__weakref__", "_begun", "_items", "calls", "line", "num_turns", "steps")

    def __init__(self, items: Iterator[Any], line: tuple[str, int]) -> None:
        self._items = items
        self.line = line
        self.num_turns = 0
        self._begun = time.process_time()
        self.steps: Counter[Hashable] = Counter()  # by optimizer
        self.calls: dict[Hashable, tuple[int, Hashable]] = {}  # of models: in which turn the last was, and how

    def __iter__(self) -> Loop:
        return self

    def __next__(self) -> Any:
        self.num_turns += 1
        return next(self._items)

    def seems_endless(self) -> bool:
        """Whether a ``while`` has waited long for a value that nobody knows."""
        if not isinstance(self._items, repeat):
            return False
        return self.num_turns > MOST_TURNS or time.process_time() - self._begun > MOST_SECONDS

    def leave(self) -> bool:
        """End with the turn that runs; whether it would have gone on, as far as that can be told."""
        goes_on = length_hint(self._items, 1) > 0
        self._items = iter(())
        return goes_on


class Loops:
    """The loops of one dry run that are under way, by thread. ``tell`` is told why each was cut short, and its line."""

    def __init__(self, tell: Callable[[str, SourceLine], None]) -> None:
        self._tell = tell
        self._active = threading.local()

    def enter(self, items: Iterator[Any], line: tuple[str, int]) -> Loop:
        """A loop begins."""
        loop = Loop(items, line)
        self._active.loops = [*self._under_way(), weakref.ref(loop)]
        return loop

    def _under_way(self) -> list[weakref.ref[Loop]]:
        """Outermost first; a loop that was left, however it was, is gone."""
        return [known for known in getattr(self._active, "loops", ()) if known() is not None]

    def _inside_out(self) -> list[Loop]:
        return [loop for known in reversed(self._under_way()) if (loop := known()) is not None]

    def step(self, optimizer: Hashable) -> bool:
        """An optimizer stepped; whether that was in a loop. Loops that have had enough end with this turn."""
        loops = self._inside_out()
        enough = LIKE_STEPS
        for loop in loops:
            loop.steps[optimizer] += 1
            if loop.steps[optimizer] >= enough:
                self._leave(loop)
            if loop.steps[optimizer] > 1:  # else it is one of a step's parts
                enough *= LIKE_TURNS
        return bool(loops)

    def call(self, model: Hashable, state: Hashable) -> None:
        """A model is called that does not train; its loop ends when two turns after the first find the same state."""
        for loop in self._inside_out()[:1]:
            turn, before = loop.calls.get(model, (0, None))
            if turn == loop.num_turns:
                return
            loop.calls[model] = loop.num_turns, state
            if loop.num_turns >= LIKE_STEPS and turn > 1 and before == state:
                self._leave(loop)

    def read(self) -> None:
        """A value that nobody knows was read: a ``while`` that goes on and on for it ends."""
        for loop in self._inside_out()[:1]:
            if loop.seems_endless():
                self._leave(
                    loop, _("this loop goes on until a value that only the GPU knows says otherwise; it was left")
                )

    def _leave(self, loop: Loop, why: str = "") -> None:
        if loop.leave():
            why = why or _(
                "after three like steps (of a loop around such loops: two like turns) the rest of this loop is left "
                "out, and what follows it is followed; what it does only in later turns is not seen "
                "(stop_after_steps=None, --steps all)"
            )
            file, number = loop.line
            self._tell(why, SourceLine(cell_name(file), number, source_text(file, number)))


class LoopsOfRun:
    """What rewritten code calls: the loops of the dry run that lasts, if one does."""

    def __init__(self) -> None:
        self._running: list[Loops] = []
        self.turn: None = None  # what a ``while`` counts its turns with

    @contextmanager
    def followed(self, loops: Loops) -> Iterator[None]:
        """``loops`` are those of the dry run, as long as it lasts."""
        self._running.append(loops)
        try:
            yield
        finally:
            self._running.pop()

    def each(self, items: Iterable[Any], line: int) -> Iterator[Any]:
        """In ``for item in items``, on this line."""
        found = iter(items)
        if not self._running or not is_of_run():
            return found
        return self._running[-1].enter(found, (sys._getframe(1).f_code.co_filename, line))

    def turns(self, line: int) -> Iterator[None]:
        """Of a ``while`` on this line: without end."""
        endless = repeat(None)
        if not self._running or not is_of_run():
            return endless
        return self._running[-1].enter(endless, (sys._getframe(1).f_code.co_filename, line))


LOOPS = LoopsOfRun()
