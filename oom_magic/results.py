"""A result shows itself: as text in a terminal, as text and HTML in a notebook.

Data know no views: how a class of results looks is defined in ``views``, which the package registers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, cast, overload

from oom_magic.interrupted import InOneLine


class Views(Protocol):
    """The functions that show results."""

    def describe(self, result: Any) -> Any:
        """A result as a title and blocks."""

    def to_text(self, description: Any) -> str:
        """The description as text of 80 columns."""

    def to_fallback(self, description: Any) -> str:
        """The same text, for where a notebook would show HTML."""

    def to_html(self, description: Any) -> str:
        """The description as a fragment of HTML."""


_loaders: list[Callable[[], Views]] = []


def show_with(load: Callable[[], Views]) -> None:
    """Results are shown by what ``load`` returns, which is called when one is shown."""
    _loaders[:] = [load]


def _views() -> Views:
    (load,) = _loaders
    return load()


class Result:
    """Mixin: gives a class its text (80 columns), its notebook output and a short repr, by its view in ``views``."""

    __slots__ = ()

    def describe(self) -> Any:
        """This result as ``views.blocks.Description``: a title and blocks, the most important first."""
        return _views().describe(self)

    @overload
    def to_json(self) -> str: ...
    @overload
    def to_json(self, path: str | Path) -> None: ...
    def to_json(self, path: str | Path | None = None) -> str | None:
        """``to_dict()`` as JSON text; None where it was written to ``path``, so that no notebook shows it."""
        text = json.dumps(self.to_dict(), ensure_ascii=False, indent=1, default=str)
        if path is None:
            return text
        Path(path).write_text(text, encoding="utf-8")
        return None

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain numbers, strings, lists and dicts."""
        return asdict(cast("Any", self))

    def __str__(self) -> str:
        """The description as text."""
        return _views().to_text(self.describe())

    def __repr__(self) -> str:
        """Its title."""
        return f"<{type(self).__name__}: {self.describe().title}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        with InOneLine("other"):
            views, description = _views(), self.describe()
            return {"text/plain": views.to_fallback(description), "text/html": views.to_html(description)}
