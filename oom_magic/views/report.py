"""The view of a MemoryReport: verdict, peaks, breakdown, lines; then the details."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import PurePath

from oom_magic.language import _, ngettext
from oom_magic.memory.categories import verdict_on
from oom_magic.memory.report import Device, MemoryReport, StepUsage
from oom_magic.memory.timeline import Phase, SourceLine, Timeline
from oom_magic.units import format_bytes
from oom_magic.views.blocks import (
    Block,
    Code,
    Description,
    Details,
    Fact,
    Facts,
    Part,
    Parts,
    Sentence,
    Table,
    register,
)
from oom_magic.views.words import (
    at_most,
    late_verdict_sentence,
    listed,
    part_sentence,
    upper_bound_sentence,
    verdict_sentence,
    word,
)

_MOST_PLACES = 3  # of lines that one sentence is about
_LONGEST_CODE = 60  # characters of a source line that are shown
_MOST_ROWS = 12
_SOFTMAX_OF_MATH = "aten::_safe_softmax"  # of _scaled_dot_product_attention_math alone
_UNEQUAL = 0.10  # shares of capacity of several cards that differ by more are worth a sentence


@register
def describe_report(report: MemoryReport, top: int = 5) -> Description:
    """One run: verdict, peaks, breakdown at the peak and the ``top`` lines, then the details."""
    blocks = [*_verdict(report), *_cards(report), _peaks(report), _breakdown(report), *_peak_line(report)]
    blocks += [
        *_lines(report, top),
        *_attention(report),
        *_steps(report),
        *_holders(report),
        _card(report),
        *_modules(report),
        *_other_cards(report),
    ]
    blocks += [*_message(report), *_assumptions(report), _footnote(report)]
    return Description(_title(report), tuple(blocks))


def describe_steps(report: MemoryReport) -> Description:
    """The optimizer steps of a run, without the rest."""
    return Description(_title(report), (*_verdict(report), _step_table(report)))


def _title(report: MemoryReport) -> str:
    name, number, capacity = report.device.name, len(report.cards), format_bytes(report.device_total_bytes)
    if number > 1:
        name = f"{number} x {name}"
        capacity = _("{capacity} each; below, {card}", capacity=capacity, card=_card_name(report))
    if report.device.rank is not None:
        rank, size = report.device.rank
        capacity = _("{capacity}; rank {rank} of {size}", capacity=capacity, rank=rank, size=size)
    if report.source == "predicted":
        return _("GPU memory predicted for {name} ({capacity})", name=name, capacity=capacity)
    return _("GPU memory measured on {name} ({capacity})", name=name, capacity=capacity)


def _card_name(report: MemoryReport) -> str:
    """``cuda:1``."""
    return f"cuda:{report.device.index}"


def _cards(report: MemoryReport) -> Iterable[Block]:
    """A row for each card, and remarks on their balance; empty for a single card."""
    cards = report.cards
    if len(cards) == 1:
        return
    rows = tuple(
        (
            _card_name(card),
            card.peak_allocated_bytes,
            card.peak_reserved_bytes,
            f"{100 * card.used_fraction:.1f} %",
            _largest(card),
        )
        for card in cards
    )
    peaks = (at_most(name, report.is_upper_bound) for name in (_("peak allocated"), _("peak reserved")))
    yield Table((_("card"), *peaks, _("in use"), _("mostly")), rows, title=_("Cards"))
    yield from _balance(cards)


def _largest(card: MemoryReport) -> str:
    name, size = max(card.breakdown.items(), key=lambda item: item[1], default=("", 0))
    return f"{word(name)} {format_bytes(size)}" if size else _("nothing")


def _balance(cards: tuple[MemoryReport, ...]) -> Iterable[Sentence]:
    unused = [_card_name(card) for card in cards if not card.peak_reserved_bytes]
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
        "The cards are unevenly loaded: {fullest} is {most:.0f} % full at its peak, {emptiest} {least:.0f} %."
        " {difference}",
        fullest=_card_name(fullest),
        most=100 * fullest.used_fraction,
        emptiest=_card_name(emptiest),
        least=100 * emptiest.used_fraction,
        difference=_difference(fullest, emptiest),
    )
    yield Sentence(text, "warning")


def _difference(fullest: MemoryReport, emptiest: MemoryReport) -> str:
    """The category that accounts for most of the difference."""
    name = max(fullest.breakdown, key=lambda name: fullest.breakdown[name] - emptiest.breakdown[name])
    return _(
        "Most of the difference is {category}: {most_bytes} vs. {least_bytes}.",
        category=word(name),
        most_bytes=fullest.breakdown[name],
        least_bytes=emptiest.breakdown[name],
    )


def _verdict(report: MemoryReport) -> Iterable[Block]:
    if report.out_of_memory is not None:
        failure = report.out_of_memory
        phase = [word(failure.phase)] if failure.phase is not Phase.OTHER else []
        card = [_("on {card}", card=_card_name(report))] if len(report.cards) > 1 else []
        step = [_("step {step}", step=failure.step)] if failure.step else []
        where = listed([place(failure.line), *card, *phase, *step])
        text = _(
            "Out of memory at {where}: {more_bytes} more did not fit.", where=where, more_bytes=failure.requested_bytes
        )
        yield Sentence(text, "bad")
        if report.is_upper_bound:
            yield upper_bound_sentence(is_failure=True)
        if failure.line.text:
            yield Code(failure.line.text)
    elif report.error:
        yield Sentence(_("The run ended with {error}.", error=report.error.rstrip(".")), "warning")
        until_there = _(
            "Up to that point, {percent:.1f} % of the card was in use at the peak. How much the rest would need is"
            " unknown.",
            percent=100 * report.used_fraction,
        )
        yield Sentence(until_there, "warning")
    elif report.source == "predicted" and not report.peak_allocated_bytes:
        yield Sentence(_("Nothing was put on the GPU: how much the code would need there is unknown."), "warning")
    else:
        yield from _fit(report)
    if report.device.other_bytes:
        yield Sentence(
            _("Other processes hold {other_bytes} of the card.", other_bytes=report.device.other_bytes), "warning"
        )
    if report.source == "predicted":
        yield Sentence(_dry(report.timeline), "quiet")


def _fit(report: MemoryReport) -> Iterable[Sentence]:
    """How full the card is at the peak of a run that ended, and at most."""
    uncollected = report.uncollected_bytes[1]
    if uncollected > report.peak_reserved_bytes:
        most = report.share_in_use(uncollected)
        yield late_verdict_sentence(report.verdict_until_collected, most, report.used_fraction)
    else:
        degree = "at most" if report.is_upper_bound else "exactly"
        is_part = report.is_lower_bound and report.verdict != "danger"
        yield (
            part_sentence(report.used_fraction)
            if is_part
            else verdict_sentence(report.verdict, report.used_fraction, degree)
        )
    if report.is_upper_bound:
        yield upper_bound_sentence(is_failure=False)
    yield from _with_context(report)
    yield from _besides(report)


def _with_context(report: MemoryReport) -> Iterable[Sentence]:
    """A remark where the verdict depends on the size of the CUDA context."""
    if verdict_on(report.most_used_fraction) != report.verdict:
        text = _(
            "{context_bytes} of that is the CUDA context, whose size depends on the driver, versions and libraries:"
            " with the largest seen on such cards, {most_bytes}, it is {percent:.1f} %.",
            context_bytes=report.device.context_bytes,
            most_bytes=(report.device.context_range or (0, 0))[1],
            percent=100 * report.most_used_fraction,
        )
        yield Sentence(text, "warning")


def _besides(report: MemoryReport) -> Iterable[Sentence]:
    """What may be allocated on top of the exact figures."""
    later, most = report.uncollected_bytes, report.most_bytes
    if later != (report.peak_allocated_bytes, report.peak_reserved_bytes):
        text = _(
            "Reference cycles that compiling leaves behind may hold memory until Python's garbage collector runs,"
            " perhaps to the end. Call gc.collect() after the first step."
        )
        yield Sentence(text, "warning")
    if most[1] > later[1]:
        text = _(
            "cuDNN's convolutions may briefly take more: up to {percent:.1f} % of the card is then in use. Where that"
            " does not fit, cuDNN picks an algorithm that needs less.",
            percent=100 * report.share_in_use(most[1]),
        )
        yield Sentence(text, "warning")


def _dry(timeline: Timeline) -> str:
    if not timeline.was_left:
        return _("Dry run on a pretend GPU: nothing ran for real.")
    return ngettext(
        "Dry run on a pretend GPU: nothing ran for real. It stopped after {count} optimizer step: later code, such as"
        " evaluation, is not counted.",
        (
            "Dry run on a pretend GPU: nothing ran for real. It stopped after {count} optimizer steps: later code, such"
            " as evaluation, is not counted."
        ),
        timeline.num_steps(),
    )


def _peaks(report: MemoryReport) -> Facts:
    def share(num_bytes: int) -> str:
        return _("{percent:.1f} % of the card", percent=100 * num_bytes / max(report.device_total_bytes, 1))

    is_bound = report.is_upper_bound
    facts = [
        Fact(at_most(_("peak allocated"), is_bound), report.peak_allocated_bytes, share(report.peak_allocated_bytes)),
        Fact(at_most(_("peak reserved"), is_bound), report.peak_reserved_bytes, share(report.peak_reserved_bytes)),
    ]
    known = report.peak_allocated_bytes, report.peak_reserved_bytes
    for whose, peaks in (
        (_("reserved, if garbage is collected late"), report.uncollected_bytes),
        (_("reserved, with cuDNN workspaces"), report.most_bytes),
    ):
        if peaks != known:
            facts.append(Fact(whose, peaks[1], _("at most; {allocated_bytes} allocated", allocated_bytes=peaks[0])))
        known = peaks
    least = report.minimum_device_bytes
    if least is not None:
        facts.append(Fact(at_most(_("minimum memory to run it"), is_bound), least, _outside(report.device)))
    facts.append(Fact(_("kept after the run"), report.kept_bytes))
    return Facts(tuple(facts))


def _outside(device: Device) -> str:
    """Memory of the process outside PyTorch; a range where it was not read, empty where it is unknown."""
    if not device.context_bytes:
        return ""
    if device.context_range is None:
        outside = _("plus {context_bytes} outside PyTorch", context_bytes=device.context_bytes)
    else:
        least, most = device.context_range
        outside = _("plus {least_bytes} to {most_bytes} outside PyTorch", least_bytes=least, most_bytes=most)
    return outside if device.rank is None else _("{outside}, NCCL not included", outside=outside)


def _breakdown(report: MemoryReport) -> Parts:
    parts = [Part(word(name), size, name) for name, size in report.breakdown.items()]
    unknown = report.peak_allocated_bytes - report.breakdown.total_bytes
    if unknown:
        parts.append(Part(_("not followed"), unknown))
    return Parts(_("At the peak"), tuple(parts), _("allocated"), report.device_total_bytes)


def _peak_line(report: MemoryReport) -> Iterable[Block]:
    if report.peak_line is not None:
        where = listed([place(report.peak_line), word(report.peak_phase)])
        yield Sentence(_("Running at the peak ({where}): {code}", where=where, code=_code(report.peak_line)))


def _lines(report: MemoryReport, top: int) -> Iterable[Block]:
    shown, others = report.lines[:top], report.lines[top:]
    if not shown:
        return
    rows = [(place(usage.line), _code(usage.line), usage.live_bytes, usage.rise_bytes) for usage in shown]
    sizes = [usage.live_bytes for usage in shown]
    if others:
        sizes.append(sum(usage.live_bytes for usage in others))
        largest = max(usage.rise_bytes for usage in others)
        rows.append((ngettext("{count} other line", "{count} other lines", len(others)), "", sizes[-1], largest))
    total = sum(sizes)
    yield Table(
        (_("line"), _("code"), _("at the peak"), _("largest rise")),
        tuple(rows),
        title=_("Memory by line"),
        shares=tuple(size / max(total, 1) for size in sizes),
        total=(_("sum"), "", total, ""),
    )


def _steps(report: MemoryReport) -> Iterable[Block]:
    if not report.steps:
        return
    first, later = report.steps[0], report.steps[1:]
    peak = {"first_bytes": first.peak_allocated_bytes, "phase": word(first.peak_phase)}
    if later:
        highest = max(later, key=lambda step: step.peak_allocated_bytes)
        text = _(
            "Step 1 peaked at {first_bytes} ({phase}), later ones at up to {later_bytes} ({later_phase}).",
            **peak,
            later_bytes=highest.peak_allocated_bytes,
            later_phase=word(highest.peak_phase),
        )
    else:
        text = _("Step 1 peaked at {first_bytes} ({phase}).", **peak)
    yield Sentence(text)
    yield Details(_("Steps ({count})", count=len(report.steps)), (_step_table(report),))


def _step_table(report: MemoryReport) -> Table:
    """A row for each stretch of steps that show the same."""
    groups = [list(steps) for _shown, steps in groupby(report.steps, key=_as_shown)]
    rows = [(_step_range(steps), *_step_values(steps[0])) for steps in groups[:_MOST_ROWS]]
    if len(groups) > _MOST_ROWS:
        rest = [step for steps in groups[_MOST_ROWS:] for step in steps]
        top = max(rest, key=lambda step: step.peak_allocated_bytes)
        rows.append((_step_range(rest), top.peak_allocated_bytes, top.peak_reserved_bytes, word(top.peak_phase)))
    peaks = (at_most(name, report.is_upper_bound) for name in (_("peak allocated"), _("peak reserved")))
    return Table((_("step"), *peaks, _("peak in")), tuple(rows))


def _step_values(step: StepUsage) -> tuple[int, int, str]:
    return step.peak_allocated_bytes, step.peak_reserved_bytes, word(step.peak_phase)


def _as_shown(step: StepUsage) -> tuple[str, str, str]:
    return (
        format_bytes(step.peak_allocated_bytes),
        format_bytes(step.peak_reserved_bytes),
        word(step.peak_phase),
    )


def _step_range(steps: list[StepUsage]) -> str:
    first, last = steps[0].step, steps[-1].step
    return f"{first}" if first == last else _("{first} to {last}", first=first, last=last)


def _holders(report: MemoryReport) -> Iterable[Block]:
    if report.holders:
        rows = tuple((holder.name, holder.num_bytes) for holder in report.holders[:_MOST_ROWS])
        yield Details(_("Variables that hold memory after the run"), (Table((_("name"), _("memory")), rows),))


def _card(report: MemoryReport) -> Details:
    device = report.device
    cached = report.peak_reserved_bytes - report.peak_allocated_bytes
    used = report.peak_reserved_bytes + device.context_bytes + device.other_bytes
    parts = (
        Part(_("peak allocated"), report.peak_allocated_bytes, "parameter"),
        Part(_("reserved on top"), cached, "cached"),
        *([Part(_("outside PyTorch"), device.context_bytes, "outside")] if device.context_bytes else []),
        Part(_("other processes"), device.other_bytes, "other"),
        Part(_("free"), max(device.total_bytes - used, 0), "free"),
    )
    return Details(_("The card at the peak"), (Parts("", parts, _("capacity"), device.total_bytes),))


def _other_cards(report: MemoryReport) -> Iterable[Details]:
    for card in report.cards:
        if card.peak_reserved_bytes and card.device.index != report.device.index:
            yield Details(_card_name(card), (_peaks(card), _breakdown(card)))


def _modules(report: MemoryReport) -> Iterable[Block]:
    if not any(report.modules):
        return
    modules = list(report.modules.folded().items())
    rows = [(name or _("outside any module"), size) for name, size in modules[:_MOST_ROWS]]
    if modules[_MOST_ROWS:]:
        rows.append(
            (_("{count} more", count=len(modules) - _MOST_ROWS), sum(size for _name, size in modules[_MOST_ROWS:]))
        )
    total = report.modules.total_bytes
    shares = tuple(size / max(total, 1) for _name, size in rows)
    yield Details(
        _("Modules at the peak"), (Table((_("module"), _("memory")), tuple(rows), "", shares, (_("sum"), total)),)
    )


def _attention(report: MemoryReport) -> Iterable[Block]:
    """Where scaled dot product attention fell back to the unfused path: sdp_utils.cpp chooses without a message."""
    timeline = report.timeline
    if _SOFTMAX_OF_MATH not in timeline.operators:
        return
    scores = (timeline.operator == timeline.operators.index(_SOFTMAX_OF_MATH)).nonzero()[0]
    largest = scores[timeline.requested_bytes[scores].argmax()]
    text = _(
        "scaled_dot_product_attention used no fused kernel ({place}): it materializes the attention scores of all"
        " pairs of tokens, {scores_bytes}, which grow with the square of the sequence length. No fused kernel supports"
        " a mask of another dtype than the queries, grouped heads with a mask or in float32, float64, bfloat16 before"
        " Ampere, or head sizes that are not a multiple of 8 (4 in float32).",
        place=place(timeline.lines[timeline.line[largest]]),
        scores_bytes=int(timeline.requested_bytes[largest]),
    )
    yield Sentence(text, "warning")


def _message(report: MemoryReport) -> Iterable[Block]:
    if report.out_of_memory is not None:
        yield Details(_("PyTorch's message"), (Sentence(report.out_of_memory.message),))


def _assumptions(report: MemoryReport) -> Iterable[Block]:
    """Each once, with the first lines that it is about: a library may have many."""
    places: dict[str, list[str]] = {}
    for item in report.assumptions:
        places.setdefault(item.text, []).extend([place(item.line)] if item.line else [])
    if places:
        sentences = [Sentence(f"{text} ({_first(found)})" if found else text) for text, found in places.items()]
        yield Details(_("Assumptions ({count})", count=len(sentences)), tuple(sentences))


def _first(places: list[str]) -> str:
    return ", ".join([*places[:_MOST_PLACES], *(["…"] if len(places) > _MOST_PLACES else [])])


def _footnote(report: MemoryReport) -> Sentence:
    torch = [f"torch {report.torch_version}"] if report.torch_version else []
    events = ngettext(
        "{count:,} allocation recorded.", "{count:,} allocations recorded.", report.timeline.num_allocations
    )
    return Sentence(listed([*torch, events]), "quiet")


def place(line: SourceLine) -> str:
    """Where a line is, briefly: ``Cell In[3]:12`` or ``models/gpt.py:88``."""
    return f"{'/'.join(PurePath(line.file).parts[-2:])}:{line.line}" if line.file else _("elsewhere")


def _code(line: SourceLine) -> str:
    code = line.text.strip()
    return code if len(code) <= _LONGEST_CODE else f"{code[: _LONGEST_CODE - 1]}…"
