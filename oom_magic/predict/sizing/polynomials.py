"""The sizes of a piece as functions of a point: polynomials, and size functions of kernels applied to polynomials.

Dimensions may be quotients of others: pooled, strided, padded or cut up. The shapes of tensors show them. Each is one
step from an argument or from another dimension, such as ``(n + 1) // 2`` after a pooling and half of that after the
next, so chains are found link by link.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from itertools import combinations, product
from math import lcm

import numpy as np

from oom_magic.memory.timeline import IntArray
from oom_magic.predict.instrumentation.recorder import SizeFunction
from oom_magic.predict.setups.gpus import GPU

_STRIDES = tuple(range(2, 33))  # with any shift: kernel and padding of a convolution decide it
_ALIGNMENTS = (48, 64, 80, 96, 128, 160, 256, 320, 512, 1024)  # rounded up or down


@dataclass(frozen=True, slots=True)
class Monomial:
    """A product of powers of the arguments, and of powers of quotients."""

    exponents: tuple[int, ...]
    quotients: tuple[tuple[Quotient, int], ...] = ()

    def values(self, points: IntArray) -> IntArray:
        """The values at ``points`` (one per row)."""
        values: IntArray = np.prod(points ** np.array(self.exponents, dtype=np.int64), axis=1)
        for quotient, exponent in self.quotients:
            values = values * quotient.values(points) ** exponent
        return values

    def bound(self, highest: IntArray) -> int:
        """An upper bound of its value at all points up to ``highest``."""
        value = 1
        for argument, exponent in zip(highest.tolist(), self.exponents, strict=True):
            value *= argument**exponent
        for quotient, exponent in self.quotients:
            value *= quotient.bound(highest) ** exponent
        return value

    def times(self, quotient: Quotient, exponent: int) -> Monomial:
        """The product with a power of a quotient."""
        return Monomial(self.exponents, (*self.quotients, (quotient, exponent))) if exponent else self


Terms = Mapping[Monomial, Fraction]


@dataclass(frozen=True, slots=True)
class Quotient:
    """How often ``modulus`` goes into a sum of ``terms`` (monomials and their factors).

    Padding to multiples of 8 is ``(n + 7) // 8``, pooling by 2 ``n // 2``, a convolution with a stride likewise.
    """

    terms: tuple[tuple[Monomial, int], ...]
    modulus: int

    @classmethod
    def up(cls, exponents: tuple[int, ...], modulus: int) -> Quotient:
        """The number of multiples of ``modulus`` to which a product of powers is padded."""
        constant = Monomial((0,) * len(exponents))
        return cls(((Monomial(exponents), 1), (constant, modulus - 1)), modulus)

    def values(self, points: IntArray) -> IntArray:
        """The values at ``points`` (one per row)."""
        parts = [factor * monomial.values(points) for monomial, factor in self.terms]
        values: IntArray = np.sum(parts, axis=0) // self.modulus
        return values

    def bound(self, highest: IntArray) -> int:
        """An upper bound of its magnitude at all points up to ``highest``."""
        return sum(abs(factor) * monomial.bound(highest) for monomial, factor in self.terms) // self.modulus + 1


Family = tuple[Monomial, ...]

MODULI = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_LARGEST = 2**62  # of what int64 holds
_LARGEST_DENOMINATOR = 4 * MODULI[-1]
_FLOAT_ERROR = 1e-7  # of a size; a family that misses by more is not tried exactly


@dataclass(frozen=True, eq=False)
class Polynomials:
    """U polynomials over M monomials: ``numerators`` (U x M) over ``denominators`` (U)."""

    monomials: tuple[Monomial, ...]
    numerators: IntArray
    denominators: IntArray

    def __call__(self, points: IntArray) -> IntArray:
        """The sizes (U x P) at P points, one per row."""
        points = points.astype(self.numerators.dtype)
        quotients = [quotient.values(points) for quotient in self._quotients]
        variables = np.column_stack([points, *quotients]) if quotients else points
        values = np.prod(variables[None] ** self._exponents[:, None], axis=2)
        sizes: IntArray = (self.numerators @ values // self.denominators[:, None]).astype(np.int64)
        return sizes

    def narrowed(self, highest: IntArray) -> Polynomials:
        """The polynomials in 64-bit integers, if these cannot overflow up to the point ``highest``."""
        tops = [abs(monomial.bound(highest)) for monomial in self.monomials]
        sums = (sum(abs(n) * top for n, top in zip(row, tops, strict=True)) for row in self.numerators)
        if max(sums, default=0) > _LARGEST:
            return self
        return Polynomials(self.monomials, self.numerators.astype(np.int64), self.denominators.astype(np.int64))

    @cached_property
    def _quotients(self) -> tuple[Quotient, ...]:
        return tuple(dict.fromkeys(quotient for monomial in self.monomials for quotient, _ in monomial.quotients))

    @cached_property
    def _exponents(self) -> IntArray:
        """For each monomial, the power of each argument and quotient (M x variables)."""
        rows = []
        for monomial in self.monomials:
            powers = dict(monomial.quotients)
            rows.append([*monomial.exponents, *(powers.get(quotient, 0) for quotient in self._quotients)])
        return np.array(rows, dtype=self.numerators.dtype)


def solve(
    points: IntArray, sizes: IntArray, spare: int, families: Iterable[Family]
) -> dict[int, dict[Monomial, Fraction]]:
    """The terms of polynomials through ``sizes`` (U x P) at ``points`` (P x k), by row; rows without one are left out.

    Each row gets the first of the ``families`` that hits all points, ``spare`` of them and more for large families
    beyond what determines it.
    """
    found: dict[int, dict[Monomial, Fraction]] = {}
    left = np.arange(len(sizes))
    for family in families:
        if not len(left):
            break
        if len(family) + spare + len(family) // 3 > len(points):
            continue
        hits = _through(family, points, sizes[left])
        found.update({int(left[row]): terms for row, terms in hits.items()})
        left = np.array([row for position, row in enumerate(left) if position not in hits], dtype=np.int64)
    return found


def assemble(
    points: IntArray, sizes: IntArray, found: Mapping[int, Mapping[Monomial, Fraction]]
) -> tuple[Polynomials, IntArray]:
    """The polynomials of all rows of ``sizes``, and which were not ``found``: those come close (least squares)."""
    left = np.array([row for row in range(len(sizes)) if row not in found], dtype=np.int64)
    close = {int(row): _close(points, sizes[row]) for row in left}
    return _assemble({**found, **close}, len(sizes), points.shape[1]), left


def _close(points: IntArray, sizes: IntArray) -> dict[Monomial, Fraction]:
    """The polynomial, linear in each argument, that fits ``sizes`` at ``points`` best (least squares)."""
    family = _box(dict.fromkeys(range(points.shape[1]), 1), points.shape[1])
    values = np.stack([monomial.values(points) for monomial in family], axis=1).astype(np.float64)
    terms = np.linalg.lstsq(values, sizes.astype(np.float64), rcond=None)[0]
    return {monomial: Fraction(round(term * 1024), 1024) for monomial, term in zip(family, terms.tolist(), strict=True)}


def _through(family: Sequence[Monomial], points: IntArray, sizes: IntArray) -> dict[int, dict[Monomial, Fraction]]:
    """The rows of ``sizes`` that the family fits at all points exactly, with their coefficients."""
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
    """The inverse of a square submatrix of ``values`` (P x M, rank M), and the rows of that submatrix."""
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


def _assemble(found: Mapping[int, Mapping[Monomial, Fraction]], num_rows: int, num_arguments: int) -> Polynomials:
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
def plain_families(num_arguments: int) -> tuple[Family, ...]:
    """Monomials of dimensions that are not padded, pooled or cut up; families with few monomials first."""
    return tuple(family for family in families(num_arguments) if not any(monomial.quotients for monomial in family))


@cache
def families(num_arguments: int) -> tuple[Family, ...]:
    """The monomials that a size may consist of; families with few monomials first."""
    found = [
        family
        for count in range(num_arguments + 1)
        for used in combinations(range(num_arguments), count)
        for family in _families_of(used, num_arguments)
    ]
    return tuple(sorted(dict.fromkeys([*_sparse(num_arguments), *found]), key=len))


def _sparse(num_arguments: int) -> Iterator[Family]:
    """One product of powers; nested ones as (seq_len - 1) * batch_size; attention between an image's parts; padding."""
    powers = sorted(product(range(3), repeat=num_arguments), key=lambda exponents: (sum(exponents), exponents[::-1]))
    for exponents in powers:
        yield (Monomial(exponents),)
    for part, whole in combinations(powers, 2):
        if all(a <= b for a, b in zip(part, whole, strict=True)):
            yield Monomial(part), Monomial(whole)
    for exponents, argument in product(powers, range(num_arguments)):
        if exponents[argument] == 0:
            yield tuple(_raised(exponents, argument, by) for by in (0, 2, 4))
    for modulus, argument in product(MODULI, range(num_arguments)):
        padded = Quotient.up(_unit(argument, num_arguments), modulus)
        for exponents in (exponents for exponents in powers if exponents[argument] < 2):
            yield (Monomial(exponents).times(padded, 1),)
            yield (Monomial(exponents).times(padded, 2),)


def families_with(quotients: Sequence[Quotient], num_arguments: int) -> list[Family]:
    """Families with one of the quotients, as a length or as the side of an image, or with two."""
    powers = sorted(product(range(3), repeat=num_arguments), key=lambda exponents: (sum(exponents), exponents[::-1]))
    found: list[Family] = []
    for rest, one in product(map(Monomial, powers), quotients):
        sums = ((1,), (2,), (1, 0), (2, 0), (2, 1, 0), (4, 2, 0))
        found += [tuple(rest.times(one, exponent) for exponent in exponents) for exponents in sums]
    for rest, (one, other) in product(map(Monomial, powers), combinations(quotients, 2)):
        both = rest.times(one, 1).times(other, 1)
        found += [(both,), (both, rest.times(one, 1), rest.times(other, 1), rest)]
    return sorted(found, key=len)


def _families_of(used: tuple[int, ...], num_arguments: int) -> Iterator[Family]:
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
            padded = Quotient.up(_unit(argument, num_arguments), modulus)
            rest = {other: 1 for other in used if other != argument}
            linear, square, others = (_box(degrees, num_arguments) for degrees in (ones, {**ones, argument: 2}, rest))
            yield _padded(linear, others, padded)
            yield _padded(square, linear, padded, others)
        if len(used) > 1:
            padded = Quotient.up(tuple(int(argument in used) for argument in range(num_arguments)), modulus)
            yield _padded(_box(ones, num_arguments), _box({}, num_arguments), padded)


def _box(degrees: dict[int, int], num_arguments: int) -> tuple[Monomial, ...]:
    """All monomials in which each argument has at most its degree."""
    powers = product(*(range(degrees.get(argument, 0) + 1) for argument in range(num_arguments)))
    return tuple(Monomial(exponents) for exponents in powers)


def _padded(
    plain: tuple[Monomial, ...], once: tuple[Monomial, ...], padded: Quotient, twice: tuple[Monomial, ...] = ()
) -> tuple[Monomial, ...]:
    """A family with some of its monomials times what is padded, and some times its square."""
    return (
        *plain,
        *(monomial.times(padded, 1) for monomial in once),
        *(monomial.times(padded, 2) for monomial in twice),
    )


def _raised(exponents: tuple[int, ...], argument: int, by: int) -> Monomial:
    return Monomial(tuple(power + by * (at == argument) for at, power in enumerate(exponents)))


def _unit(argument: int, num_arguments: int) -> tuple[int, ...]:
    return tuple(int(argument == other) for other in range(num_arguments))


@dataclass(frozen=True, eq=False)
class SizeFunctions:
    """Sizes in bytes on ``card``: first the polynomials ``plain``, then what each size function makes of its rows."""

    polynomials: Polynomials
    plain: IntArray
    size_functions: tuple[tuple[SizeFunction, tuple[int, ...]], ...]
    card: GPU

    @classmethod
    def of(
        cls, polynomials: Polynomials, makers: Sequence[tuple[SizeFunction | None, tuple[int, ...]]], card: GPU
    ) -> tuple[SizeFunctions, IntArray]:
        """The functions of allocations, each by its size function (or None) and polynomials; which of them each has."""
        plain = dict.fromkeys(rows[0] for size_function, rows in makers if size_function is None)
        computed = dict.fromkeys((size_function, rows) for size_function, rows in makers if size_function is not None)
        number: dict[tuple[SizeFunction | None, tuple[int, ...]], int] = {
            (None, (row,)): at for at, row in enumerate(plain)
        }
        number.update({maker: at for at, maker in enumerate(computed, len(plain))})
        functions = cls(polynomials, np.array(list(plain), dtype=np.int64), tuple(computed), card)
        return functions, np.array([number[maker] for maker in makers], dtype=np.int64)

    def __call__(self, points: IntArray) -> IntArray:
        """The sizes (functions x points) at points, one per row."""
        values = self.polynomials(points)
        computed = [self._by_function(size_function, values[list(rows)]) for size_function, rows in self.size_functions]
        return np.concatenate([values[self.plain], *(row[None] for row in computed)])

    def _by_function(self, size_function: SizeFunction, numbers: IntArray) -> IntArray:
        """A function's sizes for each column of ``numbers``."""
        columns = list(zip(*numbers.tolist(), strict=True)) or [()] * numbers.shape[1]
        known = {column: max(size_function(self.card, *column), 0) for column in dict.fromkeys(columns)}
        return np.array([known[column] for column in columns], dtype=np.int64)


@dataclass(frozen=True)
class Dimension:
    """A dimension of tensors: a sum of ``terms``, and its ``values`` at the traced points."""

    terms: Terms
    values: IntArray


@dataclass(frozen=True)
class FoundQuotients:
    """Quotients, and a point that decides between two explanations of a dimension (None: not needed)."""

    quotients: tuple[Quotient, ...]
    doubt: int | None


def find_quotients(known: list[Dimension], left: IntArray, lattice: IntArray) -> FoundQuotients:
    """What makes of ``known`` dimensions those that are ``left`` (one per row); the doubt is a row of ``lattice``."""
    known, found, doubt = list(known), dict[Quotient, None](), None
    rows = [row for row in left if len(np.unique(row)) > 1]
    while rows:
        explained = [(row, next(_explanations(known, row), None)) for row in rows]
        rows = [row for row, candidates in explained if candidates is None]
        if len(rows) == len(explained):
            break
        for row, candidates in explained:
            if candidates is None:
                continue
            quotient, terms = candidates[0]
            found[quotient] = None
            known.append(Dimension(terms, row))
            if doubt is None:
                doubt = _telling(candidates, lattice)
    return FoundQuotients(tuple(found), doubt)


def _explanations(known: list[Dimension], row: IntArray) -> Iterator[list[tuple[Quotient, Terms]]]:
    """For each known dimension that explains a row, its explanations, the smallest modulus first."""
    steps = [(modulus, shift) for modulus in _STRIDES for shift in range(modulus)]
    steps += [(modulus, shift) for modulus in _ALIGNMENTS for shift in (0, modulus - 1)]
    moduli, shifts = np.array(steps, dtype=np.int64).T
    low, high = int(row.argmin()), int(row.argmax())
    for dimension in known:
        quotients = (dimension.values[None] + shifts[:, None]) // moduli[:, None]
        rise = quotients[:, high] - quotients[:, low]
        factors = np.where(rise > 0, (row[high] - row[low]) // np.maximum(rise, 1), 0)
        rests = row[None] - factors[:, None] * quotients
        fits = np.flatnonzero((factors > 0) & (rests == rests[:, :1]).all(axis=1))
        if len(fits):
            yield [_made(dimension, *steps[at], int(factors[at]), int(rests[at, 0])) for at in fits.tolist()]


def _made(inner: Dimension, modulus: int, shift: int, factor: int, rest: int) -> tuple[Quotient, Terms]:
    """The quotient of a dimension, and the dimension that has it ``factor`` times and ``rest`` more."""
    constant = Monomial((0,) * len(next(iter(inner.terms)).exponents))
    denominator = lcm(*(term.denominator for term in inner.terms.values()))
    terms = {monomial: int(term * denominator) for monomial, term in inner.terms.items()}
    terms[constant] = terms.get(constant, 0) + shift * denominator
    quotient = Quotient(tuple(terms.items()), modulus * denominator)
    return quotient, {constant.times(quotient, 1): Fraction(factor), constant: Fraction(rest)}


def _telling(candidates: list[tuple[Quotient, Terms]], lattice: IntArray) -> int | None:
    """The row of ``lattice`` at which most explanations differ from the first, unless all do; None: none does."""
    first, *others = (
        sum(int(term) * monomial.values(lattice) for monomial, term in terms.items()) for _, terms in candidates
    )
    shares = np.mean([other != first for other in others], axis=0) if others else np.zeros(1)
    return int(np.minimum(shares, 1 - shares + 1e-9).argmax()) if shares.any() else None
