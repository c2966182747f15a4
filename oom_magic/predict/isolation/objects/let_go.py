"""Containers from before the run that its code lets go of: what it has put into them is freed then, as in a real run.

``history = []`` in place of a list that the run has filled frees that list's tensors. The snapshot keeps the list, to
give it back afterwards: so it gets back at once what it held before.
"""

from __future__ import annotations

import sys
from typing import Any

from oom_magic.predict.isolation.snapshot import Snapshot, by_identity, contents_of, identities

# Allocations between two looks for what has changed: few at first, then so many that looks take a small part of a run.
_FIRST_INTERVAL, _LEAST_INTERVAL, _ITEMS_PER_ALLOCATION = 32, 256, 8


def _num_references(watched: list[Any]) -> int:
    return sys.getrefcount(watched[0])


_OWN_REFERENCES = _num_references([[]])  # the list's and the call's


class ContainersLetGo:
    """Containers in a snapshot whose contents the run has changed, watched for the last reference of its code."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self.watched: list[list[Any]] = []  # a container, and its fewest references since it is watched
        self.replaced: list[Any] = []  # what they held before, and do no longer
        self._known: set[int] = set()
        self._most = max(_LEAST_INTERVAL, snapshot.num_items // _ITEMS_PER_ALLOCATION)
        self._left = self._interval = _FIRST_INTERVAL

    def release(self) -> None:
        """Give back their contents to those that no object or name of the run has; called before each allocation."""
        self._left -= 1
        if self._left < 0:
            self._left = self._interval = min(4 * self._interval, self._most)
            self._watch()
        for watched in self.watched:
            if _num_references(watched) < watched[1]:
                self._look(watched)

    def _watch(self) -> None:
        known = set(identities(self.replaced))
        for container, before in self._snapshot.changed():
            if id(container) not in self._known:
                self._known.add(id(container))
                self.watched.append([container, sys.maxsize])
            held, now = (by_identity(list(contents_of(one))) for one in (before, container))
            self.replaced += (one for number, one in held.items() if number not in known and number not in now)

    def _look(self, watched: list[Any]) -> None:
        watched[1] = _num_references(watched)
        if watched[1] - _OWN_REFERENCES <= self._snapshot.num_references(watched[0]):
            self._snapshot.restore_one(watched[0])
