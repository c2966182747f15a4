"""What a dry run changed outside itself, recorded before it happens and undone in reverse, whatever is raised."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class Journal:
    """Undoes at its end what was recorded in it. Each ``undo`` can be called twice, or without what it undoes.

    So every prefix of a change can be undone, and an undoing that was itself broken off is done again.
    """

    def __init__(self) -> None:
        self._undone: list[Callable[[], object]] = []  # to be called from the end on

    def record(self, undo: Callable[[], object]) -> None:
        """Before a change: how to undo it."""
        self._undone.append(undo)

    def undo(self) -> None:
        """Undo everything; at the end raise the first error there was. What fails twice is given up."""
        first: BaseException | None = None
        has_failed: Callable[[], object] | None = None
        while self._undone:
            undo = self._undone[-1]
            try:
                undo()
            except BaseException as error:
                first = first or error
                if has_failed is not undo:
                    has_failed = undo
                    continue
            self._undone.pop()
        if first is not None:
            raise first

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Undo all that was recorded, the last first."""
        try:
            self.undo()
        finally:
            self.undo()  # what an exception in the first broke off
