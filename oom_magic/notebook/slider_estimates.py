"""Estimates of the sliders' settings: sums of sizes while the hand moves, the replayed allocator when it rests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oom_magic.notebook.fit_map import OVER, Cells, Grid
from oom_magic.notebook.slider_ranges import BATCHES, first_of
from oom_magic.notebook.slider_source import Priced, Values
from oom_magic.notebook.slider_view import Estimate, Largest
from oom_magic.predict.sizing.sizes import Sizes


class Estimator:
    """Asks the sizes, and keeps what does not change from move to move."""

    def __init__(self, priced: Priced, grid: Grid | None) -> None:
        self.priced = priced
        self.grid = grid
        self._largest: dict[tuple[Any, ...], Largest] = {}
        self._cells: dict[tuple[Any, ...], Cells] = {}

    def quick(self, sizes: Sizes, values: Values) -> Estimate:
        """Without the allocator; a few milliseconds."""
        return Estimate(
            values=dict(values),
            device=sizes.device,
            breakdown=sizes.breakdown(**self.priced.point(values)),
            arguments=self.priced.arguments(values),
            largest=self._quick_largest(sizes, values),
        )

    def exact(self, sizes: Sizes, values: Values, estimate: Estimate) -> Estimate:
        """With the report of a run, the allocator replayed."""
        report = sizes.report(**self.priced.point(values))
        return replace(estimate, report=report, assumptions=report.assumptions)

    def with_largest(self, sizes: Sizes, values: Values, estimate: Estimate) -> Estimate:
        """With the largest batch found by replaying the allocator; not where each point would have to be run."""
        name = self._searched(values)
        if name is None or not sizes.is_exact(**self.priced.point(values)):
            return estimate
        key = self.key(sizes, values, name)
        if key not in self._largest:
            rest = {other: value for other, value in self.priced.point(values).items() if other != name}
            value = sizes.largest(name, **rest)
            self._largest[key] = Largest(name, value, int(self.priced.ranges.axes[name][-1]), True)
        return replace(estimate, largest=self._largest[key])

    def cells(self, sizes: Sizes, values: Values) -> Cells | None:
        """The map; it changes only with what is not on it."""
        if self.grid is None:
            return None
        key = self.key(sizes, values, *self.grid.names)
        if key not in self._cells:
            self._cells = {key: self.grid.cells(sizes, self.priced.point(values))}
        return self._cells[key]

    def check_cell(self, sizes: Sizes, values: Values, cells: Cells, cell: int) -> None:
        """Replay the allocator for a cell of the map, unless that was done, or the cell would have to be run."""
        assert self.grid is not None
        point = {**self.priced.point(values), **self.grid.values(cell)}
        if cells.held.flat[cell] != cells.peaks.flat[cell] or not sizes.is_exact(**point):
            return
        report = sizes.report(**point)
        cells.held.flat[cell] = OVER if report.out_of_memory is not None else report.peak_reserved_bytes

    def key(self, sizes: Sizes, values: Values, *but: str) -> tuple[Any, ...]:
        """What decides the sizes, ``but`` for some arguments."""
        rest = [(name, repr(value)) for name, value in self.priced.point(values).items() if name not in but]
        return (*rest, sizes.device)

    def _quick_largest(self, sizes: Sizes, values: Values) -> Largest | None:
        """What was searched for before, else the last value whose sum of sizes is within the card."""
        name = self._searched(values)
        if name is None:
            return None
        known = self._largest.get(self.key(sizes, values, name))
        if known is not None:
            return known
        axis = self.priced.ranges.axes[name]
        peaks = sizes.map(**{**self.priced.point(values), name: axis})
        fitting = axis[peaks <= sizes.device.usable_bytes]
        return Largest(name, int(fitting.max(initial=0)), int(axis[-1]), False)

    def _searched(self, values: Values) -> str | None:
        """The argument whose largest value is looked for: the batch, else the first number."""
        axes = self.priced.axes(values)
        return first_of(axes, BATCHES) or next(iter(axes), None)
