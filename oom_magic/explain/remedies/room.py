"""Remedies that leave the training code as it is; what they do follows from the run itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.remedies.code import code_for
from oom_magic.explain.remedies.remedy import Remedy, Situation
from oom_magic.memory.allocator.replay import minimum_device_bytes

if TYPE_CHECKING:
    from oom_magic.memory.report import MemoryReport

# Other hardware costs more than any change to the run, or all of them together.
_BOUGHT = 1000


def making_room(report: MemoryReport, needed: int, situation: Situation) -> Iterator[Remedy]:
    """What makes room for a run that needs so many bytes, or finds it elsewhere."""
    if situation.held_bytes:
        yield _freeing("free_held", 2, situation.held_bytes, needed, situation)
    if situation.copy is not None:
        yield _dropped(situation.copy, needed, situation)
    if situation.other_bytes:
        yield _freeing("close_processes", 3, situation.other_bytes, needed, situation)
    if needed > situation.usable_bytes:
        yield from _larger_card(needed, situation)
        yield from _several_cards(report, needed, situation)


def _freeing(key: str, cost: int, freed: int, needed: int, situation: Situation) -> Remedy:
    code, language = code_for(key, "plain", {})
    return Remedy(
        key, cost, "same", {"freed_bytes": freed}, needed_bytes=needed, saving_bytes=0,
        fits=needed <= situation.usable_bytes + freed, code=code, language=language,
    )  # fmt: skip


def _dropped(copy: Evidence, needed: int, situation: Situation) -> Remedy:
    freed = int(copy.values["twin_bytes"])
    values = {"names": copy.values["names"], "freed_bytes": freed}
    code, language = code_for("drop_copy", "plain", values)
    return Remedy(
        "drop_copy", 1, "same", values, needed_bytes=needed - freed, saving_bytes=freed,
        fits=needed - freed <= situation.usable_bytes, code=code, language=language,
    )  # fmt: skip


def growing_segments(report: MemoryReport, needed: int, situation: Situation) -> Iterator[Remedy]:
    """The same events in segments that grow, where that is possible and needs less."""
    if situation.expandable_segments or situation.is_windows:
        return
    now = minimum_device_bytes(report.timeline, replace(report.settings, expandable_segments=True))
    if now < needed:
        code, language = code_for("expandable_segments", situation.style, {})
        yield Remedy(
            "expandable_segments", 5, "same", peak_allocated_bytes=report.peak_allocated_bytes, needed_bytes=now,
            saving_bytes=needed - now, fits=now <= situation.usable_bytes, code=code, language=language,
        )  # fmt: skip


def _larger_card(needed: int, situation: Situation) -> Iterator[Remedy]:
    """The smallest card of the catalogue that would do."""
    from oom_magic.predict.setups.gpus import list_gpus

    present = situation.gpu
    larger = [gpu for gpu in list_gpus() if gpu.total_bytes - gpu.context_bytes >= needed]
    if larger and present.total_bytes - present.context_bytes < needed:
        gpu = min(larger, key=lambda card: (card.total_bytes, -card.capability[0]))
        values = {"gpu": gpu.name, "total_bytes": gpu.total_bytes}
        yield Remedy("larger_card", _BOUGHT, "same", values, needed_bytes=needed, saving_bytes=0, fits=True)


def _several_cards(report: MemoryReport, needed: int, situation: Situation) -> Iterator[Remedy]:
    """Sharding over several cards like this one: arithmetic, not rehearsed."""
    parts = report.breakdown
    sharded = parts["parameter"] + parts["gradient"] + parts["optimizer_state"]
    for number in (2, 4, 8):
        saving = sharded - sharded // number
        if needed - saving <= situation.usable_bytes:
            code, language = code_for("fsdp", situation.style, {"gpus": number})
            yield Remedy(
                "fsdp", _BOUGHT, "fsdp", {"gpus": number, "saving_bytes": saving}, needed_bytes=needed - saving,
                saving_bytes=saving, fits=None, note=Evidence("reason_estimate"), code=code, language=language,
            )  # fmt: skip
            return
