"""Which calls belong to a dry run: those of its thread and of the threads that it starts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from oom_magic.predict.isolation.patching import Patches


class _Here(threading.local):
    is_run = False  # this thread belongs to the run
    is_own = False  # what is called now is our own doing, not the run's


class Scope:
    """Tells the run's calls from those of other threads, and from our own that serve them."""

    def __init__(self) -> None:
        self._here = _Here()

    def applies(self) -> bool:
        """Whether the running code is the dry run's."""
        return self._here.is_run and not self._here.is_own

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread is the run's meanwhile."""
        self._here.is_run = True
        try:
            yield
        finally:
            self._here.is_run = False

    def patches(self) -> Patches:
        """Threads that the run's threads start are the run's."""
        scope, start = self, threading.Thread.start

        def started(thread: threading.Thread) -> None:
            if scope._here.is_run:
                run = thread.run

                def run_inside() -> Any:
                    scope._here.is_run = True
                    return run()

                thread.run = run_inside  # type: ignore[method-assign]
            start(thread)

        return [(threading.Thread, {"start": started})]

    def join(self) -> None:
        """The calling thread is the run's."""
        self._here.is_run = True

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What is called inside is our own doing: it reaches the disk and passes the net."""
        before, self._here.is_own = self._here.is_own, True
        try:
            yield
        finally:
            self._here.is_own = before

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What is called inside is the run's again: a callback that the user gave."""
        before, self._here.is_own = self._here.is_own, False
        try:
            yield
        finally:
            self._here.is_own = before
