"""The timeline picture: no peak lost, no matplotlib state touched, one picture for both themes."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes

from oom_magic.memory.categories import Category
from oom_magic.memory.report import MemoryReport
from oom_magic.memory.timeline import Phase
from oom_magic.notebook.figures import plot, sample, timeline_figure, timeline_picture
from oom_magic.units import MIB
from oom_magic.views.html import LIGHT
from tests.support.samples import RTX_3060, Recorder, failed, measured, predicted, training_timeline


@pytest.mark.parametrize("make", [predicted, measured, failed])
def test_picture_is_a_themed_svg(make) -> None:
    picture = timeline_picture(make())
    ElementTree.fromstring(picture.svg)
    assert "<style" not in picture.svg and "<script" not in picture.svg and "http://www.w3" in picture.svg
    assert "peak 4.05 GiB" in picture.svg and "step 2" in picture.svg and "backward" in picture.svg
    assert not [colour for colour in LIGHT.values() if re.search(rf"(?<!,){colour}", picture.svg)]
    assert len(picture.svg) < 120_000


def test_failure_is_marked() -> None:
    assert "tried to allocate 1.30 GiB more" in timeline_picture(failed()).svg
    assert "tried to allocate" not in timeline_picture(predicted()).svg


def struck(axes: Axes, report: MemoryReport) -> list[str]:
    """The words of a picture that lie over each other, or that the card's line strikes through."""
    figure = axes.figure
    figure.canvas.draw()
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    line = axes.transData.transform((0, report.device.usable_bytes))[1]
    over = [f"{a} over {b}" for a, b in combinations(boxes, 2) if boxes[a].overlaps(boxes[b])]
    return over + [text for text, box in boxes.items() if box.y0 < line < box.y1]


@settings(max_examples=60, deadline=None)
@given(peak=st.integers(100, 11_600), at=st.integers(0, 9), end=st.integers(50, 11_600), wanted=st.integers(1, 100_000))
def test_words_never_lie_over_each_other(peak: int, at: int, end: int, wanted: int) -> None:
    recorder = Recorder()
    for number in range(10):
        block = recorder.allocate((peak if number == at else min(end, peak)) * MIB, Category.ACTIVATION, 8)
        if number < 9:
            recorder.free(block)
    known = MemoryReport.from_timeline(recorder.timeline(), RTX_3060)
    failure = replace(failed().out_of_memory, tensor_bytes=wanted * MIB)
    for report in (known, replace(known, out_of_memory=failure)):
        [axes] = timeline_figure(report).axes
        assert struck(axes, report) == []


def test_downsampling_keeps_the_peak_and_the_ends() -> None:
    rng = np.random.default_rng(7)
    recorder = Recorder()
    live: list[int] = []
    for size in rng.integers(1, 64, 20_000):
        live.append(recorder.allocate(int(size) * MIB, Category.ACTIVATION, 8, Phase.FORWARD))
        if len(live) > rng.integers(5, 50):
            recorder.free(live.pop(int(rng.integers(len(live)))))
    report = MemoryReport.from_timeline(recorder.timeline(), RTX_3060)
    curve = sample(report, most_points=300)
    assert len(curve.positions) <= 302
    assert curve.by_category.sum(axis=1).max() == report.peak_allocated_bytes
    assert report.peak_position in curve.positions
    assert curve.positions[0] == 0 and curve.positions[-1] == report.timeline.num_events - 1


@pytest.mark.parametrize("num_events", [0, 1, 2])
def test_tiny_runs_can_be_drawn(num_events: int) -> None:
    recorder = Recorder()
    if num_events:
        first = recorder.allocate(MIB, Category.INPUT, 8)
        if num_events == 2:
            recorder.free(first)
    report = MemoryReport.from_timeline(recorder.timeline(), RTX_3060)
    assert timeline_picture(report).svg.startswith("<svg")


def test_matplotlib_is_left_as_it_was() -> None:
    before = dict(matplotlib.rcParams)
    timeline_figure(MemoryReport.from_timeline(training_timeline(), RTX_3060))
    timeline_picture(predicted())
    assert dict(matplotlib.rcParams) == before
    import matplotlib.pyplot as plt

    assert plt.get_fignums() == []


def test_same_report_same_picture() -> None:
    assert timeline_picture(predicted()).svg == timeline_picture(predicted()).svg


def test_runs_are_plotted_under_each_other_on_one_scale() -> None:
    shown = plot({"batch 4": predicted(), "batch 16": failed()})
    first, second = shown.figure.axes
    assert first.get_ylim() == second.get_ylim()
    assert repr(shown).splitlines()[0] == "batch 4: peak 4.05 GiB (backward)"
    assert shown._repr_png_().startswith(b"\x89PNG")
    page = shown._repr_html_()  # in a dark page's colours, too
    assert "var(--oom-activation" in page and "batch 16" in page


def test_one_run_is_plotted_without_a_name() -> None:
    assert repr(plot(predicted())) == "Allocated memory over the run, peak 4.05 GiB (backward)"
    with pytest.raises(ValueError, match="no report"):
        plot({})


def test_a_run_is_drawn_into_axes_of_the_user() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.subplots()
    assert plot(predicted(), ax=axes) is axes
    assert axes.has_data() and axes.get_legend() is not None
    with pytest.raises(ValueError, match="2 reports for one ax"):
        plot({"a": predicted(), "b": failed()}, ax=axes)  # type: ignore[call-overload]
