"""The views of comparisons: several runs, a prediction and its measurement, calculations by hand."""

from __future__ import annotations

from oom_magic.language import _
from oom_magic.memory.categories import CATEGORIES
from oom_magic.memory.comparison import Comparison, Ratios, SideBySide
from oom_magic.views.blocks import Bar, Bars, Block, Cell, Description, Part, Sentence, Table, register
from oom_magic.views.words import upper_bound_sentence, word

_WIDEST = 5  # runs whose categories fit beside each other into 80 columns


@register
def describe_comparison(comparison: Comparison) -> Description:
    """Both peaks and every category: predicted, measured and their ratio."""
    rows = tuple(
        (word(name), predicted, measured, f"{predicted / measured:.4f}" if measured else "")
        for name, predicted, measured in comparison.rows()
    )
    table = Table(("", _("predicted"), _("measured"), _("ratio")), rows)
    off = abs(comparison.allocated_ratio - 1)
    verdict = Sentence(_("Predicted peak allocated is off by {percent:.2f} %.", percent=100 * off), "strong")
    bound = [upper_bound_sentence(is_failure=False)] if comparison.predicted.is_upper_bound else []
    title = _("Predicted vs. measured on {name}", name=comparison.measured.device.name)
    return Description(title, (verdict, *bound, table))


@register
def describe_side_by_side(runs: SideBySide) -> Description:
    """A bar for each run, on one scale, and its categories in figures."""
    blocks: list[Block] = [Bars(tuple(_bar(runs, name) for name in runs.reports))]
    names = list(runs.reports)
    blocks += [_categories(runs, names[start : start + _WIDEST]) for start in range(0, len(names), _WIDEST)]
    failed = [name for name, report in runs.reports.items() if report.out_of_memory is not None]
    if failed:
        blocks.append(
            Sentence(_("Ran out of memory, shown up to that point: {failed}.", failed=", ".join(failed)), "bad")
        )
    bounds = [name for name, report in runs.reports.items() if report.is_upper_bound]
    if bounds:
        text = _("Compiled code treated as eager code, all figures are upper bounds: {names}.", names=", ".join(bounds))
        blocks.append(Sentence(text, "warning"))
    return Description(_("Peak allocated by category"), tuple(blocks))


def _bar(runs: SideBySide, name: str) -> Bar:
    parts = runs.reports[name].breakdown.items()
    shown = tuple(Part(word(part), size, part) for part, size in parts)
    return Bar(name, shown, runs.notes.get(name, ""))


def _categories(runs: SideBySide, names: list[str]) -> Table:
    shown = [part for part in CATEGORIES if any(report.breakdown[part] for report in runs.reports.values())]
    chosen = [runs.reports[name] for name in names]
    rows: list[tuple[Cell, ...]] = [
        (word(part.value), *(report.breakdown[part] for report in chosen)) for part in shown
    ]
    rows.append((_("peak reserved"), *(report.peak_reserved_bytes for report in chosen)))
    hues = (*(part.value for part in shown), "")
    return Table(("", *names), tuple(rows), hues=hues)


@register
def describe_ratios(ratios: Ratios) -> Description:
    """A row for each name."""
    rows: list[tuple[Cell, ...]] = []
    for name, size in ratios.by_hand.items():
        ratio = f"{ratios[name]:.3f}" if ratios.in_run[name] else ""
        rows.append((word(name), round(size), ratios.in_run[name], ratio))
    table = Table(("", _("by hand"), _("in the run"), _("ratio")), tuple(rows))
    return Description(_("By hand vs. the run"), (table,))
