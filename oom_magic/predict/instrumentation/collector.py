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
# Count young objects at every fourth operator, or less often where there are many, or where CPython's own counter says
# that few were made; it leaves out what comes from free lists.
_LEAST_INTERVAL, _YOUNG_PER_OPERATOR, _LOOKS_LEFT_OUT = 4, 64, 8


class Collector:
    """Replaces the collector, which is disabled in a dry run, and starts its collections.

    ``num_own`` returns the number of containers that the dry run itself holds. ``on_collected`` is called after each
    collection with the number of them that it freed.
    """

    def __init__(self, num_own: Callable[[], int], on_collected: Callable[[int], None]) -> None:
        self._num_own = num_own
        self._on_collected = on_collected
        self._own_before = 0  # at the last collection
        self._num_operators = self._interval = 0  # operators since the last look, and how many until the next one
        self._count_due = 0  # of CPython, below which there is hardly a reason to look
        self._num_young = self._num_middle = 0  # collections since the last one of the next generation
        self._num_pending = self._num_old = 0
        self._is_on = True

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replace the collector in the block. Earlier objects are old, and visited only if they hold fake tensors."""
        if self._num_own():
            with users_thawed():
                gc.collect()
                yield from self._active()
        else:
            with heap_set_aside(collects=False):
                yield from self._active()

    def _active(self) -> Iterator[None]:
        self._own_before = self._num_own()
        self._num_young = self._num_middle = self._num_pending = 0
        self._num_old = num_live_objects()
        self._is_on = gc.isenabled()
        with gc_disabled(), patched(gc, self._switches()):
            yield

    def begin(self) -> None:
        """To be called when the user's code begins: earlier objects count as old."""
        if are_set_aside():
            _freeze()
            self._own_before = self._num_own()
        else:
            self._collect_now(1)

    def collect_if_due(self) -> None:
        """Collect if CPython would: the oldest generation whose threshold is passed."""
        self._num_operators += 1
        if self._num_operators < self._interval or (
            gc.get_count()[0] < self._count_due and self._num_operators < _LOOKS_LEFT_OUT * self._interval
        ):
            return
        young, middle, old = gc.get_threshold()
        num_made = self._num_made()
        self._count_due = gc.get_count()[0] + (young - num_made) // 4
        if not self._is_on or not young or num_made <= young:
            return
        self._count_due = young // 4
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
        """Containers made and not freed since the last collection (CPython's own counter depends on free lists)."""
        num_young = count_objects(0)
        self._num_operators, self._interval = 0, max(_LEAST_INTERVAL, num_young // _YOUNG_PER_OPERATOR)
        return num_young - (self._num_own() - self._own_before)

    def _collect(self, generation: int) -> int:
        own = self._num_own()
        found = _collect(generation)
        self._own_before = self._num_own()
        self._on_collected(own - self._own_before)
        return found

    def _collect_now(self, generation: int = 2) -> int:
        """``gc.collect``, which the user's code calls."""
        found = _collect(generation)
        self._own_before = self._num_own()
        return found

    def _switches(self) -> dict[str, Callable[..., Any]]:
        """Replacements of ``gc.enable`` and other functions that the user's code may call."""

        def switch(is_on: bool) -> None:
            self._is_on = is_on

        return {
            "enable": lambda: switch(True),
            "disable": lambda: switch(False),
            "isenabled": lambda: self._is_on,
            "collect": self._collect_now,
            "freeze": lambda: None,
            "unfreeze": lambda: None,
        }
