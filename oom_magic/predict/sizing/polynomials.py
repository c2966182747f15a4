"""Sizes as exact polynomials in the arguments of a function.

A size is a product of dimensions and a dimension an affine term of the arguments, so a size is a polynomial of small
degree with whole coefficients. Kernels that pad a dimension to a multiple, or cut it into tiles, add one term: what is
missing to the next multiple. All arithmetic is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from itertools import combinations, product
from math import lcm

import numpy as np

from oom_magic.memory.timeline import IntArray

MODULI = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_LARGEST = 2**62  # of what int64 holds
_LARGEST_DENOMINATOR = 4 * MODULI[-1]
_FLOAT_ERROR = 1e-7  # of a size; a family that misses by more is not tried exactly


@dataclass(frozen=True, slots=True)
class Padding:
    """What the product of some arguments (by their exponents) lacks to a multiple of ``modulus``."""

    exponents: tuple[int, ...]
    modulus: int

    def values(self, points: IntArray) -> IntArray:
        """At each of ``points`` (one per row)."""
        lacking: IntArray = -np.prod(points ** np.array(self.exponents, dtype=np.int64), axis=1) % self.modulus
        return lacking


@dataclass(frozen=True, slots=True)
class Monomial:
    """A product of powers of the arguments and, at most, of one padding."""

    exponents: tuple[int, ...]
    padding: Padding | None = None
    padding_exponent: int = 0

    def values(self, points: IntArray) -> IntArray:
        """At each of ``points`` (one per row)."""
        values: IntArray = np.prod(points ** np.array(self.exponents, dtype=np.int64), axis=1)
        if self.padding is not None:
            values = values * self.padding.values(points) ** self.padding_exponent
        return values

    def bound(self, highest: IntArray) -> int:
        """At least its value anywhere up to the point ``highest``."""
        value = 1
        for argument, exponent in zip(highest.tolist(), self.exponents, strict=True):
            value *= argument**exponent
        return value if self.padding is None else value * self.padding.modulus**self.padding_exponent


@dataclass(frozen=True, eq=False)
class Polynomials:
    """U polynomials over M monomials: ``numerators`` (U x M) over ``denominators`` (U)."""

    monomials: tuple[Monomial, ...]
    numerators: IntArray
    denominators: IntArray

    def __call__(self, points: IntArray) -> IntArray:
        """The sizes (U x P) at P points, one per row."""
        points = points.astype(self.numerators.dtype)
        paddings = [padding.values(points) for padding in self._paddings]
        variables = np.column_stack([points, *paddings]) if paddings else points
        values = np.prod(variables[None] ** self._exponents[:, None], axis=2)
        sizes: IntArray = (self.numerators @ values // self.denominators[:, None]).astype(np.int64)
        return sizes

    def narrowed(self, highest: IntArray) -> Polynomials:
        """The same in 64-bit numbers, if those hold all that can occur up to the point ``highest``."""
        tops = [abs(monomial.bound(highest)) for monomial in self.monomials]
        sums = (sum(abs(n) * top for n, top in zip(row, tops, strict=True)) for row in self.numerators)
        if max(sums, default=0) > _LARGEST:
            return self
        return Polynomials(self.monomials, self.numerators.astype(np.int64), self.denominators.astype(np.int64))

    @cached_property
    def _paddings(self) -> tuple[Padding, ...]:
        return tuple(dict.fromkeys(monomial.padding for monomial in self.monomials if monomial.padding is not None))

    @cached_property
    def _exponents(self) -> IntArray:
        """For each monomial, the power of each argument and padding (M x variables)."""
        rows = []
        for monomial in self.monomials:
            of_paddings = [monomial.padding_exponent * (padding == monomial.padding) for padding in self._paddings]
            rows.append([*monomial.exponents, *of_paddings])
        return np.array(rows, dtype=self.numerators.dtype)


def fit(points: IntArray, sizes: IntArray, spare: int) -> tuple[Polynomials, IntArray]:
    """Polynomials through ``sizes`` (U x P) at ``points`` (P x k), and which rows found none.

    Each row gets the simplest family that hits all points, ``spare`` of them and more for large families beyond what
    determines it. A row without one gets close (least squares).
    """
    found: dict[int, dict[Monomial, Fraction]] = {}
    left = np.arange(len(sizes))
    for family in _families(points.shape[1]):
        if not len(left):
            break
        if len(family) + spare + len(family) // 3 > len(points):
            continue
        hits = _through(family, points, sizes[left])
        found.update({int(left[row]): terms for row, terms in hits.items()})
        left = np.array([row for position, row in enumerate(left) if position not in hits], dtype=np.int64)
    found.update({int(row): _close(points, sizes[row]) for row in left})
    return _assemble(found, len(sizes), points.shape[1]), left


def _close(points: IntArray, sizes: IntArray) -> dict[Monomial, Fraction]:
    """A polynomial, linear in each argument, that comes close to ``sizes`` at ``points``."""
    family = _box(dict.fromkeys(range(points.shape[1]), 1), points.shape[1])
    values = np.stack([monomial.values(points) for monomial in family], axis=1).astype(np.float64)
    terms = np.linalg.lstsq(values, sizes.astype(np.float64), rcond=None)[0]
    return {monomial: Fraction(round(term * 1024), 1024) for monomial, term in zip(family, terms.tolist(), strict=True)}


def _through(family: Sequence[Monomial], points: IntArray, sizes: IntArray) -> dict[int, dict[Monomial, Fraction]]:
    """The rows of ``sizes`` that the family hits at all points, with their coefficients."""
    values = np.stack([monomial.values(points) for monomial in family], axis=1)
    scale = values.max(axis=0, initial=1).clip(1).astype(np.float64)
    solution, _, rank, _ = np.linalg.lstsq(values / scale, sizes.T.astype(np.float64), rcond=1e-12)
    if rank < len(family):
        return {}
    misses = np.abs(values / scale @ solution - sizes.T).max(axis=0)
    close = np.flatnonzero(misses <= _FLOAT_ERROR * np.abs(sizes).max(axis=1).clip(1))
    if not len(close):
        return {}
    inverse, rows = _invert(values)
    if inverse is None:
        return {}
    hits: dict[int, dict[Monomial, Fraction]] = {}
    exact = values.astype(object)
    for row in close.tolist():
        target = [int(size) for size in sizes[row]]
        terms = [sum(a * target[at] for a, at in zip(line, rows, strict=True)) for line in inverse]
        denominator = lcm(*(Fraction(term).denominator for term in terms))
        if denominator > _LARGEST_DENOMINATOR:
            continue
        whole = np.array([int(term * denominator) for term in terms], dtype=object)
        if (exact @ whole == np.array(target, dtype=object) * denominator).all():
            hits[row] = {monomial: Fraction(term) for monomial, term in zip(family, terms, strict=True) if term}
    return hits


def _invert(values: IntArray) -> tuple[list[list[Fraction]] | None, list[int]]:
    """The inverse of a square part of ``values`` (P x M, rank M), and the rows of that part."""
    num_columns = values.shape[1]
    rows: list[int] = []
    reduced: list[tuple[int, list[Fraction]]] = []  # pivot column, row followed by what made it
    for at, line in enumerate(values.tolist()):
        if len(rows) == num_columns:
            break
        maker = [Fraction(int(len(rows) == column)) for column in range(num_columns)]
        row = [Fraction(value) for value in line] + maker
        for pivot, other in reduced:
            if row[pivot]:
                factor = row[pivot]
                row = [a - factor * b for a, b in zip(row, other, strict=True)]
        pivots = [column for column in range(num_columns) if row[column]]
        if pivots:
            rows.append(at)
            row = [value / row[pivots[0]] for value in row]
            reduced = [(pivot, _cleared(other, row, pivots[0])) for pivot, other in reduced]
            reduced.append((pivots[0], row))
    if len(rows) < num_columns:
        return None, []
    return [row[num_columns:] for _, row in sorted(reduced, key=lambda item: item[0])], rows


def _cleared(row: list[Fraction], by: list[Fraction], column: int) -> list[Fraction]:
    factor = row[column]
    return [a - factor * b for a, b in zip(row, by, strict=True)] if factor else row


def _assemble(found: dict[int, dict[Monomial, Fraction]], num_rows: int, num_arguments: int) -> Polynomials:
    constant = Monomial((0,) * num_arguments)
    monomials = tuple(dict.fromkeys([constant, *(monomial for terms in found.values() for monomial in terms)]))
    column = {monomial: position for position, monomial in enumerate(monomials)}
    numerators = np.zeros((num_rows, len(monomials)), dtype=object)
    denominators = np.ones(num_rows, dtype=object)
    for row, terms in found.items():
        denominators[row] = lcm(*(term.denominator for term in terms.values())) if terms else 1
        for monomial, term in terms.items():
            numerators[row, column[monomial]] = int(term * denominators[row])
    return Polynomials(monomials, numerators, denominators)


@cache
def _families(num_arguments: int) -> tuple[tuple[Monomial, ...], ...]:
    """What a size may be made of, the fewest monomials first."""
    families = [
        family
        for count in range(num_arguments + 1)
        for used in combinations(range(num_arguments), count)
        for family in _families_of(used, num_arguments)
    ]
    return tuple(sorted(dict.fromkeys([*_sparse(num_arguments), *families]), key=len))


def _sparse(num_arguments: int) -> Iterator[tuple[Monomial, ...]]:
    """One product of powers; two of which one is in the other, such as (seq_len - 1) * batch_size; one padded."""
    powers = sorted(product(range(3), repeat=num_arguments), key=lambda exponents: (sum(exponents), exponents[::-1]))
    for exponents in powers:
        yield (Monomial(exponents),)
    for part, whole in combinations(powers, 2):
        if all(a <= b for a, b in zip(part, whole, strict=True)):
            yield Monomial(part), Monomial(whole)
    for modulus, argument in product(MODULI, range(num_arguments)):
        padding = Padding(_unit(argument, num_arguments), modulus)
        for exponents in (exponents for exponents in powers if exponents[argument] < 2):
            more, most = (tuple(power + by * (at == argument) for at, power in enumerate(exponents)) for by in (1, 2))
            yield Monomial(more), Monomial(exponents, padding, 1)
            yield Monomial(most), Monomial(more, padding, 1), Monomial(exponents, padding, 2)


def _families_of(used: tuple[int, ...], num_arguments: int) -> Iterator[tuple[Monomial, ...]]:
    """Families in which exactly the arguments ``used`` may occur."""
    ones = dict.fromkeys(used, 1)
    yield _box(ones, num_arguments)
    for argument in used:
        yield _box({**ones, argument: 2}, num_arguments)
    if len(used) > 1:
        yield _box(dict.fromkeys(used, 2), num_arguments)
    for argument in used:
        yield _box({**ones, argument: 3}, num_arguments)
    for modulus in MODULI:
        for argument in used:
            padding = Padding(_unit(argument, num_arguments), modulus)
            rest = {other: 1 for other in used if other != argument}
            linear, square, others = (_box(degrees, num_arguments) for degrees in (ones, {**ones, argument: 2}, rest))
            yield _padded(linear, others, padding)
            yield _padded(square, linear, padding, others)
        if len(used) > 1:
            padding = Padding(tuple(int(argument in used) for argument in range(num_arguments)), modulus)
            yield _padded(_box(ones, num_arguments), _box({}, num_arguments), padding)


def _box(degrees: dict[int, int], num_arguments: int) -> tuple[Monomial, ...]:
    """All monomials in which each argument has at most its degree."""
    powers = product(*(range(degrees.get(argument, 0) + 1) for argument in range(num_arguments)))
    return tuple(Monomial(exponents) for exponents in powers)


def _padded(
    plain: tuple[Monomial, ...], once: tuple[Monomial, ...], padding: Padding, twice: tuple[Monomial, ...] = ()
) -> tuple[Monomial, ...]:
    """A family with some of its monomials times the padding, and some times its square."""
    return (
        *plain,
        *(Monomial(monomial.exponents, padding, 1) for monomial in once),
        *(Monomial(monomial.exponents, padding, 2) for monomial in twice),
    )


def _unit(argument: int, num_arguments: int) -> tuple[int, ...]:
    return tuple(int(argument == other) for other in range(num_arguments))
