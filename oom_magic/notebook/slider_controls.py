"""One control for each argument: a slider for numbers, a checkbox for a switch, a drop-down for other choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets
import numpy as np

from oom_magic.memory.timeline import IntArray
from oom_magic.notebook.fit_map import landmarks_of
from oom_magic.notebook.slider_ranges import is_even, stops_of

Control = Any  # a widget with a ``value``; ipywidgets carries no types


def number_control(name: str, axis: IntArray, start: int) -> Control:
    """A slider: with every value of a short range, else with stops in proportion."""
    if not is_even(axis):
        stops = stops_of(axis, start, *landmarks_of(axis))
        return ipywidgets.SelectionSlider(
            description=name, options=[(f"{stop:,}", stop) for stop in stops], value=start
        )
    step = int(np.diff(axis).min(initial=axis[-1]))
    return ipywidgets.IntSlider(description=name, min=int(axis[0]), max=int(axis[-1]), step=step, value=start)


def choice_control(name: str, options: Sequence[Any], start: Any) -> Control:
    """A checkbox for a switch, else a drop-down."""
    if sorted(map(repr, options)) == ["False", "True"]:
        return ipywidgets.Checkbox(description=name, value=start)
    return ipywidgets.Dropdown(description=name, options=[(str(option), option) for option in options], value=start)
