"""How runs beside each other look."""

from __future__ import annotations

from oom_magic.memory.categories import CATEGORIES, Category
from oom_magic.memory.comparison import Comparison, Ratios, SideBySide
from oom_magic.views.blocks import Bar, Bars, Block, Cell, Description, Part, Sentence, Table
from oom_magic.views.registry import register

_WIDEST = 5  # runs whose categories fit beside each other into 80 columns


@register
def describe_comparison(comparison: Comparison) -> Description:
    """Both peaks and every category: predicted, measured and their ratio."""
    rows = tuple(
        (name, predicted, measured, f"{predicted / measured:.4f}" if measured else "")
        for name, predicted, measured in comparison.rows()
    )
    table = Table(("", "predicted", "measured", "ratio"), rows)
    off = abs(comparison.allocated_ratio - 1)
    verdict = Sentence(f"Predicted peak allocated is off by {100 * off:.2f} %.", "strong")
    return Description(f"Predicted against measured on {comparison.measured.device.name}", (verdict, table))


@register
def describe_side_by_side(runs: SideBySide) -> Description:
    """A bar for each run, on one scale, and its categories in figures."""
    blocks: list[Block] = [Bars(tuple(_bar(runs, name) for name in runs.reports))]
    names = list(runs.reports)
    blocks += [_categories(runs, names[start : start + _WIDEST]) for start in range(0, len(names), _WIDEST)]
    failed = [name for name, report in runs.reports.items() if report.out_of_memory is not None]
    if failed:
        blocks.append(Sentence(f"Out of memory, shown up to there: {', '.join(failed)}.", "bad"))
    return Description("Peak allocated, by what it is for", tuple(blocks))


def _bar(runs: SideBySide, name: str) -> Bar:
    parts = runs.reports[name].breakdown.items()
    shown = tuple(Part(Category(part).label, size, part) for part, size in parts)
    return Bar(name, shown, runs.notes.get(name, ""))


def _categories(runs: SideBySide, names: list[str]) -> Table:
    shown = [part for part in CATEGORIES if any(report.breakdown[part] for report in runs.reports.values())]
    chosen = [runs.reports[name] for name in names]
    rows: list[tuple[Cell, ...]] = [(part.label, *(report.breakdown[part] for report in chosen)) for part in shown]
    rows.append(("peak reserved", *(report.peak_reserved_bytes for report in chosen)))
    hues = (*(part.value for part in shown), "free")
    return Table(("", *names), tuple(rows), hues=hues)


@register
def describe_ratios(ratios: Ratios) -> Description:
    """A row for each name."""
    rows: list[tuple[Cell, ...]] = []
    for name, size in ratios.by_hand.items():
        ratio = f"{ratios[name]:.3f}" if ratios.in_run[name] else ""
        rows.append((_shown(name), round(size), ratios.in_run[name], ratio))
    table = Table(("", "by hand", "in the run", "ratio"), tuple(rows))
    return Description("By hand against the run", (table,))


def _shown(name: str) -> str:
    return Category(name).label if name in Category._value2member_map_ else name
