"""``release``: free what a failed cell still holds, and say who holds the rest."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator, MutableMapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import torch

from oom_magic.description import Block as DescriptionBlock
from oom_magic.description import Describable, Description, Fact, Facts, Sentence, Table
from oom_magic.measure.holders import holders_in, storages_in
from oom_magic.measure.shell import running_shell, users_names
from oom_magic.memory.report import Holder
from oom_magic.memory.segments import MIN_BLOCK_BYTES, round_up

_LAST_RESULTS = ("_", "__", "___")


@dataclass(frozen=True, repr=False)
class Released(Describable):
    """What ``release`` freed and what is left, in bytes, of one device.

    ``freed_allocated_bytes`` were in tensors, ``freed_reserved_bytes`` went back to the driver, cache
    included. ``unnamed_bytes`` are allocated but reached from no name: workspaces, threads, what lies deep.
    """

    freed_allocated_bytes: int
    freed_reserved_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    unnamed_bytes: int
    actions: tuple[str, ...]
    holders: tuple[Holder, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, ready for JSON."""
        return asdict(self)

    def describe(self) -> Description:
        """What was freed, what was done, and the names that hold the rest."""
        blocks: list[DescriptionBlock] = [
            Facts(
                (
                    Fact("freed from tensors", self.freed_allocated_bytes),
                    Fact("given back to the driver", self.freed_reserved_bytes),
                    Fact("still allocated", self.allocated_bytes),
                )
            )
        ]
        blocks += [Sentence(action) for action in self.actions]
        if self.holders:
            rows = tuple((holder.name, holder.num_bytes) for holder in self.holders)
            title = "Your variables that hold memory (del frees them)"
            blocks.append(Table(("name", "memory"), rows, title=title))
        if self.unnamed_bytes:
            rest = ("no name: workspaces, rounding, threads", self.unnamed_bytes)
            blocks.append(Table(("", "memory"), (rest,)))
        return Description("Released", tuple(blocks))


def release(namespace: MutableMapping[str, Any] | None = None) -> Released:
    """Free what the last failed cell's frames and IPython's cached results hold, then empty torch's cache.

    No variable of yours is deleted; those that hold memory are named. ``namespace`` is where names are
    looked up (default: the notebook's, or the caller's globals). The traceback stays printable, but
    ``%debug`` finds its frames empty. Works on the current CUDA device; without one it only collects garbage.
    """
    names = users_names(1) if namespace is None else namespace
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.current_device() if has_cuda else 0
    before = _levels(has_cuda)
    actions = [_clear_failed_frames(), _clear_cached_results(names, device)]
    gc.collect()
    if has_cuda:
        torch.cuda.empty_cache()
    allocated, reserved = _levels(has_cuda)
    named: dict[int, int] = {}
    for value in list(names.values()):
        named.update(storages_in(value, device))
    return Released(
        freed_allocated_bytes=before[0] - allocated,
        freed_reserved_bytes=before[1] - reserved,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        unnamed_bytes=max(allocated - sum(round_up(size, MIN_BLOCK_BYTES) for size in named.values()), 0),
        actions=tuple(action for action in actions if action),
        holders=holders_in(names, device),
    )


def _levels(has_cuda: bool) -> tuple[int, int]:
    return (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if has_cuda else (0, 0)


def _clear_failed_frames() -> str:
    """Empty the frames of the last error and of those that led to it; what still runs is left alone."""
    num_cleared = 0
    for trace in _last_tracebacks():
        traceback.clear_frames(trace)
        for frame, _line in traceback.walk_tb(trace):
            num_cleared += 1
            # up to Python 3.12 whoever formatted the traceback left a copy of the locals in the frame, which
            # reading them again brings up to date: empty
            _ = frame.f_locals
    return f"Emptied {num_cleared} frames that the last error kept alive." if num_cleared else ""


def _last_tracebacks() -> Iterator[TracebackType]:
    found = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    last = getattr(sys, "last_traceback", None)
    if last is not None:
        yield last
    pending, seen = [found], set()
    while pending:
        error = pending.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        if error.__traceback__ is not None:
            yield error.__traceback__
        pending += [error.__cause__, error.__context__]


def _clear_cached_results(names: MutableMapping[str, Any], device: int) -> str:
    """Drop entries of ``Out`` and ``_`` that hold GPU memory: IPython keeps every result shown, for ever."""
    cached = names.get("Out")
    cached = cached if isinstance(cached, dict) else {}
    cleared = [number for number, value in cached.items() if storages_in(value, device)]
    for number in cleared:
        del cached[number]
        names.pop(f"_{number}", None)
    display = getattr(running_shell(), "displayhook", None)
    for name in _LAST_RESULTS:
        if storages_in(names.get(name), device):
            names[name] = ""
        if storages_in(getattr(display, name, None), device):
            setattr(display, name, "")
    if not cleared:
        return ""
    listed = ", ".join(f"Out[{number}]" for number in cleared)
    return f"Dropped {listed}: IPython keeps each result that it shows. End a line with ; to show none."
