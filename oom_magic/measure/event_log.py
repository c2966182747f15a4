"""The levels that memory went through, event by event, kept bounded for long runs."""

from __future__ import annotations

from itertools import accumulate, pairwise

from oom_magic.memory.timeline import Mark, MarkKind

_FIRST_KEPT_STEPS = 2  # the second is the first with optimizer state


class EventLog:
    """Allocations and frees in order (as in Timeline), with the bytes allocated and reserved after each."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.allocated: list[int] = []
        self.reserved: list[int] = []
        self.marks: list[Mark] = []
        self.num_forgotten_steps = 0

    def append(self, event: int, allocated_bytes: int, reserved_bytes: int) -> None:
        """An event, and the levels after it."""
        self.order.append(event)
        self.allocated.append(allocated_bytes)
        self.reserved.append(reserved_bytes)

    def mark(self, kind: MarkKind) -> None:
        """Something happens before the next event."""
        self.marks.append(Mark(len(self.order), kind))

    def forget_middle_steps(self) -> set[int]:
        """Drop what was allocated and freed within the steps that tell least; returns these allocations.

        The first two steps, the last and the one with the highest peak stay whole, so no peak is lost.
        """
        ends = [mark.position for mark in self.marks if mark.kind is MarkKind.STEP_END]
        peak = max(range(len(self.allocated)), key=self.allocated.__getitem__)
        steps = list(pairwise(ends))[_FIRST_KEPT_STEPS - 1 : -1]
        middle = [(start, end) for start, end in steps if end > start and not start <= peak < end]
        forgotten: set[int] = set()
        for start, end in reversed(_joined(middle)):
            forgotten |= self._forget(start, end)
        self.num_forgotten_steps += len(middle)
        return forgotten

    def _forget(self, start: int, end: int) -> set[int]:
        """Drop pairs inside a window; what crosses its border happens at its end, after all its marks."""
        inside = self.order[start:end]
        levels = self.allocated[start - 1 : end]
        gone = {event for event in inside if event >= 0} & {~event for event in inside if event < 0}
        changes = [
            (event, after - before)
            for event, before, after in zip(inside, levels[:-1], levels[1:], strict=True)
            if event not in gone and ~event not in gone
        ]
        # frees before allocations, so that no level exceeds one that really was
        changes.sort(key=lambda item: item[0] >= 0)
        self.order[start:end] = [event for event, _ in changes]
        self.allocated[start:end] = accumulate((change for _, change in changes), initial=levels[0])
        del self.allocated[start]
        self.reserved[start:end] = [self.reserved[end - 1]] * len(changes)
        change = len(changes) - len(inside)
        self.marks = [
            Mark(mark.position + change if mark.position > end else min(mark.position, start), mark.kind)
            for mark in self.marks
        ]
        return gone


def _joined(windows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Windows with those that touch made one."""
    joined: list[tuple[int, int]] = []
    for start, end in windows:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined
