"""What a run on several cards says of each: a row, a breakdown, and in a sentence whether they are filled alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from oom_magic.memory.categories import Category
from oom_magic.units import format_bytes
from oom_magic.views.blocks import Block, Sentence, Table

if TYPE_CHECKING:
    from oom_magic.memory.report import MemoryReport

_UNEQUAL = 0.10  # shares of capacity that differ by more are worth a sentence


def card_name(report: MemoryReport) -> str:
    """``cuda:1``."""
    return f"cuda:{report.device.index}"


def describe_cards(report: MemoryReport) -> Iterable[Block]:
    """A row for each card, and what of their balance is worth saying; nothing for one card."""
    cards = report.cards
    if len(cards) == 1:
        return
    rows = tuple(
        (
            card_name(card),
            card.peak_allocated_bytes,
            card.peak_reserved_bytes,
            f"{100 * card.used_fraction:.1f} %",
            _largest(card),
        )
        for card in cards
    )
    yield Table(("card", "peak allocated", "peak reserved", "in use", "mostly"), rows, title="Cards")
    yield from _balance(cards)


def _largest(card: MemoryReport) -> str:
    name, size = max(card.breakdown.items(), key=lambda item: item[1], default=("", 0))
    return f"{Category(name).label} {format_bytes(size)}" if size else "nothing"


def _balance(cards: tuple[MemoryReport, ...]) -> Iterable[Sentence]:
    unused = [card_name(card) for card in cards if not card.peak_reserved_bytes]
    if unused:
        verb = "is" if len(unused) == 1 else "are"
        yield Sentence(f"{' and '.join(unused)} {verb} not used.", "warning")
    used = [card for card in cards if card.peak_reserved_bytes]
    if len(used) < 2:
        return
    fullest, emptiest = (choose(used, key=lambda card: card.used_fraction) for choose in (max, min))
    if fullest.used_fraction - emptiest.used_fraction <= _UNEQUAL:
        return
    shares = (
        f"{card_name(fullest)} is {100 * fullest.used_fraction:.0f} % full at its peak, "
        f"{card_name(emptiest)} {100 * emptiest.used_fraction:.0f} %"
    )
    yield Sentence(f"The cards are filled unequally: {shares}. {_difference(fullest, emptiest)}", "warning")


def _difference(fullest: MemoryReport, emptiest: MemoryReport) -> str:
    """The category that makes the most of it."""
    name = max(fullest.breakdown, key=lambda name: fullest.breakdown[name] - emptiest.breakdown[name])
    sizes = (format_bytes(card.breakdown[name]) for card in (fullest, emptiest))
    return f"Most of the difference is {Category(name).label}: {' against '.join(sizes)}."
