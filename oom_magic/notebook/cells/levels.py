"""What was allocated before the last cell that failed: the level to which ``%oom_free`` brings it back."""

from __future__ import annotations

import sys

from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult

from oom_magic.notebook.cells.gpumem import CellRunner


class LevelWatch:
    """Notes what is allocated before each cell.

    ``before_failure`` is that of the last cell that failed, in bytes by device.
    """

    def __init__(self, runner: CellRunner) -> None:
        self._runner = runner
        self._now: dict[str, int] = {}
        self.before_failure: dict[str, int] = {}

    def before_cell(self, _: ExecutionInfo) -> None:
        """IPython's ``pre_run_cell``."""
        self._now = {}
        if "torch" in sys.modules:
            from oom_magic.notebook.cells.releasing import allocated_now

            self._now = allocated_now(self._runner)

    def after_cell(self, result: ExecutionResult) -> None:
        """IPython's ``post_run_cell``."""
        self._runner.after_cell(result)
        if not result.success:
            self.before_failure = self._now
