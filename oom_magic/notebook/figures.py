"""Timelines as a plain picture, which every notebook page shows: one run, or several on one scale."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from itertools import pairwise
from typing import overload

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.ticker import FuncFormatter, MaxNLocator

from oom_magic.language import _, choose_language, using_language
from oom_magic.memory.allocator.replay import replay
from oom_magic.memory.categories import CATEGORIES, Category
from oom_magic.memory.comparison import Runs, named_runs
from oom_magic.memory.report import MemoryReport
from oom_magic.memory.timeline import PHASES, MarkKind, Phase
from oom_magic.one_line_errors import OneLineErrors
from oom_magic.units import MIB, unit_for
from oom_magic.views import to_html
from oom_magic.views.blocks import Description, Picture
from oom_magic.views.html import LIGHT
from oom_magic.views.report import place
from oom_magic.views.text import display_width
from oom_magic.views.words import at_most, word

_MOST_POINTS = 320
_CHINESE_FONT = re.compile(
    r"(CJK|Han (Sans|Serif)|Source Han).*SC|WenQuanYi|Microsoft YaHei|SimHei|PingFang SC|Heiti SC"
)
_CARD_IN_VIEW = 0.3  # the card's limit is drawn when the peak reaches this share of it
_CHARACTER_SHARE = 0.0068  # of the width: a character of the words under the curve
_LABEL_SHARE = 0.12  # of the height: a line of words with the space around it
_STACK = (  # what stays longest at the bottom
    Category.BEFORE, Category.WORKSPACE, Category.PARAMETER, Category.OPTIMIZER_STATE,
    Category.GRADIENT, Category.ACTIVATION, Category.INPUT, Category.TEMPORARY,
)  # fmt: skip
_PHASE_SHADES = {Phase.FORWARD: 0.25, Phase.BACKWARD: 0.6, Phase.OPTIMIZER: 1.0}


@dataclass(frozen=True, eq=False)
class Curve:
    """Points of a timeline: event positions, bytes by category (a column each), reserved bytes, phases."""

    positions: npt.NDArray[np.int64]
    by_category: npt.NDArray[np.int64]
    reserved_bytes: npt.NDArray[np.int64]
    phases: npt.NDArray[np.int64]


def timeline_picture(report: MemoryReport) -> Picture:
    """The timeline as an inline SVG."""
    peak, cards = report.peak_allocated_bytes, len(report.cards)
    if cards > 1:
        alt = _(
            "Allocated memory on each of {cards} cards over the run, stacked by category; peak {peak_bytes}.",
            cards=cards,
            peak_bytes=peak,
        )
    else:
        alt = _(
            "Allocated memory over {name}, stacked by category; peak {peak_bytes}.", name=_("the run"), peak_bytes=peak
        )
    with drawn_in_chinese():
        return Picture(alt, _themed_svg(timeline_figure(report)))


def timeline_figure(report: MemoryReport) -> Figure:
    """The timeline, one for each card, as a matplotlib figure in the colours of a light page."""
    cards = report.cards
    figure = Figure(figsize=(8.6, 3.1 + 2.3 * (len(cards) - 1)), facecolor="none", layout="constrained")
    for axes, card in zip(figure.subplots(len(cards), squeeze=False)[:, 0], cards, strict=True):
        draw_timeline(axes, card)
        if len(cards) > 1:
            axes.set_ylabel(f"cuda:{card.device.index}", color=LIGHT["fg"], fontsize=9)
    return figure


def draw_timeline(axes: Axes, report: MemoryReport) -> None:
    """Draw the timeline into ``axes``."""
    axes.set_facecolor("none")
    axes.set_xlim(0, max(report.timeline.num_events - 1, 1))
    curve = sample(report)
    _draw_curve(axes, curve)
    _draw_card(axes, report, curve)
    _draw_peak(axes, report, curve)
    _draw_phases(axes, curve)
    _draw_steps(axes, report)
    _draw_failure(axes, report, curve)
    dress(axes)


def sample(report: MemoryReport, most_points: int = _MOST_POINTS) -> Curve:
    """About ``most_points`` moments: the highest of each stretch, so that no peak is lost, and both ends."""
    timeline = report.timeline
    replayed = replay(timeline, settings=report.settings)
    events = timeline.order
    made = np.where(events >= 0, events, ~events)
    sizes = np.where(events >= 0, 1, -1) * replayed.block_bytes[made]
    changes = np.zeros((len(events), len(CATEGORIES)), dtype=np.int64)
    changes[np.arange(len(events)), timeline.category[made]] = sizes
    by_category = changes.cumsum(axis=0)
    total = by_category.sum(axis=1)
    edges = np.unique(np.linspace(0, len(events), min(most_points, len(events)) + 1).astype(np.int64))
    highest = [start + int(total[start:end].argmax()) for start, end in pairwise(edges)]
    positions = np.unique(np.array([0, *highest, len(events) - 1], dtype=np.int64)) if len(events) else edges[:0]
    latest = np.maximum.accumulate(np.where(events >= 0, np.arange(len(events)), 0))  # a free has no phase
    phases = timeline.phase[made[latest]][positions]
    return Curve(positions, by_category[positions], replayed.reserved_bytes[positions], phases)


def _draw_curve(axes: Axes, curve: Curve) -> None:
    shown = [category for category in _STACK if curve.by_category[:, CATEGORIES.index(category)].any()]
    if shown:
        axes.stackplot(
            curve.positions,
            [curve.by_category[:, CATEGORIES.index(category)] for category in shown],
            colors=[LIGHT[category.value] for category in shown],
            labels=[word(category.value) for category in shown],
            edgecolor=LIGHT["paper"],
            linewidth=0.4,
        )
    axes.plot(curve.positions, curve.reserved_bytes, color=LIGHT["quiet"], linewidth=1, label=_("reserved"))


def _draw_card(axes: Axes, report: MemoryReport, curve: Curve) -> None:
    """The card's line, if it is in view, and its words where those of the peak and of a failure are not."""
    limit, top, fails = report.device.usable_bytes, report.peak_reserved_bytes, report.out_of_memory is not None
    if fails and len(curve.positions):
        top = max(top, _wanted_bytes(report, curve))
    is_in_view = top >= _CARD_IN_VIEW * limit
    axes.set_ylim(0, max(top, limit if is_in_view else MIB) / (1 - (2 if fails else 1) * _LABEL_SHARE))
    if is_in_view:
        axes.axhline(limit, color=LIGHT["bad"], linewidth=1, linestyle=(0, (5, 3)))
    is_on_line = is_in_view and not fails  # else above the picture
    x = 0 if is_on_line and len(curve.positions) and _across(curve, _peak_at(curve)) > 0.5 else 1
    axes.annotate(
        _("PyTorch can use {limit_bytes} of {total_bytes}", limit_bytes=limit, total_bytes=report.device_total_bytes),
        (x, limit if is_on_line else 1), xycoords=("axes fraction", "data" if is_on_line else "axes fraction"),
        xytext=(0, 3), textcoords="offset points", ha="right" if x else "left",
        color=LIGHT["bad" if is_in_view else "quiet"], fontsize=8,
    )  # fmt: skip


def _draw_peak(axes: Axes, report: MemoryReport, curve: Curve) -> None:
    if not len(curve.positions):
        return
    at = _peak_at(curve)
    across = _across(curve, at)
    text = at_most(_("peak {peak_bytes}", peak_bytes=report.peak_allocated_bytes), report.is_upper_bound)
    if report.peak_line is not None:
        text += f" · {place(report.peak_line)}"
    side = "left" if across < 0.25 else "right" if across > 0.75 else "center"
    axes.plot([curve.positions[at]], [curve.by_category[at].sum()], "o", color=LIGHT["fg"], markersize=5, clip_on=False)
    axes.annotate(
        text, (float(curve.positions[at]), _peak_floor(axes, report, curve)), xytext=(0, 6),
        textcoords="offset points", ha=side, color=LIGHT["fg"], fontsize=9, fontweight="bold",
    )  # fmt: skip


def _peak_at(curve: Curve) -> int:
    return int(curve.by_category.sum(axis=1).argmax())


def _peak_height(curve: Curve) -> float:
    at = _peak_at(curve)
    return float(max(curve.by_category[at].sum(), curve.reserved_bytes[at]))


def _across(curve: Curve, at: int) -> float:
    """Where a point of the curve lies between its ends: 0 to 1."""
    first, last = curve.positions[0], curve.positions[-1]
    return float((curve.positions[at] - first) / max(last - first, 1))


def _peak_floor(axes: Axes, report: MemoryReport, curve: Curve) -> float:
    return _label_floor(axes, _peak_height(curve), [(report.device.usable_bytes, report.device.usable_bytes)])


def _label_floor(axes: Axes, height: float, in_the_way: Sequence[tuple[float, float]]) -> float:
    """Where a label of this height stands: on it, or above what is in the way (from, to), one after another."""
    for start, end in in_the_way:
        if height < end and start < height + _LABEL_SHARE * axes.get_ylim()[1]:
            height = end
    return height


def _wanted_bytes(report: MemoryReport, curve: Curve) -> int:
    """What would have been allocated with the request that did not fit."""
    assert report.out_of_memory is not None
    return int(curve.by_category[-1].sum()) + report.out_of_memory.requested_bytes


def _draw_phases(axes: Axes, curve: Curve) -> None:
    """A ribbon under the curve, darker from forward to optimizer, with names where there is room."""
    changes = (np.flatnonzero(np.diff(curve.phases)) + 1).tolist()
    for first, last in zip([0, *changes], [*changes, len(curve.positions) - 1], strict=True):
        if last <= first or PHASES[curve.phases[first]] is Phase.OTHER:
            continue
        phase = PHASES[curve.phases[first]]
        start, end = float(curve.positions[first]), float(curve.positions[last])
        shade = _PHASE_SHADES[phase]
        axes.axvspan(start, end, -0.05, -0.02, color=LIGHT["quiet"], alpha=shade, lw=0, clip_on=False)
        _label_span(axes, start, end, word(phase), -0.06)


def _draw_steps(axes: Axes, report: MemoryReport) -> None:
    start = 0
    ends = report.timeline.positions(MarkKind.STEP_END)
    for number, end in enumerate(ends, 1):
        axes.axvline(end, color=LIGHT["quiet"], linewidth=0.6, alpha=0.5)
        _label_span(axes, start, end, _("step {number}", number=number), -0.13)
        start = end


def _label_span(axes: Axes, start: float, end: float, text: str, height: float) -> None:
    """A name under a stretch of the run, if the stretch is as wide as the name."""
    left, right = axes.get_xlim()
    if end - start >= _CHARACTER_SHARE * (display_width(text) + 1) * (right - left):
        axes.text(
            (start + end) / 2, height, text, transform=axes.get_xaxis_transform(), ha="center", va="top",
            color=LIGHT["quiet"], fontsize=8,
        )  # fmt: skip


def _draw_failure(axes: Axes, report: MemoryReport, curve: Curve) -> None:
    """What was asked for on top of the last point; its words stand above the peak's if those are near."""
    if report.out_of_memory is None or not len(curve.positions):
        return
    position, height = float(curve.positions[-1]), float(curve.by_category[-1].sum())
    wanted = _wanted_bytes(report, curve)
    axes.plot([position, position], [height, wanted], color=LIGHT["bad"], linewidth=2, linestyle=":")
    axes.plot([position], [wanted], "X", color=LIGHT["bad"], markersize=7, clip_on=False)
    text = _("tried to allocate {more_bytes} more", more_bytes=report.out_of_memory.requested_bytes)
    limit, peak = report.device.usable_bytes, _peak_floor(axes, report, curve)
    label = peak, peak + _LABEL_SHARE * axes.get_ylim()[1]
    floor = _label_floor(axes, wanted, [(limit, limit), label, (limit, limit)])
    axes.annotate(
        text, (position, floor), xytext=(0, 6), textcoords="offset points", ha="right",
        color=LIGHT["bad"], fontsize=9, fontweight="bold",
    )  # fmt: skip


def dress(axes: Axes) -> None:
    """Ticks in round units, a quiet grid and the legend above."""
    unit, name = unit_for(axes.get_ylim()[1])
    ticks = MaxNLocator(5, steps=[1, 2, 4, 5, 10]).tick_values(0, axes.get_ylim()[1] / unit)
    axes.set_yticks([tick * unit for tick in ticks if tick * unit <= axes.get_ylim()[1]])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _at: f"{value / unit:g} {name}"))
    axes.set_xticks([])
    axes.tick_params(colors=LIGHT["quiet"], length=0, labelsize=8)
    axes.grid(axis="y", color=LIGHT["line"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.03), ncols=9, frameon=False, fontsize=8,
        labelcolor=LIGHT["quiet"], handlelength=1, handleheight=0.9, columnspacing=1.2, handletextpad=0.5,
    )  # fmt: skip


@contextmanager
def drawn_in_chinese() -> Iterator[None]:
    """Select a font with Chinese characters; where none is installed the SVG names none and the page's font is used."""
    with matplotlib.rc_context({"font.family": ["sans-serif", *_chinese_fonts()]}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


@cache
def _chinese_fonts() -> list[str]:
    """Installed fonts with Chinese characters, by what foundries call them."""
    names = sorted({font.name for font in fontManager.ttflist})
    return [name for name in names if _CHINESE_FONT.search(name)]


def _themed_svg(figure: Figure) -> str:
    """The figure as an SVG element in the page's font and the style sheet's colours, without global style."""
    file = BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "oom_magic"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue().decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda found: re.sub(r"(\d\.\d)\d+", r"\1", found[0]), svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*?sans-serif", "system-ui, sans-serif", svg)
    svg = re.sub(r'width="[^"]*" height="[^"]*" viewBox', 'width="100%" viewBox', svg, count=1)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    for hue, colour in LIGHT.items():
        svg = svg.replace(colour, f"var(--oom-{hue},{colour})")
    return re.sub(r"\s*\n\s*", " ", svg)


_WIDTH, _HEIGHT = 8.6, 3.1  # inches, a run
_DOTS_PER_INCH = 110


class Plot:
    """A matplotlib ``figure``, displayed as an SVG in the page's colours and as a PNG; its text is a summary."""

    def __init__(self, figure: Figure, words: str) -> None:
        self.figure = figure
        self.words = words

    def __repr__(self) -> str:
        return self.words

    def _repr_html_(self) -> str:
        with OneLineErrors("other"), drawn_in_chinese():
            return to_html(Description(_("Allocated memory"), (Picture(self.words, _themed_svg(self.figure)),)))

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        with OneLineErrors("other"):
            self.figure.savefig(file, format="png", dpi=_DOTS_PER_INCH)
        return file.getvalue()


@overload
def plot(runs: Runs) -> Plot: ...


@overload
def plot(runs: MemoryReport, *, ax: Axes) -> Axes: ...


def plot(runs: Runs, *, ax: Axes | None = None) -> Plot | Axes:
    """Allocated memory over a run, stacked by category; of runs by name, one under the other on one scale.

    With ``ax`` one run is drawn into these matplotlib axes, which are returned. Raises ValueError without a run, or for
    several with one ``ax``; TypeError for anything that is not a run.
    """
    named = {"": runs} if isinstance(runs, MemoryReport) else named_runs(runs, "plot")
    with using_language(choose_language() if _chinese_fonts() else "en"), drawn_in_chinese():
        if ax is not None:
            if len(named) > 1:
                raise ValueError(_("plot() got {count} reports for one ax; call it once per report.", count=len(named)))
            draw_timeline(ax, next(iter(named.values())))
            return ax
        with OneLineErrors("other"):
            figure = _side_by_side(named)
        return Plot(figure, "\n".join(_words(name, report) for name, report in named.items()))


def _side_by_side(named: Mapping[str, MemoryReport]) -> Figure:
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
    return figure


def _words(name: str, report: MemoryReport) -> str:
    values = {"peak_bytes": report.peak_allocated_bytes, "phase": word(report.peak_phase)}
    if name:
        text = _("{name}: peak {peak_bytes} ({phase})", name=name, **values)
    else:
        text = _("Allocated memory over the run, peak {peak_bytes} ({phase})", **values)
    return at_most(text, report.is_upper_bound)
