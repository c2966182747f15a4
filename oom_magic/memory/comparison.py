"""A calculation held against a run: what was worked out by hand, what the run says, and one over the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oom_magic.memory.categories import CATEGORIES, Category
from oom_magic.memory.report import MemoryReport
from oom_magic.views.blocks import Bar, Bars, Block, Cell, Describable, Description, Part, Sentence, Table

_WIDEST = 5  # runs whose categories fit beside each other into 80 columns


@dataclass(frozen=True, eq=False, repr=False)
class SideBySide(Describable):
    """Runs by name, with what is noted of them. Made by ``compare``."""

    reports: Mapping[str, MemoryReport]
    notes: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> Description:
        """A bar for each run, on one scale, and its categories in figures."""
        blocks: list[Block] = [Bars(tuple(map(self._bar, self.reports)))]
        names = list(self.reports)
        blocks += [self._categories(names[start : start + _WIDEST]) for start in range(0, len(names), _WIDEST)]
        failed = [name for name, report in self.reports.items() if report.out_of_memory is not None]
        if failed:
            blocks.append(Sentence(f"Out of memory, shown up to there: {', '.join(failed)}.", "bad"))
        return Description("Peak allocated, by what it is for", tuple(blocks))

    def to_dict(self) -> dict[str, Any]:
        """Each run's report as plain data."""
        return {name: report.to_dict() for name, report in self.reports.items()}

    def _bar(self, name: str) -> Bar:
        parts = self.reports[name].breakdown.items()
        shown = tuple(Part(Category(part).label, size, part) for part, size in parts)
        return Bar(name, shown, self.notes.get(name, ""))

    def _categories(self, names: list[str]) -> Table:
        shown = [part for part in CATEGORIES if any(report.breakdown[part] for report in self.reports.values())]
        chosen = [self.reports[name] for name in names]
        rows: list[tuple[Cell, ...]] = [(part.label, *(report.breakdown[part] for report in chosen)) for part in shown]
        rows.append(("peak reserved", *(report.peak_reserved_bytes for report in chosen)))
        hues = (*(part.value for part in shown), "free")
        return Table(("", *names), tuple(rows), hues=hues)


def compare(reports: Mapping[str, MemoryReport], notes: Mapping[str, str] | None = None) -> SideBySide:
    """Runs beside each other: ``compare({"float32": report, "bfloat16": other})``.

    Shows peak allocated of each, by category, and peak reserved; ``notes`` has a word to put beside a run's bar.
    Raises ValueError without a run, KeyError for a note on a run that is not there.
    """
    if not reports:
        raise ValueError("compare() got no report; give it at least one: compare({'now': report}).")
    notes = notes or {}
    for name in notes:
        if name not in reports:
            raise KeyError(f"{name!r} has a note and no report; there are: {', '.join(reports)}.")
    return SideBySide(dict(reports), dict(notes))


@dataclass(frozen=True, repr=False)
class Ratios(Describable):
    """Bytes by name, twice. Made by ``ratios``; ``result[name]`` is the ratio by hand / in the run."""

    by_hand: Mapping[str, int]
    in_run: Mapping[str, int]

    def __getitem__(self, name: str) -> float:
        return self.by_hand[name] / self.in_run[name] if self.in_run[name] else float("nan")

    def describe(self) -> Description:
        """A row for each name."""
        rows: list[tuple[Cell, ...]] = []
        for name, size in self.by_hand.items():
            ratio = f"{self[name]:.3f}" if self.in_run[name] else ""
            rows.append((_shown(name), round(size), self.in_run[name], ratio))
        table = Table(("", "by hand", "in the run", "ratio"), tuple(rows))
        return Description("By hand against the run", (table,))

    def to_dict(self) -> dict[str, Any]:
        """For each name: bytes by hand, bytes in the run, ratio."""
        return {name: {"by_hand": size, "in_run": self.in_run[name], "ratio": self[name]}
                for name, size in self.by_hand.items()}  # fmt: skip


def ratios(by_hand: Mapping[Any, int], in_run: Mapping[Any, int]) -> Ratios:
    """Bytes worked out by hand beside those of a run, by name: ``ratios({"parameter": 4 * n}, report.highest)``.

    ``in_run``: ``report.breakdown`` (at the peak), ``report.highest``, ``report.modules`` or a dict.
    Raises KeyError, naming what is there, for a name that the run does not have.
    """
    try:
        found = {_label(name): int(in_run[name]) for name in by_hand}
    except KeyError as error:
        raise KeyError(f"{error.args[0]!r} is not in the run, which has: {', '.join(map(str, in_run))}.") from None
    return Ratios({_label(name): size for name, size in by_hand.items()}, found)


def _shown(name: str) -> str:
    return Category(name).label if name in Category._value2member_map_ else name


def _label(name: object) -> str:
    return str(getattr(name, "value", name))
