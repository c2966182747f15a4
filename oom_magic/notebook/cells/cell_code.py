"""The code of a failed cell as a rehearsal executes it: without magics, prints and writes."""

from __future__ import annotations

import ast
import inspect
import linecache
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from oom_magic.explain.syntax import bound_in, names_in
from oom_magic.notebook.options import with_cards_quoted
from oom_magic.user_code import compiled_cell

_MAIN = "__main__"
_TIMED_FILES = ("<timed exec>", "<timed eval>")  # IPython/core/magics/execution.py, ``time``
# Magics that run the rest of their line, or their cell, each with its options that take a value.
_RUNNING_MAGICS = {
    "gpumem": "--gpu --memory --steps --device --top -o --output --json",
    "time": "",
    "timeit": "-n -r -p",
    "prun": "-l -s -T -D",
    "capture": "",
    "memit": "-r -t -i",
    "mprun": "-f -T",
}


# Functions that print or write their arguments, and those that only read them.
_PRINTING_CALLS = (
    "print pprint display info debug warning savefig show save savez save_file save_pretrained save_model dump "
    "to_csv to_json to_parquet to_excel write writelines writerow writerows write_text write_bytes"
)
_READING_CALLS = (
    "len str repr int float round sum min max format join item tolist state_dict keys memory_allocated "
    "max_memory_allocated memory_reserved max_memory_reserved memory_summary time open Path dumps"
)


@dataclass(frozen=True)
class CellCode:
    """Statements and their namespace; ``arguments`` are a script's command line, its path first.

    ``read_beside`` are the names of earlier cells that statements read which are left out.
    """

    tree: ast.Module
    names: dict[str, Any]
    file: str = "<ipython-input-rehearsed>"  # a cell by its name: the user's code, no library's
    arguments: list[str] = field(default_factory=list)
    read_beside: frozenset[str] = frozenset()

    def execute(self, tree: ast.Module, names: dict[str, Any]) -> None:
        """Execute ``tree``: these statements, or a changed copy of them."""
        before = sys.argv
        if self.arguments:
            sys.argv = list(self.arguments)
        try:
            code = self._compiled(tree)
            if not code.co_flags & inspect.CO_COROUTINE:
                exec(code, names)
            else:
                from oom_magic.predict.isolation.process.event_loops import awaited

                awaited(eval(code, names))
        finally:
            sys.argv = before

    def _compiled(self, tree: ast.Module) -> CodeType:
        if "torch" in sys.modules:
            from oom_magic.predict.instrumentation.loop_code import compiled_with_loops
            from oom_magic.predict.instrumentation.loops import LOOPS

            if LOOPS.are_known:
                return compiled_with_loops(tree, self.file)
        return compiled_cell(ast.fix_missing_locations(tree), self.file)


def code_of(shell: InteractiveShell, source: str, names: dict[str, Any]) -> CellCode:
    """What a cell executes: its statements, those under ``%%time`` or ``%gpumem``, or a script that it runs.

    Statements that only call the shell, print or write are left out. ``names`` are the cell's variables.
    """
    tree = _without_magics(shell, ast.parse(shell.transform_cell(source)))
    script = _script_of(tree)
    if script is None:
        kept = [one for one in tree.body if not _calls_shell(one) and not _only_prints(one)]
        left_out = [node for one in tree.body if one not in kept for node in ast.walk(one)]
        read = {node.id for node in left_out if isinstance(node, ast.Name)} - newly_assigned_names(tree)
        body = [*kept, *_read_at_the_end(tree.body, kept)]
        return CellCode(ast.Module(body, tree.type_ignores), names, read_beside=frozenset(read))
    path, arguments, is_interactive = script
    own = names if is_interactive else {"__name__": _MAIN, "__file__": str(path), "__builtins__": __builtins__}
    return CellCode(ast.parse(path.read_bytes()), own, str(path), [str(path), *arguments])


def _read_at_the_end(body: list[ast.stmt], kept: list[ast.stmt]) -> Iterator[ast.stmt]:
    """A statement that only reads what the statements ``kept`` bind and those behind them show: code to paste must
    leave it."""
    end = body.index(kept[-1]) + 1 if kept else len(body)
    made = {name for one in kept for name in bound_in(one)}
    read = [name for name in names_in(ast.Module(body[end:], [])) if name in made]
    if read:
        value = ast.Tuple([ast.Name(name, ast.Load()) for name in read], ast.Load())
        yield ast.copy_location(ast.Expr(value), body[end])


def newly_assigned_names(tree: ast.Module) -> frozenset[str]:
    """The names that a cell assigns without reading their earlier value first."""
    made: set[str] = set()
    read: set[str] = set()
    for statement in tree.body:
        _note_assigned(statement, made, read)
    return frozenset(made)


def _note_assigned(node: ast.AST, made: set[str], read: set[str]) -> None:
    """Note the names that a node assigns and reads, in the order of execution."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        made.add(node.name)
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load):
            read |= {node.id} - made
        elif node.id not in read:
            made.add(node.id)
        return
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        made |= {(one.asname or one.name).partition(".")[0] for one in node.names}
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        read |= {node.target.id} - made
    parts = list(ast.iter_child_nodes(node))
    targets = [one for one in parts if one in (*getattr(node, "targets", ()), getattr(node, "target", None))]
    for part in (*(one for one in parts if one not in targets and not isinstance(one, ast.stmt)), *targets):
        _note_assigned(part, made, read)
    for part in parts:
        if isinstance(part, ast.stmt):
            _note_assigned(part, made, read)


@contextmanager
def timed_lines_known(shell: InteractiveShell, source: str) -> Iterator[None]:
    """Tracebacks inside the block show the lines of a cell under ``%%time``, which IPython does not keep."""
    text = ""
    with suppress(SyntaxError):
        text = _timed_source(shell, source)
    entry = (len(text), None, text.splitlines(keepends=True))
    before = {file: linecache.cache.pop(file, None) for file in _TIMED_FILES}
    linecache.cache.update({file: (*entry, file) for file in _TIMED_FILES} if text else {})
    try:
        yield
    finally:
        for file, known in before.items():
            linecache.cache.pop(file, None)
            linecache.cache.update({} if known is None else {file: known})


def _timed_source(shell: InteractiveShell, source: str) -> str:
    """What ``%%time`` runs, as IPython compiles it; "" without one."""
    calls = filter(None, map(_magic_call, ast.parse(shell.transform_cell(source)).body))
    name, _, cell = next((one for one in calls if one[0] in _RUNNING_MAGICS and one[2]), ("", "", ""))
    return shell.transform_cell(cell) if name == "time" else _timed_source(shell, cell) if cell else ""


def _only_prints(statement: ast.stmt) -> bool:
    """Whether a statement only prints or writes existing values."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] not in _PRINTING_CALLS.split():
        return False
    inner = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and node is not call]
    return all(ast.unparse(node.func).rpartition(".")[2] in _READING_CALLS.split() for node in inner)


def _without_magics(shell: InteractiveShell, tree: ast.Module) -> ast.Module:
    """The tree with each magic replaced by the statements that it runs."""
    body: list[ast.stmt] = []
    for statement in tree.body:
        called = _magic_call(statement)
        inner = None if called is None else _statements_run_by(shell, *called)
        body += [statement] if inner is None else inner.body
    tree.body = body
    return tree


def _magic_call(statement: ast.stmt) -> tuple[str, str, str] | None:
    """Name, line and cell of the magic that a statement calls; None for any other statement."""
    call = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
    if not (isinstance(call, ast.Call) and _calls_shell(statement) and isinstance(call.func, ast.Attribute)):
        return None
    texts = [one.value if isinstance(one, ast.Constant) else None for one in call.args]
    if call.func.attr not in ("run_line_magic", "run_cell_magic") or not all(isinstance(one, str) for one in texts):
        return None
    name, line, *cell = map(str, texts)
    return name, line, cell[0] if cell else ""


def _statements_run_by(shell: InteractiveShell, name: str, line: str, cell: str) -> ast.Module | None:
    """The statements that a magic runs; None for a magic that runs no code of the notebook."""
    if name not in _RUNNING_MAGICS:
        return None
    with suppress(SyntaxError):
        code = cell or _without_options(line, _RUNNING_MAGICS[name].split())
        return _without_magics(shell, ast.parse(shell.transform_cell(code)))
    return None


def _without_options(line: str, valued: list[str]) -> str:
    """The rest of a magic's line after its options."""
    words = with_cards_quoted(line).strip()
    while words.startswith("-"):
        option, _, words = words.partition(" ")
        words = words.lstrip()
        if option in valued and words:
            words = _after_value(words)
    return words


def _after_value(words: str) -> str:
    quote = words[0] if words[0] in "'\"" else ""
    _, _, rest = words[1:].partition(quote) if quote else words.partition(" ")
    return rest.lstrip()


def _script_of(tree: ast.Module) -> tuple[Path, tuple[str, ...], bool] | None:
    """The last script that ``%run`` executes: its path, its arguments and whether it sees the notebook's names."""
    found = None
    for statement in tree.body:
        called = _magic_call(statement)
        if called is None or called[0] != "run":
            continue
        words = shlex.split(called[1])
        options = [word for word in words if word.startswith("-")][: next(
            (at for at, word in enumerate(words) if not word.startswith("-")), len(words))]  # fmt: skip
        names = words[len(options) :]
        with suppress(IndexError):
            path = Path(names[0]).expanduser()
            path = path if path.suffix else path.with_suffix(".py")
            if path.is_file() and path.suffix in (".py", ".ipy"):
                found = path, tuple(names[1:]), "-i" in options
    return found


def _calls_shell(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "get_ipython" for node in ast.walk(statement))
