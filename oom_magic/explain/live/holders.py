"""What else holds memory: variables, frames of failures, other processes, a model loaded twice; lines of the run."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Literal

from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.live.called import called_in, parsed
from oom_magic.explain.messages.failure import Failure
from oom_magic.user_code import is_users_file

if TYPE_CHECKING:
    from oom_magic.measure.holders.release import Released
    from oom_magic.memory.report import MemoryReport

HolderKind = Literal["name", "output", "frames", "own_frames", "process", "category", "line"]


@dataclass(frozen=True)
class Holder:
    """A variable, a kept result, a process, a category or a line of code, and the bytes it holds; ``what`` it is."""

    kind: HolderKind
    name: str
    num_bytes: int
    what: Evidence | None = None


_MOST_LINES = 5
# What measure.holders says, by the key of the sentence with the same meaning.
_WORDS = {
    "held_as_module": re.compile(r"module (?P<kind>.+)"),
    "held_as_optimizer": re.compile(r"optimizer (?P<kind>.+), its state"),
    "held_as_gradients": re.compile("gradients"),
    "held_as_graph": re.compile("autograd graph"),
    "held_as_shown": re.compile("shown result"),
    "held_as_cache": re.compile("functools cache"),
    "held_by_error": re.compile(r"(?P<kind>\S+) in (?P<place>.+)"),
}
_LEAST_BYTES = 2**20
_NOTEWORTHY_SHARE = 0.2


def find_holders(
    released: Released | None,
    report: MemoryReport | None,
    failure: Failure | None,
    error: BaseException | None = None,
    names: Mapping[str, Any] | None = None,
) -> tuple[tuple[Holder, ...], tuple[Evidence, ...]]:
    """Holders of memory, largest first within a kind, and what about them is worth a sentence.

    ``released`` is what ``release`` would do now, in a dry run: what failures hold, and who holds the rest.
    ``error`` may show a model on its way to the device, ``names`` are the notebook's.
    """
    holders: list[Holder] = []
    evidence: list[Evidence] = []
    if released is not None:
        holders += _in_notebook(released)
        holders += _of_processes(0 if failure is None else failure.device_index or 0)
        used = _names_used(error, names or {})
        evidence += [*_twins(released, used)] or _loaded_before(released, error, names or {})
    if report is not None and report.out_of_memory is not None:
        holders += _in_report(report)
    return tuple(holders), tuple(evidence)


def data_sets_on_device(released: Released | None, names: Mapping[str, Any], failure: Failure | None) -> list[Evidence]:
    """The data sets that hold a good part of what PyTorch had: they could wait in RAM, and each batch be moved."""
    if released is None or failure is None or "torch" not in sys.modules:
        return []
    data = sys.modules["torch"].utils.data
    least = max(_LEAST_BYTES, int(_NOTEWORTHY_SHARE * (failure.pytorch_bytes or 0)))
    large = (one for one in released.holders if one.num_bytes >= least)
    sets = (one for one in large if isinstance(names.get(one.name), (data.DataLoader, data.Dataset)))
    return [Evidence("data_set_on_device", {"name": one.name, "held_bytes": one.num_bytes}) for one in sets]


def earlier_bytes(holders: Sequence[Holder], report: MemoryReport | None) -> int:
    """Bytes that earlier failures hold; where the run was recorded, no more than was there before it."""
    total = sum(one.num_bytes for one in holders if one.kind == "frames")
    return total if report is None else min(total, report.breakdown["before"])


def _in_notebook(released: Released) -> Iterator[Holder]:
    for gone in released.freed:
        yield Holder("own_frames" if gone.is_of_error else "frames", gone.what, gone.num_bytes, in_words(gone.what))
    for one in released.holders:
        if one.name and one.num_bytes >= _LEAST_BYTES:
            kind: HolderKind = "output" if one.name.startswith("Out[") else "name"
            yield Holder(kind, one.name, one.num_bytes, in_words(one.what))


def in_words(what: str) -> Evidence:
    """What ``release`` says of a holder, as a sentence of the catalogue."""
    for key, pattern in _WORDS.items():
        match = pattern.fullmatch(what)
        if match is not None:
            return Evidence(key, match.groupdict())
    return Evidence("held_as", {"kind": what})


def _of_processes(device: int) -> Iterator[Holder]:
    """Other processes on a real GPU."""
    from oom_magic.measure.device.cards import is_available

    if not is_available():
        return
    import os

    from oom_magic.measure.device.cards import read_cards

    for card in read_cards():
        if card.index == device:
            for process in card.processes:
                if process.pid != os.getpid() and process.num_bytes:
                    yield Holder("process", f"{process.pid} {process.name}".strip(), process.num_bytes)


def _loaded_before(released: Released, error: BaseException | None, names: Mapping[str, Any]) -> Iterator[Evidence]:
    """A name that holds a model of the class that is being loaded, so that both models are on the device at once."""
    if error is None or error.__traceback__ is None:
        return
    from oom_magic.explain.live.frames import model_on_the_way  # loads torch

    kind, identity = model_on_the_way(error) or ("", 0)
    for one in released.holders:
        is_other = id(names.get(one.name)) != identity
        if one.what == f"module {kind}" and is_other and one.num_bytes >= _LEAST_BYTES:
            yield Evidence("model_loaded_before", {"names": one.name, "model": kind, "twin_bytes": one.num_bytes})


def _twins(released: Released, used: Collection[str]) -> Iterator[Evidence]:
    """Names of models of one class and equal size: a model loaded twice, unless the code that failed uses them all, as
    it does an average of the weights or a target network."""
    for (_, num_bytes), names in _alike(released).items():
        number = min(len([name for name in names if name not in used]), len(names) - 1)
        if number:
            yield Evidence("same_model_twice", {"names": ", ".join(names), "twin_bytes": num_bytes * number})


def _names_used(error: BaseException | None, names: Mapping[str, Any]) -> set[str]:
    """The names that are read in the cell or file whose run failed, and in the user's functions that it calls."""
    codes: list[ast.AST] = []
    for frame, _ in walk_tb(None if error is None else error.__traceback__):
        if frame.f_code.co_name == "<module>" and is_users_file(frame.f_code.co_filename):
            codes.append(parsed(frame.f_code.co_filename, frame.f_globals))
    codes += [one.definition for code in tuple(codes) for one in called_in(code, names)]
    found = (node for code in codes for node in ast.walk(code) if isinstance(node, ast.Name))
    return {node.id for node in found if isinstance(node.ctx, ast.Load)}


def _alike(released: Released) -> dict[tuple[str, int], list[str]]:
    alike: dict[tuple[str, int], list[str]] = defaultdict(list)
    for one in released.holders:
        if one.name and one.what.startswith("module ") and one.num_bytes >= _LEAST_BYTES:
            alike[one.what, one.num_bytes].append(one.name)
    return alike


def _in_report(report: MemoryReport) -> Iterator[Holder]:
    """The categories at the peak of the failed run, and the lines that allocated most of it."""
    for name, num_bytes in sorted(report.breakdown.items(), key=lambda item: -item[1]):
        yield Holder("category", name, num_bytes)
    for usage in report.lines[:_MOST_LINES]:
        if usage.live_bytes >= _LEAST_BYTES and usage.line.file:
            yield Holder("line", usage.line.place, usage.live_bytes)
