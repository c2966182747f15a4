"""Python's garbage collector: disabled for a block, and queried for the live objects."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def gc_disabled() -> Iterator[None]:
    """No automatic collection starts inside the block.

    A full one walks all of torch's objects: 0.1 s, with a million objects a second, each time that many were made.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def live_objects(is_wanted: Callable[[type], bool]) -> list[Any]:
    """All objects that the garbage collector knows whose type is wanted; 500,000 objects take about 0.05 s.

    ``wanted`` is given types, once each, not objects: a proxy would answer for its target.
    """
    answers: dict[type, bool] = {}
    found = []
    for one in gc.get_objects():
        kind = type(one)
        answer = answers.get(kind)
        if answer is None:
            answer = answers[kind] = is_wanted(kind)
        if answer:
            found.append(one)
    return found
