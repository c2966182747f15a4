"""A result shows itself: as text in a terminal, as text and HTML in a notebook.

Data know no views. What a class of results looks like is in ``views``, which is looked up by name when a result is
first shown: the one junction between the two.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from types import ModuleType


class Result:
    """Mixin: gives a class its text (80 columns), its notebook output and a short repr, by its view in ``views``."""

    __slots__ = ()

    def describe(self) -> Any:
        """This result as ``views.blocks.Description``: a title and blocks, the most important first."""
        return _views().describe(self)

    def to_json(self, path: str | Path | None = None) -> str:
        """``to_dict()`` as JSON text, written to ``path`` if one is given."""
        text = json.dumps(self.to_dict(), ensure_ascii=False, indent=1, default=str)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain numbers, strings, lists and dicts."""
        return asdict(cast("Any", self))

    def __str__(self) -> str:
        return str(_views().to_text(self.describe()))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.describe().title}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        views, description = _views(), self.describe()
        return {"text/plain": views.to_text(description), "text/html": views.to_html(description)}


def _views() -> ModuleType:
    return import_module("oom_magic.views")
