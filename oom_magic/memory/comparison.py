"""Runs beside each other: a prediction and its measurement, several runs, a calculation by hand and a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oom_magic.language import _
from oom_magic.memory.categories import CATEGORIES
from oom_magic.memory.report import MemoryReport, data_frame
from oom_magic.results import Result


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """A prediction and a measurement of the same run. Ratios are predicted / measured."""

    predicted: MemoryReport
    measured: MemoryReport

    @property
    def allocated_ratio(self) -> float:
        """Predicted peak allocated over measured."""
        return self.predicted.peak_allocated_bytes / max(self.measured.peak_allocated_bytes, 1)

    @property
    def reserved_ratio(self) -> float:
        """Predicted peak reserved over measured."""
        return self.predicted.peak_reserved_bytes / max(self.measured.peak_reserved_bytes, 1)

    def rows(self) -> Sequence[tuple[str, int, int]]:
        """(name, predicted bytes, measured bytes): both peaks, then every category that either has."""
        pairs = [
            ("peak allocated", self.predicted.peak_allocated_bytes, self.measured.peak_allocated_bytes),
            ("peak reserved", self.predicted.peak_reserved_bytes, self.measured.peak_reserved_bytes),
        ]
        both = (self.predicted.breakdown, self.measured.breakdown)
        pairs += [
            (category.label, both[0][category.value], both[1][category.value])
            for category in CATEGORIES
            if any(breakdown[category.value] for breakdown in both)
        ]
        return pairs

    def to_dict(self) -> dict[str, Any]:
        """Both reports as plain data, and the ratios."""
        return {
            "predicted": self.predicted.to_dict(),
            "measured": self.measured.to_dict(),
            "allocated_ratio": self.allocated_ratio,
            "reserved_ratio": self.reserved_ratio,
        }


@dataclass(frozen=True, eq=False, repr=False)
class SideBySide(Result):
    """Runs by name, with notes. Made by ``compare``."""

    reports: Mapping[str, MemoryReport]
    notes: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Each run's report as plain data."""
        return {name: report.to_dict() for name, report in self.reports.items()}

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with a row for each run: both peaks and every category at the peak, in bytes.

        Raises ImportError with the fix where pandas is not installed.
        """
        return data_frame(
            {
                "run": name,
                "peak_allocated_bytes": report.peak_allocated_bytes,
                "peak_reserved_bytes": report.peak_reserved_bytes,
                **{category.value: report.breakdown[category.value] for category in CATEGORIES},
            }
            for name, report in self.reports.items()
        )


Runs = Mapping[str, MemoryReport] | Iterable[MemoryReport] | MemoryReport


def compare(*runs: Runs, notes: Mapping[str, str] | None = None) -> SideBySide:
    """Runs beside each other: ``compare({"float32": report, "bfloat16": other})``; without names they are numbered.

    Shows peak allocated of each, by category, and peak reserved; ``notes`` has a word to put beside a run's bar.
    Raises ValueError without a run, TypeError for what is none, KeyError for a note on a run that is not there.
    """
    given: Any = runs[0] if len(runs) == 1 else runs
    reports = named_runs(given, "compare")
    notes = notes or {}
    for name in notes:
        if name not in reports:
            names = ", ".join(reports)
            raise KeyError(_("{name!r} has a note but no report; reports are: {names}.", name=name, names=names))
    return SideBySide(reports, dict(notes))


def named_runs(runs: Runs, function: str) -> dict[str, MemoryReport]:
    """One run or several by name, numbered if they have none. Raises as ``compare`` does, for ``function``."""
    if isinstance(runs, MemoryReport):
        runs = [runs]
    if not isinstance(runs, Mapping) and isinstance(runs, Iterable) and not isinstance(runs, str):
        runs = {f"run {number}": report for number, report in enumerate(runs, 1)}
    found: list[Any] = list(runs.values()) if isinstance(runs, Mapping) else [runs]
    others = [one for one in found if not isinstance(one, MemoryReport)]
    if others:
        values = {"function": function, "kind": type(others[0]).__name__}
        raise TypeError(_("{function}() takes reports from dry_run() or measure(), not {kind}.", **values))
    if not runs:
        raise ValueError(
            _(
                "{function}() got no report; give it one, or several by name: {function}({{'now': report}}).",
                function=function,
            )
        )
    return dict(runs)


@dataclass(frozen=True, repr=False)
class Ratios(Result):
    """Bytes by name, by hand and in a run. Made by ``ratios``; ``result[name]`` is by hand / in the run."""

    by_hand: Mapping[str, int]
    in_run: Mapping[str, int]

    def __getitem__(self, name: str) -> float:
        """Bytes by hand over bytes in the run; NaN if the run has none."""
        return self.by_hand[name] / self.in_run[name] if self.in_run[name] else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """For each name: bytes by hand, bytes in the run, ratio."""
        return {name: {"by_hand": size, "in_run": self.in_run[name], "ratio": self[name]}
                for name, size in self.by_hand.items()}  # fmt: skip

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with a row for each name, as in ``to_dict``; ImportError where pandas is not installed."""
        return data_frame({"name": name, **row} for name, row in self.to_dict().items())


def ratios(by_hand: Mapping[Any, int], in_run: Mapping[Any, int]) -> Ratios:
    """Bytes worked out by hand beside those of a run, by name: ``ratios({"parameter": 4 * n}, report.highest)``.

    ``in_run``: ``report.breakdown`` (at the peak), ``report.highest``, ``report.modules`` or a dict.
    Raises KeyError, naming what is there, for a name that the run does not have.
    """
    try:
        found = {_label(name): int(in_run[name]) for name in by_hand}
    except KeyError as error:
        names = ", ".join(map(str, in_run))
        text = _("{name!r} is not in the run, which has: {names}.", name=error.args[0], names=names)
        raise KeyError(text) from None
    return Ratios({_label(name): size for name, size in by_hand.items()}, found)


def _label(name: object) -> str:
    return str(getattr(name, "value", name))
