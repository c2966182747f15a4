"""The turns that a loop would still have made when a run was left: like its last ones, with sizes that grow on.

A key-value cache, or outputs that are collected, take more with each turn. Every size is a polynomial of what grows, as
``predict.sizing`` has it, but kernels round some up to a multiple of 8 or 16, and code does some things at every tenth
turn only. So what is compared, and goes on, are several turns together: a stretch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from oom_magic.memory.timeline import ALLOCATION_COLUMNS, IntArray, Mark, MarkKind, Timeline

_MOST_TOGETHER = 16  # turns of a stretch
_COMPARED = 4  # stretches: three give a polynomial of degree 2, the fourth confirms it
MOST_EVENTS = 100_000  # that are added; where more are left, each stretch stands for several
_SMALL_SHARE = 500  # of what is alive at the end: what follows no polynomial together, and is taken as large as it was


def with_later_turns(timeline: Timeline, starts: Sequence[int], num_left: int | None) -> Timeline | None:
    """The timeline, left at the last of the events ``starts`` at which turns of a loop began, with ``num_left`` more
    turns (None: not known how many). None where it cannot be told what they take."""
    for num_together in range(min((len(starts) - 1) // _COMPARED, _MOST_TOGETHER), 0, -1):
        stretches = _Stretches(timeline, starts[-1 - _COMPARED * num_together :], num_together)
        if stretches.are_alike():
            if not stretches.are_growing():
                return timeline
            return None if num_left is None else stretches.continued(*divmod(num_left, num_together))
    return None


class _Stretches:
    """The last ``_COMPARED`` stretches of a timeline; turns began at the events ``starts``, where the last was left."""

    def __init__(self, timeline: Timeline, starts: Sequence[int], num_together: int) -> None:
        self._timeline = _left_at(timeline, starts[-1])
        self._turns = np.array(starts[-1 - num_together :]) - starts[-1 - num_together]  # events of the last stretch
        self._starts = list(starts[::num_together])
        made = np.append(0, np.cumsum(timeline.order >= 0))
        self._first = made[self._starts]  # allocation of each stretch

    def _made(self, column: IntArray) -> list[IntArray]:
        """A column of the allocations of each stretch, the last first."""
        return [column[first:after] for first, after in pairwise(self._first)][::-1]

    def _events(self, stretch: int) -> IntArray:
        """A row for each event: whether it makes an allocation, how many stretches ago that was made, and which of that
        stretch it is."""
        order = self._timeline.order[self._starts[stretch] : self._starts[stretch + 1]]
        owner = np.maximum(order, ~order)
        made_in = np.searchsorted(self._first, owner, side="right") - 1
        number = owner - np.where(made_in < 0, 0, self._first[made_in])
        return np.stack([order >= 0, stretch - made_in, number], axis=1)

    def are_alike(self) -> bool:
        """Whether the same is made and freed in them, in the same order, and how sizes grow is known."""
        columns = (getattr(self._timeline, name) for name in ("operator", "line", "module", "stream"))
        events = [self._events(stretch) for stretch in range(1, _COMPARED)]  # the first frees what was made otherwise
        made = [self._made(column) for column in columns]
        is_alike = all(np.array_equal(one, other) for alike in (events, *made) for one, other in pairwise(alike))
        if not is_alike or events[0][:, 1].max(initial=0) > 1:
            return False
        sizes = self._made(self._timeline.requested_bytes)
        unknown = np.max(sizes, axis=0)[_difference(sizes, 3) != 0].sum()
        live = self._timeline.live_at(self._timeline.num_events - 1)
        return bool(unknown * _SMALL_SHARE <= self._timeline.requested_bytes[live].sum())

    def are_growing(self) -> bool:
        """Whether they leave anything, or need more each time."""
        sizes = self._made(self._timeline.requested_bytes)
        return bool(len(self._left()) or _difference(sizes, 1).any() or _difference(sizes, 2).any())

    def _left(self) -> IntArray:
        """Which of a stretch's allocations are never freed, by it or by the next one."""
        events = self._events(_COMPARED - 1)
        return np.setdiff1d(np.arange(self._first[-1] - self._first[-2]), events[events[:, 0] == 0, 2])

    def _sizes(self, times: int) -> IntArray:
        """Of the allocations of a stretch so many after the last; what follows no polynomial is as large as ever."""
        sizes = self._made(self._timeline.requested_bytes)
        first, second, third = (_difference(sizes, degree) for degree in (1, 2, 3))
        grown = sizes[0] + first * times + second * (times * (times + 1) // 2)
        return np.where(third == 0, grown, np.max(sizes, axis=0))

    def continued(self, number: int, num_turns: int) -> Timeline:
        """The timeline with so many more stretches and turns."""
        most = max(MOST_EVENTS // max(self._starts[-1] - self._starts[-2], 1), 1)
        jumps = list(range(number, 0, -max(-(-number // most), 1)))[::-1]
        cuts = {one: int(self._turns[-1]) for one in jumps}
        if num_turns:
            cuts[number + 1] = int(self._turns[num_turns])
        return self._with(cuts)

    def _with(self, cuts: Mapping[int, int]) -> Timeline:
        """The timeline with stretches, each up to an event of it, by how many after the last they are. Before each,
        what a stretch leaves is left once for every one that is not among them."""
        timeline, left = self._timeline, self._left()
        events = self._events(_COMPARED - 1)
        source = np.arange(self._first[-2], self._first[-1])
        num_made, before, first = timeline.num_allocations, 0, int(self._first[-2])
        sizes, sources, orders = [timeline.requested_bytes], [np.arange(num_made)], [timeline.order]
        for times, cut in cuts.items():
            its_sizes, skipped = self._sizes(times), np.repeat(left, times - before - 1)
            begin = num_made + len(skipped)
            is_made, age, number = events[:cut].T
            owner = np.where(age > 0, first, begin) + number
            orders += [np.arange(num_made, begin), np.where(is_made, owner, ~owner)]
            num_new = int(is_made.sum())
            sizes += [its_sizes[skipped], its_sizes[:num_new]]
            sources += [source[skipped], source[:num_new]]
            num_made, before, first = begin + num_new, times, begin
        chosen = np.concatenate(sources)
        columns = {name: getattr(timeline, name)[chosen] for name in ALLOCATION_COLUMNS}
        columns["requested_bytes"] = np.concatenate(sizes)
        marks = (*timeline.marks, Mark(timeline.num_events, MarkKind.CONTINUED))
        return replace(timeline, order=np.concatenate(orders), marks=marks, **columns)


def _left_at(timeline: Timeline, position: int) -> Timeline:
    """The timeline up to an event, left there where that was later."""
    until, last = timeline.until(position), timeline.marks[-1:]
    is_later = any(mark.kind is MarkKind.LEFT and mark.position > position for mark in last)
    return replace(until, marks=(*until.marks, Mark(position, MarkKind.LEFT))) if is_later else until


def _difference(sizes: Sequence[IntArray], degree: int) -> IntArray:
    """The backward difference of the first of ``sizes``, which go back in time."""
    for _unused in range(degree):
        sizes = [after - before for after, before in pairwise(sizes)]
    return sizes[0]
