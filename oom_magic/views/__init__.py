"""The two encodings of a description: text and HTML. They show the same rows."""

from __future__ import annotations

from oom_magic.views.html import style_element, to_fragment, to_html
from oom_magic.views.text import to_text

__all__ = ["style_element", "to_fragment", "to_html", "to_text"]
