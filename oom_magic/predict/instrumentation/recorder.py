"""The trace of a dry run: every allocation with its attribution, served by the simulated allocator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from oom_magic.language import _
from oom_magic.memory.allocator.caching_allocator import CachingAllocator
from oom_magic.memory.allocator.replay import Replay
from oom_magic.memory.allocator.segments import Block
from oom_magic.memory.categories import CATEGORIES, Category
from oom_magic.memory.timeline import PHASES, Mark, MarkKind, NameTable, Phase, SourceLine, Timeline

STEP_LIMIT_SECONDS = 300

_CATEGORY_CODE = {category: code for code, category in enumerate(CATEGORIES)}
_PHASE_CODE = {phase: code for code, phase in enumerate(PHASES)}
_FORWARD, _BACKWARD = _PHASE_CODE[Phase.FORWARD], _PHASE_CODE[Phase.BACKWARD]
_TEMPORARY = _CATEGORY_CODE[Category.TEMPORARY]
_PROVISIONAL = {_CATEGORY_CODE[category] for category in (Category.TEMPORARY, Category.INPUT, Category.BEFORE)}
_ACTIVATION = _CATEGORY_CODE[Category.ACTIVATION]

SizeFunction = Callable[..., int]


@dataclass(frozen=True, slots=True)
class SizeExpression:
    """Bytes of a kernel's scratch memory: ``size_function(card, *numbers)``, which may be 0.

    The numbers are dimensions and values from the user's code; thresholds and the like are inside the function.
    """

    size_function: SizeFunction
    numbers: tuple[int, ...]


class Recorder:
    """Ordered allocations and frees on the pretend GPU.

    ``allocate`` returns the number of the allocation, by which it is freed and given its category later. It raises the
    allocator's AllocatorOutOfMemory if the card is full. ``keeps_empty``: scratch memory whose size function returns 0
    is recorded as an allocation of 0 bytes, since it may need more with other numbers.
    """

    def __init__(self, allocator: CachingAllocator, *, keeps_empty: bool = False) -> None:
        self.allocator = allocator
        self.keeps_empty = keeps_empty
        self.expressions: dict[int, SizeExpression] = {}
        self.dims: list[int] = []  # of all new tensors, one after another
        self.order: list[int] = []
        self.columns: list[tuple[int, ...]] = []  # bytes, phase, step, operator, line, module, stream
        self.category: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.block_bytes: list[int] = []
        self.allocated: list[int] = []
        self.reserved: list[int] = []
        self.marks: list[Mark] = []
        self.transient: dict[int, int] = {}  # by event: the most bytes that a library may allocate just before it
        self.freed_late: set[int] = set()  # allocations that a real run may free later
        self._without_graph: list[slice] = []  # allocations of models that ran so
        self.operators = NameTable("")
        self.lines = NameTable(SourceLine("", 0))
        self.modules = NameTable("")
        self.step = 0
        self.live_bytes = 0  # that were requested, without what blocks have beside them
        self._step_due = float("inf")
        self.watch: Callable[[], None] | None = None  # called before each allocation; may end the run
        self.num_before = 0  # allocations that were there when the trace began

    def allocate(
        self,
        num_bytes: int,
        operator: str,
        phase: Phase,
        line: SourceLine | None,
        module: str,
        category: Category = Category.TEMPORARY,
        expression: SizeExpression | None = None,
        stream: int = 0,
    ) -> int:
        """Allocate on a stream; returns the allocation's number. Raises TimeoutError if no step ends for too long."""
        if time.monotonic() > self._step_due:
            raise TimeoutError(
                _(
                    "No optimizer step within {seconds} seconds of this dry run. Does the loop call"
                    " optimizer.step()? A smaller model, fewer layers or a shorter loop before it also help.",
                    seconds=STEP_LIMIT_SECONDS,
                )
            )
        if self.watch is not None:
            self.watch()
        number = len(self.columns)
        if num_bytes or expression is None:
            self.blocks[number] = self.allocator.allocate(num_bytes, stream)
        self.block_bytes.append(self.blocks[number].size_bytes if number in self.blocks else 0)
        if expression is not None:
            self.expressions[number] = expression
        self.columns.append((
            num_bytes,
            _PHASE_CODE[phase],
            self.step,
            self.operators.number(operator),
            0 if line is None else self.lines.number(line),
            self.modules.number(module),
            stream,
        ))  # fmt: skip
        self.category.append(_CATEGORY_CODE[category])
        self.live_bytes += num_bytes
        self._event(number)
        return number

    def free(self, number: int) -> None:
        """Free an allocation."""
        block = self.blocks.pop(number, None)
        if block is not None:
            self.allocator.free(block)
        self.live_bytes -= self.columns[number][0]
        self._event(~number)

    def _event(self, event: int) -> None:
        self.order.append(event)
        self.allocated.append(self.allocator.allocated_bytes)
        self.reserved.append(self.allocator.reserved_bytes)

    def assign(self, number: int, category: Category) -> None:
        """Set an allocation's category once it is known; one that stays between steps keeps its first category."""
        if self.category[number] in _PROVISIONAL:
            self.category[number] = _CATEGORY_CODE[category]

    def restart(self) -> dict[int, int]:
        """Begin a new trace on the same card. Allocations that are alive come first in it.

        Returns their new numbers by their old ones.
        """
        numbers = {old: new for new, old in enumerate(sorted(self.blocks))}
        before = _CATEGORY_CODE[Category.BEFORE]
        self.category = [before if self.category[old] in _PROVISIONAL else self.category[old] for old in numbers]
        self.columns = [self.columns[old] for old in numbers]
        self.live_bytes = sum(column[0] for column in self.columns)
        self.block_bytes = [self.block_bytes[old] for old in numbers]
        self.blocks = {new: self.blocks[old] for old, new in numbers.items()}
        self.expressions = {numbers[old]: by for old, by in self.expressions.items() if old in numbers}
        self.order, self.marks, self.step = list(numbers.values()), [], 0
        self.transient, self.freed_late, self._without_graph = {}, set(), []
        self.num_before = len(numbers)
        self.allocated = list(accumulate(self.block_bytes))
        self.reserved = [self.allocator.reserved_bytes] * len(self.order)
        return numbers

    @contextmanager
    def without_graph(self) -> Iterator[None]:
        """What is allocated inside is saved for no backward, unless one comes before it is freed."""
        begin = len(self.columns)
        try:
            yield
        finally:
            self._without_graph.append(slice(begin, len(self.columns)))

    def expect_step(self) -> None:
        """Count the time until the next optimizer step from now on."""
        self._step_due = time.monotonic() + STEP_LIMIT_SECONDS

    def mark(self, kind: MarkKind) -> None:
        """Note a moment that allocates nothing."""
        self.marks.append(Mark(len(self.order), kind))

    def note_transient(self, num_bytes: int) -> None:
        """Note that a library may allocate up to this many bytes here for a moment; the trace goes on without them."""
        if num_bytes:
            self.transient[len(self.order)] = max(num_bytes, self.transient.get(len(self.order), 0))

    def empty_cache(self) -> None:
        """What ``torch.cuda.empty_cache`` does."""
        self.mark(MarkKind.EMPTY_CACHE)
        self.allocator.empty_cache()

    def timeline(self) -> Timeline:
        """The timeline of everything so far."""
        columns = np.array(self.columns, dtype=np.int64).reshape(-1, 7).T
        requested, phase, step, operator, line, module, stream = (np.ascontiguousarray(column) for column in columns)
        order = np.array(self.order, dtype=np.int64)
        category = np.array(self.category, dtype=np.int64)
        return Timeline(
            order=order,
            requested_bytes=requested,
            category=_with_activations(order, category, phase, self._without_graph),
            phase=phase,
            step=step,
            operator=operator,
            line=line,
            module=module,
            stream=stream,
            operators=self.operators.items(),
            lines=self.lines.items(),
            modules=self.modules.items(),
            marks=tuple(self.marks),
        )

    def replayed(self) -> Replay:
        """The allocator's history, as ``memory.allocator.replay`` would compute it."""
        return Replay(
            np.array(self.allocated, dtype=np.int64),
            np.array(self.reserved, dtype=np.int64),
            np.array(self.block_bytes, dtype=np.int64),
            max(self.reserved, default=0),
            self.allocator.num_retries,
            None,
        )


def _with_activations(
    order: np.ndarray, category: np.ndarray, phase: np.ndarray, without_graph: Sequence[slice]
) -> np.ndarray:
    """The categories; what a forward allocated and the next backward finds alive is an activation, and with a graph
    also what the end finds alive."""
    allocations, frees = np.flatnonzero(order >= 0), np.flatnonzero(order < 0)
    backward = allocations[phase[order[allocations]] == _BACKWARD]
    begin = np.empty(len(category), dtype=np.int64)
    begin[order[allocations]] = allocations
    end = np.full(len(category), len(order), dtype=np.int64)
    end[~order[frees]] = frees
    next_backward = np.append(backward, len(order))[np.searchsorted(backward, begin)]
    saved = (phase == _FORWARD) & (category == _TEMPORARY) & (end >= next_backward)
    for some in without_graph:
        saved[some] &= next_backward[some] < len(order)
    return np.where(saved, _ACTIVATION, category)
