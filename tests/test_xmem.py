"""NVML peaks that others measured on a real RTX 3060: what the dry run says of each, misses included."""

from __future__ import annotations

from statistics import median

import pytest
from xmem import TABLE, predict


@pytest.mark.slow
def test_measured_runs_are_foretold() -> None:
    """Each that was out of memory, and only those; of the others reserved memory, as README has it."""
    found = [(row, predict(row)) for row in TABLE["rows"]]
    assert [report.out_of_memory is not None for _row, report in found] == [row["oom"] for row, _report in found]
    errors = [report.peak_reserved_bytes / row["measured"] - 1 for row, report in found if not row["oom"]]
    assert min(errors) > 0
    assert max(errors) < 0.08
    assert median(errors) < 0.02
