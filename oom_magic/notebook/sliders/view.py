"""What the panel says about one setting of the sliders: the same blocks live, saved and in a terminal."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oom_magic.language import _
from oom_magic.memory.categories import DANGER_SHARE, TIGHT_SHARE, Breakdown, Category, verdict_on
from oom_magic.memory.report import Assumption, Device, MemoryReport, are_upper_bounds
from oom_magic.memory.timeline import SourceLine
from oom_magic.notebook.sliders.ranges import ACCUMULATIONS, BATCHES, LENGTHS, first_of
from oom_magic.units import format_bytes
from oom_magic.views.blocks import Block, Code, Details, Fact, Facts, Part, Parts, Sentence, Table
from oom_magic.views.report import place
from oom_magic.views.words import at_most, upper_bound_sentence, verdict_sentence, word


def error_blocks(error: BaseException) -> tuple[Block, ...]:
    """The error in a sentence; the line of the user's code that raised it, if one did."""
    line = _users_line(error)
    if line is None:
        return (Sentence(str(error) or type(error).__name__, "bad"),)
    return (Sentence(f"{error} ({place(line)})", "bad"), Code(line.text.strip()))


def _users_line(error: BaseException) -> SourceLine | None:
    """The innermost line of the user's on the way to the error that all others follow from."""
    from oom_magic.user_code import cell_name, is_users_file

    while error.__cause__ is not None:
        error = error.__cause__
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users_file(frame.filename) and frame.lineno is not None:
            text = linecache.getline(frame.filename, frame.lineno)
            return SourceLine(cell_name(frame.filename), frame.lineno, text)
    return None


@dataclass(frozen=True)
class Largest:
    """The largest value of an argument that fits (0: none does), the others as they are."""

    name: str
    value: int
    limit: int
    is_exact: bool


@dataclass(frozen=True)
class WayOut:
    """Other choices with which the same numbers fit, and what is then needed."""

    choices: Mapping[str, Any]
    needed_bytes: int


@dataclass(frozen=True)
class Estimate:
    """One setting and what it takes. Without a ``report`` the allocator was not replayed yet.

    ``arguments`` has, beside the ``values`` of the sliders, what does not vary.
    """

    values: Mapping[str, Any]
    device: Device
    breakdown: Breakdown
    arguments: Mapping[str, Any] = field(default_factory=dict)
    largest: Largest | None = None
    report: MemoryReport | None = None
    assumptions: tuple[Assumption, ...] = ()
    way_out: WayOut | None = None  # of what does not fit, where one was found
    notes: tuple[str, ...] = ()  # of arguments that do not vary

    @property
    def peak_allocated_bytes(self) -> int:
        """What the run needs at its peak, whether or not the card has it."""
        if self.report is not None and self.fits:
            return self.report.peak_allocated_bytes
        return self.breakdown.total_bytes

    @property
    def fits(self) -> bool:
        """Whether it fits, as far as is known."""
        if self.report is not None:
            return self.report.out_of_memory is None
        return self.breakdown.total_bytes <= self.device.usable_bytes

    @property
    def is_upper_bound(self) -> bool:
        """Whether what was taken in place of something needs more memory."""
        return are_upper_bounds(self.assumptions)

    @property
    def needed_bytes(self) -> int:
        """Reserved at the peak; before the replay, what is reserved at least."""
        return self.report.peak_reserved_bytes if self.report is not None and self.fits else self.breakdown.total_bytes

    @property
    def used_fraction(self) -> float:
        """Share of the card in use at the peak, with what is outside PyTorch."""
        return (self.needed_bytes + self.device.context_bytes) / max(self.device.total_bytes, 1)


def live_blocks(estimate: Estimate) -> tuple[Block, ...]:
    """Verdict, numbers and bar: what follows the hand."""
    way_out = () if estimate.way_out is None or estimate.fits else (_way_out(estimate.way_out, estimate.arguments),)
    notes = (Sentence(note, "quiet") for note in estimate.notes)
    bounds = (upper_bound_sentence(is_failure=not estimate.fits),) if estimate.is_upper_bound else ()
    return verdict(estimate), *bounds, *way_out, _facts(estimate), _bar(estimate), *notes


def _way_out(found: WayOut, arguments: Mapping[str, Any]) -> Sentence:
    changes = [
        _("tick {name}", name=name) if value is True else _("set {name} to {value}", name=name, value=value)
        for name, value in found.choices.items()
    ]
    names = (first_of(arguments, BATCHES), first_of(arguments, LENGTHS))
    setting = " x ".join(str(arguments[name]) for name in names if name is not None)
    values = {"changes": _(" and ").join(changes), "setting": setting, "needed_bytes": found.needed_bytes}
    return Sentence(_("This would fit: {changes}; {setting} then needs {needed_bytes}.", **values))


def verdict(estimate: Estimate) -> Sentence:
    """Whether it fits, by the thresholds of every report."""
    if not estimate.fits and estimate.is_upper_bound:
        text = _(
            "Does not fit as eager code: it needs {needed_bytes}, and PyTorch can use {usable_bytes}.",
            needed_bytes=estimate.needed_bytes,
            usable_bytes=estimate.device.usable_bytes,
        )
        return Sentence(text, "bad")
    if not estimate.fits:
        text = _(
            "Does not fit: it needs at least {needed_bytes}, and PyTorch can use {usable_bytes}.",
            needed_bytes=estimate.needed_bytes,
            usable_bytes=estimate.device.usable_bytes,
        )
        return Sentence(text, "bad")
    known = "at least" if estimate.report is None else "exactly"
    degree = "at most" if estimate.is_upper_bound else known
    return verdict_sentence(verdict_on(estimate.used_fraction), estimate.used_fraction, degree)


def _facts(estimate: Estimate) -> Facts:
    allocated = estimate.peak_allocated_bytes
    share = _("{percent:.1f} % of the card", percent=100 * allocated / max(estimate.device.total_bytes, 1))
    facts = [Fact(at_most(_("peak allocated"), estimate.is_upper_bound), allocated, share), _reserved(estimate)]
    largest = estimate.largest
    if largest is not None:
        facts.append(_largest(largest, estimate.is_upper_bound))
    facts += _per_step(estimate.arguments)
    return Facts(tuple(facts))


def _reserved(estimate: Estimate) -> Fact:
    outside = _("plus {context_bytes} outside PyTorch", context_bytes=estimate.device.context_bytes)
    name = at_most(_("peak reserved"), estimate.is_upper_bound)
    if not estimate.fits:
        return Fact(name, _("exceeds the card"), outside)
    sign = "" if estimate.report is not None else "≈ " if estimate.is_upper_bound else "≥ "
    return Fact(name, f"{sign}{format_bytes(estimate.needed_bytes)}", outside)


def _largest(largest: Largest, is_upper_bound: bool) -> Fact:
    if not largest.value:
        value, note = _("none"), _("not even the smallest value")
    else:
        value = f"{'' if largest.is_exact else '≈ '}{largest.value:,}"
        note = _("end of its range") if largest.value == largest.limit else _("the next value does not")
    if is_upper_bound and largest.value != largest.limit:
        note = _("as eager code; compiled code may fit with more")
    return Fact(_("largest {name} that fits", name=largest.name), value, note)


def _per_step(arguments: Mapping[str, Any]) -> list[Fact]:
    """Sequences and tokens per optimizer step, as far as arguments with usual names say."""
    numbers = {name: value for name, value in arguments.items() if isinstance(value, int)}
    batch, length = first_of(numbers, BATCHES), first_of(numbers, LENGTHS)
    accumulation = first_of(numbers, ACCUMULATIONS)
    if batch is None:
        return []
    count = numbers[batch]
    facts = []
    if accumulation is not None:
        count *= numbers[accumulation]
        note = _("{batch} x {times} accumulation steps", batch=numbers[batch], times=numbers[accumulation])
        facts.append(Fact(_("global batch"), f"{count:,}", note))
    if length is not None:
        facts.append(Fact(_("tokens per step"), f"{count * numbers[length]:,}", f"{count} x {numbers[length]}"))
    return facts


def _bar(estimate: Estimate) -> Parts:
    device = estimate.device
    breakdown = estimate.breakdown
    if estimate.report is not None and estimate.fits:
        breakdown = estimate.report.breakdown
    parts = [Part(word(name), breakdown[name], name) for name in _ALWAYS if breakdown[name]]
    shown = breakdown.total_bytes
    if estimate.report is not None and estimate.fits:
        parts.append(Part(_("reserved on top"), estimate.needed_bytes - shown, "cached"))
        shown = estimate.needed_bytes
    parts.append(Part(_("outside PyTorch"), device.context_bytes, "outside"))
    free = device.total_bytes - shown - device.context_bytes
    if free >= 0:
        parts.append(Part(_("free"), free, "free"))
    total = _("capacity") if free >= 0 else _("needed, of {total_bytes}", total_bytes=device.total_bytes)
    return Parts("", tuple(parts), total, device.total_bytes, (TIGHT_SHARE, DANGER_SHARE))


_ALWAYS = tuple(category.value for category in Category)


def settings_table(values: Mapping[str, Any]) -> Table:
    """The sliders as a table."""
    return Table((_("argument"), _("value")), tuple((name, str(value)) for name, value in values.items()))


def assumption_blocks(assumptions: tuple[Assumption, ...]) -> tuple[Block, ...]:
    """What could not be followed exactly."""
    if not assumptions:
        return (Sentence(_("None: everything in this run was followed exactly."), "quiet"),)
    return tuple(Sentence(f"{item.text} ({place(item.line)})" if item.line else item.text) for item in assumptions)


def assumption_details(assumptions: tuple[Assumption, ...]) -> Details:
    """The same under a heading."""
    return Details(_("Assumptions ({count})", count=len(assumptions)), assumption_blocks(assumptions))
