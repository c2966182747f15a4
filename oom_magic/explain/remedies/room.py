"""Remedies that do not change the training code: allocator settings, hardware, and memory that earlier cells hold.

Such memory is on the device although the failed run does not use it: an older model, results.
"""

from __future__ import annotations

import ast
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.remedies.code import RELEASE, code_for, in_a_notebook
from oom_magic.explain.remedies.remedy import Remedy, Situation

if TYPE_CHECKING:
    from oom_magic.measure.holders.reach import Locate
    from oom_magic.memory.allocator.settings import AllocatorSettings
    from oom_magic.memory.report import MemoryReport


DROPPED = "drop_copy"  # objects of earlier cells
_BETWEEN_STEPS = ("parameter", "gradient", "optimizer_state", "before", "workspace")
_CONTAINERS = (dict, list, set, deque, defaultdict, OrderedDict)
_ADDING = ("append", "appendleft", "add", "extend", "update")
_LEAST_SHARE = 0.02  # of the card: less than that is not mentioned, such as the MiB that others hold for a display


def needed_bytes(
    report: MemoryReport,
    batches: tuple[int, int] = (1, 0),
    settings: AllocatorSettings | None = None,
    exact_up_to_bytes: int | None = None,
) -> int:
    """The least memory for PyTorch's allocator, in bytes, with which a rehearsed run ends, and goes on if it was left
    after a step; as it was set up (None). ``batches`` of a step were followed, and so many more come. What is more than
    ``exact_up_to_bytes`` may be 0.2 % too much."""
    from oom_magic.memory.allocator.replay import minimum_device_bytes  # loads NumPy, which texts do not need

    return minimum_device_bytes(report.timeline, settings or report.settings, *batches, exact_up_to_bytes)


def between_steps_bytes(report: MemoryReport) -> int:
    """Memory that is kept between steps, in bytes, at the peak of a run."""
    return sum(report.breakdown[name] for name in _BETWEEN_STEPS)


def making_room(report: MemoryReport, needed: int, situation: Situation) -> Iterator[Remedy]:
    """The remedies that make room for an unchanged run with this need, in bytes, once what failures held is free."""
    is_part = report.is_lower_bound
    if situation.is_filled_by_held(needed):
        remedy = _room("free_held", 2, {"freed_bytes": situation.held_bytes}, is_part)
        yield situation.judged(replace(remedy, saving_bytes=situation.held_bytes), needed)
    if situation.raised is not None and situation.usable_bytes < needed <= situation.raised.usable_bytes:
        yield situation.raised.judged(_room("raise_limit", 4, {}, is_part), needed)
    is_enough = situation.usable_bytes < needed <= situation.usable_bytes + situation.other_bytes
    if is_enough or situation.other_bytes > _LEAST_SHARE * situation.total_bytes:
        remedy = _room("close_processes", 3, {"freed_bytes": situation.other_bytes}, is_part)
        yield situation.judged(remedy, needed, situation.other_bytes)


def dropping(found: InTheWay, report: MemoryReport, needed: int, now: int, situation: Situation) -> Remedy:
    """Deleting objects of earlier cells that the run does not use: ``report`` is the run without them."""
    values = {"names": ", ".join(found.names), "freed_bytes": found.num_bytes}
    remedy = _room(DROPPED, 1, values, report.is_lower_bound)
    remedy = replace(remedy, code="\n".join([*found.statements, RELEASE]))
    peak, saving = report.peak_allocated_bytes, needed - now
    return situation.judged(replace(remedy, peak_allocated_bytes=peak, saving_bytes=saving), now)


def _room(key: str, cost: int, values: Mapping[str, Any], is_part: bool) -> Remedy:
    code, language = code_for(key, "plain", values)
    return Remedy(key, cost, "same", values, saving_bytes=0, code=code, language=language, is_lower_bound=is_part)


def growing_segments(report: MemoryReport, needed: int, situation: Situation) -> Iterator[Remedy]:
    """The same events with expandable segments, where they are available and need less."""
    if situation.expandable_segments or situation.is_windows:
        return
    expandable = replace(report.settings, expandable_segments=True)
    now = needed_bytes(report, settings=expandable, exact_up_to_bytes=situation.usable_bytes)
    if now < needed:
        code, language = code_for("expandable_segments", situation.style, {})
        peak = report.peak_allocated_bytes
        remedy = Remedy("expandable_segments", 5, "same", peak_allocated_bytes=peak, code=code, language=language)
        remedy = replace(remedy, saving_bytes=needed - now, is_lower_bound=report.is_lower_bound)
        yield situation.judged(remedy, now)


def with_segments(remedy: Remedy, report: MemoryReport, needed: int, situation: Situation) -> Iterator[Remedy]:
    """A remedy, whose run ``report`` is of, together with expandable segments, if both fit."""
    for more in growing_segments(report, needed, situation):
        if more.fits:
            values = {**remedy.values, "keys": (remedy.key, more.key)}
            code = f"{remedy.code}\n\n{in_a_notebook(more.code)}" if remedy.code else ""
            both = replace(more, key="combination", cost=remedy.cost + more.cost, speed="combination", values=values)
            batches = (remedy.global_batch_before, remedy.global_batch_after)
            both = replace(both, global_batch_before=batches[0], global_batch_after=batches[1])
            yield replace(both, code=code, language=remedy.language)


def cheapest_with_segments(
    in_pieces: Sequence[tuple[Remedy, MemoryReport]], needed: int, situation: Situation
) -> Iterator[Remedy]:
    """The cheapest of the changes, each with the report of its run, that fits together with expandable segments."""
    for remedy, report in sorted(in_pieces, key=lambda one: one[0].cost):
        for both in with_segments(remedy, report, needed, situation):
            yield both
            return


def other_hardware(report: MemoryReport, needed: int, situation: Situation, is_alone: bool) -> Iterator[Remedy]:
    """Other cards, or several of them for a run on one card, on which a run with this need fits; without code."""
    if is_alone:
        yield from _several_cards(report, needed, situation)
    yield from _larger_card(needed, situation)


def _larger_card(needed: int, situation: Situation) -> Iterator[Remedy]:
    """The smallest sufficient card of the catalogue."""
    from oom_magic.predict.setups.gpus import list_gpus

    situation = situation.raised or situation
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
    for number in (2, 4, 8) if needed > situation.usable_bytes else ():
        saving = sharded - sharded // number
        if needed - saving <= situation.usable_bytes:
            values = {"gpus": number, "saving_bytes": saving}
            remedy = Remedy("fsdp", 0, "fsdp", values, is_bought=True)
            needs = needed - saving
            yield replace(remedy, needed_bytes=needs, saving_bytes=saving, note=Evidence("reason_estimate"))
            return


@dataclass(frozen=True)
class InTheWay:
    """Names, the bytes that only they hold, and the objects that only they lead to, by identity.

    ``emptied`` are the names of containers that the run only adds to: they stay.
    """

    names: tuple[str, ...]
    num_bytes: int
    objects: frozenset[int] = frozenset()
    emptied: frozenset[str] = frozenset()

    def leave(self, names: dict[str, Any]) -> None:
        """Take them out of the ``names`` that a cell sees."""
        for name in self.names:
            value = names.pop(name, None)
            if name in self.emptied:
                names[name] = copy(value)
                names[name].clear()

    @property
    def statements(self) -> list[str]:
        """What does the same in a notebook."""
        deleted = [name for name in self.names if name not in self.emptied]
        clearing = [f"{name}.clear()" for name in self.names if name in self.emptied]
        return [*([f"del {', '.join(deleted)}"] if deleted else []), *clearing]


def names_needed(tree: ast.Module, names: Mapping[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    """What a cell reads before it makes it, without the containers that it only adds to; and those."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    made = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
    into = {id(node) for one in ast.walk(tree) for node in _added_to(one)}
    read = {node.id for node in nodes if id(node) not in into}
    added = {node.id for node in nodes if id(node) in into and type(names.get(node.id)) in _CONTAINERS}
    return frozenset({node.id for node in nodes} - made - (added - read)), frozenset(added - read - made)


def _added_to(node: ast.AST) -> Iterator[ast.expr]:
    """The container that a statement puts something into."""
    match node:
        case ast.Assign(targets=[ast.Subscript(value=ast.Name() as container)]):
            yield container
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name() as container, attr=attr))) if attr in _ADDING:
            yield container


def find_in_the_way(
    names: Mapping[str, Any], needed: Collection[str], locate: Locate, room_bytes: int
) -> InTheWay | None:
    """The ``names`` that could be deleted, without those that are ``needed``; None where that would give little of the
    ``room_bytes`` that PyTorch can have.

    ``locate`` finds device memory that was taken before the run. Memory that other names hold as well is not counted.
    """
    from oom_magic.measure.holders.inventory import named_values  # these load torch
    from oom_magic.measure.holders.reach import namespaces_of_modules, reach

    around = {id(names), *namespaces_of_modules()}
    reached = {
        name: reach([value], locate, around) for name, value in named_values(names) if not name.startswith("Out[")
    }
    going = {
        name
        for name, one in reached.items()
        if name not in needed and sum(one.everything().values()) >= _LEAST_SHARE * room_bytes
    }
    # A name for a part of what they hold goes along, such as a small model with its optimizer.
    held = {address for name in going for address in reached[name].everything()}
    going |= {
        name
        for name, one in reached.items()
        if name not in needed and one.everything() and held.issuperset(one.everything())
    }
    staying: dict[int, int] = {}
    known: set[int] = set()
    for name, one in reached.items():
        if name not in going:
            staying |= one.everything()
            known |= one.objects
    storages: dict[int, int] = {}
    objects: set[int] = set()
    for name in tuple(going):
        own = {address: size for address, size in reached[name].everything().items() if address not in staying}
        if own:
            storages |= own
            objects |= reached[name].objects
        else:  # such as an optimizer created since, whose contents all lead to the model
            going.remove(name)
            known |= reached[name].objects
    num_bytes = sum(storages.values())
    if num_bytes < _LEAST_SHARE * room_bytes:
        return None
    return InTheWay(tuple(sorted(going)), num_bytes, frozenset(objects - known))
