"""Timelines as a plain picture, which every notebook page shows: one run, or several on one scale."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO

from matplotlib.figure import Figure

from oom_magic.memory.report import MemoryReport
from oom_magic.notebook.figures import draw_timeline, dress
from oom_magic.rendering.palette import LIGHT
from oom_magic.units import format_bytes

_WIDTH, _HEIGHT = 8.6, 3.1  # inches, a run
_DOTS_PER_INCH = 110


class Plot:
    """A matplotlib ``figure`` that shows itself as a PNG; its text is what it shows, in words."""

    def __init__(self, figure: Figure, words: str) -> None:
        self.figure = figure
        self.words = words

    def __repr__(self) -> str:
        return self.words

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.figure.savefig(file, format="png", dpi=_DOTS_PER_INCH)
        return file.getvalue()


def plot(runs: MemoryReport | Mapping[str, MemoryReport]) -> Plot:
    """Allocated memory over a run, stacked by category; of runs by name, one under the other on one scale.

    Raises ValueError without a run.
    """
    named = {"": runs} if isinstance(runs, MemoryReport) else dict(runs)
    if not named:
        raise ValueError("plot() got no report; give it one, or several by name: plot({'now': report}).")
    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(named)), facecolor=LIGHT["paper"], layout="constrained")
    all_axes = figure.subplots(len(named), squeeze=False)[:, 0]
    for axes, (name, report) in zip(all_axes, named.items(), strict=True):
        draw_timeline(axes, report)
        if name:
            axes.set_title(name, loc="left", fontsize=10, fontweight="bold", color=LIGHT["fg"], pad=24)
    highest = max(axes.get_ylim()[1] for axes in all_axes)
    for axes in all_axes:
        axes.set_ylim(0, highest)
        dress(axes)
    return Plot(figure, "\n".join(_words(name, report) for name, report in named.items()))


def _words(name: str, report: MemoryReport) -> str:
    peak = f"peak {format_bytes(report.peak_allocated_bytes)} ({report.peak_phase.value})"
    return f"{name}: {peak}" if name else f"Allocated memory over the run, {peak}"
