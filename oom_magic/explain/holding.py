"""What else holds memory: the notebook's variables, other processes, a model loaded twice; lines of the run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from oom_magic.explain.causes import Evidence
from oom_magic.explain.failure import Failure
from oom_magic.explain.held import Held

if TYPE_CHECKING:
    from oom_magic.memory.report import MemoryReport

_MOST_LINES = 5
_LEAST_BYTES = 2**20


def who_holds(
    names: Mapping[str, Any] | None, report: MemoryReport | None, failure: Failure | None
) -> tuple[tuple[Held, ...], tuple[Evidence, ...]]:
    """Holders of memory, largest first within a kind, and what about them is worth a sentence."""
    held: list[Held] = []
    evidence: list[Evidence] = []
    if names is not None and "torch" in sys.modules:
        held += _in_notebook(names, 0 if failure is None else failure.device_index or 0)
        evidence += _twins(names)
    if report is not None and report.out_of_memory is not None:
        held += _in_report(report)
    return tuple(held), tuple(evidence)


def _in_notebook(names: Mapping[str, Any], device: int) -> Iterator[Held]:
    """On a real GPU: the variables that hold memory, and other processes."""
    from oom_magic.measure.device_memory import is_available

    if not is_available():
        return
    import os

    from oom_magic.measure.device import read_cards
    from oom_magic.measure.holders import holders_in
    from oom_magic.measure.ownership import on_cuda

    holders = holders_in(names, on_cuda(device))
    for holder in holders:
        yield Held("output" if holder.name.startswith("Out[") else "name", holder.name, holder.num_bytes)
    for card in read_cards():
        if card.index == device:
            for process in card.processes:
                if process.pid != os.getpid() and process.num_bytes:
                    yield Held("process", f"{process.pid} {process.name}".strip(), process.num_bytes)


def _twins(names: Mapping[str, Any]) -> Iterator[Evidence]:
    from oom_magic.measure.twins import twin_models

    for twins, num_bytes in twin_models(names):
        yield Evidence("same_model_twice", {"names": ", ".join(twins), "twin_bytes": num_bytes})


def _in_report(report: MemoryReport) -> Iterator[Held]:
    """Of the run that failed: categories at the peak, and the lines that made most of it."""
    for name, num_bytes in sorted(report.breakdown.items(), key=lambda item: -item[1]):
        yield Held("category", name, num_bytes)
    for usage in report.lines[:_MOST_LINES]:
        if usage.live_bytes >= _LEAST_BYTES and usage.line.file:
            yield Held("line", f"{usage.line.file.rpartition('/')[2]}:{usage.line.line}", usage.live_bytes)
