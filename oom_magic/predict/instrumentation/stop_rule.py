"""When a dry run has followed enough of a training loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

STEPS_OF_EACH_OPTIMIZER = 2  # the first makes its state
MOST_STEPS = 20
MOST_SECONDS = 8
MOST_SECONDS_OF_SLOW_STEPS = 10
SECONDS_WITHOUT_STEPS = 5
MOST_SECONDS_WITHOUT_STEPS = 40
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
    ``after_calls``: the number of calls of models that end a run without optimizer steps.
    ``most_seconds``: the time that ends a run without optimizer steps.
    ``leaves_evaluations``: loops of like calls without gradients end after three. The run sets it to False if one of
    them had not reserved ``enough_bytes`` by then.
    """

    after_steps: StopAfter = "alike"
    enough_bytes: int = 0
    after_calls: int | None = None
    most_seconds: float = math.inf
    leaves_evaluations: bool = True

    def is_met_without_steps(self, num_calls: int, seconds: float, has_enough: Callable[[], bool]) -> bool:
        """Whether a run ends that made ``num_calls`` calls of models and no optimizer step."""
        if self.after_calls is not None:
            return num_calls >= self.after_calls
        if not self.enough_bytes or seconds < SECONDS_WITHOUT_STEPS:
            return seconds > self.most_seconds
        return seconds > MOST_SECONDS_WITHOUT_STEPS or has_enough()

    def is_met_by_step(self, number: int, seconds: float, has_enough: bool, may_grow: Callable[[], bool]) -> bool:
        """Whether a run that counts its steps ends with step ``number``."""
        if not isinstance(self.after_steps, int) or number < self.after_steps:
            return False
        is_late = seconds > MOST_SECONDS
        if not has_enough:
            return (is_late and number >= MOST_STEPS) or seconds > MOST_SECONDS_OF_SLOW_STEPS
        return not self.enough_bytes or is_late or number >= MOST_STEPS or not may_grow()
