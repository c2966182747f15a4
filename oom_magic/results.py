"""A result shows itself: as text in a terminal, as text and HTML in a notebook.

Data know no views. What a class of results looks like is in ``views``, which is looked up by name when a result is
first shown: the one junction between the two.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


class Result:
    """Mixin: gives a class its text (80 columns), its notebook output and a short repr, by its view in ``views``."""

    __slots__ = ()

    def describe(self) -> Any:
        """This result as ``views.blocks.Description``: a title and blocks, the most important first."""
        return _views().describe(self)

    def __str__(self) -> str:
        return str(_views().to_text(self.describe()))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.describe().title}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        views, description = _views(), self.describe()
        return {"text/plain": views.to_text(description), "text/html": views.to_html(description)}


def _views() -> ModuleType:
    return import_module("oom_magic.views")
