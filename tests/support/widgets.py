"""What somebody sees of the sliders: the widgets that a front end would draw, and what is still under way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any


def drawn_in(widget: Any) -> Iterator[Any]:
    """A widget and all that it contains."""
    yield widget
    for child in getattr(widget, "children", ()):
        yield from drawn_in(child)


def part(panel: Any, css_class: str) -> Any:
    """The part of the panel with a class of the style sheet."""
    return next(one for one in drawn_in(panel) if css_class in one._dom_classes)


def status(panel: Any) -> Any:
    """What is being done."""
    return part(panel, "oom-picture").children[0]


def picture(panel: Any) -> Any:
    """The picture that follows the sliders."""
    return part(panel, "oom-picture").children[-1]


def code(panel: Any) -> Any:
    """The code to paste."""
    return part(panel, "oom-more").children[1]


async def at_rest() -> None:
    """Until the panels have found all that they are looking for."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.gather(*others, return_exceptions=True)
