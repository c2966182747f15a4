"""Remedies for the cell that failed: the very cell rehearsed, with its names as they were, on a pretend GPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell

from oom_magic.notebook.setup_options import similar_card
from oom_magic.predict.setups.gpus import DEFAULT_GPU, GPU, find_gpu

if TYPE_CHECKING:
    from oom_magic.explain.diagnosis import Diagnosis
    from oom_magic.memory.report import MemoryReport
    from oom_magic.notebook.failures import FailedCell
    from oom_magic.notebook.gpumem import CellRunner

_FILE = "<ipython-input-rehearsed>"  # a cell by its name: the user's code, no library's


def prices(
    shell: InteractiveShell,
    runner: CellRunner,
    cell: FailedCell,
    diagnosis: Diagnosis,
    report: MemoryReport | None,
) -> Iterator[Diagnosis]:
    """The diagnosis with remedies as they are priced by dry runs of the cell."""
    from oom_magic.explain.advice import advise
    from oom_magic.explain.rehearsal import CellRehearsal
    from oom_magic.predict.following.live_objects import heap_set_aside

    tree = _tree(shell, cell.source)
    gpu, memory = _card(diagnosis, report)
    with ExitStack() as stack:
        names: dict[str, Any] = shell.user_ns
        if cell.is_dry:
            names = stack.enter_context(runner.names.entered(shell))
        stack.enter_context(heap_set_aside())
        origin = runner.session if cell.is_dry else None
        failed = None if report is None else report.out_of_memory
        step = 0 if failed is None else failed.step
        rehearsal = CellRehearsal(
            _execute, tree, names, gpu=gpu.name, memory=memory, origin=origin, failed_in_step=step
        )
        yield from advise(diagnosis, rehearsal, gpu, report)


def _execute(tree: ast.Module, names: dict[str, Any]) -> None:
    exec(compile(ast.fix_missing_locations(tree), _FILE, "exec", dont_inherit=True), names)


def _tree(shell: InteractiveShell, source: str) -> ast.Module:
    """The statements of a cell without the magic above it, and without those that call the shell."""
    first, _, rest = source.lstrip().partition("\n")
    tree: ast.Module = ast.parse(shell.transform_cell(rest if first.startswith("%%") else source))
    tree.body = [statement for statement in tree.body if not _calls_shell(statement)]
    return tree


def _calls_shell(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "get_ipython" for node in ast.walk(statement))


def _card(diagnosis: Diagnosis, report: MemoryReport | None) -> tuple[GPU, int | None]:
    """The card of the failed run: by its name, else one of its size; and its memory."""
    failure = diagnosis.main_failure
    total = report.device.total_bytes if report is not None else failure.total_bytes if failure else None
    if report is not None:
        try:
            return find_gpu(report.device.name), total
        except ValueError:
            pass
    similar = None if total is None else similar_card(total)
    return similar or find_gpu(DEFAULT_GPU), total
