"""What the later steps of a training run ask of the allocator: the events of the last step that was followed, again.

The same requests find the cache in other pieces than the step before did, so a device can be large enough for two steps
and too small for the third. The batches over which gradients are accumulated repeat likewise within a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter

import numpy as np

from oom_magic.memory.allocator.caching_allocator import CachingAllocator
from oom_magic.memory.allocator.segments import NOWHERE, Block
from oom_magic.memory.timeline import PHASES, MarkKind, Phase, Timeline

MOST_STEPS = 20  # that are followed where none leaves the allocator as one before
FEW_STEPS = 2  # that nearly always show what all of them need
_BACKWARD = PHASES.index(Phase.BACKWARD)
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Stretch:
    """Events in a row. Before them the cache is emptied if it ``empties``, and of each pair in ``carried`` the first
    allocation is from then on where the second one is."""

    events: list[int]
    carried: Pairs = ()
    empties: bool = False


@dataclass(frozen=True)
class Course:
    """A run of a timeline: ``first`` once, then ``again`` and again, which is empty where the run does not go on so.
    ``kept`` are the allocations that are alive each time."""

    timeline: Timeline
    first: tuple[Stretch, ...]
    again: tuple[Stretch, ...] = ()
    kept: tuple[int, ...] = ()

    def run(self, allocator: CachingAllocator, most_steps: int = MOST_STEPS) -> None:
        """Follow it until a step leaves the allocator as one before did, so that nothing new comes, or ``most_steps``
        came again. Raises AllocatorOutOfMemory."""
        blocks = [NOWHERE] * self.timeline.num_allocations
        self._follow(self.first, allocator, blocks)
        seen: set[tuple[object, ...]] = set()
        for _unused in range(most_steps if self.again else 0):
            self._follow(self.again, allocator, blocks)
            state = _layout(allocator, {one: blocks[one] for one in self.kept})
            if state in seen:
                return
            seen.add(state)

    def _follow(self, stretches: Sequence[Stretch], allocator: CachingAllocator, blocks: list[Block]) -> None:
        requested, streams = self._requests
        allocate, free = allocator.allocate, allocator.free
        for stretch in stretches:
            if stretch.empties:
                allocator.empty_cache()
            for old, new in stretch.carried:
                blocks[old] = blocks[new]
            for event in stretch.events:  # a search needs no record of its trials
                if event >= 0:
                    blocks[event] = allocate(requested[event], streams[event])
                else:
                    free(blocks[~event])

    @cached_property
    def _requests(self) -> tuple[list[int], list[int]]:
        return self.timeline.requested_bytes.tolist(), self.timeline.stream.tolist()


def course_of(timeline: Timeline, batches: int = 1, more_batches: int = 0) -> Course:
    """The course of a run that was left after a step, with its last step again; of any other, its events.

    Each step has ``batches`` batches, of which the last comes ``more_batches`` more times. What would then leave more
    than it found, as a leak does, is not repeated.
    """
    ends = timeline.positions(MarkKind.STEP_END)
    left = timeline.positions(MarkKind.LEFT)
    if len(ends) < 2 or left != ends[-1:]:
        return Course(timeline, tuple(_stretches(timeline, 0, timeline.num_events)))
    start, stop = ends[-2:]
    last_batch = _last_batch(timeline, start, stop, batches) if more_batches else None
    repeated = None if last_batch is None else _again(timeline, *last_batch)

    def step(start: int, carried: Pairs = (), skipped: frozenset[int] = frozenset()) -> Iterator[Stretch]:
        """From ``start`` to the end of the last step, with all batches."""
        if last_batch is None or repeated is None:
            yield from _stretches(timeline, start, stop, carried, skipped)
            return
        yield from _stretches(timeline, start, last_batch[1], carried, skipped)
        for _unused in range(more_batches):
            yield from _stretches(timeline, *last_batch, *repeated)
        yield from _stretches(timeline, last_batch[1], stop, (), skipped)

    again = _again(timeline, start, stop)
    if again is None:
        return Course(timeline, tuple(step(0)))
    return Course(timeline, tuple(step(0)), tuple(step(start, *again)), tuple(timeline.live_at(stop - 1).tolist()))


def _layout(allocator: CachingAllocator, kept: Mapping[int, Block]) -> tuple[object, ...]:
    """How memory is divided, and where ``kept`` allocations are: a step that leaves it as it was does so for ever."""
    pieces = [(one.address, one, -1) for one in allocator.free_blocks()]
    pieces += [(one.address, one, owner) for owner, one in kept.items() if one.pool is not None]
    pieces.sort(key=itemgetter(0))
    return tuple((one.size_bytes, owner, one.previous is None, one.next is None) for _, one, owner in pieces)


def _stretches(
    timeline: Timeline, start: int, stop: int, carried: Pairs = (), skipped: frozenset[int] = frozenset()
) -> Iterator[Stretch]:
    """The events from ``start`` to ``stop``, but for the frees of allocations ``skipped``."""
    empties = set(timeline.positions(MarkKind.EMPTY_CACHE))
    cuts = [start, *sorted(one for one in empties if start < one < stop), stop]
    for begin, end in pairwise(cuts):
        events = [event for event in timeline.order[begin:end].tolist() if ~event not in skipped]
        yield Stretch(events, carried if begin == start else (), begin in empties)


def _again(timeline: Timeline, start: int, stop: int) -> tuple[Pairs, frozenset[int]] | None:
    """How these events run again: what they left before takes the place of what they free, each with its like; what has
    none is not freed again. None where they leave more than they free."""
    before, after = timeline.live_at(start - 1), timeline.live_at(stop - 1)
    freed, left = np.setdiff1d(before, after).tolist(), np.setdiff1d(after, before).tolist()
    requested, places = timeline.requested_bytes, np.stack([timeline.operator, timeline.line, timeline.module])
    kinds: tuple[Callable[[int], Hashable], ...] = (
        lambda one: (int(requested[one]), *places[:, one].tolist()),
        lambda one: int(requested[one]),
        lambda one: tuple(places[:, one].tolist()),
    )
    carried: dict[int, int] = {}
    for kind in kinds:
        waiting: dict[Hashable, list[int]] = defaultdict(list)
        for old in reversed(freed):
            waiting[kind(old)].append(old)
        carried |= {waiting[kind(new)].pop(): new for new in left if waiting[kind(new)]}
        freed = [one for one in freed if one not in carried]
        left = sorted(set(left).difference(carried.values()))
    return None if left else (tuple(carried.items()), frozenset(freed))


def _last_batch(timeline: Timeline, start: int, stop: int, batches: int) -> tuple[int, int] | None:
    """From where to where the last of a step's batches goes: from the end of the backward of the one before to that of
    its own. None where the step does not have so many backwards, or as many for each batch."""
    order = timeline.order
    made = start + np.flatnonzero(order[start:stop] >= 0)
    is_backward = timeline.phase[order[made]] == _BACKWARD
    backwards = np.flatnonzero(np.diff(is_backward, prepend=False, append=False)).reshape(-1, 2)
    number, rest = divmod(len(backwards), batches)
    if batches < 2 or not number or rest:
        return None
    ends = []
    for first, after in backwards[[-1 - number, -1]].tolist():
        end = int(made[after - 1]) + 1
        while end < stop and order[end] < 0 and ~order[end] >= order[made[first]]:
            end += 1  # what this backward made and freed at once
        ends.append(end)
    return ends[0], ends[1]
