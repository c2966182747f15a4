"""The widgets of the panel and where they are; contents are written in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import ipywidgets
import numpy as np
import traitlets

from oom_magic.language import _, choose_language, ngettext
from oom_magic.memory.report import Device
from oom_magic.memory.timeline import IntArray
from oom_magic.notebook.sliders.fit_map import Cells, FitMap, Grid, landmarks_of
from oom_magic.notebook.sliders.ranges import stops_of
from oom_magic.notebook.sliders.view import Estimate, assumption_blocks, live_blocks
from oom_magic.notebook.step_chart import step_picture
from oom_magic.views import style_element, to_fragment
from oom_magic.views.blocks import Block, Code, Sentence
from oom_magic.views.words import code_in

Control = Any  # a widget with a ``value``; ipywidgets carries no types


class NumberControl(ipywidgets.HBox):
    """A slider with every value of a short range, else with stops in proportion; any other value can be typed.

    ``value`` is always on the axis: others are moved to the nearest point of it.
    """

    value = traitlets.Int()

    def __init__(self, name: str, axis: IntArray, start: int) -> None:
        self._axis = axis
        self._stops = stops_of(axis, start, *landmarks_of(axis))
        self._is_following = False
        low, high, step = int(axis[0]), int(axis[-1]), int(np.diff(axis).min(initial=axis[-1]))
        self.field = ipywidgets.BoundedIntText(description=name, value=start, min=low, max=high, step=step)
        self.slider = ipywidgets.SelectionSlider(options=self._stops, value=start)
        super().__init__([self.field, self.slider], value=start)
        self.add_class("oom-number")
        self.observe(self._follow, names="value")
        for part in (self.field, self.slider):
            part.observe(self._moved, names="value")

    @property
    def disabled(self) -> bool:
        """Whether the control is disabled."""
        return bool(self.field.disabled)

    @disabled.setter
    def disabled(self, is_disabled: bool) -> None:
        self.field.disabled = self.slider.disabled = is_disabled

    @traitlets.validate("value")
    def _on_axis(self, proposal: Mapping[str, Any]) -> int:
        return int(self._axis[np.abs(self._axis - proposal["value"]).argmin()])

    def _moved(self, change: Mapping[str, Any]) -> None:
        if not self._is_following:
            self.value = change["new"]
            self._follow(change)

    def _follow(self, _change: Any) -> None:
        """The field shows the value, the slider the stop next to it."""
        self._is_following = True
        self.field.value = self.value
        self.slider.value = min(self._stops, key=lambda stop: abs(stop - self.value))
        self._is_following = False


class CardControl(ipywidgets.HBox):
    """A drop-down of cards and a field that leaves those whose names have all of its words, beside the chosen one."""

    value = traitlets.Any()

    def __init__(self, options: Sequence[tuple[str, Any]]) -> None:
        self.options = tuple(options)
        self.field = ipywidgets.Dropdown(description="GPU", options=self.options, value=self.options[0][1])
        self.search = ipywidgets.Text(
            placeholder=_("search"), tooltip=_("Show only the cards whose names contain these words")
        )
        self._is_filtering = False
        super().__init__([self.field, self.search], value=self.field.value)
        self.add_class("oom-card")
        self.observe(lambda change: setattr(self.field, "value", change["new"]), names="value")
        self.field.observe(self._chosen, names="value")
        self.search.observe(self._filter, names="value")

    def _chosen(self, change: Mapping[str, Any]) -> None:
        if not self._is_filtering:
            self.value = change["new"]

    def _filter(self, change: Mapping[str, Any]) -> None:
        words = change["new"].lower().split()
        left = [
            (name, card)
            for name, card in self.options
            if card == self.value or all(word in name.lower() for word in words)
        ]
        self._is_filtering = True
        self.field.options = left
        self.field.value = self.value
        self._is_filtering = False


def choice_control(name: str, options: Sequence[Any], start: Any) -> Control:
    """A checkbox for a switch, else a drop-down."""
    if sorted(map(repr, options)) == ["False", "True"]:
        return ipywidgets.Checkbox(description=name, value=start)
    return ipywidgets.Dropdown(description=name, options=[(str(option), option) for option in options], value=start)


class Panel:
    """Controls on the left; picture, map, timeline, code and assumptions. ``widget`` holds them all."""

    def __init__(
        self,
        title: str,
        controls: Mapping[str, Control],
        grid: Grid | None,
        go_to: Callable[[dict[str, int]], None],
        style: str,
    ) -> None:
        self._activity = ""  # what is done in the background
        self._progress = ipywidgets.Output()
        self._status, self._picture, self._chart, self._code, self._assumptions = (
            ipywidgets.HTML() for _area in range(5)
        )
        self._map = FitMap(grid, go_to) if grid is not None else None
        self._chart.add_class("oom-chart")
        left = ipywidgets.VBox(_aligned(controls)).add_class("oom-controls")
        right = ipywidgets.VBox([self._status, self._progress, self._picture]).add_class("oom-picture")
        folded = [*_folded(_("Code to paste"), self._code), *_folded(_("Assumptions"), self._assumptions)]
        more = ipywidgets.VBox(folded).add_class("oom-more")
        lower = ([self._map.widget] if self._map is not None else []) + [self._chart]
        self._lower = ipywidgets.HBox(lower).add_class("oom-bottom")
        self.children = [
            ipywidgets.HTML(f"{style_element()}<style>{_style()}{style}</style>"),
            ipywidgets.HTML(to_fragment([Sentence(title, "strong")])),
            ipywidgets.HBox([left, right]).add_class("oom-top"),
            self._lower,
            more,
        ]

    def show(self, estimate: Estimate) -> None:
        """The picture of a setting, and the cursor on the map."""
        self._lower.remove_class("oom-stale")
        _write(self._picture, live_blocks(estimate))
        if self._map is not None:
            self._map.mark(estimate.values)

    def show_map(self, cells: Cells, device: Device) -> None:
        """The numbers of the map."""
        if self._map is not None:
            self._map.show(cells, device)

    def show_code(self, code: str) -> None:
        """The code to paste."""
        _write(self._code, (Code(code_in(choose_language(), code)),))

    def show_details(self, estimate: Estimate) -> None:
        """The timeline and what was assumed."""
        if estimate.report is not None:
            _write(self._chart, (Sentence(_("One step"), "strong"), step_picture(estimate.report)))
        _write(self._assumptions, assumption_blocks(estimate.assumptions))

    def show_failure(self, blocks: Sequence[Block]) -> None:
        """An error where the picture was; the rest fades."""
        _write(self._picture, blocks)
        self._lower.add_class("oom-stale")
        self._chart.value = self._code.value = self._assumptions.value = ""

    @contextmanager
    def tracing(self, text: str, is_shown: bool) -> Iterator[None]:
        """Say that the function is traced, the picture faded. The progress bar goes into the panel once it is shown."""
        _write(self._status, (Sentence(text, "strong"),))
        for area in (self._picture, self._lower):
            area.add_class("oom-stale")
        with self._progress if is_shown else nullcontext():
            yield
        self._status.value, self._progress.outputs = "", ()
        for area in (self._picture, self._lower):
            area.remove_class("oom-stale")

    @contextmanager
    def working(self, text: str, fades: bool = False) -> Iterator[None]:
        """Show what is done in the background; ``fades``: the picture is still that of another setting."""
        self._activity = text
        _write(self._status, (Sentence(text, "quiet"),))
        if fades:
            self._picture.add_class("oom-stale")
        try:
            yield
        finally:
            self._activity, self._status.value = "", ""
            self._picture.remove_class("oom-stale")

    def count(self, num_runs: int) -> None:
        """How many dry runs were made for what is said."""
        if self._activity:
            counted = ngettext("{count} dry run", "{count} dry runs", num_runs)
            _write(self._status, (Sentence(f"{self._activity} {counted}", "quiet"),))


def _folded(title: str, content: Any) -> tuple[Any, Any]:
    """A button, and the content that it shows and hides; an accordion's headings cannot be reached with keys."""
    tooltip = _("Show or hide: {title}", title=title)
    button = ipywidgets.ToggleButton(description=title, icon="caret-right", tooltip=tooltip)
    button.add_class("oom-fold")
    content.layout.display = "none"

    def turn(change: Mapping[str, Any]) -> None:
        button.icon, content.layout.display = ("caret-down", "") if change["new"] else ("caret-right", "none")

    button.observe(turn, names="value")
    return button, content


def _aligned(controls: Mapping[str, Control]) -> list[Control]:
    """The controls with labels of one width."""
    boxes = [name for name, control in controls.items() if isinstance(control, ipywidgets.Checkbox)]
    longest = max(len(name) for name in controls if name not in boxes)
    for control in controls.values():
        control.layout.width = "100%"
        labelled = control.field if isinstance(control, (NumberControl, CardControl)) else control
        labelled.style.description_width = f"{min(0.56 * longest + 0.8, 13):.1f}rem"
    return list(controls.values())


def _write(area: Any, blocks: Sequence[Block]) -> None:
    area.value = to_fragment(blocks) if blocks else ""


@cache
def _style() -> str:
    return Path(__file__).with_name("sliders.css").read_text(encoding="utf-8")
