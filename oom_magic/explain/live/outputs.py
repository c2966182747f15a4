"""What a recorded run kept alive that it need not have: the outputs of earlier calls, tensors of earlier steps."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from oom_magic.explain.evidence.causes import Evidence
from oom_magic.memory.categories import CATEGORIES, Category

if TYPE_CHECKING:
    from oom_magic.memory.report import MemoryReport

_PASSING = [CATEGORIES.index(one) for one in (Category.ACTIVATION, Category.INPUT, Category.TEMPORARY)]
# A step may well hold a few forwards at once: both sides of a comparison, a policy and its reference.
_MANY_CALLS = 5
_LEAST_SHARE = 0.2


def find_kept_outputs(report: MemoryReport) -> Evidence | None:
    """The evidence that something keeps what should have gone before memory ran out; None without it."""
    failure, timeline = report.out_of_memory, report.timeline
    if failure is None or not timeline.num_events:
        return None
    live = timeline.live_at(report.peak_position)
    passing = live[np.isin(timeline.category[live], _PASSING)]
    least = _LEAST_SHARE * report.breakdown.total_bytes
    steps = timeline.step[passing]
    old = passing[(steps >= 1) & (steps < failure.step - 1)]
    old_bytes = int(timeline.requested_bytes[old].sum())
    if old_bytes >= least and len(np.unique(timeline.step[old])) > 1:
        return Evidence("earlier_steps_alive", {"kept_bytes": old_bytes})
    if failure.num_calls < _MANY_CALLS:
        return None
    kept_bytes = _copied_bytes(report, passing, failure.num_calls // 2)
    return (
        Evidence("calls_alive", {"count": failure.num_calls, "kept_bytes": kept_bytes}) if kept_bytes >= least else None
    )


def _copied_bytes(report: MemoryReport, allocations: np.ndarray, least_copies: int) -> int:
    """Bytes of what a module made the same at least so many times, all alive at once."""
    timeline = report.timeline
    within = allocations[timeline.module[allocations] > 0]
    columns = (timeline.module, timeline.operator, timeline.requested_bytes)
    kinds = Counter(zip(*(column[within].tolist() for column in columns), strict=True))
    return sum(num_bytes * copies for (_, _, num_bytes), copies in kinds.items() if copies >= least_copies)
