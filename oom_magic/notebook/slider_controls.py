"""One control for each argument: a slider and a field for numbers, a checkbox for a switch, a drop-down otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets
import numpy as np
import traitlets

from oom_magic.memory.timeline import IntArray
from oom_magic.notebook.fit_map import landmarks_of
from oom_magic.notebook.slider_ranges import stops_of

Control = Any  # a widget with a ``value``; ipywidgets carries no types


class NumberControl(ipywidgets.HBox):
    """A slider with every value of a short range, else with stops in proportion; any other value can be typed.

    ``value`` is on the axis: what is not is moved to the nearest that is.
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
        """Whether it cannot be moved."""
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

    def _follow(self, _: Any) -> None:
        """The field shows the value, the slider the stop next to it."""
        self._is_following = True
        self.field.value = self.value
        self.slider.value = min(self._stops, key=lambda stop: abs(stop - self.value))
        self._is_following = False


def choice_control(name: str, options: Sequence[Any], start: Any) -> Control:
    """A checkbox for a switch, else a drop-down."""
    if sorted(map(repr, options)) == ["False", "True"]:
        return ipywidgets.Checkbox(description=name, value=start)
    return ipywidgets.Dropdown(description=name, options=[(str(option), option) for option in options], value=start)
