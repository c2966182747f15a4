"""The map of what fits: batch against sequence length, with the current point; a click moves there.

The cells are the buttons of one ToggleButtons widget. Their text and colours come from one style element, so a change
is one message and no button is rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets
import numpy as np

from oom_magic.language import _
from oom_magic.memory.categories import verdict_on
from oom_magic.memory.report import Device, MemoryReport
from oom_magic.memory.timeline import IntArray
from oom_magic.notebook.sliders.ranges import BATCHES, LENGTHS, first_of, landmarks
from oom_magic.units import unit_for
from oom_magic.views.blocks import Table

if TYPE_CHECKING:
    from oom_magic.predict.sizing.sizes import Sizes

_MOST_COLUMNS = _MOST_ROWS = 8
_ROW_HEIGHT = 24
# Of what PyTorch can have. Below, what is reserved is not replayed: of the 92 runs in tests/data (PyTorch 2.13) that
# allocate 256 MiB or more, 86 reserve less than 1 / 0.65 times as much; all others are ranks of sharded training.
_DOUBT = 0.65
OVER = 2**60
_SIGNS = {"safe": "✓", "tight": "▲", "danger": "▲", "over": "✗"}


@dataclass(frozen=True)
class Cells:
    """Peak allocated bytes of each cell, and what decides whether it fits: bytes reserved, where replayed.

    A cell that fails when replayed needs ``OVER``.
    """

    peaks: IntArray
    needed: IntArray

    def note(self, cell: int, report: MemoryReport) -> None:
        """What the replayed allocator says of a cell: the numbers that a report of this setting has, too."""
        if report.out_of_memory is not None:
            self.needed.flat[cell] = OVER
            return
        self.peaks.flat[cell], self.needed.flat[cell] = report.peak_allocated_bytes, report.peak_reserved_bytes

    def doubtful(self, device: Device) -> list[int]:
        """Cells so close to the card's limit that reserved memory decides, the closest first."""
        share = self.peaks.ravel() / max(device.usable_bytes, 1)
        near = np.flatnonzero((share > _DOUBT) & (share <= 1))
        return [int(cell) for cell in near[np.argsort(-share[near])]]


@dataclass(frozen=True)
class Grid:
    """The two arguments of a map and their values: columns across, rows down (None: a single row)."""

    across: str
    columns: tuple[int, ...]
    down: str | None
    rows: tuple[int, ...]

    @classmethod
    def of(cls, axes: Mapping[str, IntArray]) -> Grid | None:
        """Sequence length across and batch down where there are such arguments, else the first two."""
        names = list(axes)
        if not names:
            return None
        batch, length = first_of(names, BATCHES), first_of(names, LENGTHS)
        down = batch or next(name for name in names if name != length or len(names) == 1)
        across = length or next((name for name in names if name != down), None)
        if across is None or across == down:
            return cls(down, tuple(landmarks(axes[down], _MOST_COLUMNS)), None, (0,))
        return cls(
            across,
            tuple(landmarks(axes[across], _MOST_COLUMNS)),
            down,
            tuple(landmarks(axes[down], _MOST_ROWS)),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments on the map."""
        return (self.across,) if self.down is None else (self.down, self.across)

    def values(self, cell: int) -> dict[str, int]:
        """The arguments at a cell, counted along the rows."""
        row, column = divmod(cell, len(self.columns))
        values = {self.across: self.columns[column]}
        return values if self.down is None else {self.down: self.rows[row], **values}

    def cell(self, values: Mapping[str, Any]) -> int | None:
        """The cell of a setting, counted along the rows; None for one between the cells."""
        cells = range(len(self.rows) * len(self.columns))
        return next((cell for cell in cells if self.values(cell).items() <= values.items()), None)

    def cells(self, sizes: Sizes, point: Mapping[str, Any]) -> Cells:
        """Peak allocated bytes at every cell, the other arguments as they are at ``point``."""
        wanted: dict[str, Any] = {self.across: list(self.columns)}
        if self.down is not None:
            wanted = {self.down: list(self.rows), **wanted}
        peaks = sizes.map(**{**point, **wanted}).reshape(len(self.rows), len(self.columns))
        return Cells(peaks, peaks.copy())

    def table(self, cells: Cells, device: Device) -> Table:
        """The map in text."""
        unit, name = unit_for(cells.peaks.max(initial=0))
        corner = f"{self.down} \\ {self.across}" if self.down else self.across
        signs = [[_SIGNS[state_of(int(needed), device)] for needed in line] for line in cells.needed]
        numbers = [[_number(int(peak), unit) for peak in line] for line in cells.peaks]
        rows = tuple(
            (str(row) if self.down else "", *map(" ".join, zip(signs[at], numbers[at], strict=True)))
            for at, row in enumerate(self.rows)
        )
        title = _("What fits: peak allocated in {name} (✓ safe, ▲ tight or in danger, ✗ does not fit)", name=name)
        return Table((corner, *(str(column) for column in self.columns)), rows, title)


def landmarks_of(axis: IntArray) -> list[int]:
    """The values of an axis that a map may have."""
    return landmarks(axis, _MOST_COLUMNS)


class FitMap:
    """The map as a widget; ``on_choice`` is called with the arguments of a cell that is clicked."""

    def __init__(self, grid: Grid, on_choice: Callable[[dict[str, int]], None]) -> None:
        self.grid = grid
        self._on_choice = on_choice
        cells = range(len(grid.rows) * len(grid.columns))
        labels = [", ".join(f"{name} {value}" for name, value in grid.values(cell).items()) for cell in cells]
        self._buttons = ipywidgets.ToggleButtons(
            options=[(label, cell) for cell, label in enumerate(labels)],
            tooltips=[_("Go to {label}", label=label) for label in labels],
            value=None,
        )
        self._buttons.observe(self._chosen, names="value")
        self._class = f"oom-map-{self._buttons.model_id[:12]}"
        self._buttons.add_class("oom-map").add_class(self._class)
        self._style = ipywidgets.HTML()
        self._cells = self._cursor = ""
        self._write()
        self.widget = ipywidgets.VBox([ipywidgets.HTML(self._heading()), self._buttons, self._style])
        self.widget.add_class("oom-map-box").add_class(f"{self._class}-box")

    def show(self, cells: Cells, device: Device) -> None:
        """New numbers in the cells."""
        unit, name = unit_for(cells.peaks.max(initial=0))
        rules = [f'.{self._class}-box .oom-unit::after{{content:" ({name})"}}']
        for number, (peak, needed) in enumerate(zip(cells.peaks.flat, cells.needed.flat, strict=True), 1):
            state = state_of(int(needed), device)
            rules.append(
                f'.{self._class} button:nth-child({number}){{--said:"{_SIGNS[state]} {_number(int(peak), unit)}";'
                f"background:var(--oom-map-{state})}}"
            )
        self._cells = "".join(rules)
        self._write()

    def mark(self, values: Mapping[str, Any]) -> None:
        """Move the cursor to a setting."""
        first, count = _around(values[self.grid.across], self.grid.columns)
        upper, rows = (0, 1) if self.grid.down is None else _around(values[self.grid.down], self.grid.rows)
        share = 100 / len(self.grid.columns)
        self._cursor = (
            f".{self._class}>div::before{{left:{share * first:.2f}%;width:{share * count:.2f}%;"
            f"top:{_ROW_HEIGHT * upper}px;height:{_ROW_HEIGHT * rows}px}}"
        )
        self._write()

    def _write(self) -> None:
        columns = f".{self._class}>div{{--columns:{len(self.grid.columns)}}}"
        self._style.value = f"<style>{columns}{self._cells}{self._cursor}</style>"

    def _chosen(self, change: Mapping[str, Any]) -> None:
        if change["new"] is not None:
            values = self.grid.values(change["new"])
            self._buttons.value = None  # the cursor shows the position; every click must be a change
            self._on_choice(values)

    def _heading(self) -> str:
        """Title and the labels of columns and rows, laid over the same grid as the buttons."""
        grid = self.grid
        columns = "".join(f"<span>{column}</span>" for column in grid.columns)
        rows = "".join(f"<span>{row}</span>" for row in grid.rows) if grid.down else "<span></span>"
        names = f"{escape(grid.down)} ↓, {escape(grid.across)} →" if grid.down else f"{escape(grid.across)} →"
        title, help_ = _("What fits"), _("Click to go there.")
        names += f"; {_('peak allocated')}<span class='oom-unit'></span>. {help_}"
        return (
            f'<div class="oom oom-map-heading"><b>{title}</b> <small>{names}</small>'
            f'<div class="columns" style="--columns:{len(grid.columns)}">{columns}</div>'
            f'<div class="rows" aria-hidden="true">{rows}</div></div>'
        )


def state_of(needed: int, device: Device) -> str:
    """ "safe", "tight", "danger" or "over", by the thresholds of every report."""
    used = (needed + device.context_bytes) / max(device.total_bytes, 1)
    if needed > device.usable_bytes:
        return "over"
    return verdict_on(used)


def _number(num_bytes: int, unit: int) -> str:
    number = num_bytes / unit
    return f"{number:.1f}" if number < 99.95 else f"{number:.0f}"


def _around(value: int, marks: Sequence[int]) -> tuple[int, int]:
    """The first mark of a cursor around ``value``, and how many it holds: one, or the two that the value is between."""
    above = next((at for at, mark in enumerate(marks) if mark >= value), len(marks) - 1)
    is_between = above > 0 and marks[above - 1] < value < marks[above]
    return (above - 1, 2) if is_between else (above, 1)
