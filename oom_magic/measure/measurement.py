"""``measure``: what a block of code took on a real GPU, as a MemoryReport."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from oom_magic.errors import describe_error
from oom_magic.garbage_collector import gc_disabled
from oom_magic.inputs import parse_bytes
from oom_magic.interrupts import Interrupts, InterruptsAround
from oom_magic.language import _, ngettext
from oom_magic.measure.device.cards import current_device
from oom_magic.measure.history import recording as history
from oom_magic.measure.history.assembly import Assembler, FailedRequest
from oom_magic.measure.history.attribution import find_owners, gradient_owners, on_cuda
from oom_magic.measure.holders.failed_frames import users_names
from oom_magic.measure.holders.inventory import holders_in
from oom_magic.memory.allocator.settings import AllocatorSettings
from oom_magic.memory.report import Assumption, MemoryReport, OutOfMemory
from oom_magic.memory.timeline import Phase, SourceLine
from oom_magic.memory.workspaces import Workspaces
from oom_magic.units import format_bytes

_TRIED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_UNKNOWN = FailedRequest(0, SourceLine("", 0), "", Phase.OTHER, 0)


def find_out_of_memory(
    error: BaseException | None, failed: FailedRequest | None, settings: AllocatorSettings
) -> OutOfMemory | None:
    """Details of the torch out-of-memory error that ended a block; None if it ended otherwise.

    Sizes in bytes: exact if the allocator's history holds the failed request, else as rounded in the message.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    message = str(error)
    printed = _TRIED.search(message)
    if failed is None:
        failed = _UNKNOWN._replace(num_bytes=parse_bytes(printed[1]) if printed else 0)
    requested = failed.segment_bytes(settings)
    if printed and format_bytes(requested) != printed[1]:
        requested = parse_bytes(printed[1])
    return failed.out_of_memory(message, requested)


def measure(
    device: int | str | torch.device | None = None, *, namespace: Mapping[str, Any] | None = None
) -> Measurement:
    """Observe the GPU memory of a ``with`` block; returns the Measurement whose ``report`` it fills.

    ``device`` is a CUDA device (default: the current one). ``namespace`` is where the names that keep memory
    are looked up (default: the notebook's, or the caller's globals). An exception in the block passes
    unchanged and the report is made all the same. Raises RuntimeError if there is no CUDA device, and ValueError or
    TypeError for a ``device`` that is not a device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            _(
                "There is no CUDA device to measure; om.dry_run(fn, ...) shows how much memory your code"
                " would take on one."
            )
        )
    with torch._C.DisableTorchFunction():
        index = _index_of(device)
    return Measurement(index, users_names() if namespace is None else namespace)


class Measurement:
    """A running or finished observation; made by ``measure``.

    Nothing is reset, emptied or synchronized, and no mode or tensor class of the user's is asked. The peaks
    come from the allocator's history, which gives every level that torch's counters go through: a peak counter
    cannot tell a block from what ran before it, and once reset it cannot be restored. So blocks may be nested
    and may call ``reset_peak_memory_stats``, and every counter reads afterwards as it would without them. Where
    the counter rose during the block it must, and does, agree. Afterwards only numbers and text are kept: no
    tensor, frame or exception.
    """

    def __init__(self, device: int, namespace: Mapping[str, Any]) -> None:
        self.device = device
        self._namespace: Mapping[str, Any] = namespace
        self._report: MemoryReport | None = None
        self._ending = ExitStack()  # ends the recording
        self._interrupts = InterruptsAround(self, Measurement.__exit__)
        self._stepped: set[int] = set()
        self._problems: set[str] = set()

    @property
    def report(self) -> MemoryReport:
        """What the block took. Raises RuntimeError before the block has ended, and if it never began."""
        if self._report is None:
            raise RuntimeError(_("The block has not ended yet; read .report after the with statement."))
        return self._report

    def __enter__(self) -> Measurement:
        """Begin to record the device's allocations."""
        try:
            self._interrupts.begin()
            with Interrupts().waiting(), torch._C.DisableTorchFunction():
                self._begin()
        except BaseException:  # above all an interrupt, which waited
            self._ending.close()
            self._interrupts.end()
            raise
        return self

    def _begin(self) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._owners = find_owners()
        self._settings = history.read_settings(self.device)
        state = history.read_current_state(self.device)
        self._start = _Counters.read(self.device)
        self._assembler = Assembler(state, self._start.num_events, self._settings)
        self._assembler.observe_owners(self._start.num_events, self._owners.by_address)
        self._ending.callback(history.ignore, self.device, self._assembler.feed)
        self._history = history.observe(self.device, self._assembler.feed)
        self._ending.callback(register_optimizer_step_post_hook(self._after_step).remove)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the recording and make the report; an exception of the block passes, noted in it."""
        try:
            with torch._C.DisableTorchFunction():
                self._end(error)
        finally:
            self._interrupts.end()

    def _end(self, error: BaseException | None) -> None:
        with self._ending:
            owners = find_owners()
            self._assembler.observe_owners(history.count_events(self.device), owners.by_address)
        with gc_disabled():
            self._report = self._build(owners.has_graph, error)
        self._namespace = {}
        del self._assembler, self._history, self._owners

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Called by torch at the end of every optimizer's step. An interrupt waits for its end."""
        with Interrupts().waiting(), torch._C.DisableTorchFunction():
            self._observe_step(optimizer)

    def _observe_step(self, optimizer: torch.optim.Optimizer) -> None:
        count = history.count_events(self.device)
        owners = self._owners
        try:
            # the first step makes the optimizer's state; later ones only gradients
            if id(optimizer) in self._stepped:
                owners = gradient_owners(optimizer, self._owners)
            else:
                owners = self._owners = find_owners()
            self._stepped.add(id(optimizer))
        except Exception as error:  # an unusual tensor subclass must not break the user's training
            self._problems.add(_("The owners of memory could not be determined after a step: {error}", error=error))
        self._assembler.observe_owners(count, owners.by_address, ends_step=True)
        self._history.drain_if_large()

    def _build(self, has_graph: bool, error: BaseException | None) -> MemoryReport:
        end = _Counters.read(self.device)
        device = current_device(self.device)
        workspaces = frozenset(Workspaces.here(torch.__version__).lasting_bytes(device.capability or (0, 0)).values())
        timeline = self._assembler.timeline(has_graph=has_graph, workspace_sizes=workspaces)
        replayed = self._assembler.replayed(end.num_retries - self._start.num_retries)
        return MemoryReport.from_timeline(
            timeline,
            device,
            source="measured",
            settings=self._settings,
            replayed=replayed,
            peak_allocated_bytes=_peak(replayed.peak_allocated_bytes, self._start.allocated, end.allocated),
            peak_reserved_bytes=_peak(replayed.peak_reserved_bytes, self._start.reserved, end.reserved),
            kept_bytes=end.allocated.current - self._start.allocated.current,
            holders=holders_in(self._namespace, on_cuda(self.device), among=self._assembler.new_addresses()),
            out_of_memory=find_out_of_memory(error, self._assembler.failed, self._settings),
            assumptions=tuple(map(Assumption, self._doubts(end))),
            torch_version=str(torch.__version__),
            error=describe_error(error),
        )

    def _doubts(self, end: _Counters) -> list[str]:
        """What could not be followed exactly."""
        doubts = sorted(self._problems)
        if self._history.is_users:
            doubts.append(_("Your own recording of the memory history was read and left running."))
        if self._history.was_reset:
            doubts.append(
                _("torch's memory statistics were reset inside the block: steps and categories are less certain.")
            )
        if self._history.problem:
            doubts.append(_("Only torch's counters could be read: {problem}", problem=self._history.problem))
            return doubts
        num_missing, num_forgotten = self._assembler.num_missing, self._assembler.log.num_forgotten_steps
        if num_missing:
            doubts.append(
                _(
                    "The history lost {num_missing} allocations and frees (its buffer was full or cleared);"
                    " lines, categories and steps describe the rest.",
                    num_missing=num_missing,
                )
            )
        if num_missing and end.allocated.peak == self._start.allocated.peak:
            doubts.append(_("The peak may have been higher, up to the peak that torch had recorded before the block."))
        if num_forgotten:
            doubts.append(
                ngettext(
                    "{count} step is left out of the record, which would be too long; it did not have a higher peak.",
                    "{count} steps are left out of the record, which would be too long; none of them had a higher"
                    " peak.",
                    num_forgotten,
                )
            )
        if self._assembler.drift_bytes and not num_missing:
            drift = self._assembler.drift_bytes
            doubts.append(_("The block sizes are off by {drift} bytes at the end.", drift=drift))
        return doubts


@dataclass(frozen=True, slots=True)
class _Level:
    current: int
    peak: int


@dataclass(frozen=True, slots=True)
class _Counters:
    """torch's counters at one moment, in bytes."""

    allocated: _Level
    reserved: _Level
    num_events: int
    num_retries: int

    @classmethod
    def read(cls, device: int) -> _Counters:
        """What PyTorch's allocator counts now on a device."""
        stats = torch.cuda.memory_stats(device)
        allocated, reserved = (
            _Level(stats.get(f"{name}.all.current", 0), stats.get(f"{name}.all.peak", 0))
            for name in ("allocated_bytes", "reserved_bytes")
        )
        return cls(allocated, reserved, history.count_events(device), stats.get("num_alloc_retries", 0))


def _peak(seen: int, start: _Level, end: _Level) -> int:
    """The peak of a block; a peak counter that rose within it counts even if the history lost that moment."""
    return max(seen, end.current, end.peak if end.peak > start.peak else 0)


def _index_of(device: int | str | torch.device | None) -> int:
    if callable(device):
        raise TypeError(
            _("om.measure observes a with block: `with om.measure() as measured: train()`, then read measured.report.")
        )
    try:
        asked = torch.device("cuda" if device is None else device)
    except (RuntimeError, TypeError):
        text = _('{device!r} is not a device; give "cuda:0" or 0, or nothing for the current one.', device=device)
        raise ValueError(text) from None
    if asked.type != "cuda":
        text = _(
            "om.measure observes CUDA devices, and {asked} is not one; leave it out for the current device.",
            asked=asked,
        )
        raise ValueError(text)
    count = torch.cuda.device_count()
    if asked.index is not None and asked.index >= count:
        raise ValueError(
            ngettext(
                "There is no {asked}: this machine has {count} CUDA device, starting at cuda:0.",
                "There is no {asked}: this machine has {count} CUDA devices, starting at cuda:0.",
                count,
                asked=asked,
            )
        )
    return torch.cuda.current_device() if asked.index is None else asked.index
