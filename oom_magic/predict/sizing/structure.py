"""What stays the same when only sizes change: which allocations and frees a run makes, where, why and in what order."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oom_magic.language import _
from oom_magic.memory.timeline import IntArray, Timeline
from oom_magic.predict.instrumentation.recorder import SizeExpression, SizeFunction

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of a function, which is another in each process
_COLUMNS = ("order", "category", "phase", "step", "operator", "line", "module", "stream")
_TABLES = ("operators", "lines", "modules", "marks")


@dataclass(frozen=True, eq=False)
class Structure:
    """A timeline whose sizes do not count. Two are the same when their keys are.

    Allocation ``a`` has the size that ``size_functions[a]`` makes of ``counts[a]`` numbers; without one the number
    is the size. What may be empty is an allocation too.
    """

    timeline: Timeline
    size_functions: Mapping[int, SizeFunction]
    counts: IntArray
    key: bytes

    @classmethod
    def of(cls, timeline: Timeline, expressions: Mapping[int, SizeExpression]) -> Structure:
        """The structure of a run's timeline, some of whose sizes are computed by functions."""
        counts = np.ones(timeline.num_allocations, dtype=np.int64)
        for allocation, expression in expressions.items():
            counts[allocation] = len(expression.numbers)
        size_functions = {
            allocation: expression.size_function for allocation, expression in sorted(expressions.items())
        }
        return cls.made(timeline, size_functions, counts)

    @classmethod
    def made(cls, timeline: Timeline, size_functions: Mapping[int, SizeFunction], counts: IntArray) -> Structure:
        """The structure of a timeline with these functions, in the order of allocations, and counts of numbers."""
        timeline = replace(timeline, order=_canonical(timeline))
        digest = hashlib.sha256()
        for name in _COLUMNS:
            column = getattr(timeline, name)
            digest.update(f"{name} {len(column)} ".encode())
            digest.update(column.tobytes())
        for name in _TABLES:
            digest.update(repr(getattr(timeline, name)).encode())
        digest.update(_ADDRESS.sub("", repr(size_functions)).encode())
        digest.update(counts.tobytes())
        return cls(timeline, size_functions, counts, digest.digest())

    def with_sizes(self, requested_bytes: IntArray) -> Timeline:
        """The timeline of a run of this structure with these sizes (0: no allocation)."""
        return replace(self.timeline, requested_bytes=requested_bytes).without_empty()

    def makers(self, rows: IntArray) -> list[tuple[SizeFunction | None, tuple[int, ...]]]:
        """The size function of each allocation (None: none), and which of ``rows``, one for each number, it has."""
        ends = np.cumsum(self.counts).tolist()
        parts = [tuple(rows[end - count : end].tolist()) for end, count in zip(ends, self.counts.tolist(), strict=True)]
        return [(self.size_functions.get(allocation), part) for allocation, part in enumerate(parts)]

    def place(self, allocation: int) -> str:
        """Where an allocation is made, such as ``"aten::mm at train.py:12"``."""
        operator = self.timeline.operators[self.timeline.operator[allocation]] or _("an allocation")
        line = self.timeline.line[allocation]
        return _("{operator} at {line}", operator=operator, line=self.timeline.lines[line]) if line else operator

    def difference(self, other: Structure) -> str:
        """The first event that differs in ``other``, in words."""
        mine, others = self.timeline, other.timeline
        length = min(mine.num_events, others.num_events)
        differs = mine.order[:length] != others.order[:length]
        for names, column in (("operators", "operator"), ("lines", "line"), ("modules", "module")):
            named = [_names(timeline, names, column)[:length] for timeline in (mine, others)]
            differs |= named[0] != named[1]
        position = int(differs.argmax()) if differs.any() else length
        return _(
            "event {position}: {one} vs. {another}",
            position=position,
            one=self._event(position),
            another=other._event(position),
        )

    def _event(self, position: int) -> str:
        if position >= self.timeline.num_events:
            return _("the end")
        event = int(self.timeline.order[position])
        return self.place(event) if event >= 0 else _("freeing what {place} allocated", place=self.place(~event))


def sizing_numbers(requested_bytes: IntArray, expressions: Mapping[int, SizeExpression]) -> IntArray:
    """The numbers that determine the sizes: those of a size function, or the size itself."""
    numbers: list[int] = []
    for allocation, num_bytes in enumerate(requested_bytes.tolist()):
        expression = expressions.get(allocation)
        numbers.extend((num_bytes,) if expression is None else expression.numbers)
    return np.array(numbers, dtype=np.int64)


def _names(timeline: Timeline, table: str, column: str) -> Any:
    """For each event, the value of its allocation in ``column``."""
    allocations = np.where(timeline.order >= 0, timeline.order, ~timeline.order)
    return np.array([str(name) for name in getattr(timeline, table)])[getattr(timeline, column)[allocations]]


def _canonical(timeline: Timeline) -> IntArray:
    """The events; frees between two allocations or marks are put in the order of their numbers."""
    order = timeline.order
    moments: IntArray = np.cumsum(order >= 0, dtype=np.int64)
    marks = np.array([mark.position for mark in timeline.marks], dtype=np.int64)
    moments = moments + np.searchsorted(marks, np.arange(len(order)), side="right")
    within = np.where(order >= 0, -1, ~order)
    return order[np.lexsort((within, moments))]
