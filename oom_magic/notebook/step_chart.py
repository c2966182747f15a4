"""The timeline of one training step as a small picture, drawn in milliseconds."""

from __future__ import annotations

from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from oom_magic.language import _
from oom_magic.memory.allocator.segments import MIN_BLOCK_BYTES
from oom_magic.memory.categories import CATEGORIES, Category
from oom_magic.memory.report import MemoryReport
from oom_magic.memory.timeline import PHASES, MarkKind, Phase, Timeline
from oom_magic.units import unit_for
from oom_magic.views.blocks import Picture
from oom_magic.views.words import word

_WIDTH, _HEIGHT = 560, 150  # of the curve
_LEFT, _TOP, _BELOW = 52, 14, 34
_NUM_POINTS = 160
_STACK = (  # what stays longest at the bottom
    Category.BEFORE, Category.WORKSPACE, Category.PARAMETER, Category.OPTIMIZER_STATE,
    Category.GRADIENT, Category.ACTIVATION, Category.INPUT, Category.TEMPORARY,
)  # fmt: skip
_LABEL_HEIGHT = 18  # of words with the space below them
_CARD_IN_VIEW = 0.4  # the card's limit is drawn when the peak reaches this share of it

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.floating[Any]]


def step_picture(report: MemoryReport) -> Picture:
    """Allocated memory over the last whole step (the whole run if no step ended), stacked by category."""
    start, end, name = _last_step(report.timeline)
    positions, stacked, phases = _curve(report.timeline, start, end)
    peak = report.steps[-1].peak_allocated_bytes if start else report.peak_allocated_bytes
    limit = report.device.usable_bytes
    shows_limit = peak >= _CARD_IN_VIEW * limit
    top = max(peak, limit if shows_limit else 0, 1) * 1.06
    x = _LEFT + (positions - start) * (_WIDTH / max(end - start - 1, 1))
    y = _TOP + _HEIGHT - stacked * (_HEIGHT / top)
    parts = [_grid(top), *_areas(x, y), _phase_ribbon(x, phases)]
    limit_y = _TOP + _HEIGHT - limit * _HEIGHT / top
    if shows_limit:
        peak_x = float(x[y[:, -1].argmin()]) if len(x) else _LEFT
        parts.append(_limit(limit_y, limit, peak_x))
    if len(x):
        parts.append(_peak(x, y[:, -1], peak, limit_y))
    size = f"0 0 {_LEFT + _WIDTH + 8} {_TOP + _HEIGHT + _BELOW}"
    start_tag = f'<svg viewBox="{size}" width="100%" style="max-width:40rem" font-size="10" fill="var(--oom-quiet)">'
    svg = f"{start_tag}{''.join(parts)}</svg>"
    alt = _("Allocated memory over {name}, stacked by category; peak {peak_bytes}.", name=name, peak_bytes=peak)
    return Picture(alt, svg)


def _last_step(timeline: Timeline) -> tuple[int, int, str]:
    """First event, end and name of the stretch to draw."""
    ends = timeline.positions(MarkKind.STEP_END)
    if len(ends) > 1:
        return ends[-2], ends[-1], _("step {number}", number=len(ends))
    return 0, timeline.num_events, _("the run")


def _curve(timeline: Timeline, start: int, end: int) -> tuple[IntArray, IntArray, IntArray]:
    """Positions, bytes stacked in the order of ``_STACK`` (a column each) and phases: the highest of each stretch."""
    events = timeline.order[:end]
    made = np.where(events >= 0, events, ~events)
    blocks = -(-timeline.requested_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    changes = np.where(events >= 0, 1, -1) * blocks[made]
    total = changes.cumsum()
    edges = np.unique(np.linspace(start, end, min(_NUM_POINTS, end - start) + 1).astype(np.int64))
    highest = [first + int(total[first:last].argmax()) for first, last in pairwise(edges)]
    positions = np.unique(np.array([start, *highest, end - 1], dtype=np.int64)) if end > start else edges[:0]
    categories = timeline.category[made]
    columns = [
        np.where(categories == CATEGORIES.index(category), changes, 0).cumsum()[positions] for category in _STACK
    ]
    first = start + int((events[start:] >= 0).argmax()) if end > start else 0
    latest = np.maximum.accumulate(np.where(events >= 0, np.arange(end), first))  # a free has no phase
    phases = timeline.phase[made[np.maximum(latest, first)]]
    return positions, np.stack(columns, axis=1).cumsum(axis=1), phases[positions]


def _areas(x: FloatArray, y: FloatArray) -> list[str]:
    areas = []
    floor: FloatArray = np.full(len(x), _TOP + _HEIGHT, dtype=np.float64)
    for column, category in enumerate(_STACK):
        if (np.abs(y[:, column] - floor) > 0.05).any():
            there = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y[:, column], strict=True))
            back = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x[::-1], floor[::-1], strict=True))
            hue = category.value
            areas.append(
                f'<polygon points="{there} {back}" fill="var(--oom-{hue})" stroke="var(--oom-paper)"'
                f' stroke-width=".5"><title>{word(category.value)}</title></polygon>'
            )
        floor = y[:, column]
    return areas


def _grid(top: float) -> str:
    unit, name = unit_for(top)
    rough = top / unit / 4
    power = 10 ** np.floor(np.log10(rough))
    step = next(float(factor * power) for factor in (1, 2, 5, 10) if factor * power >= rough * 0.8)
    lines = []
    for number in range(int(top / unit / step) + 1):
        y = _TOP + _HEIGHT * (1 - number * step * unit / top)
        lines.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--oom-line)"/>'
            f'<text x="{_LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{number * step:g} {name}</text>'
        )
    return "".join(lines)


def _limit(y: float, limit: int, peak_x: float) -> str:
    """The card's line; its words are away from the peak's."""
    right = _LEFT + _WIDTH
    x, anchor = (_LEFT, "start") if peak_x > _LEFT + _WIDTH / 2 else (right, "end")
    return (
        f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--oom-bad)"'
        f' stroke-dasharray="5 3"/><text x="{x}" y="{y - 4:.1f}" text-anchor="{anchor}" fill="var(--oom-bad)">'
        f"{escape(_('PyTorch can use {limit_bytes}', limit_bytes=limit))}</text>"
    )


def _peak(x: FloatArray, y: FloatArray, peak: int, limit_y: float) -> str:
    """The highest point and its bytes, above the card's line if that would strike them through."""
    at = int(y.argmin())
    words_y = min(y[at], limit_y) - 6 if y[at] - _LABEL_HEIGHT < limit_y else y[at] - 6
    side = "start" if x[at] < _LEFT + 90 else "end" if x[at] > _LEFT + _WIDTH - 90 else "middle"
    return (
        f'<circle cx="{x[at]:.1f}" cy="{y[at]:.1f}" r="3" fill="var(--oom-fg)"/>'
        f'<text x="{x[at]:.1f}" y="{words_y:.1f}" text-anchor="{side}" fill="var(--oom-fg)"'
        f' font-weight="600">{escape(_("peak {peak_bytes}", peak_bytes=peak))}</text>'
    )


def _phase_ribbon(x: FloatArray, phases: IntArray) -> str:
    """The names of the phases under their stretches."""
    if not len(x):
        return ""
    changes = (np.flatnonzero(np.diff(phases)) + 1).tolist()
    shades = {Phase.FORWARD: 0.25, Phase.BACKWARD: 0.55, Phase.OPTIMIZER: 0.9}
    parts = []
    for first, last in zip([0, *changes], [*changes, len(x) - 1], strict=True):
        phase, width = PHASES[phases[first]], float(x[last] - x[first])
        if phase not in shades or width <= 0:
            continue
        y = _TOP + _HEIGHT + 6
        parts.append(
            f'<rect x="{x[first]:.1f}" y="{y}" width="{width:.1f}" height="5" fill="var(--oom-quiet)"'
            f' opacity="{shades[phase]}"/>'
        )
        if width > 45:
            parts.append(f'<text x="{x[first] + width / 2:.1f}" y="{y + 17}" text-anchor="middle">{word(phase)}</text>')
    return "".join(parts)
