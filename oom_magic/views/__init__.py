"""Views of results: one for each class, as a Description that ``text`` and ``html`` encode with the same rows."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from oom_magic.language import _
from oom_magic.views.blocks import Description, describe_registered
from oom_magic.views.html import style_element, to_fragment, to_html
from oom_magic.views.text import to_text
from oom_magic.views.words import current_shell

__all__ = ["describe", "style_element", "to_fallback", "to_fragment", "to_html", "to_text"]

# Where a class of results is defined, and the view to load before one is first shown.
_VIEWS = {
    "oom_magic.explain.doctor": "system_check",
    "oom_magic.explain.diagnosis": "diagnosis",
    "oom_magic.measure.holders.release": "release",
    "oom_magic.measure.system_check": "system_check",
    "oom_magic.memory.comparison": "comparison",
    "oom_magic.memory.memory_map": "memory_map",
    "oom_magic.memory.report": "report",
    "oom_magic.predict.setups.setup": "sizes",
    "oom_magic.predict.sizing.sizes": "sizes",
}


def describe(result: Any) -> Description:
    """A result as a title and blocks, by its view. Raises TypeError where there is none."""
    for kind in type(result).__mro__:
        if kind.__module__ in _VIEWS:
            import_module(f"{__name__}.{_VIEWS[kind.__module__]}")
    return describe_registered(result)


def to_fallback(description: Description) -> str:
    """The description as text, for where HTML is not shown; in a notebook, an untrusted one, say, it names what to
    run."""
    text = to_text(description)
    if getattr(current_shell(), "kernel", None) is None:
        return text
    return f"{text}\n\n{_('Shown as text; Run All shows the pictures and sliders.')}"
