"""Descriptions of results: a title and blocks, which ``text`` and ``html`` encode with the same rows.

A cell of a table is text or an ``int``: a byte count, formatted at the last moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import Any, Literal

from oom_magic.results import Result
from oom_magic.units import format_bytes

Tone = Literal["plain", "strong", "quiet", "good", "warning", "bad"]
Cell = str | int


@dataclass(frozen=True, slots=True)
class Sentence:
    """A paragraph. A tone is shown as a colour and, so that colour is never needed, as a sign."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Fact:
    """One number that matters: what it is, the number, and what to hold it against."""

    label: str
    value: Cell
    note: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """A few numbers that matter, side by side."""

    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A share of a whole. ``hue``, its colour: a category's value, "cached", "outside", "other", "free"."""

    label: str
    num_bytes: int
    hue: str = "outside"


@dataclass(frozen=True, slots=True)
class Parts:
    """A whole and its parts, which sum to it: a stacked bar, and a row for each.

    The bar and the percentages are of ``capacity_bytes`` (0: of the sum); ``marks`` are shares of it, from 0
    to 1, at which a line crosses the bar.
    """

    title: str
    parts: tuple[Part, ...]
    total_label: str
    capacity_bytes: int = 0
    marks: tuple[float, ...] = ()

    @property
    def total_bytes(self) -> int:
        """The sum of the parts, in bytes."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def whole_bytes(self) -> int:
        """What 100 % stands for, in bytes."""
        return self.capacity_bytes or max(self.total_bytes, 1)

    def share(self, num_bytes: int) -> str:
        """Text such as ``"12.5 %"``."""
        return f"{round(100 * num_bytes / self.whole_bytes, 1) + 0:.1f} %"  # 0.0 is no negative number


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings; columns of byte counts and numbers are right-aligned.

    ``shares``, one per row and from 0 to 1, adds a bar to each; ``total`` is a last row under a rule; ``hues``,
    one per row, are the colours by which rows explain those of parts beside them (empty: no such part).
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    shares: tuple[float, ...] = ()
    total: tuple[Cell, ...] = ()
    hues: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of ``Bars``: its name, its parts from left to right, and what else is said of it."""

    label: str
    parts: tuple[Part, ...]
    note: str = ""

    @property
    def total_bytes(self) -> int:
        """The sum of the parts, in bytes."""
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Bars:
    """Stacked bars under each other on one scale. Labels of parts are read by pointing at them.

    ``capacity_bytes`` is the reference line (0: none), ``marks`` are shares of it, at which lines cross.
    ``marks_note`` says what the lines mean; text has none.
    """

    bars: tuple[Bar, ...]
    title: str = ""
    capacity_bytes: int = 0
    marks: tuple[float, ...] = ()
    marks_note: str = ""

    @property
    def scale_bytes(self) -> int:
        """What a bar of full width stands for, in bytes."""
        return max(1, self.capacity_bytes, *(bar.total_bytes for bar in self.bars))


@dataclass(frozen=True, slots=True)
class Code:
    """Code to paste; never wrapped."""

    text: str
    language: str = "python"


@dataclass(frozen=True, slots=True)
class Picture:
    """An inline SVG, drawn by us and so not escaped. Text shows nothing in its place."""

    alt: str
    svg: str


@dataclass(frozen=True, slots=True)
class Details:
    """Blocks for a reader who wants to know more: collapsed in HTML, indented in text."""

    title: str
    blocks: tuple[Block, ...]


Block = Sentence | Facts | Parts | Table | Bars | Code | Picture | Details


@dataclass(frozen=True, slots=True, repr=False)
class Description(Result):
    """A title and blocks."""

    title: str
    blocks: tuple[Block, ...] = ()


def cell_text(cell: Cell) -> str:
    """A cell as shown: a byte count formatted, text as it is."""
    return format_bytes(cell) if isinstance(cell, int) else cell


@singledispatch
def describe_registered(result: Any) -> Description:
    """The Description of a result whose view is loaded. Raises TypeError for a class without one."""
    raise TypeError(f"no view is registered for {type(result).__name__}; add one in oom_magic/views.")


register = describe_registered.register


@register
def _(description: Description) -> Description:
    return description
