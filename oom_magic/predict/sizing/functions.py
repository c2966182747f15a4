"""The sizes of a piece as functions of a point: polynomials, and what kernels' laws make of polynomials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oom_magic.memory.timeline import IntArray
from oom_magic.predict.following.recorder import Law
from oom_magic.predict.setups.gpus import GPU
from oom_magic.predict.sizing.polynomials import Polynomials


@dataclass(frozen=True, eq=False)
class SizeFunctions:
    """Sizes in bytes on ``card``: first the polynomials ``plain`` themselves, then what each law makes of its rows."""

    polynomials: Polynomials
    plain: IntArray
    laws: tuple[tuple[Law, tuple[int, ...]], ...]
    card: GPU

    @classmethod
    def of(
        cls, polynomials: Polynomials, makers: Sequence[tuple[Law | None, tuple[int, ...]]], card: GPU
    ) -> tuple[SizeFunctions, IntArray]:
        """The functions of allocations made so (by a law, or None, from polynomials), and which of them each has."""
        plain = dict.fromkeys(rows[0] for law, rows in makers if law is None)
        lawful = dict.fromkeys((law, rows) for law, rows in makers if law is not None)
        number: dict[tuple[Law | None, tuple[int, ...]], int] = {(None, (row,)): at for at, row in enumerate(plain)}
        number.update({maker: at for at, maker in enumerate(lawful, len(plain))})
        functions = cls(polynomials, np.array(list(plain), dtype=np.int64), tuple(lawful), card)
        return functions, np.array([number[maker] for maker in makers], dtype=np.int64)

    def __call__(self, points: IntArray) -> IntArray:
        """The sizes (functions x points) at points, one per row."""
        values = self.polynomials(points)
        lawful = [self._by_law(law, values[list(rows)]) for law, rows in self.laws]
        return np.concatenate([values[self.plain], *(row[None] for row in lawful)])

    def _by_law(self, law: Law, numbers: IntArray) -> IntArray:
        """A law's sizes for each column of ``numbers``."""
        columns = list(zip(*numbers.tolist(), strict=True)) or [()] * numbers.shape[1]
        known = {column: max(law(self.card, *column), 0) for column in dict.fromkeys(columns)}
        return np.array([known[column] for column in columns], dtype=np.int64)
