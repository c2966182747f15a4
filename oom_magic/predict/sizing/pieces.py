"""A function's memory by pieces: where only sizes change, and each size is a polynomial."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from oom_magic.memory.allocator_settings import AllocatorSettings
from oom_magic.memory.report import Assumption
from oom_magic.memory.timeline import IntArray, Timeline
from oom_magic.predict.setups.gpus import GPU
from oom_magic.predict.sizing.functions import SizeFunctions
from oom_magic.predict.sizing.peaks import Peaks
from oom_magic.predict.sizing.polynomials import Polynomials, fit
from oom_magic.predict.sizing.regions import Border, Point, Region, find_border
from oom_magic.predict.sizing.structure import Structure

_NUM_SPARE = 2  # points that a polynomial must hit beyond those that determine it
_MOST_POINTS = 24  # traced in one piece in search of polynomials
_MOST_TRACES = 100  # after which no more borders are looked for
_NUM_SAMPLES = 24  # replayed to learn what the allocator adds

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Trace:
    """A dry run at one point: its structure, and the numbers that make the sizes, one allocation after another."""

    structure: Structure
    numbers: IntArray
    assumptions: tuple[Assumption, ...]


@dataclass(frozen=True, eq=False)
class Piece:
    """A region with one structure. Allocation ``a`` has the size ``functions`` number ``kind[a]``.

    ``inexact`` are the allocations whose sizes follow no polynomial; theirs are close at best.
    """

    structure: Structure
    kind: IntArray
    functions: SizeFunctions
    points: tuple[Point, ...]
    inexact: IntArray
    assumptions: tuple[Assumption, ...]
    peaks: Peaks

    def sizes(self, point: Point) -> IntArray:
        """The size of each allocation at ``point``; 0 for none."""
        return self.functions(np.array([point], dtype=np.int64))[self.kind, 0]

    def timeline(self, point: Point) -> Timeline:
        """The timeline of a run at ``point``."""
        return self.structure.with_sizes(self.sizes(point))

    def explains(self, point: Point, trace: Trace) -> bool:
        """Whether a run was as it would have it."""
        same = self.structure.key == trace.structure.key
        return same and bool((self.sizes(point) == trace.structure.timeline.requested_bytes).all())


@dataclass(frozen=True, eq=False)
class Fork:
    """Where a region divides."""

    border: Border
    inside: Node
    outside: Node


@dataclass(frozen=True, eq=False)
class Steps:
    """An argument, by position, that changes the structure with each value, as a number of layers does.

    ``explore`` finds what is at a value, when it is first asked for.
    """

    argument: int
    explore: Callable[[int], Node]
    nodes: dict[int, Node]

    def at(self, value: int) -> Node:
        """What is at a value of the argument."""
        if value not in self.nodes:
            self.nodes[value] = self.explore(value)
        return self.nodes[value]


Node = Piece | Fork | Steps


def pieces_at(node: Node, points: IntArray, among: BoolArray | None = None) -> Iterator[tuple[Piece, BoolArray]]:
    """The pieces that ``points`` (one per row; those ``among`` them) lie in, and which points lie there."""
    among = np.ones(len(points), dtype=bool) if among is None else among
    if not among.any():
        return
    if isinstance(node, Piece):
        yield node, among
        return
    if isinstance(node, Steps):
        column = points[:, node.argument]
        for value in np.unique(column[among]).tolist():
            yield from pieces_at(node.at(value), points, among & (column == value))
        return
    holds = node.border.holds(points)
    yield from pieces_at(node.inside, points, among & holds)
    yield from pieces_at(node.outside, points, among & ~holds)


def piece_at(node: Node, point: Point) -> Piece:
    """The piece that ``point`` lies in."""
    row = np.array([point], dtype=np.int64)
    while not isinstance(node, Piece):
        if isinstance(node, Steps):
            node = node.at(point[node.argument])
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
    """The same pieces with the sizes that they have on another card, which goes the same ways."""
    if isinstance(node, Fork):
        return replace(node, inside=on_card(node.inside, card), outside=on_card(node.outside, card))
    if isinstance(node, Steps):
        return replace(node, nodes={value: on_card(part, card) for value, part in node.nodes.items()})
    functions = replace(node.functions, card=card)
    return replace(node, functions=functions, peaks=replace(node.peaks, functions=functions))


def all_borders(node: Node) -> Iterator[Border]:
    """Every border, from the first division on."""
    if isinstance(node, Fork):
        yield node.border
    for part in _parts(node):
        yield from all_borders(part)


def all_steps(node: Node) -> Iterator[Steps]:
    """Every argument that changes the structure with each value."""
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

    All traces are made inside a ``tracing()``; ``known`` were made before.
    """

    def __init__(
        self,
        trace: Callable[[Point], Trace],
        tracing: Callable[[], AbstractContextManager[None]],
        axes: Sequence[IntArray],
        card: GPU,
        settings: AllocatorSettings,
        known: Mapping[Point, Trace],
    ) -> None:
        self._trace = trace
        self._tracing = tracing
        self._axes = axes
        self._card = card
        self._settings = settings
        self._traces = dict(known)
        self._borders: list[Border] = []
        self._random = np.random.default_rng(0)

    def explore(self) -> Node:
        """The pieces, and the borders between them."""
        return self._enter(Region(self._axes))

    def _enter(self, region: Region) -> Node:
        with self._tracing():
            return self._explore(region)

    def _at(self, point: Point) -> Trace:
        found = self._traces.get(point)
        if found is None:
            found = self._traces[point] = self._trace(point)
        return found

    def _key(self, point: Point) -> bytes:
        return self._at(point).structure.key

    def _explore(self, region: Region) -> Node:
        known = [point for point in self._traces if point in region]
        ends, inside = region.extremes(), region.middles()
        enough = 2 + 2 * region.num_free  # points, so that neither polynomials nor one structure are found by chance
        points = list(dict.fromkeys([*ends[:2], *inside, *known]))
        points += [point for point in ends[2:] if point not in points][: max(enough - len(points), 0)]
        while True:
            if len({self._key(point) for point in points}) > 1:
                steps = self._find_steps(region)
                return steps or self._divide(region, points, self._key) or self._majority(region, points)
            fitted = self._fit(points, _NUM_SPARE)
            is_sure = not len(fitted.left) and len(points) >= enough
            if is_sure or len(points) >= _MOST_POINTS:
                return self._piece(region, points, fitted)
            fresh = region.draw(self._random, set(points))
            if fresh is None:
                return self._piece(region, points, self._fit(points, 0))
            points.append(fresh)

    def _at_step(self, region: Region, argument: int, value: int) -> Node:
        return self._enter(region.at(argument, value))

    def _find_steps(self, region: Region) -> Steps | None:
        """An argument whose first values, and the last, all make other structures at the lowest point."""
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
                return Steps(argument, partial(self._at_step, region, argument), {})
        return None

    def _divide(self, region: Region, points: list[Point], label: Callable[[Point], Hashable]) -> Node | None:
        """Both sides of a border between different labels; None if there is no simple one."""
        if len(self._traces) >= _MOST_TRACES:
            return None
        border = find_border(region, points, label, self._borders, self._random)
        if border is None:
            return None
        if border not in self._borders:
            self._borders.append(border)
        inside, outside = region.within(border, True), region.within(border, False)
        return Fork(border, self._explore(inside), self._explore(outside))

    def _majority(self, region: Region, points: list[Point]) -> Piece:
        """The piece of the most frequent structure, where no simple border divides it from the others."""
        keys = [self._key(point) for point in points]
        common = max(set(keys), key=keys.count)
        ours = [point for point, key in zip(points, keys, strict=True) if key == common]
        other = next(self._at(point) for point, key in zip(points, keys, strict=True) if key != common)
        piece = self._piece(region, ours, self._fit(ours, _NUM_SPARE))
        difference = piece.structure.difference(other.structure)
        text = f"what the function does changes with its arguments in a way that is not followed ({difference})"
        return replace(piece, assumptions=(*piece.assumptions, Assumption(text)))

    def _fit(self, points: list[Point], num_spare: int) -> _Fitted:
        columns = np.stack([self._at(point).numbers for point in points], axis=1)
        numbers, row = np.unique(columns, axis=0, return_inverse=True)
        polynomials, left = fit(_rows(points), numbers, num_spare)
        highest = np.array([axis[-1] for axis in self._axes], dtype=np.int64)
        return _Fitted(row.reshape(-1), polynomials.narrowed(highest), left)

    def _piece(self, region: Region, points: list[Point], fitted: _Fitted) -> Piece:
        traces = [self._at(point) for point in points]
        structure = traces[0].structure
        samples = _rows(region.sample(self._random, _NUM_SAMPLES))
        makers = structure.makers(fitted.row)
        functions, kind = SizeFunctions.of(fitted.polynomials, makers, self._card)
        unknown = set(fitted.left.tolist())
        inexact = np.array([at for at, (_, rows) in enumerate(makers) if not unknown.isdisjoint(rows)], dtype=np.int64)
        found = [assumption for trace in traces for assumption in trace.assumptions]
        return Piece(
            structure=structure,
            kind=kind,
            functions=functions,
            points=tuple(points),
            inexact=inexact,
            assumptions=tuple(dict.fromkeys([*found, *_said(structure, inexact)])),
            peaks=Peaks.learn(structure, kind, functions, samples, self._settings),
        )


@dataclass(frozen=True, eq=False)
class _Fitted:
    """The polynomial (row) of each number, and which of the polynomials are close only (``left``)."""

    row: IntArray
    polynomials: Polynomials
    left: IntArray


def _rows(points: Sequence[Point]) -> IntArray:
    return np.array(points, dtype=np.int64).reshape(len(points), -1)


def _said(structure: Structure, inexact: IntArray) -> Iterator[Assumption]:
    """Which sizes are not exact."""
    timeline = structure.timeline
    for operator, line in dict.fromkeys((int(timeline.operator[at]), int(timeline.line[at])) for at in inexact):
        text = f"some sizes of {timeline.operators[operator]} follow no polynomial of the arguments and are close only"
        yield Assumption(text, timeline.lines[line] if line else None)
