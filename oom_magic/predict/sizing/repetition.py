"""A run of a model with any number of equal layers, known from runs with few.

With each further layer a run repeats some stretches of its events once more: while the model is built, in the forward,
in the backward, in the optimizer. ``Repetition.learn`` finds them by comparing two runs, and how what an event refers
to follows from the number of layers: the allocation that a free ends, the layers in a module's path, a size that sums
over layers. What two runs taught is then held against others.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from oom_magic.memory.timeline import IntArray, Mark, MarkKind, Timeline
from oom_magic.predict.sizing.structure import Structure

BoolArray = npt.NDArray[np.bool_]

_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # a number in a module's path
_MOST_NUMBERS = 4  # in one path
_LEAST_COPIES = 3  # in the shorter run: the first and the last, which may refer to what is not repeated, and another
_MARK = int(np.iinfo(np.int64).max)
_MARKS = tuple(MarkKind)


class IrregularError(Exception):
    """The layers do not repeat in a way that is known here."""


@dataclass(frozen=True, eq=False)
class LayeredRun:
    """A run of a model with ``num_layers``: its structure, and the numbers that make its sizes."""

    num_layers: int
    structure: Structure
    numbers: IntArray


@dataclass(frozen=True, eq=False)
class Repetition:
    """What a run of ``base`` is with more layers.

    In copy ``i`` of what is repeated, with ``n`` layers more, event ``t`` refers to ``references[t] @ (i, n, 1)``:
    which copy of event ``target[t]`` it frees, and the numbers in its module's path. ``growth`` is what each of the
    numbers that make the sizes gains with a layer.
    """

    base: LayeredRun
    line: _Line
    stretches: tuple[_Stretch, ...]
    target: IntArray
    references: IntArray
    growth: IntArray

    @classmethod
    def learn(cls, runs: Sequence[LayeredRun]) -> Repetition:
        """From runs at one point, the first two of which differ by one layer.

        Raises IrregularError unless what these two teach foretells the others to the last event.
        """
        try:
            return cls._learned(runs, by_size=True)
        except IrregularError:  # a size that sums over layers is another with each number of them
            return cls._learned(runs, by_size=False)

    @classmethod
    def _learned(cls, runs: Sequence[LayeredRun], by_size: bool) -> Repetition:
        """The same from events that are told apart by their sizes too, or not."""
        kinds: dict[Hashable, int] = {}
        first, second = (_Line.of(run, kinds, by_size) for run in runs[:2])
        stretches = tuple(_find_stretches(first.kind, second.kind))
        layouts = [_Layout.of(stretches, len(first.kind), more) for more in (0, 1)]
        found = cls(runs[0], first, stretches, *_references_of(layouts, (first, second)), growth=np.zeros(0, np.int64))
        found = replace(found, growth=found._growth(layouts[1], runs[1].numbers))
        for run in runs:
            found.check(runs[0], run)
        return found

    def check(self, base: LayeredRun, run: LayeredRun) -> None:
        """Raise IrregularError unless ``run`` equals ``base``, a run of this structure, extended to as many layers."""
        structure, numbers = self.lengthened(base, run.num_layers)
        if structure.key != run.structure.key:
            raise IrregularError(structure.difference(run.structure))
        if (numbers != run.numbers).any():
            at = int((numbers != run.numbers).argmax())
            raise IrregularError(f"number {at} is {run.numbers[at]}, not {numbers[at]}")

    def lengthened(self, base: LayeredRun, num_layers: int) -> tuple[Structure, IntArray]:
        """The structure and numbers of the run with ``num_layers`` instead of those of ``base``."""
        more = num_layers - base.num_layers
        layout = _Layout.of(self.stretches, len(self.line.kind), more)
        is_made = self.line.is_made[layout.event]
        source, size_functions = self.line.allocation[layout.event[is_made]], self.base.structure.size_functions
        of_number = self._numbers_of(source)
        growth = self.growth[of_number] * more
        counts = self.base.structure.counts[source]
        requested_bytes = base.structure.timeline.requested_bytes[source] + growth[np.cumsum(counts) - counts]
        structure = Structure.made(
            self._timeline(layout, more, requested_bytes),
            {at: size_functions[number] for at, number in enumerate(source.tolist()) if number in size_functions},
            counts,
        )
        return structure, base.numbers[of_number] + growth

    def _referred(self, layout: _Layout, more: int) -> IntArray:
        """For each event of a longer run, which copy it frees and the numbers in its module's path."""
        copy = np.stack([layout.copy, np.full_like(layout.copy, more), np.ones_like(layout.copy)], axis=1)
        referred: IntArray = np.einsum("ekc,ec->ek", self.references[layout.event], copy)
        return referred

    def _timeline(self, layout: _Layout, more: int, requested_bytes: IntArray) -> Timeline:
        line, timeline, events = self.line, self.base.structure.timeline, layout.event
        referred = self._referred(layout, more)
        is_made, is_end, is_mark = line.is_made[events], line.ended[events] >= 0, line.is_mark[events]
        made = np.cumsum(is_made) - 1
        ended = layout.event_at(self.target[events[is_end]], referred[is_end, 0])
        order = np.where(is_made, made, 0)
        order[is_end] = ~made[ended]
        if (line.kind[events[ended]] + 1 != line.kind[events[is_end]]).any():
            raise IrregularError("a free ends something else")
        source = line.allocation[events[is_made]]
        module, modules = _named(timeline, timeline.module[source], referred[is_made, 1:])
        columns: dict[str, Any] = {
            name: getattr(timeline, name)[source]
            for name in ("category", "phase", "step", "operator", "line", "stream")
        }
        positions = np.flatnonzero(is_mark) - np.arange(int(is_mark.sum()))
        kinds = [_MARKS[-1 - kind] for kind in line.kind[events[is_mark]].tolist()]
        marks = tuple(Mark(position, kind) for position, kind in zip(positions.tolist(), kinds, strict=True))
        columns |= {"requested_bytes": requested_bytes, "module": module, "modules": modules}
        return replace(timeline, order=order[~is_mark], marks=marks, **columns)

    def _numbers_of(self, source: IntArray) -> IntArray:
        """Where the numbers of these allocations of the base are, one allocation after another."""
        counts = self.base.structure.counts
        firsts = np.cumsum(counts) - counts
        taken = counts[source]
        within = np.arange(int(taken.sum())) - np.repeat(np.cumsum(taken) - taken, taken)
        positions: IntArray = np.repeat(firsts[source], taken) + within
        return positions

    def _growth(self, layout: _Layout, numbers: IntArray) -> IntArray:
        """What each number of the base gains with one layer, from those of the run with one more."""
        source = self.line.allocation[layout.event[self.line.is_made[layout.event]]]
        of_number = self._numbers_of(source)
        if len(of_number) != len(numbers):
            raise IrregularError("sizes are made of other numbers")
        growth = np.zeros_like(self.base.numbers)
        growth[of_number] = numbers - self.base.numbers[of_number]
        counts = self.base.structure.counts
        computed = np.repeat(np.isin(np.arange(len(counts)), list(self.base.structure.size_functions)), counts)
        if growth[computed].any():
            raise IrregularError("what a kernel takes inside grows with the layers")
        return growth


@dataclass(frozen=True, eq=False)
class _Line:
    """A run as a line of events: allocations, frees and marks.

    ``kind`` is what each is, apart from layers (a free's is one more than that of what it frees);
    ``allocation`` its number in the timeline, ``ended`` the event of the allocation that a free ends (-1: it is none),
    ``path`` the numbers in its module's path.
    """

    kind: IntArray
    allocation: IntArray
    ended: IntArray
    path: IntArray
    is_made: BoolArray
    is_mark: BoolArray

    @classmethod
    def of(cls, run: LayeredRun, kinds: dict[Hashable, int], by_size: bool) -> _Line:
        """The events of a run. ``kinds`` numbers what they are, in all runs that are compared."""
        timeline = run.structure.timeline
        order = np.insert(timeline.order, [mark.position for mark in timeline.marks], _MARK)
        is_mark = order == _MARK
        is_made = (order >= 0) & ~is_mark
        allocation = np.where(is_mark, 0, np.where(is_made, order, ~order))
        is_end = ~is_made & ~is_mark
        kind = 2 * _kinds_of(run, kinds, by_size)[allocation] + is_end
        kind[is_mark] = [-1 - _MARKS.index(mark.kind) for mark in timeline.marks]
        ended = np.full(len(order), -1, dtype=np.int64)
        ended[is_end] = np.flatnonzero(is_made)[allocation[is_end]]
        path = np.where(is_made[:, None], _path_numbers(timeline)[timeline.module[allocation]], 0)
        return cls(kind, allocation, ended, path, is_made, is_mark)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """``copies`` of ``period`` events from ``start`` on; ``lead`` events before are the end of one more copy."""

    start: int
    period: int
    copies: int
    lead: int


@dataclass(frozen=True, eq=False)
class _Layout:
    """The events of a run with some more layers, each by the event of the shorter run that is its pattern.

    ``copy`` counts the copies between the first and the last of a stretch, which have patterns of their own.
    ``place`` and ``place_copy`` are an event's address: the event of the shorter run in the first copy, and which
    copy it is of that. ``first`` has where each address begins, ``period`` how far its copies are apart.
    """

    event: IntArray
    copy: IntArray
    place: IntArray
    place_copy: IntArray
    first: IntArray
    period: IntArray

    @classmethod
    def of(cls, stretches: Sequence[_Stretch], num_events: int, more: int) -> _Layout:
        """The layout of ``num_events`` with so many layers more."""
        parts: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
        first, period = np.arange(num_events), np.zeros(num_events, dtype=np.int64)
        done = 0
        for stretch in stretches:
            parts.append(_once(done, stretch.start - stretch.lead))
            parts.append(_led(stretch))
            parts.append(_repeated(stretch, more))
            done = stretch.start + stretch.period * stretch.copies
            period[stretch.start : stretch.start + stretch.period] = stretch.period
            first[done:] += more * stretch.period
        parts.append(_once(done, num_events))
        event, copy, place, place_copy = (np.concatenate(column) for column in zip(*parts, strict=True))
        return cls(event, copy, place, place_copy, first, period)

    def event_at(self, place: IntArray, copy: IntArray) -> IntArray:
        """The events at these addresses. Raises IrregularError if one lies beyond the ends."""
        events: IntArray = self.first[place] + self.period[place] * copy
        if len(events) and (events.min() < 0 or events.max() >= len(self.event)):
            raise IrregularError("a free refers to what is not there")
        return events


def _once(start: int, end: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    events = np.arange(start, end)
    zeros = np.zeros_like(events)
    return events, zeros, events, zeros


def _led(stretch: _Stretch) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    events = np.arange(stretch.start - stretch.lead, stretch.start)
    zeros = np.zeros_like(events)
    return events, zeros, events + stretch.period, zeros - 1


def _repeated(stretch: _Stretch, more: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    copies = stretch.copies + more
    which = np.repeat(np.arange(copies), stretch.period)
    place = np.tile(np.arange(stretch.start, stretch.start + stretch.period), copies)
    is_last = which == copies - 1
    pattern = np.where(which == 0, 0, np.where(is_last, stretch.copies - 1, 1))
    copy = np.where((which == 0) | is_last, 0, which - 1)
    return place + pattern * stretch.period, copy, place, which


def _find_stretches(shorter: IntArray, longer: IntArray) -> Iterator[_Stretch]:
    """What the longer line repeats once more than the shorter one."""
    shift, done = 0, 0
    missing = len(longer) - len(shorter)
    at = _num_alike(shorter, longer)
    while at < len(shorter) or shift < missing:
        period = _period(shorter, longer, at, shift, missing)
        start, end = _extent(longer, at + shift, period, done + shift)
        copies = (end - start) // period
        if copies - 1 < _LEAST_COPIES:
            raise IrregularError(f"a stretch of {period} events repeats {copies - 1} times only")
        lead = (end - start) % period
        yield _Stretch(start + lead - shift, period, copies - 1, lead)
        shift, done = shift + period, at
        at += _num_alike(shorter[at:], longer[at + shift :])


def _period(shorter: IntArray, longer: IntArray, at: int, shift: int, missing: int) -> int:
    """How many events the longer line repeats before it goes on as the shorter one does from ``at`` on, longest."""
    here = at + shift
    found = {
        _num_alike(shorter[at:], longer[here + period :]): period
        for period in range(min(missing - shift, here), 0, -1)
        if longer[here] == longer[here - period]
        and np.array_equal(longer[here : here + period], longer[here - period : here])
    }
    if not found:
        raise IrregularError("what a layer adds is no repetition")
    return found[max(found)]


def _num_alike(one: IntArray, other: IntArray) -> int:
    """How many events two lines begin with alike."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _extent(line: IntArray, here: int, period: int, least: int) -> tuple[int, int]:
    """From where to where the line repeats itself each ``period`` events, around ``here``."""
    same = line[least : here - period] == line[least + period : here]
    start = least if same.all() else least + len(same) - int((~same)[::-1].argmax())
    return start, here + period


def _kinds_of(run: LayeredRun, kinds: dict[Hashable, int], by_size: bool) -> IntArray:
    """For each allocation, a number for what it is apart from the layer, and from its size unless ``by_size``."""
    structure, timeline = run.structure, run.structure.timeline
    sizes = timeline.requested_bytes if by_size else np.zeros(timeline.num_allocations, dtype=np.int64)
    lines = [str(line) for line in timeline.lines]
    paths = [_LAYER.sub("*", path) for path in timeline.modules]
    columns = (timeline.category, timeline.phase, timeline.step, timeline.stream, structure.counts, sizes)
    rows = zip(
        (timeline.operators[at] for at in timeline.operator.tolist()),
        (lines[at] for at in timeline.line.tolist()),
        (paths[at] for at in timeline.module.tolist()),
        (repr(structure.size_functions.get(number)) for number in range(timeline.num_allocations)),
        *(column.tolist() for column in columns),
        strict=True,
    )
    return np.array([kinds.setdefault(row, len(kinds)) for row in rows], dtype=np.int64)


def _path_numbers(timeline: Timeline) -> IntArray:
    """The numbers in each module's path."""
    numbers = np.zeros((len(timeline.modules), _MOST_NUMBERS), dtype=np.int64)
    for at, path in enumerate(timeline.modules):
        found = _LAYER.findall(path)
        if len(found) > _MOST_NUMBERS:
            raise IrregularError(f"{path} is made of too many modules")
        numbers[at, : len(found)] = list(map(int, found))
    return numbers


def _named(timeline: Timeline, module: IntArray, numbers: IntArray) -> tuple[IntArray, tuple[str, ...]]:
    """Modules with other numbers in their paths: a number for each, in the order in which they come, and the paths."""
    paths: dict[str, int] = {"": 0}
    known: dict[tuple[int, ...], int] = {}
    found = []
    for row in zip(module.tolist(), *numbers.T.tolist(), strict=True):
        if row not in known:
            parts = iter(row[1:])
            path = _LAYER.sub(lambda _, parts=parts: str(next(parts)), timeline.modules[row[0]])  # type: ignore[misc]
            known[row] = paths.setdefault(path, len(paths))
        found.append(known[row])
    return np.array(found, dtype=np.int64), tuple(paths)


def _references_of(layouts: Sequence[_Layout], lines: Sequence[_Line]) -> tuple[IntArray, IntArray]:
    """What each event of the shorter run refers to: an event of it, and how copies of it follow."""
    targets, values = [], []
    for layout, line in zip(layouts, lines, strict=True):
        if len(layout.event) != len(line.kind):
            raise IrregularError("the stretches do not add up")
        is_end = line.ended >= 0
        targets.append(np.where(is_end, layout.place[line.ended], -1))
        copy = np.where(is_end, layout.place_copy[line.ended], 0)
        values.append(np.column_stack([copy, line.path]))
    num_events = len(lines[0].kind)

    def at(column: int, copy: int) -> IntArray:
        """Where each event's pattern has its first or second copy."""
        found = np.full(num_events, -1, dtype=np.int64)
        chosen = np.flatnonzero(layouts[column].copy == copy)
        found[layouts[column].event[chosen]] = chosen
        return found

    before, after, next_one = at(0, 0), at(1, 0), at(1, 1)
    # Events of a stretch beyond its second copy are no patterns.
    is_pattern = before >= 0
    constant = np.where(is_pattern[:, None], values[0][before], 0)
    by_layer = np.where(is_pattern[:, None], values[1][after], 0) - constant
    has_next = next_one >= 0
    by_copy = np.where(has_next[:, None], values[1][next_one] - values[1][after], 0)
    target = np.where(is_pattern, targets[0][before], -1)
    if (is_pattern & (targets[1][after] != target)).any() or (has_next & (targets[1][next_one] != target)).any():
        raise IrregularError("what is freed changes with the layers")
    return target, np.stack([by_copy, by_layer, constant], axis=2)
