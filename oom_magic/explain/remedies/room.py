"""Remedies that leave the training code as it is; what they do follows from the run itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.remedies.code import code_for
from oom_magic.explain.remedies.remedy import Remedy, Situation
from oom_magic.memory.allocator.replay import minimum_device_bytes

if TYPE_CHECKING:
    from oom_magic.explain.remedies.in_the_way import InTheWay
    from oom_magic.memory.report import MemoryReport


def making_room(needed: int, situation: Situation) -> Iterator[Remedy]:
    """What makes room for a run that needs so many bytes as it is."""
    if situation.held_bytes:
        after = needed - situation.held_bytes
        remedy = _room("free_held", 2, {"freed_bytes": situation.held_bytes})
        yield situation.judged(replace(remedy, saving_bytes=situation.held_bytes), after)
    if situation.other_bytes:
        remedy = _room("close_processes", 3, {"freed_bytes": situation.other_bytes})
        yield situation.judged(remedy, needed, situation.other_bytes)


def dropping(found: InTheWay, report: MemoryReport, needed: int, now: int, situation: Situation) -> Remedy:
    """What earlier cells made and the run has no use for, deleted first: ``report`` is the run without it."""
    values = {"names": ", ".join(found.names), "freed_bytes": found.num_bytes}
    remedy = _room("drop_copy", 1, values)
    peak, saving = report.peak_allocated_bytes, needed - now
    return situation.judged(replace(remedy, peak_allocated_bytes=peak, saving_bytes=saving), now)


def _room(key: str, cost: int, values: Mapping[str, Any]) -> Remedy:
    code, language = code_for(key, "plain", values)
    return Remedy(key, cost, "same", values, saving_bytes=0, code=code, language=language)


def growing_segments(report: MemoryReport, needed: int, situation: Situation) -> Iterator[Remedy]:
    """The same events in segments that grow, where that is possible and needs less."""
    if situation.expandable_segments or situation.is_windows:
        return
    now = minimum_device_bytes(report.timeline, replace(report.settings, expandable_segments=True))
    if now < needed:
        code, language = code_for("expandable_segments", situation.style, {})
        peak = report.peak_allocated_bytes
        remedy = Remedy("expandable_segments", 5, "same", peak_allocated_bytes=peak, code=code, language=language)
        yield situation.judged(replace(remedy, saving_bytes=needed - now), now)


def other_hardware(report: MemoryReport, needed: int, situation: Situation, is_of_job: bool) -> Iterator[Remedy]:
    """Other cards, or more of them where the run has but one, with which one fits that needs so many bytes."""
    if not is_of_job:
        yield from _several_cards(report, needed, situation)
    yield from _larger_card(needed, situation)


def _larger_card(needed: int, situation: Situation) -> Iterator[Remedy]:
    """The smallest card of the catalogue that would do."""
    from oom_magic.predict.setups.gpus import list_gpus

    gpu = situation.gpu
    present = (situation.total_bytes or gpu.total_bytes) - gpu.context_bytes
    larger = [gpu for gpu in list_gpus() if gpu.total_bytes - gpu.context_bytes >= needed]
    if larger and present < needed:
        gpu = min(larger, key=lambda card: (card.total_bytes, -card.capability[0]))
        values = {"gpu": gpu.name, "total_bytes": gpu.total_bytes}
        yield Remedy("larger_card", 0, "same", values, needed_bytes=needed, saving_bytes=0, fits=True,
                     is_bought=True)  # fmt: skip


def _several_cards(report: MemoryReport, needed: int, situation: Situation) -> Iterator[Remedy]:
    """Sharding over several cards like this one: arithmetic, not rehearsed."""
    parts = report.breakdown
    sharded = parts["parameter"] + parts["gradient"] + parts["optimizer_state"]
    for number in (2, 4, 8):
        saving = sharded - sharded // number
        if needed - saving <= situation.usable_bytes:
            code, language = code_for("fsdp", situation.style, {"gpus": number})
            values = {"gpus": number, "saving_bytes": saving}
            remedy = Remedy("fsdp", 0, "fsdp", values, is_bought=True, code=code, language=language)
            needs = needed - saving
            yield replace(remedy, needed_bytes=needs, saving_bytes=saving, note=Evidence("reason_estimate"))
            return
