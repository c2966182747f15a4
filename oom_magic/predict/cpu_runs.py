"""Dry runs that stayed on the CPU because of a name such as ``device``, and the memory they would need on the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import TYPE_CHECKING, Protocol

from oom_magic.language import _
from oom_magic.memory.report import Assumption, MemoryReport
from oom_magic.predict.instrumentation.decided.decided_names import DecidedNames, cpu_fields, cpu_names, joined, shown
from oom_magic.predict.silence import silenced

if TYPE_CHECKING:
    from oom_magic.predict.instrumentation.recorder import Recorder


class EndedRun(Protocol):
    """The interface of a session whose dry run has ended."""

    report: MemoryReport | None

    @property
    def recorders(self) -> Sequence[Recorder]:
        """One for each card."""


@dataclass(frozen=True, slots=True)
class StayedOnCPU:
    """A run that took no GPU memory: the ``names`` that kept it on the CPU, and what it would take with "cuda".

    ``values`` are the names' values as code, ``peak_allocated_bytes`` is None where that run failed, or was not made:
    fields of objects (``cfg.device``) are named only.
    """

    names: tuple[str, ...]
    values: tuple[str, ...]
    peak_allocated_bytes: int | None

    def __str__(self) -> str:
        """The sentence that the report shows."""
        decided = zip(self.names, self.values, strict=True)
        was = joined([_("`{name}` was set to {value}", name=name, value=value) for name, value in decided])
        if self.peak_allocated_bytes is None:
            return _("nothing was put on the GPU: {was} before the dry run", was=was)
        return _(
            "nothing was put on the GPU: {was} before the dry run; with 'cuda' the run would take {peak_bytes}",
            was=was,
            peak_bytes=self.peak_allocated_bytes,
        )


def stayed_on_cpu(
    session: EndedRun,
    codes: Sequence[CodeType],
    followed: Collection[str],
    presume: Callable[[Collection[str]], DecidedNames],
    again: Callable[[DecidedNames], EndedRun],
) -> StayedOnCPU | None:
    """The names that kept a session's run on the CPU, which its report then says, too; None if there are none.

    ``followed`` are names that were decided again in the run already. ``presume`` returns the names that are to be
    decided otherwise, and ``again`` runs the ``codes`` once more with them, without showing their output again.
    """
    report = session.report
    if report is None or report.error or _took_memory(session):
        return None
    decided = presume(())
    seen = {**decided.namespace, **decided.above}
    names = sorted({name for code in codes for name in cpu_names(seen, code)}.difference(followed))
    values = {name: seen[name] for name in names}
    peak = None
    if names:
        with contextlib.suppress(Exception), silenced():
            other = again(presume(names))
            if not _took_memory(other):
                values.clear()  # the names have another purpose
            peak = None if other.report is None or not values else other.report.peak_allocated_bytes
    if not values:
        for code in codes:
            values |= cpu_fields(seen, code)
    if not values:
        return None
    stayed = StayedOnCPU(tuple(values), tuple(shown(value) for value in values.values()), peak)
    session.report = replace(report, assumptions=(*report.assumptions, Assumption(str(stayed), None)))
    return stayed


def _took_memory(session: EndedRun) -> bool:
    return any(len(recorder.columns) > recorder.num_before for recorder in session.recorders)
