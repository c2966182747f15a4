"""Reading HTML back: the words that a reader sees, for comparing with the text encoding."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from oom_magic.views import to_html, to_text
from oom_magic.views.blocks import Description

_BARS = re.compile("[─ ▏▎▍▌▋▊▉█]+")
_UNSEEN = {"style", "svg", "picture"}


class Page(HTMLParser):
    """Tags and visible words of a fragment; the text fallback is kept apart."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.open: list[str] = []
        self.seen: list[str] = []
        self.fallback: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        kind = "fallback" if ("class", "oom-text") in attrs else "picture" if ("aria-hidden", "true") in attrs else tag
        self.open.append(kind)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() in (tag, "fallback", "picture")

    def handle_data(self, data: str) -> None:
        if "fallback" in self.open:
            self.fallback.append(data)
        elif not _UNSEEN.intersection(self.open):
            self.seen.append(data)


def words(lines: str) -> list[str]:
    """Words of a text, without rules and bars."""
    return _BARS.sub(" ", lines).split()


def assert_text_and_html_agree(description: Description) -> None:
    """Unwrapped text and HTML show the same words in the same order; 80 columns the same letters."""
    page = Page(to_html(description))
    wide = words(to_text(description, width=100_000))
    assert words(" ".join(page.seen)) == wide
    narrow = to_text(description)
    assert sorted("".join(words(narrow))) == sorted("".join(wide))
    assert "".join(page.fallback) == narrow
