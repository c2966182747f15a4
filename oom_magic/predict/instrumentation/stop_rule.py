"""When a dry run has followed enough of a training loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from oom_magic.memory.later_turns import with_later_turns
from oom_magic.memory.timeline import MarkKind, Timeline
from oom_magic.predict.instrumentation.loops import LIKE_STEPS, Loops

CALLS_COMPARED = 72  # before the rest of a loop is told from the turns that were followed
STEPS_OF_EACH_OPTIMIZER = 2  # the first makes its state
MOST_STEPS = 20
MOST_SECONDS = 8
MOST_SECONDS_OF_SLOW_STEPS = 10
SECONDS_WITHOUT_STEPS = 5
MOST_SECONDS_WITHOUT_STEPS = 40
_TURNS_COMPARED = 4  # of a loop that is left behind the steps
FOLLOWING_SECONDS = 10  # for what follows three like steps, or as long as those took
StopAfter = int | Literal["alike"] | None


class Finished(BaseException):
    """Raised in the user's code to end a dry run that was followed far enough."""


@dataclass(kw_only=True)
class StopRule:
    """When a dry run has followed enough of a training loop. Seconds are seconds of computing.

    ``after_steps``: the number of optimizer steps that end the run. None: the end of its code. ``"alike"``:
    a loop ends after three steps, and what follows it is followed for ``FOLLOWING_SECONDS``, or as long as the steps
    took.
    ``enough_bytes``: what the run is known to reserve, for example from the message of its failure. Steps go on, within
    the limits above, until so much was reserved, no new sizes of inputs come, and every optimizer has made its state.
    ``leaves_like_steps``: they also end after three that take the same, as what follows may be what takes so much.
    ``after_calls``: the number of calls of models that end a run without optimizer steps.
    ``most_seconds``: the time that ends a run without optimizer steps.
    ``leaves_evaluations``: loops of like calls without gradients end after three. The run sets it to False if one of
    them had not reserved ``enough_bytes`` by then.
    """

    after_steps: StopAfter = "alike"
    enough_bytes: int = 0
    leaves_like_steps: bool = False
    after_calls: int | None = None
    most_seconds: float = math.inf
    leaves_evaluations: bool = True

    def is_met_without_steps(
        self, num_calls: int, seconds: float, has_enough: Callable[[], bool], will_have: Callable[[], bool]
    ) -> bool:
        """Whether a run ends that made ``num_calls`` calls of models and no optimizer step. ``will_have``: whether the
        calls that are still to come can be told from the others, and take enough."""
        if self.after_calls is not None:
            return num_calls >= self.after_calls
        if not self.enough_bytes:
            return seconds > self.most_seconds
        if num_calls and num_calls % CALLS_COMPARED == 0 and will_have():  # not each time: asking takes time
            return True
        return seconds > SECONDS_WITHOUT_STEPS and (seconds > MOST_SECONDS_WITHOUT_STEPS or has_enough())

    def is_met_by_step(
        self, number: int, seconds: float, num_alike: int, has_enough: bool, may_grow: Callable[[], bool]
    ) -> bool:
        """Whether a run that counts its steps ends with step ``number``; the last ``num_alike`` took the same."""
        if not isinstance(self.after_steps, int) or number < self.after_steps:
            return False
        is_late = seconds > MOST_SECONDS
        if not has_enough:
            if self.leaves_like_steps and num_alike >= LIKE_STEPS and not may_grow():
                return True
            return (is_late and number >= MOST_STEPS) or seconds > MOST_SECONDS_OF_SLOW_STEPS
        return not self.enough_bytes or is_late or number >= MOST_STEPS or not may_grow()


class Turns:
    """The turns of the loop in which models are called while nothing is trained: what later ones take is told from
    those that were followed, where a run is left."""

    def __init__(self, loops: Loops) -> None:
        self._loops = loops
        self._begun: list[tuple[_Turn | None, tuple[int, ...]]] = []  # by call: turn of a loop, events by card
        self._calls_left: tuple[int, int] | None = None  # after this number of calls
        self.left: LeftLoop | None = None

    def clear(self) -> None:
        """Begin anew."""
        self._begun.clear()
        self._calls_left = self.left = None

    def begin(self, events: tuple[int, ...]) -> None:
        """A model is about to be called, after so many events by card."""
        loop = self._loops.innermost
        self._begun.append((None if loop is None else _Turn(loop.number, loop.num_turns), events))

    @property
    def have_begun(self) -> bool:
        """Whether a model was called."""
        return bool(self._begun)

    def note_calls_left(self, number: int) -> None:
        """A loop of a library's will call its model so many more times."""
        self._calls_left = len(self._begun), number

    def under_way(self) -> LeftLoop:
        """The loop that would be left at the call that began last."""
        calls = self._begun[:-1]
        turn, events = self._begun[-1]
        loop = self._loops.innermost
        if self._calls_left is None or self._calls_left[0] < len(calls):
            begun = {one.number: its for one, its in reversed(self._begun) if one and turn and one.loop == turn.loop}
            if loop is not None and len(begun) > 1:
                num_left = None if loop.num_left is None else loop.num_left + 1
                return LeftLoop(tuple(reversed(begun.values())), num_left, loop.num_turns - 1, loop.line)
            num_left = None
        else:
            num_left = self._calls_left[1]
        starts = (*(its for one, its in calls if one == turn), events)
        return LeftLoop(starts, num_left, len(starts) - 1)

    def leave(self) -> None:
        """The run is left here."""
        self.left = self.under_way()


class _Turn(NamedTuple):
    loop: int
    number: int


class LeftLoop(NamedTuple):
    """A loop that was left: the events by card at which turns began, the last one where it was left, how many turns are
    to come (None: not known) after how many, and its line; of a library's loop none."""

    starts: tuple[tuple[int, ...], ...]
    num_left: int | None
    num_turns: int
    line: tuple[str, int] | None = None

    def continued(self, timeline: Timeline, card: int) -> Timeline | None:
        """A card's timeline with the turns to come; None where what they take cannot be told."""
        return with_later_turns(timeline, [events[card] for events in self.starts], self.num_left)

    def is_rising(self, timeline: Timeline, card: int) -> bool:
        """Whether more was in use on a card at each of the last turns than at the one before."""
        events = [one[card] for one in self.starts[-_TURNS_COMPARED:]]
        taken = [int(timeline.requested_bytes[timeline.live_at(max(at - 1, 0))].sum()) for at in events]
        return len(taken) == _TURNS_COMPARED and all(before < after for before, after in pairwise(taken))

    def kept(self, continued: Timeline) -> tuple[int, int]:
        """How many turns there are in all, and the bytes that each one to come leaves on the card of ``continued``."""
        if not self.num_left or not continued.was_continued:
            return self.num_turns, 0
        at = continued.positions(MarkKind.CONTINUED)[-1]
        before, after = (
            int(continued.requested_bytes[continued.live_at(position)].sum())
            for position in (at - 1, continued.num_events - 1)
        )
        return self.num_turns + self.num_left, max(after - before, 0) // self.num_left
