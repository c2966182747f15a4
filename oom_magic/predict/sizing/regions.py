"""Where a function behaves alike: the points of its arguments, borders between them, and how a border is found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product
from math import prod

import numpy as np

from oom_magic.language import _
from oom_magic.memory.timeline import IntArray

Point = tuple[int, ...]
BoolArray = np.ndarray  # of bool

_MOST_LISTED = 300_000  # points of a lattice that are listed; larger ones are sampled
_NUM_SAMPLED = 60_000
_BORDER_MODULI = (8, 16, 4, 2, 32, 64, 128)  # 8 first: what attention and 16-bit products are aligned to
_MOST_QUESTIONS = 60  # traces spent on one border
_NUM_CONFIRMATIONS = 2


@dataclass(frozen=True, slots=True)
class Border:
    """A condition on a point: a product of arguments is at most ``threshold``, or divisible by ``modulus``."""

    exponents: tuple[int, ...]
    threshold: int = 0
    modulus: int = 0

    def feature(self, points: IntArray) -> IntArray:
        """The product of arguments, at each point (one per row)."""
        feature: IntArray = np.prod(points ** np.array(self.exponents, dtype=np.int64), axis=1)
        return feature

    def holds(self, points: IntArray) -> BoolArray:
        """Whether the condition holds, at each point."""
        feature = self.feature(points)
        return feature % self.modulus == 0 if self.modulus else feature <= self.threshold

    def text(self, names: Sequence[str], holds: bool = True) -> str:
        """The condition, or its contrary, in words such as ``"batch_size x seq_len <= 3072"``."""
        factors = " x ".join(name for name, exponent in zip(names, self.exponents, strict=True) if exponent)
        if self.modulus:
            if holds:
                return _("{factors} a multiple of {modulus}", factors=factors, modulus=self.modulus)
            return _("{factors} not a multiple of {modulus}", factors=factors, modulus=self.modulus)
        return f"{factors} {'<=' if holds else '>'} {self.threshold}"


class Region:
    """The points of a lattice, of which ``axes`` are the values of each argument, that meet some conditions."""

    def __init__(self, axes: Sequence[IntArray], conditions: tuple[tuple[Border, bool], ...] = ()) -> None:
        self.axes = tuple(axes)
        self._draws_small = False
        self.conditions = conditions
        self.points = _list_points(self.axes)
        self.points = self.points[self._meets(self.points)]
        self.points = np.unique(np.concatenate([self.points, *self._at_borders()]), axis=0)

    def __contains__(self, point: Point) -> bool:
        """Whether a point meets all conditions of the region."""
        return bool(self._meets(np.array([point], dtype=np.int64))[0])

    def within(self, border: Border, holds: bool) -> Region:
        """The part in which the border's condition holds, or does not."""
        return Region(self.axes, (*self.conditions, (border, holds)))

    def at(self, argument: int, first: int, width: int) -> Region:
        """The part in which an argument has one of ``width`` values from the ``first`` on."""
        unit = tuple(int(argument == other) for other in range(len(self.axes)))
        return self.within(Border(unit, first + width - 1), True).within(Border(unit, first - 1), False)

    def num_values(self, argument: int) -> int:
        """How many values an argument has here."""
        return len(np.unique(self.points[:, argument]))

    @property
    def num_free(self) -> int:
        """How many of the arguments have several values here."""
        return sum(self.num_values(argument) > 1 for argument in range(len(self.axes)))

    def extremes(self) -> list[Point]:
        """Its corners, as far as it has some: the lowest, the highest, and where one argument is high."""
        spans = np.maximum(self.points.max(axis=0) - self.points.min(axis=0), 1)
        scaled = self.points / spans
        signs = [-np.ones(len(self.axes)), np.ones(len(self.axes)), *(2 * np.eye(len(self.axes)) - 1)]
        return list(dict.fromkeys(self._at(int((scaled @ sign).argmax())) for sign in signs))

    def middles(self) -> list[Point]:
        """Points inside: one just below round numbers and one just above, which tell apart what those are padded to."""
        logs = np.log2(self.points)
        low, high = logs.min(axis=0), logs.max(axis=0)
        found = []
        for off, part in ((-1, 0.4), (1, 0.7)):
            middle = low + part * (high - low)
            columns = [_roundest(axis, off, 2**at) for axis, at in zip(self.axes, middle, strict=True)]
            candidates = np.array(list(product(*columns)), dtype=np.int64).reshape(-1, len(self.axes))
            candidates = np.concatenate([candidates[self._meets(candidates)], self.points])
            score = sum(_roundness(column - off) for column in candidates.T) - np.abs(np.log2(candidates) - middle).sum(
                axis=1
            )
            found.append(tuple(candidates[int(score.argmax())].tolist()))
        return list(dict.fromkeys(found))

    def draw(self, random: np.random.Generator, known: Collection[Point]) -> Point | None:
        """A point that is not among the ``known``, in turn from everywhere and from the small; None: no more.

        With remainders that they do not have, which show what is padded or pooled, and odd if there is a choice.
        """
        small = 1 / np.prod(self.points.astype(np.float64), axis=1)
        self._draws_small = not self._draws_small
        weights = small / small.sum() if self._draws_small else None
        drawn = random.choice(len(self.points), 30, p=weights)
        fresh = [point for point in map(self._at, drawn.tolist()) if point not in known]
        if fresh:
            seen = {remainder for point in known for remainder in _remainders(point)}
            return max(fresh, key=lambda point: (len(_remainders(point) - seen), sum(number % 2 for number in point)))
        return next((point for point in map(tuple, self.points.tolist()) if point not in known), None)

    def sample(self, random: np.random.Generator, count: int) -> list[Point]:
        """Some points: corners first, then more among the small."""
        points = self.extremes()
        while len(points) < count and (point := self.draw(random, set(points))) is not None:
            points.append(point)
        return points

    def between(
        self, border: Border, low: int, high: int, pair: tuple[Point, Point], known: Container[Point]
    ) -> Point | None:
        """A point at which the border's feature lies strictly between: near the middle and the ``pair`` of points.

        Cases often end at a power of 2, and a dimension of 1 often is one of its own (it is broadcast, and always
        contiguous), so what follows a power of 2 is asked for first.
        """
        middle = low + 1 if low & (low - 1) == 0 else (low + high) // 2
        candidates = np.concatenate([self.points, *self._near(border, middle)])
        features = border.feature(candidates)
        inside = np.flatnonzero((features > low) & (features < high))
        if not len(inside):
            return None
        logs, ends = np.log(candidates[inside]), np.log(np.array(pair))
        away = np.abs(logs - np.clip(logs, ends.min(axis=0), ends.max(axis=0))).sum(axis=1)
        off = np.abs(features[inside] - middle) / (high - low)
        ranked = (tuple(candidates[inside[at]].tolist()) for at in np.argsort(away + off, kind="stable"))
        return next((point for point in ranked if point not in known), None)

    def beside(self, border: Border, holds: bool, known: set[Point], random: np.random.Generator) -> Point | None:
        """A point not among the ``known`` on one side of the border, near it."""
        side = self.points[border.holds(self.points) == holds]
        if border.modulus:
            off = border.feature(side) % (border.modulus // 2) + random.random(len(side))
        else:
            off = np.abs(border.feature(side) - border.threshold)
        nearest = [tuple(point) for point in side[np.argsort(off, kind="stable")[: len(known) + 20]].tolist()]
        fresh = [point for point in nearest if point not in known]
        return fresh[int(random.integers(len(fresh)))] if fresh else None

    def both_sides(
        self, border: Border, first: int, count: int, known: set[Point], random: np.random.Generator
    ) -> list[Point]:
        """So many points not among the ``known`` near the border, in turn on one and the other side of it."""
        found: list[Point] = []
        for at in range(first, first + count):
            point = self.beside(border, at % 2 == 0, {*known, *found}, random)
            if point is None:
                break
            found.append(point)
        return found

    def _near(self, border: Border, feature: int) -> Iterator[IntArray]:
        """Points of the region at which the border's feature is close to ``feature``: one argument solved for."""
        rows = self.points[:: max(len(self.points) // 2000, 1)]
        for argument, exponent in enumerate(border.exponents):
            if not exponent:
                continue
            rest = border.feature(rows) // rows[:, argument]
            axis = self.axes[argument]
            at = np.searchsorted(axis, feature / rest)
            for shift in (-1, 0):
                solved = rows.copy()
                solved[:, argument] = axis[np.clip(at + shift, 0, len(axis) - 1)]
                yield solved[self._meets(solved)]

    def _at_borders(self) -> Iterator[IntArray]:
        """Points close to the borders, which a sample of a large lattice may miss."""
        for border, _unused in self.conditions:
            if not border.modulus:
                yield from self._near(border, border.threshold)
                yield from self._near(border, border.threshold + 1)

    def _meets(self, points: IntArray) -> BoolArray:
        meets = np.ones(len(points), dtype=bool)
        for border, holds in self.conditions:
            meets &= border.holds(points) == holds
        return meets

    def _at(self, index: int) -> Point:
        return tuple(self.points[index].tolist())


def _remainders(point: Point) -> set[tuple[int, int, int]]:
    """Each argument's remainder (argument, modulus, remainder) modulo small powers of 2."""
    return {(argument, modulus, number % modulus) for argument, number in enumerate(point) for modulus in (2, 4, 8)}


def _roundness(numbers: IntArray) -> IntArray:
    """The power of 2 in each number, up to 10."""
    return sum((numbers % 2**power == 0) & (numbers > 0) for power in range(1, 11))


def _roundest(axis: IntArray, off: int, middle: float) -> IntArray:
    """Some values of ``axis`` that are ``off`` a round number, around ``middle``."""
    return axis[np.argsort(np.abs(np.log2(axis / middle)) - _roundness(axis - off), kind="stable")[:4]]


def _list_points(axes: tuple[IntArray, ...]) -> IntArray:
    """All points of a lattice, or a sample of a large one: corners, evenly spread points, more small ones."""
    count = 1
    for axis in axes:
        count *= len(axis)
    if not axes:
        return np.empty((1, 0), dtype=np.int64)
    if count <= _MOST_LISTED:
        return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
    random = np.random.default_rng(0)
    even = np.stack([random.choice(axis, _NUM_SAMPLED) for axis in axes], axis=1)
    small = np.stack([axis[(len(axis) ** random.random(_NUM_SAMPLED)).astype(int) - 1] for axis in axes], axis=1)
    corners = np.array(list(product(*(sorted({axis[0], axis[-1]}) for axis in axes))))
    return np.unique(np.concatenate([corners, even, small]), axis=0)


def find_border(
    region: Region,
    points: Sequence[Point],
    label_of: Callable[[Point], Hashable],
    known: Sequence[Border],
    random: np.random.Generator,
    expect: Callable[[Sequence[Point]], None] = lambda _: None,
) -> Border | None:
    """A border between two of the labels that ``points`` have, exact on the region's lattice; None: no simple one.

    Asks for the labels of further points; ``expect`` is told of several that will be asked for if nothing surprises.
    Borders that are ``known`` from elsewhere are tried first.
    """
    confirmed, questions = None, list[Point]()
    labels = {point: label_of(point) for point in points}
    num_labels = len(set(labels.values()))
    guess: tuple[tuple[int, ...], int] | None = None
    num_confirmed = 0
    for _unused in range(_MOST_QUESTIONS):
        pair, border, low, high = _best_hypothesis(labels, known, by_support=len(set(labels.values())) == num_labels)
        if guess != (border.exponents, border.modulus):
            guess, num_confirmed = (border.exponents, border.modulus), 0
        is_exact = border.modulus > 0 or border in known
        question = None if is_exact else region.between(border, low, high, pair, labels)
        if question is None:
            num_left = _NUM_CONFIRMATIONS * (1 + (border.modulus > 0)) - num_confirmed
            if border != confirmed:
                confirmed, questions = border, region.both_sides(border, num_confirmed, num_left, set(labels), random)
                expect(questions)
            if not questions or not num_left:
                return border
            question = questions.pop(0)
            num_confirmed += 1
        labels[question] = label_of(question)
    return None


def _best_hypothesis(
    labels: dict[Point, Hashable], known: Sequence[Border], *, by_support: bool
) -> tuple[tuple[Point, Point], Border, int, int]:
    """A border that divides the points of two labels, and the closest two of those points.

    One that has each label wholly on one side comes first: else parts of one label would be looked at apart. By support
    a border between frequent labels comes first: it is more likely one of the whole region. If no border divides the
    points of any two labels, it is one between the closest two points.
    """
    by_label: dict[Hashable, list[Point]] = {}
    for point, label in labels.items():
        by_label.setdefault(label, []).append(point)
    ranked = []
    for ones, others in combinations(by_label.values(), 2):
        (num_differing, factor), pair = min((_distance(*pair), pair) for pair in product(ones, others))
        support = min(len(ones), len(others)) if by_support else 0
        ranked.append((num_differing, -support, factor, pair))
    ranked.sort()
    simplest = []
    for *_unused, pair in ranked:
        ones, others = (by_label[labels[point]] for point in pair)
        simplest += [(pair, *found) for found in islice(_hypotheses(np.array(ones), np.array(others), known), 1)]
    if simplest:
        return min(simplest, key=lambda found: sum(_splits(found[1], points) for points in by_label.values()))
    one, other = ranked[0][-1]
    return (one, other), *next(_hypotheses(np.array([one]), np.array([other]), known))


def _distance(one: Point, other: Point) -> tuple[int, float]:
    """The number of arguments in which two points differ, and by what factor."""
    ratios = [max(a, b) / min(a, b) for a, b in zip(one, other, strict=True) if a != b]
    return len(ratios), prod(ratios)


def products(num_arguments: int) -> list[tuple[int, ...]]:
    """The exponents of every product of arguments, the simplest first."""
    exponents = product((0, 1), repeat=num_arguments)
    return sorted(exponents, key=lambda item: (sum(item), item[::-1]))[1:]


def _hypotheses(ones: IntArray, others: IntArray, known: Sequence[Border]) -> Iterator[tuple[Border, int, int]]:
    """Borders that divide the points, the simplest first; a threshold's feature lies in [low, high)."""
    for border in known:
        if _divides(border, ones, others):
            yield border, 0, 0
    for exponents in products(ones.shape[1]):
        border = Border(exponents)
        of_ones, of_others = border.feature(ones), border.feature(others)
        for low, high in ((of_ones.max(), of_others.min()), (of_others.max(), of_ones.min())):
            if low < high:
                yield Border(exponents, threshold=int(low)), int(low), int(high)
    for exponents in products(ones.shape[1])[: ones.shape[1]]:
        for modulus in _BORDER_MODULI:
            border = Border(exponents, modulus=modulus)
            if _divides(border, ones, others):
                yield border, 0, 0


def _splits(border: Border, points: list[Point]) -> bool:
    """Whether points of one label lie on both sides: then each side would have to be divided again."""
    holds = border.holds(np.array(points))
    return bool(holds.any() and not holds.all())


def _divides(border: Border, ones: IntArray, others: IntArray) -> bool:
    of_ones, of_others = border.holds(ones), border.holds(others)
    return bool((of_ones.all() and not of_others.any()) or (of_others.all() and not of_ones.any()))
