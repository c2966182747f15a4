"""Dimensions that are quotients of others: pooled, strided, padded or cut up.

The shapes of tensors show them. Each is one step from an argument or from another dimension, such as
``(n + 1) // 2`` after a pooling and half of that after the next, so chains are found link by link.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np

from oom_magic.memory.timeline import IntArray
from oom_magic.predict.sizing.polynomials import Monomial, Quotient

Terms = Mapping[Monomial, Fraction]

_STRIDES = tuple(range(2, 33))  # with any shift: kernel and padding of a convolution decide it
_ALIGNMENTS = (48, 64, 80, 96, 128, 160, 256, 320, 512, 1024)  # rounded up or down


@dataclass(frozen=True)
class Dimension:
    """A dimension of tensors, as a sum of ``terms``, and what it is ``values`` at the points that were traced."""

    terms: Terms
    values: IntArray


@dataclass(frozen=True)
class FoundQuotients:
    """Quotients, and a point that will tell between two that explain a dimension alike (None: there is none)."""

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
    """For each known dimension that explains a row, every way in which it does, the smallest modulus first."""
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
