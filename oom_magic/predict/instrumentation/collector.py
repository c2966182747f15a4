"""Python's garbage collector during a dry run: it runs when CPython's would, but never inside the dry run's own code.

A collection frees tensors that are held only by reference cycles, so its time decides what is allocated. CPython starts
one when the containers created exceed those freed by a threshold (Modules/gcmodule.c, ``gc_collect_generations``).
Containers of the dry run itself do not count here.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from oom_magic.garbage_collector import gc_disabled
from oom_magic.predict.isolation.live_objects import (
    are_set_aside,
    count_objects,
    heap_set_aside,
    num_live_objects,
    users_thawed,
)
from oom_magic.predict.isolation.patching import patched

_collect, _freeze = gc.collect, gc.freeze
_SELDOM, _PER_CALL = 4, 64  # count young objects at every fourth operator, or less often where there are many


class Collector:
    """Stands in for the collector, which is off while a dry run lasts.

    ``num_own`` says how many containers the dry run itself holds. ``has_collected``
    is told after each collection how many of them it freed.
    """

    def __init__(self, num_own: Callable[[], int], has_collected: Callable[[int], None]) -> None:
        self._num_own = num_own
        self._has_collected = has_collected
        self._own_before = 0  # at the last collection
        self._num_passed = self._next_look = 0  # operators since the last look, and how many until the next one
        self._num_young = self._num_middle = 0  # collections since the last one of the next generation
        self._num_pending = self._num_old = 0
        self._is_on = True

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """While a dry run lasts. Earlier objects count as old and are only examined if they hold fake tensors."""
        if self._num_own():
            with users_thawed():
                gc.collect()
                yield from self._standing_in()
        else:
            with heap_set_aside(collects=False):
                yield from self._standing_in()

    def _standing_in(self) -> Iterator[None]:
        self._own_before = self._num_own()
        self._num_young = self._num_middle = self._num_pending = 0
        self._num_old = num_live_objects()
        self._is_on = gc.isenabled()
        with gc_disabled(), patched(gc, self._switches()):
            yield

    def begin(self) -> None:
        """The user's code begins: earlier objects count as old."""
        if are_set_aside():
            _freeze()
            self._own_before = self._num_own()
        else:
            self._collect_now(1)

    def collect_if_due(self) -> None:
        """Collect if CPython would: the oldest generation whose threshold is passed."""
        self._num_passed += 1
        if self._num_passed < self._next_look:
            return
        young, middle, old = gc.get_threshold()
        if not self._is_on or not young or self._num_made() <= young:
            return
        if self._num_middle > old and self._num_pending > self._num_old // 4:
            self._collect(2)
            self._num_young = self._num_middle = self._num_pending = 0
            self._num_old = num_live_objects()
        elif self._num_young > middle:
            self._num_pending += count_objects(0) + count_objects(1) - self._collect(1)
            self._num_young = 0
            self._num_middle += 1
        else:
            self._collect(0)
            self._num_young += 1

    def _num_made(self) -> int:
        """Containers made and not freed since the last collection; CPython's counter depends on its free lists."""
        num_young = count_objects(0)
        self._num_passed, self._next_look = 0, max(_SELDOM, num_young // _PER_CALL)
        return num_young - (self._num_own() - self._own_before)

    def _collect(self, generation: int) -> int:
        own = self._num_own()
        found = _collect(generation)
        self._own_before = self._num_own()
        self._has_collected(own - self._own_before)
        return found

    def _collect_now(self, generation: int = 2) -> int:
        """``gc.collect``, which the user's code calls."""
        found = _collect(generation)
        self._own_before = self._num_own()
        return found

    def _switches(self) -> dict[str, Callable[..., Any]]:
        """``gc.enable`` and its like, for code that turns the collector on and off."""

        def turn(is_on: bool) -> None:
            self._is_on = is_on

        return {
            "enable": lambda: turn(True),
            "disable": lambda: turn(False),
            "isenabled": lambda: self._is_on,
            "collect": self._collect_now,
            "freeze": lambda: None,
            "unfreeze": lambda: None,
        }
