"""What sizes are made of: products of arguments, and of what is left when something is padded, pooled or cut up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oom_magic.memory.timeline import IntArray


@dataclass(frozen=True, slots=True)
class Monomial:
    """A product of powers of the arguments, and of powers of quotients."""

    exponents: tuple[int, ...]
    quotients: tuple[tuple[Quotient, int], ...] = ()

    def values(self, points: IntArray) -> IntArray:
        """At each of ``points`` (one per row)."""
        values: IntArray = np.prod(points ** np.array(self.exponents, dtype=np.int64), axis=1)
        for quotient, exponent in self.quotients:
            values = values * quotient.values(points) ** exponent
        return values

    def bound(self, highest: IntArray) -> int:
        """At least its value anywhere up to the point ``highest``."""
        value = 1
        for argument, exponent in zip(highest.tolist(), self.exponents, strict=True):
            value *= argument**exponent
        for quotient, exponent in self.quotients:
            value *= quotient.bound(highest) ** exponent
        return value

    def times(self, quotient: Quotient, exponent: int) -> Monomial:
        """The same with powers of a quotient."""
        return Monomial(self.exponents, (*self.quotients, (quotient, exponent))) if exponent else self


@dataclass(frozen=True, slots=True)
class Quotient:
    """How often ``modulus`` goes into a sum of ``terms`` (monomials and their factors).

    Padding to multiples of 8 is ``(n + 7) // 8``, pooling by 2 ``n // 2``, a convolution with a stride likewise.
    """

    terms: tuple[tuple[Monomial, int], ...]
    modulus: int

    @classmethod
    def up(cls, exponents: tuple[int, ...], modulus: int) -> Quotient:
        """How many multiples of ``modulus`` a product of powers is padded to."""
        constant = Monomial((0,) * len(exponents))
        return cls(((Monomial(exponents), 1), (constant, modulus - 1)), modulus)

    def values(self, points: IntArray) -> IntArray:
        """At each of ``points`` (one per row)."""
        parts = [factor * monomial.values(points) for monomial, factor in self.terms]
        values: IntArray = np.sum(parts, axis=0) // self.modulus
        return values

    def bound(self, highest: IntArray) -> int:
        """At least its magnitude anywhere up to the point ``highest``."""
        return sum(abs(factor) * monomial.bound(highest) for monomial, factor in self.terms) // self.modulus + 1
