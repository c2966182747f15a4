"""The base class of all results: text in a terminal, text and HTML in a notebook.

Results do not import their views. ``oom_magic/__init__.py`` registers the ``views`` package here, which is imported
when a result is first shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, cast, overload

from oom_magic.one_line_errors import OneLineErrors


class Views(Protocol):
    """What ``views/__init__.py`` provides."""

    def describe(self, result: Any) -> Any:
        """A result as ``views.blocks.Description``: a title and blocks."""

    def to_text(self, description: Any) -> str:
        """The description as text of 80 columns."""

    def to_fallback(self, description: Any) -> str:
        """The description as the text/plain beside HTML, for frontends that do not render HTML."""

    def to_html(self, description: Any) -> str:
        """The description as an HTML fragment."""


_loaders: list[Callable[[], Views]] = []


def register_views(load: Callable[[], Views]) -> None:
    """``load`` returns the views; it is called when a result is shown, not before."""
    _loaders[:] = [load]


def _views() -> Views:
    (load,) = _loaders
    return load()


class Result:
    """Mixin that displays a result: ``str()``, ``repr()``, notebook output and JSON."""

    __slots__ = ()

    def describe(self) -> Any:
        """This result as ``views.blocks.Description``: a title and blocks, the most important first."""
        return _views().describe(self)

    @overload
    def to_json(self) -> str: ...
    @overload
    def to_json(self, path: str | Path) -> None: ...
    def to_json(self, path: str | Path | None = None) -> str | None:
        """``to_dict()`` as JSON text, or None when it is written to ``path``."""
        text = json.dumps(self.to_dict(), ensure_ascii=False, indent=1, default=str)
        if path is None:
            return text
        Path(path).write_text(text, encoding="utf-8")
        return None

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain numbers, strings, lists and dicts."""
        return asdict(cast("Any", self))

    def __str__(self) -> str:
        """The description as text of 80 columns."""
        return _views().to_text(self.describe())

    def __repr__(self) -> str:
        """The class and the description's title."""
        return f"<{type(self).__name__}: {self.describe().title}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        with OneLineErrors("other"):
            views, description = _views(), self.describe()
            return {"text/plain": views.to_fallback(description), "text/html": views.to_html(description)}
