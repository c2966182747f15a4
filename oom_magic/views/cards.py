"""What a run on several cards says of each: a row, a breakdown, and in a sentence whether they are filled alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from oom_magic.language import _, ngettext
from oom_magic.units import format_bytes
from oom_magic.views.blocks import Block, Sentence, Table
from oom_magic.views.words import word

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
    yield Table((_("card"), _("peak allocated"), _("peak reserved"), _("in use"), _("mostly")), rows, title=_("Cards"))
    yield from _balance(cards)


def _largest(card: MemoryReport) -> str:
    name, size = max(card.breakdown.items(), key=lambda item: item[1], default=("", 0))
    return f"{word(name)} {format_bytes(size)}" if size else _("nothing")


def _balance(cards: tuple[MemoryReport, ...]) -> Iterable[Sentence]:
    unused = [card_name(card) for card in cards if not card.peak_reserved_bytes]
    if unused:
        names = ", ".join(unused)
        yield Sentence(ngettext("{names} is not used.", "{names} are not used.", len(unused), names=names), "warning")
    used = [card for card in cards if card.peak_reserved_bytes]
    if len(used) < 2:
        return
    fullest, emptiest = (choose(used, key=lambda card: card.used_fraction) for choose in (max, min))
    if fullest.used_fraction - emptiest.used_fraction <= _UNEQUAL:
        return
    text = _(
        "The cards are filled unequally: {fullest} is {most:.0f} % full at its peak, {emptiest} {least:.0f} %."
        " {difference}",
        fullest=card_name(fullest),
        most=100 * fullest.used_fraction,
        emptiest=card_name(emptiest),
        least=100 * emptiest.used_fraction,
        difference=_difference(fullest, emptiest),
    )
    yield Sentence(text, "warning")


def _difference(fullest: MemoryReport, emptiest: MemoryReport) -> str:
    """The category that makes the most of it."""
    name = max(fullest.breakdown, key=lambda name: fullest.breakdown[name] - emptiest.breakdown[name])
    return _(
        "Most of the difference is {category}: {most_bytes} against {least_bytes}.",
        category=word(name),
        most_bytes=fullest.breakdown[name],
        least_bytes=emptiest.breakdown[name],
    )
