"""Sizes that follow one polynomial up to some product of the arguments and another one above it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from oom_magic.memory.timeline import IntArray
from oom_magic.predict.sizing.polynomials import Polynomials, fit
from oom_magic.predict.sizing.regions import Border, products

_NUM_SPARE = 2  # points that a polynomial must hit beyond those that determine it
_FEWEST_POINTS = 3  # on one side


@dataclass(frozen=True, eq=False)
class Law:
    """What the sizes of row ``row`` follow on one side, and where that may end (``guesses``)."""

    row: int
    polynomial: Polynomials
    guesses: tuple[Border, ...]


def find_law(points: IntArray, sizes: IntArray, lattice: IntArray) -> Law | None:
    """The law that explains most of ``points`` (P x k) for one of the rows of ``sizes`` (U x P); None: there is none.

    ``lattice`` has points (one per row) between which a border may lie.
    """
    found: list[tuple[int, Law]] = []
    for row in range(len(sizes)):
        for exponents in products(points.shape[1]):
            border = Border(exponents)
            order = np.argsort(border.feature(points), kind="stable")
            low = _longest(points[order], sizes[row, order])
            high = _longest(points[order[::-1]], sizes[row, order[::-1]])
            for side, other in ((low, high), (high, low)):
                if side is not None:
                    guesses = tuple(_crossing(border, low, high, lattice)) if other is not None else ()
                    found.append((side[1], Law(row, side[0], guesses)))
    return max(found, key=lambda item: item[0])[1] if found else None


def _longest(points: IntArray, sizes: IntArray) -> tuple[Polynomials, int] | None:
    """A polynomial through as many points from the first on as there is one, and their number."""
    best, too_many = None, len(points)
    enough = _FEWEST_POINTS - 1
    while too_many - enough > 1:
        middle = (enough + too_many) // 2
        polynomials, left = fit(points[:middle], sizes[None, :middle], _NUM_SPARE)
        if len(left):
            too_many = middle
        else:
            best, enough = (polynomials, middle), middle
    return best


def _crossing(
    border: Border, low: tuple[Polynomials, int] | None, high: tuple[Polynomials, int] | None, lattice: IntArray
) -> Iterator[Border]:
    """Where one polynomial overtakes the other, if the size is the smaller or the larger of both."""
    if low is None or high is None:
        return
    features = border.feature(lattice)
    order = np.argsort(features, kind="stable")
    signs = np.sign(low[0](lattice[order])[0] - high[0](lattice[order])[0])
    changes = np.flatnonzero(signs[1:] != signs[:-1])
    for change in changes[:4]:
        yield Border(border.exponents, threshold=int(features[order[change]]))
