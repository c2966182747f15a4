"""The ordered allocations and frees of one run: what measuring and predicting both produce.

Columns of NumPy arrays, not objects: a training step of a large model has 100,000 events.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
_T = TypeVar("_T", bound=Hashable)
# Of a Timeline, each with a value for every allocation.
ALLOCATION_COLUMNS = ("requested_bytes", "category", "phase", "step", "operator", "line", "module", "stream")


class Phase(str, Enum):
    """The part of a training step in which an allocation was made."""

    OTHER = "other"  # building the model, loading data, anything outside a step's three parts
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


PHASES = tuple(Phase)


class MarkKind(str, Enum):
    """A moment on the timeline that allocates nothing."""

    STEP_END = "step_end"  # an optimizer step ended
    EMPTY_CACHE = "empty_cache"  # torch.cuda.empty_cache()
    RESET_PEAK = "reset_peak"  # torch.cuda.reset_peak_memory_stats()
    LEFT = "left"  # enough steps were seen: the user's code would have gone on
    CONTINUED = "continued"  # what comes was not seen: turns of a loop like those before


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's code. ``file`` is a path, or ``"Cell In[3]"`` for a notebook cell."""

    file: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.line}"

    @property
    def place(self) -> str:
        """The same without folders."""
        return f"{self.file.rpartition('/')[2]}:{self.line}"


class NameTable(Generic[_T]):
    """Operators, lines or modules, numbered in the order of first use. Number 0 is ``unknown``."""

    def __init__(self, unknown: _T) -> None:
        self._numbers = {unknown: 0}

    def number(self, item: _T) -> int:
        """The number of an item; a new one gets the next number."""
        return self._numbers.setdefault(item, len(self._numbers))

    def items(self) -> tuple[_T, ...]:
        """All items in the order of their numbers: a table of ``Timeline``."""
        return tuple(self._numbers)


@dataclass(frozen=True, slots=True)
class Mark:
    """``kind`` happened just before event ``position`` of ``Timeline.order``."""

    position: int
    kind: MarkKind


@dataclass(frozen=True, eq=False)
class Timeline:
    """Ordered allocations and frees.

    Allocation ``a`` (0 <= a < A) asked for ``requested_bytes[a]``; ``category``, ``phase``, ``operator``,
    ``line`` and ``module`` are positions in ``CATEGORIES``, ``PHASES`` and the tables below (position 0 of
    a table means "not known"); ``step`` counts optimizer steps from 1 (0: before the first began).
    Event ``e`` (0 <= e < E) is ``order[e]``: ``a`` when allocation ``a`` is made, ``~a`` when it is freed.
    Allocations that were there before the observed code come first, with category ``before`` or their own.
    """

    order: IntArray
    requested_bytes: IntArray
    category: IntArray
    phase: IntArray
    step: IntArray
    operator: IntArray
    line: IntArray
    module: IntArray
    stream: IntArray
    operators: tuple[str, ...] = ("",)
    lines: tuple[SourceLine, ...] = (SourceLine("", 0),)
    modules: tuple[str, ...] = ("",)
    marks: tuple[Mark, ...] = ()

    @property
    def num_allocations(self) -> int:
        """A, the number of allocations."""
        return len(self.requested_bytes)

    @property
    def num_events(self) -> int:
        """E, the number of allocations and frees together."""
        return len(self.order)

    def live_at(self, position: int) -> IntArray:
        """Indices of the allocations alive after event ``position`` (-1: none yet), ascending."""
        alive = np.zeros(self.num_allocations, dtype=bool)
        events = self.order[: position + 1]
        alive[events[events >= 0]] = True
        alive[~events[events < 0]] = False
        return np.flatnonzero(alive)

    def until(self, position: int) -> Timeline:
        """The timeline before event ``position``."""
        order = self.order[:position]
        num_made = int((order >= 0).sum())
        marks = tuple(mark for mark in self.marks if mark.position <= position)
        columns: dict[str, Any] = {name: getattr(self, name)[:num_made] for name in ALLOCATION_COLUMNS}
        return replace(self, order=order, marks=marks, **columns)

    def without_empty(self) -> Timeline:
        """The timeline without allocations of no bytes."""
        is_nonempty = self.requested_bytes > 0
        if is_nonempty.all():
            return self
        numbers = np.cumsum(is_nonempty) - 1
        is_made = self.order >= 0
        allocations = np.where(is_made, self.order, ~self.order)
        stays = is_nonempty[allocations]
        renumbered = np.where(is_made, numbers[allocations], ~numbers[allocations])
        before = np.append(0, np.cumsum(stays))
        columns: dict[str, Any] = {name: getattr(self, name)[is_nonempty] for name in ALLOCATION_COLUMNS}
        marks = tuple(Mark(int(before[mark.position]), mark.kind) for mark in self.marks)
        return replace(self, order=renumbered[stays], marks=marks, **columns)

    def since(self, position: int) -> Timeline:
        """The timeline from event ``position`` on; allocations that are alive then come first, in their order."""
        later = self.order[position:]
        kept = np.union1d(self.live_at(position - 1), later[later >= 0])
        numbers = np.full(self.num_allocations, -1, dtype=np.int64)
        numbers[kept] = np.arange(len(kept))
        num_before = len(kept) - int((later >= 0).sum())
        renumbered = np.where(later >= 0, numbers[np.maximum(later, ~later)], ~numbers[np.maximum(later, ~later)])
        order = np.concatenate([np.arange(num_before), renumbered])
        moved = (replace(mark, position=mark.position - position + num_before) for mark in self.marks)
        marks = tuple(mark for mark in moved if mark.position >= num_before)
        taken: dict[str, Any] = {name: getattr(self, name)[kept] for name in ALLOCATION_COLUMNS}
        return replace(self, order=order, marks=marks, **taken)

    def positions(self, kind: MarkKind) -> list[int]:
        """The events just before which something of a kind happened, in their order."""
        return [mark.position for mark in self.marks if mark.kind is kind]

    def num_steps(self) -> int:
        """How many optimizer steps ended."""
        return len(self.positions(MarkKind.STEP_END))

    @property
    def was_left(self) -> bool:
        """Whether the user's code would have gone on after the last step."""
        return bool(self.positions(MarkKind.LEFT))

    @property
    def was_continued(self) -> bool:
        """Whether turns of a loop were added where it was left."""
        return bool(self.positions(MarkKind.CONTINUED))

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and strings, ready for JSON."""
        plain: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            plain[field.name] = value.tolist() if isinstance(value, np.ndarray) else value
        plain["lines"] = [[line.file, line.line, line.text] for line in self.lines]
        plain["marks"] = [[mark.position, mark.kind.value] for mark in self.marks]
        plain["operators"], plain["modules"] = list(self.operators), list(self.modules)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Timeline:
        """The timeline that ``to_dict`` described."""
        arrays = {
            field.name: np.asarray(plain[field.name], dtype=np.int64)
            for field in fields(cls)
            if field.name not in ("operators", "lines", "modules", "marks")
        }
        return cls(
            **arrays,
            operators=tuple(plain["operators"]),
            lines=tuple(SourceLine(*line) for line in plain["lines"]),
            modules=tuple(plain["modules"]),
            marks=tuple(Mark(position, MarkKind(kind)) for position, kind in plain["marks"]),
        )
