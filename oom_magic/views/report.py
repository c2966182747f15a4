"""What a MemoryReport says about itself, the most important first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import PurePath

from oom_magic.memory.categories import Category
from oom_magic.memory.report import MemoryReport, StepUsage
from oom_magic.memory.timeline import Phase, SourceLine, Timeline
from oom_magic.units import format_bytes
from oom_magic.views.blocks import Block, Code, Description, Details, Fact, Facts, Part, Parts, Sentence, Table, Tone
from oom_magic.views.cards import card_name, describe_cards
from oom_magic.views.registry import register

_LONGEST_CODE = 60  # characters of a source line that are shown
_MOST_ROWS = 12

_VERDICTS: Mapping[str, tuple[Tone, str]] = {
    "safe": ("good", "Safe: "),
    "tight": ("warning", "Tight: "),
    "danger": ("bad", "Danger: "),
}


@register
def describe_report(report: MemoryReport, top: int = 5) -> Description:
    """One run: verdict, peaks, breakdown at the peak and the ``top`` lines; then what else is known."""
    verb = "predicted for" if report.source == "predicted" else "measured on"
    capacity = format_bytes(report.device_total_bytes)
    blocks = [*_verdict(report), *describe_cards(report), _peaks(report), _breakdown(report), *_peak_line(report)]
    blocks += [*_lines(report, top), *_steps(report), *_kept(report), _card(report), *_other_cards(report)]
    blocks += [*_modules(report), *_message(report), *_assumptions(report), _footnote(report)]
    name, number = report.device.name, len(report.cards)
    if number > 1:
        name, capacity = f"{number} x {name}", f"{capacity} each; below, {card_name(report)}"
    return Description(f"GPU memory {verb} {name} ({capacity})", tuple(blocks))


def _verdict(report: MemoryReport) -> Iterable[Block]:
    if report.out_of_memory is not None:
        failure = report.out_of_memory
        phase = [failure.phase.value] if failure.phase is not Phase.OTHER else []
        card = [f"on {card_name(report)}"] if len(report.cards) > 1 else []
        where = ", ".join([place(failure.line), *card, *phase, *([f"step {failure.step}"] if failure.step else [])])
        text = f"Out of memory at {where}: "
        yield Sentence(f"{text}{format_bytes(failure.tensor_bytes)} more did not fit.", "bad")
        if report.is_upper_bound:
            yield Sentence("That holds for eager code; compiled code needs less and may fit.", "warning")
        if failure.line.text:
            yield Code(failure.line.text)
    elif report.error:
        until_there = f"Until there {100 * report.used_fraction:.1f} % of the card was in use at the peak."
        yield Sentence(f"The run ended with {report.error.rstrip('.')}.", "warning")
        yield Sentence(f"{until_there} What the rest would take is not known.", "warning")
    else:
        tone, word = _VERDICTS[report.verdict]
        at_most = "at most " if report.is_upper_bound else ""
        yield Sentence(f"{word}{at_most}{100 * report.used_fraction:.1f} % of the card is in use at the peak.", tone)
        if report.is_upper_bound:
            yield Sentence("Compiled code was followed as eager code: all figures are upper bounds.", "warning")
    if report.device.other_bytes:
        yield Sentence(f"Other processes hold {format_bytes(report.device.other_bytes)} of the card.", "warning")
    if report.source == "predicted":
        yield Sentence(f"A dry run on a pretend GPU: nothing was run for real.{_left(report.timeline)}", "quiet")


def _left(timeline: Timeline) -> str:
    if not timeline.was_left:
        return ""
    steps = f"{timeline.num_steps()} optimizer step{'s' if timeline.num_steps() > 1 else ''}"
    return f" It ended after {steps}: what the code does later, such as evaluation, is not counted."


def _peaks(report: MemoryReport) -> Facts:
    def share(num_bytes: int) -> str:
        return f"{100 * num_bytes / max(report.device_total_bytes, 1):.1f} % of the card"

    facts = [
        Fact("peak allocated", report.peak_allocated_bytes, share(report.peak_allocated_bytes)),
        Fact("peak reserved", report.peak_reserved_bytes, share(report.peak_reserved_bytes)),
    ]
    least = report.minimum_device_bytes
    if least is not None:
        outside = format_bytes(report.device.context_bytes)
        facts.append(Fact("least memory that runs it", least, f"and {outside} outside PyTorch"))
    facts.append(Fact("kept after the run", report.kept_bytes))
    return Facts(tuple(facts))


def _breakdown(report: MemoryReport) -> Parts:
    parts = [Part(Category(name).label, size, name) for name, size in report.breakdown.items()]
    unknown = report.peak_allocated_bytes - report.breakdown.total_bytes
    if unknown:
        parts.append(Part("not followed", unknown))
    return Parts("At the peak", tuple(parts), "allocated", report.device_total_bytes)


def _peak_line(report: MemoryReport) -> Iterable[Block]:
    if report.peak_line is not None:
        where = f"{place(report.peak_line)}, {report.peak_phase.value}"
        yield Sentence(f"Running at the peak ({where}): {_code(report.peak_line)}")


def _lines(report: MemoryReport, top: int) -> Iterable[Block]:
    shown, others = report.lines[:top], report.lines[top:]
    if not shown:
        return
    rows = [(place(usage.line), _code(usage.line), usage.live_bytes, usage.rise_bytes) for usage in shown]
    sizes = [usage.live_bytes for usage in shown]
    if others:
        sizes.append(sum(usage.live_bytes for usage in others))
        largest = max(usage.rise_bytes for usage in others)
        rows.append((f"{len(others)} other lines" if len(others) > 1 else "1 other line", "", sizes[-1], largest))
    total = sum(sizes)
    yield Table(
        ("line", "code", "at the peak", "largest rise"),
        tuple(rows),
        title="What each line took",
        shares=tuple(size / max(total, 1) for size in sizes),
        total=("sum", "", total, ""),
    )


def _steps(report: MemoryReport) -> Iterable[Block]:
    if not report.steps:
        return
    first, later = report.steps[0], report.steps[1:]
    text = f"Step 1 peaked at {format_bytes(first.peak_allocated_bytes)} ({first.peak_phase.value})"
    if later:
        highest = max(later, key=lambda step: step.peak_allocated_bytes)
        text += f", later ones at up to {format_bytes(highest.peak_allocated_bytes)} ({highest.peak_phase.value})"
    yield Sentence(f"{text}.")
    groups = [list(steps) for _, steps in groupby(report.steps, key=_as_shown)]
    rows = [(_step_range(steps), *_step_values(steps[0])) for steps in groups[:_MOST_ROWS]]
    if len(groups) > _MOST_ROWS:
        rest = [step for steps in groups[_MOST_ROWS:] for step in steps]
        top = max(rest, key=lambda step: step.peak_allocated_bytes)
        rows.append((_step_range(rest), top.peak_allocated_bytes, top.peak_reserved_bytes, top.peak_phase.value))
    table = Table(("step", "peak allocated", "peak reserved", "peak in"), tuple(rows))
    yield Details(f"Steps ({len(report.steps)})", (table,))


def _step_values(step: StepUsage) -> tuple[int, int, str]:
    return step.peak_allocated_bytes, step.peak_reserved_bytes, step.peak_phase.value


def _as_shown(step: StepUsage) -> tuple[str, str, str]:
    return (
        format_bytes(step.peak_allocated_bytes),
        format_bytes(step.peak_reserved_bytes),
        step.peak_phase.value,
    )


def _step_range(steps: list[StepUsage]) -> str:
    first, last = steps[0].step, steps[-1].step
    return f"{first}" if first == last else f"{first} to {last}"


def _kept(report: MemoryReport) -> Iterable[Block]:
    if report.kept_by:
        rows = tuple((holder.name, holder.num_bytes) for holder in report.kept_by[:_MOST_ROWS])
        yield Details("Names that hold memory after the run", (Table(("name", "holds"), rows),))


def _card(report: MemoryReport) -> Details:
    device = report.device
    cached = report.peak_reserved_bytes - report.peak_allocated_bytes
    used = report.peak_reserved_bytes + device.context_bytes + device.other_bytes
    parts = (
        Part("peak allocated", report.peak_allocated_bytes, "parameter"),
        Part("reserved beyond it", cached, "cached"),
        Part("outside PyTorch", device.context_bytes, "outside"),
        Part("other processes", device.other_bytes, "other"),
        Part("free", max(device.total_bytes - used, 0), "free"),
    )
    return Details("The card at its fullest", (Parts("", parts, "capacity", device.total_bytes),))


def _other_cards(report: MemoryReport) -> Iterable[Details]:
    for card in report.cards:
        if len(report.cards) > 1 and card.device.index != report.device.index:
            yield Details(card_name(card), (_peaks(card), _breakdown(card)))


def _modules(report: MemoryReport) -> Iterable[Block]:
    if not any(report.modules):
        return
    modules = list(report.modules.folded().items())
    rows = [(name or "outside any module", size) for name, size in modules[:_MOST_ROWS]]
    if modules[_MOST_ROWS:]:
        rows.append((f"{len(modules) - _MOST_ROWS} more", sum(size for _, size in modules[_MOST_ROWS:])))
    total = report.modules.total_bytes
    shares = tuple(size / max(total, 1) for _, size in rows)
    yield Details("Modules at the peak", (Table(("module", "holds"), tuple(rows), "", shares, ("sum", total)),))


def _message(report: MemoryReport) -> Iterable[Block]:
    if report.out_of_memory is not None:
        yield Details("PyTorch's message", (Sentence(report.out_of_memory.message),))


def _assumptions(report: MemoryReport) -> Iterable[Block]:
    if report.assumptions:
        sentences = [
            Sentence(f"{item.text} ({place(item.line)})" if item.line else item.text) for item in report.assumptions
        ]
        yield Details(f"Assumptions ({len(sentences)})", tuple(sentences))


def _footnote(report: MemoryReport) -> Sentence:
    torch = f"torch {report.torch_version}, " if report.torch_version else ""
    num_allocations = report.timeline.num_allocations
    events = f"{num_allocations:,} allocation{'s' * (num_allocations != 1)} followed"
    return Sentence(f"{torch}{events}.", "quiet")


def place(line: SourceLine) -> str:
    """Where a line is, briefly: ``Cell In[3]:12`` or ``models/gpt.py:88``."""
    return f"{'/'.join(PurePath(line.file).parts[-2:])}:{line.line}" if line.file else "elsewhere"


def _code(line: SourceLine) -> str:
    code = line.text.strip()
    return code if len(code) <= _LONGEST_CODE else f"{code[: _LONGEST_CODE - 1]}…"
