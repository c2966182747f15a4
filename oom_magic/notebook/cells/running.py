"""Running a cell's code the way IPython's ``%%time`` does: same value, same traceback, exceptions pass."""

from __future__ import annotations

import ast
import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import wraps
from itertools import takewhile
from types import CodeType, TracebackType
from typing import Any, Protocol, TypeVar

from IPython.core.error import InputRejected
from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell

from oom_magic.explain.syntax import bound_in
from oom_magic.interrupts import Interrupts
from oom_magic.language import ngettext
from oom_magic.one_line_errors import Interrupted, OneLineErrors, ShownAsOneLine
from oom_magic.user_code import compiled_cell, is_machinery, is_users_file


class Watch(Protocol):
    """What is called before and after cells."""

    @property
    def shell(self) -> InteractiveShell:
        """That of the cells."""


_MAGIC_CALLS = {"run_cell_magic", "run_line_magic"}
W = TypeVar("W", bound=Watch)
C = TypeVar("C", ExecutionInfo, ExecutionResult)


def around_cells(callback: Callable[[W, C], None]) -> Callable[[W, C], None]:
    """Decorator for IPython's ``pre_run_cell`` and ``post_run_cell`` callbacks: an interrupt waits for their end.

    So no module is left half imported, and no cell unnoticed. IPython goes on whatever a callback raises; so the cell
    is rejected, or its result is an error: one line is shown, and Run All stops.
    """

    @wraps(callback)
    def uninterrupted(self: W, cell: C) -> None:
        has_run = isinstance(cell, ExecutionResult)
        transformers = self.shell.ast_transformers
        try:
            if has_run:
                transformers[:] = [one for one in transformers if not isinstance(one, _Rejecting)]
            with OneLineErrors("after a cell" if has_run else "before a cell"), Interrupts().waiting():
                callback(self, cell)
        except Interrupted as error:
            if isinstance(cell, ExecutionInfo):
                transformers.insert(0, _Rejecting(str(error)))
            else:
                cell.error_in_exec = cell.error_in_exec or error
                self.shell.showtraceback((type(error), error, None))

    return uninterrupted


class _Rejecting(ast.NodeTransformer):
    """Rejects the cell that was interrupted before it began, as any of IPython's ``ast_transformers`` can."""

    def __init__(self, words: str) -> None:
        self._words = words

    def visit(self, _node: ast.AST) -> Any:
        """The cell."""
        raise _CellInterruptedError(self._words)


class _CellInterruptedError(ShownAsOneLine, InputRejected):
    shown_as = "KeyboardInterrupt"


def trimmed(error: BaseException) -> BaseException:
    """``error`` with a traceback without this package's frames and those of what wraps calls."""
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        if not is_machinery(traceback.tb_frame.f_code.co_filename):
            frames.append(traceback)
        traceback = traceback.tb_next
    return error.with_traceback(_make_traceback(frames))


def shortened(error: BaseException, shell: InteractiveShell) -> BaseException:
    """``error``, which IPython shows with the user's frames and the last one only; ``%debug`` has all of them."""
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    kept = [frame for frame in frames if frame is frames[-1] or is_users_file(frame.tb_frame.f_code.co_filename)]
    short = _make_traceback(kept)
    alone = type(error)(*error.args)  # a function that refers to the error itself would be a reference cycle

    def _render_traceback_() -> list[str]:
        lines: list[str] = shell.InteractiveTB.structured_traceback(type(alone), alone, short, tb_offset=0)
        if len(kept) == len(frames):
            return lines
        left_out = ngettext(
            "    [... {count} library frame omitted]",
            "    [... {count} library frames omitted]",
            len(frames) - len(kept),
        )
        return [*lines[:-1], left_out, *lines[-1:]]

    error._render_traceback_ = _render_traceback_  # type: ignore[attr-defined]
    return error


def _make_traceback(frames: list[TracebackType]) -> TracebackType | None:
    """A traceback of these frames."""
    chained: TracebackType | None = None
    for frame in reversed(frames):
        chained = TracebackType(chained, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return chained


@dataclass(frozen=True, slots=True)
class CompiledCell:
    """Code of a cell: its ``statements``, and ``value``, the expression at its end, if there is one.

    ``assigned`` are the names that the statements assign in the notebook; ``tree`` is their syntax tree.
    """

    statements: CodeType | None
    value: CodeType | None
    assigned: frozenset[str]
    tree: ast.Module

    @property
    def codes(self) -> list[CodeType]:
        """The code objects in the order of execution."""
        return [code for code in (self.statements, self.value) if code is not None]

    @property
    def rebound(self) -> frozenset[str]:
        """The assigned names whose earlier values the cell does not read, so that assignment frees their memory."""
        read: set[str] = set()
        found: set[str] = set()
        for instruction in () if self.statements is None else dis.get_instructions(self.statements):
            if instruction.opname == "STORE_NAME":
                found |= {instruction.argval} - read
            elif instruction.opname == "LOAD_NAME":
                read.add(instruction.argval)
        return frozenset(found)

    @property
    def dropped(self) -> frozenset[str]:
        """The names that it assigns or deletes, whose earlier values may be freed."""
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, ast.Name))
        return self.assigned | {node.id for node in nodes if isinstance(node.ctx, ast.Del)}

    @property
    def calls_magics(self) -> bool:
        """Whether it calls magics, which may run code of theirs, as ``%%time`` does."""
        return any(not _MAGIC_CALLS.isdisjoint(code.co_names) for code in self.codes)

    def watched(self, watch: Callable[[ast.Module], ast.Module]) -> CompiledCell:
        """The same cell with the statements that ``watch`` adds."""
        if self.statements is None:
            return self
        return replace(self, statements=compiled_cell(watch(self.tree), self.statements.co_filename))

    def changed(self, change: Callable[[CodeType], CodeType]) -> CompiledCell:
        """The same cell with changed code for its statements."""
        return self if self.statements is None else replace(self, statements=change(self.statements))

    @property
    def awaits(self) -> bool:
        """Whether it awaits something outside functions."""
        return any(code.co_flags & inspect.CO_COROUTINE for code in self.codes)

    def run(self, namespace: dict[str, Any]) -> Any:
        """Execute in ``namespace``; returns the value of the final expression, or None.

        A cell that awaits has an event loop of its own.
        """
        __tracebackhide__ = True
        if self.awaits:
            from oom_magic.predict.isolation.process.event_loops import awaited

            return awaited(self._run_to_the_end(namespace))
        if self.statements is not None:
            exec(self.statements, namespace)
        return eval(self.value, namespace) if self.value is not None else None

    async def _run_to_the_end(self, namespace: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        from oom_magic.predict.isolation.process.event_loops import others_ended

        found = None
        for code in self.codes:
            found = eval(code, namespace)
            if code.co_flags & inspect.CO_COROUTINE:
                found = await found
        await others_ended()
        return found if self.value is not None else None


class _Changing(ast.NodeTransformer):
    """Changes what magics run, as any of IPython's ``ast_transformers`` can."""

    def __init__(self, change: Callable[[ast.Module], ast.Module]) -> None:
        self._change = change

    def visit(self, node: ast.AST) -> Any:
        """The code of a magic."""
        return self._change(node) if isinstance(node, ast.Module) else node


@contextmanager
def code_of_magics_changed(shell: InteractiveShell, change: Callable[[ast.Module], ast.Module]) -> Iterator[None]:
    """Inside, what ``%%time`` and others of IPython's magics run is ``change``d first."""
    changing = _Changing(change)
    shell.ast_transformers.append(changing)
    try:
        yield
    finally:
        with suppress(ValueError):  # IPython takes out those that fail
            shell.ast_transformers.remove(changing)


@contextmanager
def ended_by_scripts(shell: InteractiveShell) -> Iterator[None]:
    """Inside, a script of ``%run`` that runs out of memory ends the cell: IPython only shows what a script raises, and
    goes on with the cell's later lines (IPython/core/interactiveshell.py, ``safe_execfile``)."""
    usual = shell.showtraceback

    def showtraceback(*args: Any, **kwargs: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and type(error).__name__ == "OutOfMemoryError":
            raise error
        usual(*args, **kwargs)

    before = vars(shell).get("showtraceback")
    shell.showtraceback = showtraceback  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del shell.showtraceback
        else:
            shell.showtraceback = before  # type: ignore[method-assign]


def compile_cell(shell: InteractiveShell, text: str, lines_above: int = 0) -> CompiledCell:
    """Compile a cell with its magics and ``!`` commands translated. A SyntaxError shows the user's line.

    ``lines_above``: lines of the cell before ``text``, so that line numbers are those of the editor.
    """
    __tracebackhide__ = True
    try:
        return _compiled(shell, text, lines_above)
    except SyntaxError as error:
        raise error.with_traceback(None) from None  # the compiler's own frames do not show the user's line


def _compiled(shell: InteractiveShell, text: str, lines_above: int) -> CompiledCell:
    blank = takewhile(lambda line: not line.strip(), text.splitlines())
    source = "\n" * (lines_above + len(list(blank))) + shell.transform_cell(text)
    name = shell.compile.cache(source, _cell_number(shell), raw_code="\n" * lines_above + text)
    tree = shell.transform_ast(ast.parse(source, name))
    final = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    statements = compiled_cell(tree, name) if tree.body else None
    value = compiled_cell(ast.Expression(final.value), name, "eval") if final else None
    return CompiledCell(statements, value, _assigned(tree, statements), tree)


def _assigned(tree: ast.Module, statements: CodeType | None) -> frozenset[str]:
    stored = bound_in(tree)
    return frozenset() if statements is None else frozenset(stored.intersection(statements.co_names))


def _cell_number(shell: InteractiveShell) -> int:
    """The number, for tracebacks, of the cell that called the magic."""
    numbers: dict[str, int] = getattr(shell.compile, "_filename_map", {})
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in numbers:
            return numbers[frame.f_code.co_filename]
        frame = frame.f_back  # type: ignore[assignment]
    return shell.execution_count
