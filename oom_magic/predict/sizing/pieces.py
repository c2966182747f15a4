"""A function's memory by pieces: where only sizes change, and each size is a polynomial."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import gcd

import numpy as np
import numpy.typing as npt

from oom_magic.language import _, ngettext
from oom_magic.memory.allocator.replay import ReplayFailure, failure_message
from oom_magic.memory.allocator.settings import AllocatorSettings
from oom_magic.memory.report import Assumption, Device, OutOfMemory
from oom_magic.memory.timeline import PHASES, IntArray, Timeline
from oom_magic.predict.setups.gpus import GPU
from oom_magic.predict.sizing.peaks import Peaks
from oom_magic.predict.sizing.polynomials import (
    Dimension,
    FoundQuotients,
    Polynomials,
    Quotient,
    SizeFunctions,
    assemble,
    families,
    families_with,
    find_quotients,
    plain_families,
    solve,
)
from oom_magic.predict.sizing.regions import Border, Point, Region, find_border
from oom_magic.predict.sizing.structure import Structure

_NUM_SPARE = 2  # how many points a polynomial must hit beyond those that determine it
_NUM_CONFIRMATIONS = 3  # of polynomials with quotients: remainders can be alike by chance
_FEW_POINTS = 10  # with fewer points polynomials would fit by chance
_MANY_POINTS = 16  # traced in one piece; if no polynomials go through them, those through some are looked for
_MOST_POINTS = 24  # traced in one piece in search of polynomials
_MOST_TRACES = 100  # at once, after which no more borders are looked for
_MOST_COMPARED = 2000  # points of a region at which explanations are compared
_FEW_ENDS = 3  # of runs of values, from which on equal distances are no chance
_MOST_RUNS = 64
_FEWEST_SAMPLES, _MOST_SAMPLES = 8, 24  # replayed to learn what the allocator adds
_SAMPLED_EVENTS = 240_000  # in all of them; a long run has many blocks, over which chance evens out

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Trace:
    """A dry run at one point: its structure, and the numbers that make the sizes, one allocation after another.

    ``dims`` are the dimensions of all tensors, one tensor after another.
    """

    structure: Structure
    numbers: IntArray
    dims: IntArray
    assumptions: tuple[Assumption, ...]

    def difference(self, other: Trace) -> str | None:
        """How another run differs, in words; None if it does not."""
        if self.structure.key != other.structure.key:
            return self.structure.difference(other.structure)
        if not (self.numbers != other.numbers).any():
            return None
        at = int((self.numbers != other.numbers).argmax())
        allocation = int(np.searchsorted(np.cumsum(self.structure.counts), at, side="right"))
        return f"{self.structure.place(allocation)} took {self.numbers[at]} bytes, then {other.numbers[at]}"


@dataclass(frozen=True, eq=False)
class Piece:
    """A region with one structure. Allocation ``a`` has the size ``functions`` number ``kind[a]``.

    ``inexact`` are the allocations whose sizes follow no polynomial; theirs are close at best. Where not
    ``is_followed``, even the structure is one of several.
    """

    structure: Structure
    kind: IntArray
    functions: SizeFunctions
    points: tuple[Point, ...]
    inexact: IntArray
    assumptions: tuple[Assumption, ...]
    samples: IntArray
    settings: AllocatorSettings
    is_followed: bool = True

    @cached_property
    def peaks(self) -> Peaks:
        """What the allocator adds, learned at the ``samples`` when it is first asked for."""
        return Peaks.learn(self.structure, self.kind, self.functions, self.samples, self.settings)

    def on_card(self, card: GPU) -> Piece:
        """The same piece with its sizes on another card."""
        moved = replace(self, functions=replace(self.functions, card=card))
        if "peaks" in vars(self):
            vars(moved)["peaks"] = replace(self.peaks, functions=moved.functions)
        return moved

    @property
    def is_exact(self) -> bool:
        """Whether the sizes of a run at any of its points are known to the byte."""
        return self.is_followed and not len(self.inexact)

    def sizes(self, point: Point) -> IntArray:
        """The size of each allocation at ``point``; 0 for none."""
        return self.functions(np.array([point], dtype=np.int64))[self.kind, 0]

    def timeline(self, point: Point) -> Timeline:
        """The timeline of a run at ``point``."""
        return self.structure.with_sizes(self.sizes(point))

    def out_of_memory(self, failure: ReplayFailure, device: Device) -> OutOfMemory:
        """The OutOfMemory of a run on ``device`` in which the allocator fails."""
        timeline, at = self.structure.timeline, failure.allocation
        return OutOfMemory(
            message=failure_message(failure, device.total_bytes, device.context_bytes, None, device.index),
            requested_bytes=failure.segment_bytes,
            tensor_bytes=failure.requested_bytes,
            step=int(timeline.step[at]),
            phase=PHASES[timeline.phase[at]],
            operator=timeline.operators[timeline.operator[at]],
            line=timeline.lines[timeline.line[at]],
            module=timeline.modules[timeline.module[at]],
            device_index=device.index,
        )

    def explains(self, point: Point, trace: Trace) -> bool:
        """Whether a run has this piece's structure and sizes."""
        same = self.structure.key == trace.structure.key
        return same and bool((self.sizes(point) == trace.structure.timeline.requested_bytes).all())


@dataclass(frozen=True, eq=False)
class Fork:
    """A border that divides a region."""

    border: Border
    inside: Node
    outside: Node


@dataclass(frozen=True, eq=False)
class Steps:
    """An argument, by position, that changes the structure with each value, as a number of layers does, or with each
    ``width`` of them from ``start`` on, as a loop over chunks does.

    ``explore`` finds what is from a value on, when it is first asked for.
    """

    argument: int
    explore: Callable[[int], Node]
    nodes: dict[int, Node]
    width: int = 1
    start: int = 0

    def first(self, values: IntArray) -> IntArray:
        """The first value of the step that contains each of these values of the argument."""
        return values - (values - self.start) % self.width

    def at(self, first: int) -> Node:
        """The pieces of the step that begins at value ``first``."""
        if first not in self.nodes:
            self.nodes[first] = self.explore(first)
        return self.nodes[first]

    def text(self, names: Sequence[str]) -> str:
        """A description in words."""
        return ngettext(
            "{name}: at each value, traced when first needed",
            "{name}: every {count} values, traced when first needed",
            self.width,
            name=names[self.argument],
        )


Node = Piece | Fork | Steps


def pieces_at(node: Node, points: IntArray, among: BoolArray | None = None) -> Iterator[tuple[Piece, BoolArray]]:
    """The pieces that contain ``points`` (one per row; only those ``among`` them), with the points in each."""
    among = np.ones(len(points), dtype=bool) if among is None else among
    if not among.any():
        return
    if isinstance(node, Piece):
        yield node, among
        return
    if isinstance(node, Steps):
        firsts = node.first(points[:, node.argument])
        for first in np.unique(firsts[among]).tolist():
            yield from pieces_at(node.at(first), points, among & (firsts == first))
        return
    holds = node.border.holds(points)
    yield from pieces_at(node.inside, points, among & holds)
    yield from pieces_at(node.outside, points, among & ~holds)


def piece_at(node: Node, point: Point) -> Piece:
    """The piece that contains ``point``."""
    row = np.array([point], dtype=np.int64)
    while not isinstance(node, Piece):
        if isinstance(node, Steps):
            node = node.at(int(node.first(row[0, node.argument])))
        else:
            node = node.inside if node.border.holds(row)[0] else node.outside
    return node


def all_pieces(node: Node) -> Iterator[Piece]:
    """Every piece that is known."""
    if isinstance(node, Piece):
        yield node
    for part in _parts(node):
        yield from all_pieces(part)


def on_card(node: Node, card: GPU) -> Node:
    """The same pieces with their sizes on another card, assuming that the structure is the same there."""
    if isinstance(node, Fork):
        return replace(node, inside=on_card(node.inside, card), outside=on_card(node.outside, card))
    if isinstance(node, Steps):
        return replace(node, nodes={value: on_card(part, card) for value, part in node.nodes.items()})
    return node.on_card(card)


def all_borders(node: Node) -> Iterator[Border]:
    """Every border, outermost first."""
    if isinstance(node, Fork):
        yield node.border
    for part in _parts(node):
        yield from all_borders(part)


def all_steps(node: Node) -> Iterator[Steps]:
    """Every argument whose values each have another structure."""
    if isinstance(node, Steps):
        yield node
    for part in _parts(node):
        yield from all_steps(part)


def _parts(node: Node) -> list[Node]:
    if isinstance(node, Fork):
        return [node.inside, node.outside]
    return list(node.nodes.values()) if isinstance(node, Steps) else []


class Explorer:
    """Finds the pieces of a function by tracing it at points of a lattice, of which ``axes`` are the values.

    All traces are made inside a ``tracing()``; ``known`` were made before, ``expect`` is told which will be.
    """

    def __init__(
        self,
        trace: Callable[[Point], Trace],
        expect: Callable[[Iterable[Point]], None],
        tracing: Callable[[], AbstractContextManager[None]],
        axes: Sequence[IntArray],
        card: GPU,
        settings: AllocatorSettings,
        known: Mapping[Point, Trace],
    ) -> None:
        self._trace = trace
        self._expect = expect
        self._tracing = tracing
        self._axes = axes
        self._card = card
        self._settings = settings
        self._traces = dict(known)
        self._borders: list[Border] = []
        self._random = np.random.default_rng(0)
        self._most_traces = _MOST_TRACES

    def explore(self) -> Node:
        """The pieces, and the borders between them."""
        return self._enter(Region(self._axes))

    def _enter(self, region: Region) -> Node:
        with self._tracing():
            self._most_traces = len(self._traces) + _MOST_TRACES
            return self._explore(region)

    def _at(self, point: Point) -> Trace:
        found = self._traces.get(point)
        if found is None:
            found = self._traces[point] = self._trace(point)
        return found

    def _key(self, point: Point) -> bytes:
        return self._at(point).structure.key

    def _explore(self, region: Region) -> Node:
        enough = 2 + 2 * region.num_free  # points, so that neither polynomials nor one structure are found by chance
        points = self._beginning(region, enough)
        self._told(points)
        num_confirmed = 0
        while True:
            if len({self._key(point) for point in points}) > 1:
                steps = self._find_steps(region) or self._find_runs(region)
                return steps or self._divide(region, points, self._key) or self._majority(region, points)
            fitted = self._fit(region, points, _NUM_SPARE)
            if fitted.is_sure and len(points) >= enough and num_confirmed >= fitted.num_wanted:
                return self._piece(region, points, fitted)
            if len(points) == _MANY_POINTS or len(points) >= _MOST_POINTS:
                parts = self._divide_by_sizes(region, points)
                if parts is not None or len(points) >= _MOST_POINTS:
                    return parts or self._piece(region, points, fitted)
            fresh = fitted.doubt or region.draw(self._random, set(points))
            if fresh is None:
                return self._piece(region, points, self._fit(region, points, 0))
            points.append(fresh)
            num_confirmed = num_confirmed + 1 if fitted.is_sure and self._follows(fitted, fresh) is True else 0

    def _beginning(self, region: Region, enough: int) -> list[Point]:
        """The points at which a region is traced first."""
        ends, known = region.extremes(), [point for point in self._traces if point in region]
        points = list(dict.fromkeys([*ends[:2], *region.middles(), *known]))
        return points + [point for point in ends[2:] if point not in points][: max(enough - len(points), 0)]

    def _told(self, points: Iterable[Point]) -> None:
        self._expect(point for point in points if point not in self._traces)

    def _at_step(self, region: Region, argument: int, width: int, first: int) -> Node:
        return self._enter(region.at(argument, first, width))

    def _find_steps(self, region: Region) -> Steps | None:
        """An argument whose first values, and the last, have different structures at the lowest point."""
        lowest = region.extremes()[0]
        for argument in range(len(self._axes)):
            values = np.unique(region.points[:, argument]).tolist()
            keys: set[bytes] = set()
            for value in (values[0], values[-1], *values[1:3]):
                key = self._key((*lowest[:argument], value, *lowest[argument + 1 :]))
                if key in keys:
                    break
                keys.add(key)
            if len(keys) == 4:
                return Steps(argument, partial(self._at_step, region, argument, 1), {})
        return None

    def _find_runs(self, region: Region) -> Steps | None:
        """An argument that changes the structure at equal intervals, according to the borders found so far."""
        for argument in range(len(self._axes)):
            unit = tuple(int(argument == other) for other in range(len(self._axes)))
            ends = sorted(border.threshold for border in self._borders if border == Border(unit, border.threshold))
            if len(ends) < _FEW_ENDS:
                continue
            width = gcd(*np.diff(ends).tolist())
            steps = Steps(argument, partial(self._at_step, region, argument, width), {}, width, ends[0] + 1)
            if 1 < len(np.unique(steps.first(region.points[:, argument]))) <= _MOST_RUNS:
                return steps
        return None

    def _divide(self, region: Region, points: list[Point], label: Callable[[Point], Hashable]) -> Node | None:
        """Both sides of a border between different labels; None if there is no simple one."""
        if len(self._traces) >= self._most_traces:
            return None
        border = find_border(region, points, label, self._borders, self._random, self._told)
        if border is None:
            return None
        if border not in self._borders:
            self._borders.append(border)
        inside, outside = region.within(border, True), region.within(border, False)
        for part in (inside, outside):
            self._told([*part.extremes()[:2], *part.middles()])
        return Fork(border, self._explore(inside), self._explore(outside))

    def _divide_by_sizes(self, region: Region, points: list[Point]) -> Node | None:
        """Both sides of a border where sizes follow other polynomials: a length that is cut, a batch of one."""
        for argument in range(len(self._axes)):
            ascending = sorted(points, key=lambda point: point[argument])
            higher = [point for point in ascending if point[argument] > ascending[0][argument]]
            for some in (higher, ascending[: len(points) // 2], ascending[len(points) // 2 :]):
                if len(some) < _FEW_POINTS:
                    continue
                label = partial(self._follows, self._fit(region, some, 2 * _NUM_SPARE))
                if all(label(point) is True for point in some) and any(label(point) is False for point in points):
                    return self._divide(region, points, label)
        return None

    def _follows(self, fitted: _Fitted, point: Point) -> bool | bytes:
        """Whether the fitted sizes hold at a point; if the structure differs there, its key."""
        trace = self._at(point)
        if len(trace.numbers) != len(fitted.row):
            return trace.structure.key
        return bool((fitted.polynomials(_rows([point]))[fitted.row, 0] == trace.numbers).all())

    def _majority(self, region: Region, points: list[Point]) -> Piece:
        """The piece of the most frequent structure, if no simple border divides it from the others."""
        keys = [self._key(point) for point in points]
        common = max(set(keys), key=keys.count)
        ours = [point for point, key in zip(points, keys, strict=True) if key == common]
        other = next(self._at(point) for point, key in zip(points, keys, strict=True) if key != common)
        piece = self._piece(region, ours, self._fit(region, ours, _NUM_SPARE))
        difference = piece.structure.difference(other.structure)
        text = _(
            "the function's behavior changes with its arguments in a way that is not modeled ({difference});"
            " reports come from dry runs at those points, maps and quick peaks are only close",
            difference=difference,
        )
        return replace(piece, assumptions=(*piece.assumptions, Assumption(text)), is_followed=False)

    def _fit(self, region: Region, points: list[Point], num_spare: int) -> _Fitted:
        rows = _rows(points)
        columns = np.stack([self._at(point).numbers for point in points], axis=1)
        numbers, row = np.unique(columns, axis=0, return_inverse=True)
        found = solve(rows, numbers, num_spare, families(len(self._axes)))
        doubt, num_wanted = None, 0
        if len(found) < len(numbers):
            lattice = region.points[:: max(len(region.points) // _MOST_COMPARED, 1)]
            hidden = self._quotients(points, num_spare, lattice)
            left = [at for at in range(len(numbers)) if at not in found]
            more = solve(rows, numbers[left], num_spare, families_with(hidden.quotients, len(self._axes)))
            found.update({left[at]: terms for at, terms in more.items()})
            doubt = None if hidden.doubt is None else tuple(lattice[hidden.doubt].tolist())
            num_wanted = _NUM_CONFIRMATIONS
        polynomials, unknown = assemble(rows, numbers, found)
        highest = np.array([axis[-1] for axis in self._axes], dtype=np.int64)
        return _Fitted(row.reshape(-1), polynomials.narrowed(highest), unknown, doubt, num_wanted)

    def _quotients(self, points: list[Point], num_spare: int, lattice: IntArray) -> FoundQuotients:
        """The quotients that occur in the dimensions of tensors."""
        columns = [self._at(point).dims for point in points]
        if len({len(column) for column in columns}) > 1:
            return FoundQuotients((), None)
        rows = _rows(points)
        dims = np.unique(np.concatenate([rows.T, np.stack(columns, axis=1)]), axis=0)
        known = solve(rows, dims, num_spare, plain_families(len(self._axes)))
        quotients: tuple[Quotient, ...] = ()
        while True:  # what is made of quotients, as the parts of an image are, may be padded again
            simple = sorted(known.items(), key=lambda item: len(item[1]))
            left = [row for row in range(len(dims)) if row not in known]
            found = find_quotients([Dimension(terms, dims[row]) for row, terms in simple], dims[left], lattice)
            quotients = (*quotients, *found.quotients)
            made = solve(rows, dims[left], num_spare, families_with(found.quotients, len(self._axes)))
            known.update({left[at]: terms for at, terms in made.items()})
            if found.doubt is not None or not made:
                return FoundQuotients(quotients, found.doubt)

    def _piece(self, region: Region, points: list[Point], fitted: _Fitted) -> Piece:
        traces = [self._at(point) for point in points]
        structure = traces[0].structure
        num_events = structure.timeline.num_events
        num_samples = min(max(_SAMPLED_EVENTS // max(num_events, 1), _FEWEST_SAMPLES), _MOST_SAMPLES)
        makers = structure.makers(fitted.row)
        functions, kind = SizeFunctions.of(fitted.polynomials, makers, self._card)
        unknown = set(fitted.left.tolist())
        inexact = np.array(
            [at for at, (_unused, rows) in enumerate(makers) if not unknown.isdisjoint(rows)], dtype=np.int64
        )
        found = [assumption for trace in traces for assumption in trace.assumptions]
        return Piece(
            structure=structure,
            kind=kind,
            functions=functions,
            points=tuple(points),
            inexact=inexact,
            assumptions=tuple(dict.fromkeys([*found, *_said(structure, inexact)])),
            samples=_rows(region.sample(self._random, num_samples)),
            settings=self._settings,
        )


@dataclass(frozen=True, eq=False)
class _Fitted:
    """The polynomial (row) of each number, which of the polynomials are close only (``left``), a point at which
    another explanation would have other sizes (None: there is none), and how many more points it should foresee."""

    row: IntArray
    polynomials: Polynomials
    left: IntArray
    doubt: Point | None
    num_wanted: int

    @property
    def is_sure(self) -> bool:
        """Whether every size is exact and has one explanation only."""
        return not len(self.left) and self.doubt is None


def _rows(points: Sequence[Point]) -> IntArray:
    return np.array(points, dtype=np.int64).reshape(len(points), -1)


def _said(structure: Structure, inexact: IntArray) -> Iterator[Assumption]:
    """The assumption about sizes that are not exact."""
    timeline = structure.timeline
    for operator, line in dict.fromkeys((int(timeline.operator[at]), int(timeline.line[at])) for at in inexact):
        text = _(
            "some sizes of {operator} are not polynomials of the arguments; reports come from dry runs at those"
            " points, maps and quick peaks are only close",
            operator=timeline.operators[operator],
        )
        yield Assumption(text, timeline.lines[line] if line else None)
