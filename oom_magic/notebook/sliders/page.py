"""Scripts beside the panel: accessible names for its handles, and sliders for pages without a kernel.

The saved ones move between stops whose pictures were made beforehand.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from oom_magic.language import _
from oom_magic.notebook.sliders.ranges import few_stops
from oom_magic.notebook.sliders.source import Estimator, Values
from oom_magic.notebook.sliders.view import live_blocks
from oom_magic.predict.sizing.sizes import Sizes
from oom_magic.views import to_fragment
from oom_magic.views.blocks import Sentence, Table

_MOST_PICTURES = 240  # or a few more, as the present setting is among them: about a second, and 50 KB


class SavedSliders:
    """What the script of a page needs: the stops of each number, and the picture for each combination of them.

    Pictures are cached, so a move only draws those with new values.
    """

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._pictures: dict[tuple[Any, ...], str] = {}

    def missing(self, sizes: Sizes, values: Values) -> list[Values]:
        """The settings that ``html`` needs and that are still to be drawn."""
        return [point for point in self._points(values) if self._key(sizes, point) not in self._pictures]

    def draw(self, sizes: Sizes, values: Values) -> str:
        """Draw the picture that the panel shows while a setting is dragged, with the map around it."""
        key = self._key(sizes, values)
        if key not in self._pictures:
            others = ", ".join(f"{name} {values[name]}" for name in self._estimator.sizer.ranges.choices)
            blocks = [*live_blocks(self._estimator.quick(sizes, values)), *self._map(sizes, values)]
            blocks += [Sentence(others, "quiet")] if others else []
            self._pictures[key] = to_fragment(blocks)
        return self._pictures[key]

    def html(self, sizes: Sizes, values: Values) -> str:
        """Style and script, to stand right behind the still picture of ``values``; nothing if no number varies."""
        stops = self._stops(values)
        if not stops:
            return ""
        dials = [{"name": name, "stops": at, "at": at.index(values[name])} for name, at in stops.items()]
        pictures = [self.draw(sizes, point) for point in self._points(values)]
        told = json.dumps({"dials": dials, "pictures": pictures, "reset": _("Back to what was set")})
        return _template("page.html").replace("PACKED", base64.b64encode(zlib.compress(told.encode(), 9)).decode())

    def _key(self, sizes: Sizes, values: Values) -> tuple[Any, ...]:
        """What decides a picture."""
        return (*self._estimator.key(sizes, values), self._estimator.replayed(sizes, values) is None)

    def _stops(self, values: Values) -> dict[str, list[int]]:
        sizer = self._estimator.sizer
        names = sizer.axes(values)
        most = int(_MOST_PICTURES ** (1 / max(len(names), 1)))
        return {name: few_stops(sizer.ranges.axes[name], most, values[name]) for name in names}

    def _points(self, values: Values) -> Iterator[dict[str, Any]]:
        stops = self._stops(values)
        for point in product(*stops.values()):
            yield {**values, **dict(zip(stops, point, strict=True))}

    def _map(self, sizes: Sizes, values: Values) -> tuple[Table, ...]:
        grid, cells = self._estimator.grid, self._estimator.cells(sizes, values)
        return () if grid is None or cells is None else (grid.table(cells, sizes.device),)


def naming_script(live_class: str) -> str:
    """A script that gives the panel's slider handles names and values for screen readers."""
    return _template("names.html").replace("PANEL", live_class)


@cache
def _template(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
