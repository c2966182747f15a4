"""The values of context variables (``contextvars``) that dry runs set: each run has a context of its own."""

from __future__ import annotations

from contextvars import Context, ContextVar, copy_context
from typing import Any

_UNSET = object()


class ContextValues:
    """What a run finds in ``set_by_runs`` is set in its context, and nowhere else while it lasts; then it holds what
    this and earlier runs set there."""

    def __init__(self) -> None:
        self.set_by_runs: dict[ContextVar[Any], Any] = {}

    def context(self) -> Context:
        """The context of a run: the caller's, with what earlier runs set."""
        context = copy_context()
        for variable, value in self.set_by_runs.items():
            context.run(variable.set, value)
        self.set_by_runs.clear()  # the values are free when the run sets others
        return context

    def note(self, context: Context) -> None:
        """Note what differs at the end of a run from the caller's context."""
        outer = copy_context()
        self.set_by_runs.update(
            {variable: value for variable, value in context.items() if outer.get(variable, _UNSET) is not value}
        )
