"""Python's garbage collector: disabled within a block, and asked for the objects that are alive."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def gc_disabled() -> Iterator[None]:
    """No automatic collection starts inside the block.

    A full collection visits every object of torch: 0.1 s, and a second where there are a million objects more.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def live_objects(is_wanted: Callable[[type], bool]) -> list[Any]:
    """All objects tracked by the garbage collector whose type is wanted; 500,000 objects take about 0.05 s.

    ``is_wanted`` is called once per type, not with objects: a proxy would answer for its target.
    """
    objects = gc.get_objects()
    wanted = {kind for kind in set(map(type, objects)) if is_wanted(kind)}
    return [one for one in objects if type(one) in wanted]
