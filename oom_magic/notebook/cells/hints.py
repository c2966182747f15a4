"""A hint of one line under errors that oom_magic can explain, above all out-of-memory errors.

The error is kept as text, never as an exception: that would keep the failed cell's tensors alive.
"""

from __future__ import annotations

import re
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell

from oom_magic.language import _, load_language
from oom_magic.notebook.cells.running import around_cells

if TYPE_CHECKING:
    from oom_magic.measure.holders.release import FreedItem
    from oom_magic.notebook.cells.gpumem import CellRunner
    from oom_magic.predict.instrumentation.starting_point import StartingPoint

_OUT_OF_MEMORY = re.compile(
    r"out of memory|not enough memory|(?:can't|cannot|unable to) allocate|_ALLOC_FAILED|NOT_ENOUGH_MEMORY|bad_alloc",
    re.IGNORECASE,
)
_CLASSES = ("OutOfMemoryError", "MemoryError")


@dataclass(frozen=True, slots=True)
class FailedCell:
    """A cell that ran out of memory, as text.

    ``is_observed``: it ran under ``%%gpumem``; ``is_dry``: as a dry run.
    ``start``: what was on a real device before it, by weak references; ``is_inferred``: found only afterwards.
    ``is_caught``: the cell caught the error, so it did not fail.
    ``held_before``: what earlier errors alone kept alive when it began. IPython keeps the last error only, so this may
    be free by now.
    """

    source: str
    is_observed: bool = False
    is_dry: bool = False
    start: StartingPoint | None = None
    is_inferred: bool = False
    is_caught: bool = False
    held_before: tuple[FreedItem, ...] = ()


class FailureWatch:
    """Keeps the last out-of-memory error and its cell, as text, and prints the hint at ``%oom_explain`` under it.

    ``runner`` knows the names that dry runs assigned, and whether the last ``%%gpumem`` was a dry run.
    """

    def __init__(self, shell: InteractiveShell, runner: CellRunner) -> None:
        self.shell = shell
        self._runner = runner
        self.last_text = ""
        self.failed_cell: FailedCell | None = None
        self.is_hinting = True
        self._start: StartingPoint | None = None
        self._names_before: set[str] | None = None  # set where torch was not loaded, so nothing was on a device
        self._shown_before = 0  # the error that was shown last, by identity
        self._held: tuple[int, tuple[FreedItem, ...]] = (0, ())  # what errors hold since that error, by identity

    @around_cells
    def before_cell(self, _info: ExecutionInfo) -> None:
        """IPython's ``pre_run_cell``: note what is on the GPU."""
        self._start, self._names_before = None, None
        self._shown_before = id(getattr(sys, "last_value", None))
        if "torch" not in sys.modules:
            self._names_before = set(self.shell.user_ns)
            return
        from oom_magic.measure.device.cards import is_available

        if is_available():
            from oom_magic.predict.instrumentation.starting_point import StartingPoint

            self._start = StartingPoint([self.shell.user_ns])
            self._note_held_by_errors()

    def _note_held_by_errors(self) -> None:
        """Note what errors alone keep alive, once for each error that the shell keeps."""
        if self._held[0] == self._shown_before:
            return
        from oom_magic.notebook.cells.releasing import find_holders

        is_kept = getattr(sys, "last_value", None) is not None
        found = find_holders(self.shell, self._runner, None) if is_kept else None
        self._held = (self._shown_before, () if found is None else found.freed)

    def forget_held(self) -> None:
        """To be called when what errors held is free, or held by another error."""
        self._held = (0, ())

    @around_cells
    def after_cell(self, result: ExecutionResult) -> None:
        """IPython's ``post_run_cell``: keep an out-of-memory error as text and print the hint."""
        error = result.error_in_exec or result.error_before_exec or self._displayed_error()
        if isinstance(error, NameError) and (hint := self._runner.names.hint(error.name or "", self.shell.user_ns)):
            print(hint)
        held = self._held[1]
        if error is not None:
            self.forget_held()  # another error is kept now
        if error is None or not is_out_of_memory(error):
            return
        self.last_text = text_of(error)
        source = str(getattr(result.info, "raw_cell", "") or "")
        is_observed = source.lstrip().startswith(("%%gpumem", "%gpumem"))
        is_dry = is_observed and self._runner.was_dry
        start = None if is_dry else self._starting_point()
        self.failed_cell = FailedCell(source, is_observed, is_dry, start, held_before=() if is_dry else held)
        if self.is_hinting:
            print(_("%oom_explain says which tensor did not fit, why, and what to change (--off: no more hints)."))
            _preload_explanations()

    def _starting_point(self) -> StartingPoint | None:
        """What was on a device before the cell; nothing, if the cell itself loaded torch."""
        if self._names_before is None or "torch" not in sys.modules:
            return self._start
        from oom_magic.measure.device.cards import is_available

        if not is_available():
            return None
        from oom_magic.predict.instrumentation.starting_point import StartingPoint

        return StartingPoint.inferred(self.shell.user_ns, set(self.shell.user_ns) - self._names_before)

    def _displayed_error(self) -> BaseException | None:
        """An error that a magic such as ``%run`` displayed itself, without failing."""
        shown = getattr(sys, "last_value", None)
        return None if id(shown) == self._shown_before else shown


def _preload_explanations() -> None:
    """Import and read what every explanation needs, so that the next one is fast."""
    import oom_magic.explain.advice
    import oom_magic.views.diagnosis  # noqa: F401
    from oom_magic.explain.evidence.measured.likeness import likeness
    from oom_magic.explain.evidence.measured.precedents import precedents
    from oom_magic.explain.evidence.tensors import preset_dims

    load_language()
    precedents()
    likeness()
    preset_dims()


def unwatched_cell(shell: InteractiveShell, error: BaseException, is_caught: bool = False) -> FailedCell | None:
    """The cell that ``error`` comes from, though nothing watched it fail, from IPython's history; None if unknown.

    With a GPU, what was there before the cell is inferred from what is there now.
    """
    numbers: dict[str, int] = getattr(shell.compile, "_filename_map", {})
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    cells = (code.co_filename for code in codes if code.co_name == "<module>")  # others are of where they are defined
    number = next((numbers[file] for file in cells if file in numbers), None)
    history = getattr(shell.history_manager, "input_hist_raw", ())
    if number is None or number >= len(history) or "torch" not in sys.modules:
        return None
    from oom_magic.measure.device.cards import is_available
    from oom_magic.notebook.cells.cell_code import code_of, newly_assigned_names

    source = str(history[number])
    if not is_available():
        return FailedCell(source, is_caught=is_caught)
    from oom_magic.predict.instrumentation.starting_point import StartingPoint

    made = newly_assigned_names(code_of(shell, source, shell.user_ns).tree)
    start = StartingPoint.inferred(shell.user_ns, made)
    return FailedCell(source, start=start, is_inferred=True, is_caught=is_caught)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error, or one in its chain of causes, is an out-of-memory error."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        message = "".join(traceback.format_exception_only(cause))  # str() of it may raise
        if type(cause).__name__ in _CLASSES or _OUT_OF_MEMORY.search(message):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def text_of(error: Any) -> str:
    """The error and its traceback as Python prints them."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))
