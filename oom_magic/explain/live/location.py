"""Locating a failure: from the frames of a live exception, or the report of the run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from oom_magic.explain.evidence.tensors import TensorCandidate, requested_window
from oom_magic.explain.messages.failure import Failure
from oom_magic.units import format_bytes

if TYPE_CHECKING:
    from oom_magic.explain.live.frames import LiveFailure
    from oom_magic.memory.report import MemoryReport, OutOfMemory

_KINDS = {
    "_log_softmax": "probabilities",
    "nll_loss_backward": "logits_gradient",
    "_log_softmax_backward_data": "logits_gradient",
}
_AS_FULL = 0.02  # of what was allocated: a message rounds it, and counts what allocations are rounded up to
_PHASES = {"forward": "forward", "backward": "backward", "optimizer": "optimizer_step"}


@dataclass(frozen=True)
class FailureLocation:
    """Candidates for the tensor, best first, and the user's line; ``is_exact`` where a report has its size."""

    candidates: tuple[TensorCandidate, ...] = ()
    place: str = ""
    code: str = ""
    phase: str | None = None
    is_exact: bool = False


UNKNOWN_LOCATION = FailureLocation()


def locate_failure(
    error: BaseException | None,
    report: MemoryReport | None,
    failure: Failure,
    phase: str | None,
    names: Mapping[str, Any] | None = None,
) -> FailureLocation:
    """Where the failure of a message happened, by exception and report; ``names`` are the notebook's."""
    recorded = None if report is None else report.out_of_memory
    if recorded is not None and not _agrees(recorded, failure):
        recorded = None
    location = _from_report(recorded) if recorded is not None else UNKNOWN_LOCATION
    if error is None or error.__traceback__ is None or "torch" not in sys.modules:
        return location
    from oom_magic.explain.live.frames import inspect_failure  # these import torch
    from oom_magic.explain.live.tensors import live_candidates

    exact_bytes = recorded.tensor_bytes if recorded is not None else None
    operator = recorded.operator.rpartition("::")[2] if recorded is not None else ""
    phase = phase or location.phase
    try:
        live = inspect_failure(error, names)
        found = () if live is None else live_candidates(live, failure, phase, exact_bytes, operator)
    except Exception:  # the user's objects may raise anything when they are read
        return location
    if live is None:
        return location
    if not found:
        found = tuple(_with_shape(one, live) for one in location.candidates)
    place, code = location.place or live.place, location.code or live.code
    return replace(location, candidates=found or location.candidates, place=place, code=code)


def _with_shape(candidate: TensorCandidate, live: LiveFailure) -> TensorCandidate:
    """The tensor of a loss, for which a report has only the size, with the shape that follows from the frames."""
    from oom_magic.explain.live.tensors import formula_over_vocabulary

    is_of_the_loss = candidate.name in _KINDS.values()
    formula = formula_over_vocabulary(live, candidate.num_bytes) if is_of_the_loss else ""
    return replace(candidate, formula=formula or candidate.formula)


def located_in_rehearsal(report: MemoryReport, failure: Failure) -> FailureLocation:
    """What was refused in a backward, whose operators no frame shows: the first request of that size in the backward
    of a rehearsal that is made with as much allocated, if it is of a known kind."""
    import numpy as np  # imported here, since explaining a text does not need it

    from oom_magic.memory.timeline import PHASES, Phase

    window, timeline = requested_window(failure), report.timeline
    if window is None or not failure.allocated_bytes:
        return UNKNOWN_LOCATION
    is_made = timeline.order >= 0
    made = np.where(is_made, timeline.order, ~timeline.order)
    sizes = timeline.requested_bytes[made]
    before = np.cumsum(np.where(is_made, sizes, -sizes)) - sizes
    fits = (window[0] <= sizes) & (sizes <= window[1]) & (timeline.phase[made] == PHASES.index(Phase.BACKWARD))
    is_as_full = np.abs(before - failure.allocated_bytes) <= _AS_FULL * failure.allocated_bytes
    for one in made[is_made & fits & is_as_full][:1].tolist():
        operator = timeline.operators[timeline.operator[one]].rpartition("::")[2]
        if operator in _KINDS:
            num_bytes = int(timeline.requested_bytes[one])
            formula = f"{operator} = {format_bytes(num_bytes)}"
            return FailureLocation((TensorCandidate(_KINDS[operator], formula, num_bytes, 1.0),), phase="backward")
    return UNKNOWN_LOCATION


def _agrees(recorded: OutOfMemory, failure: Failure) -> bool:
    """Whether a report describes this failure."""
    return failure.requested_bytes is None or format_bytes(recorded.requested_bytes) == format_bytes(
        failure.requested_bytes
    )


def _from_report(recorded: OutOfMemory) -> FailureLocation:
    operator = recorded.operator.rpartition("::")[2]
    phase = _PHASES.get(recorded.phase.value)
    where = f"{recorded.module}: " if recorded.module else ""
    formula = f"{where}{operator or '?'} = {format_bytes(recorded.tensor_bytes)}"
    kind = "optimizer_state" if phase == "optimizer_step" else _KINDS.get(operator, "result")
    candidate = TensorCandidate(kind, formula, recorded.tensor_bytes, 1.0, recorded.line.text)
    place = recorded.line.place if recorded.line.file else ""
    return FailureLocation((candidate,), place, recorded.line.text.strip(), phase, is_exact=True)
