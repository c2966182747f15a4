"""MemoryReport: what one run took, when, on which line and for what. Measured and predicted runs share it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from oom_magic.language import _
from oom_magic.memory.allocator.replay import Replay, minimum_device_bytes, peaks_at_most, replay
from oom_magic.memory.allocator.settings import AllocatorSettings
from oom_magic.memory.categories import CATEGORIES, Breakdown, Category, verdict_on
from oom_magic.memory.snapshot import write_snapshot
from oom_magic.memory.timeline import PHASES, IntArray, MarkKind, Phase, SourceLine, Timeline
from oom_magic.results import Result

_PLAIN_FIELDS = (
    "source",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "kept_bytes",
    "peak_position",
    "torch_version",
    "error",
)
_PAIRS = ("capability", "context_range", "rank")
NOT_IN_YOUR_CODE = SourceLine("", 0, "not in your code")


@dataclass(frozen=True, slots=True)
class Device:
    """The card of a run. Sizes in bytes."""

    name: str
    total_bytes: int
    context_bytes: int = 0  # this process's memory outside PyTorch: CUDA context, libraries
    other_bytes: int = 0  # memory of other processes
    capability: tuple[int, int] | None = None
    index: int = 0  # among the cards that the process sees: cuda:0, cuda:1, ...
    context_range: tuple[int, int] | None = None  # of ``context_bytes``, if it was not measured
    rank: tuple[int, int] | None = None  # of the process in a job, and the job's number of processes

    @property
    def usable_bytes(self) -> int:
        """The most memory that PyTorch's allocator can have."""
        return max(self.total_bytes - self.context_bytes - self.other_bytes, 0)


@dataclass(frozen=True, slots=True)
class LineUsage:
    """One source line: the bytes it allocated that are alive at the peak, and its largest rise.

    The rise is the largest increase of allocated memory while the line ran, temporaries included.
    """

    line: SourceLine
    live_bytes: int
    rise_bytes: int


@dataclass(frozen=True, slots=True)
class StepUsage:
    """One optimizer step (1 is the first): its peaks, and the phase in which allocated memory peaked."""

    step: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_phase: Phase


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """Why and where a run failed."""

    message: str
    requested_bytes: int  # asked of the driver ...
    tensor_bytes: int  # ... for a tensor of this size
    step: int
    phase: Phase
    operator: str
    line: SourceLine
    module: str
    category: Category = Category.TEMPORARY
    num_calls: int = 0  # of models, with something saved for a backward, since the last optimizer step; 0: not known
    device_index: int = 0  # of the card that was full


@dataclass(frozen=True, slots=True)
class Assumption:
    """What could not be followed exactly, what was assumed instead, and on which line."""

    text: str
    line: SourceLine | None = None
    is_upper_bound: bool = False  # what was assumed needs more memory than the real thing
    is_lower_bound: bool = False  # it needs less: not all was followed


def are_upper_bounds(assumptions: Iterable[Assumption]) -> bool:
    """Whether figures computed under these assumptions are upper bounds."""
    return any(assumption.is_upper_bound for assumption in assumptions)


@dataclass(frozen=True, slots=True)
class NamedHolder:
    """A variable that still holds memory after the run."""

    name: str
    num_bytes: int


@dataclass(frozen=True, eq=False, repr=False)
class MemoryReport(Result):
    """One run; made by ``MemoryReport.from_timeline``. All sizes in bytes.

    ``breakdown``, ``lines`` and ``modules`` describe the moment of the peak, and each sums to ``peak_allocated_bytes``.
    ``kept_bytes`` is what the run left allocated beyond what was there before. Holds numbers and text only: no tensor,
    no frame, no exception.
    """

    source: Literal["predicted", "measured"]
    device: Device
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    breakdown: Breakdown
    lines: tuple[LineUsage, ...]
    modules: Breakdown
    steps: tuple[StepUsage, ...]
    kept_bytes: int
    timeline: Timeline
    peak_position: int
    peak_line: SourceLine | None = None
    peak_phase: Phase = Phase.OTHER
    holders: tuple[NamedHolder, ...] = ()
    out_of_memory: OutOfMemory | None = None
    assumptions: tuple[Assumption, ...] = ()
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    torch_version: str = ""
    error: str = ""  # the user's own exception, if one ended the run: type and first line
    all_cards: tuple[MemoryReport, ...] = ()  # of the run, if it saw several
    transient: tuple[tuple[int, int], ...] = ()  # (event, the most bytes that a library may allocate just before it)
    freed_late: tuple[int, ...] = ()  # allocations that a real run may free only when Python's collector runs

    @classmethod
    def from_timeline(
        cls,
        timeline: Timeline,
        device: Device,
        *,
        source: Literal["predicted", "measured"] = "predicted",
        settings: AllocatorSettings | None = None,
        replayed: Replay | None = None,
        **known: Any,
    ) -> MemoryReport:
        """The report of a timeline, which is replayed through the allocator unless ``replayed`` is given.

        ``known`` overrides or adds fields: a measured run passes the peaks of torch's own counters.
        """
        settings = settings or AllocatorSettings()
        replayed = replayed or replay(timeline, settings=settings)
        peak = replayed.peak_position
        live = timeline.live_at(peak)
        live_bytes = replayed.block_bytes[live]
        at_peak = int(timeline.order[peak]) if timeline.num_events else -1
        known = {"kept_bytes": _kept_bytes(timeline, replayed), **known}
        return cls(
            source=source,
            device=device,
            peak_allocated_bytes=known.pop("peak_allocated_bytes", replayed.peak_allocated_bytes),
            peak_reserved_bytes=known.pop("peak_reserved_bytes", replayed.peak_reserved_bytes),
            breakdown=_by_category(timeline.category[live], live_bytes),
            lines=_by_line(timeline, replayed, live, live_bytes),
            modules=_by_name(timeline.modules, timeline.module[live], live_bytes),
            steps=_by_step(timeline, replayed),
            timeline=timeline,
            peak_position=peak,
            peak_line=_line_of(timeline, at_peak),
            peak_phase=PHASES[timeline.phase[at_peak]] if at_peak >= 0 else Phase.OTHER,
            settings=settings,
            **known,
        )

    @classmethod
    def of_cards(cls, cards: Sequence[MemoryReport]) -> MemoryReport:
        """The report of a run on several cards: that of the card that failed, else of the fullest (by share)."""
        failed = [card for card in cards if card.out_of_memory is not None]
        fullest = failed[0] if failed else max(cards, key=lambda card: card.used_fraction)
        return replace(fullest, all_cards=tuple(cards)) if len(cards) > 1 else fullest

    @property
    def cards(self) -> tuple[MemoryReport, ...]:
        """A report for each card of the run, in the order of their numbers."""
        return self.all_cards or (self,)

    @property
    def device_total_bytes(self) -> int:
        """Capacity of the card, in bytes."""
        return self.device.total_bytes

    @cached_property
    def minimum_device_bytes(self) -> int | None:
        """The least device memory, without the CUDA context, in which the run ends; None for a run that failed.

        Found by replaying the allocator with its own rule: free cached blocks, try again, then fail.
        """
        if self.error or self.out_of_memory is not None:
            return None
        return minimum_device_bytes(self.timeline, self.settings)

    @cached_property
    def highest(self) -> Breakdown:
        """The most bytes that each category held at any moment: at different ones, so they do not sum to the peak."""
        return _highest(self.timeline, replay(self.timeline, settings=self.settings))

    def operators(self, module: str = "") -> Breakdown:
        """Bytes at the peak by the operator that allocated them, largest first.

        ``module``: of this module only, named as in ``modules`` or by the end of its name: ``"h.0.attn"``.
        """
        timeline = self.timeline
        live = timeline.live_at(self.peak_position)
        if module:
            wanted = [name == module or name.endswith(f".{module}") for name in timeline.modules]
            live = live[np.array(wanted)[timeline.module[live]]]
        block_bytes = replay(timeline, settings=self.settings).block_bytes
        return _by_name(timeline.operators, timeline.operator[live], block_bytes[live])

    def with_allocator(self, options: str) -> MemoryReport:
        """The same run with other options in ``PYTORCH_CUDA_ALLOC_CONF``, such as ``"expandable_segments:True"``.

        The timeline, up to a failure, is replayed on a card that is large enough: reserved memory changes and, by
        rounding, allocated memory. Raises ValueError, with the fix, for unknown options.
        """
        settings = replace(AllocatorSettings.parse(options), is_by_address=self.settings.is_by_address)
        return MemoryReport.from_timeline(
            self.timeline, self.device, source=self.source, settings=settings, torch_version=self.torch_version
        )

    @cached_property
    def most_bytes(self) -> tuple[int, int]:
        """Peak allocated and peak reserved, in bytes, with the most ``transient`` memory, and ``freed_late`` kept.

        Libraries free transient memory at once, and use less if it does not fit, so no run fails for it.
        """
        return self._peaks_at_most(self.transient)

    @property
    def workspace_bytes(self) -> int:
        """The most ``transient`` memory at one moment, in bytes."""
        return max((num_bytes for _, num_bytes in self.transient), default=0)

    @cached_property
    def uncollected_bytes(self) -> tuple[int, int]:
        """Peak allocated and peak reserved, in bytes, if allocations ``freed_late`` are never freed.

        May exceed the card's memory: then a run may fail for it.
        """
        return self._peaks_at_most(())

    def _peaks_at_most(self, transient: Sequence[tuple[int, int]]) -> tuple[int, int]:
        peaks = self.peak_allocated_bytes, self.peak_reserved_bytes
        if not (transient or self.freed_late) or self.out_of_memory is not None:
            return peaks
        found = peaks_at_most(self.timeline, transient, self.freed_late, self.device.usable_bytes, self.settings)
        return max(peaks[0], found[0]), max(peaks[1], found[1])

    @property
    def used_fraction(self) -> float:
        """Peak reserved memory and all memory outside PyTorch, as a share of the card."""
        return self.share_in_use(self.peak_reserved_bytes)

    def share_in_use(self, reserved_bytes: int) -> float:
        """``reserved_bytes`` and all memory outside PyTorch, as a share of the card."""
        outside = self.device.context_bytes + self.device.other_bytes
        return (reserved_bytes + outside) / max(self.device.total_bytes, 1)

    @property
    def most_used_fraction(self) -> float:
        """``used_fraction`` with the largest CUDA context that was measured on such cards."""
        device = self.device
        _unused, most = device.context_range or (0, device.context_bytes)
        return self.used_fraction + (most - device.context_bytes) / max(device.total_bytes, 1)

    @property
    def is_upper_bound(self) -> bool:
        """Whether the sizes are upper bounds, because some code was run in a form that needs more memory."""
        return are_upper_bounds(self.assumptions)

    @property
    def is_lower_bound(self) -> bool:
        """Whether the sizes are lower bounds, because the run was left before a part that may take more."""
        return any(assumption.is_lower_bound for assumption in self.assumptions)

    @property
    def verdict(self) -> Literal["safe", "tight", "danger", "out of memory"]:
        """Below 85 % of the card safe, up to 90 % tight, above danger."""
        if self.out_of_memory is not None:
            return "out of memory"
        return verdict_on(self.used_fraction)

    @property
    def verdict_until_collected(self) -> Literal["safe", "tight", "danger", "out of memory"]:
        """The verdict on ``uncollected_bytes``."""
        reserved = self.uncollected_bytes[1]
        if reserved == self.peak_reserved_bytes:
            return self.verdict
        return "out of memory" if reserved > self.device.usable_bytes else verdict_on(self.share_in_use(reserved))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, ready for JSON; ``from_dict`` reads it back."""
        plain: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN_FIELDS}
        plain["peak_phase"] = self.peak_phase.value
        plain["device_total_bytes"] = self.device_total_bytes
        plain["breakdown"], plain["modules"] = self.breakdown.to_dict(), self.modules.to_dict()
        for name in ("device", "peak_line", "out_of_memory", "settings"):
            value = getattr(self, name)
            plain[name] = None if value is None else asdict(value)
        plain["transient"] = [list(item) for item in self.transient]
        plain["freed_late"] = list(self.freed_late)
        for name in ("lines", "steps", "holders", "assumptions"):
            plain[name] = [asdict(item) for item in getattr(self, name)]
        plain["timeline"] = self.timeline.to_dict()
        if self.all_cards:
            plain["cards"] = [card.to_dict() for card in self.all_cards]
        return plain

    def to_dataframe(self, of: str = "lines") -> Any:
        """A pandas DataFrame of the ``"lines"``, ``"steps"``, ``"breakdown"`` or ``"modules"``; sizes in bytes.

        Raises ValueError for another name, ImportError with the fix where pandas is not installed.
        """
        tables: dict[str, list[dict[str, Any]]] = {
            "lines": [{**asdict(use.line), "live_bytes": use.live_bytes, "rise_bytes": use.rise_bytes}
                      for use in self.lines],
            "steps": [{**asdict(use), "peak_phase": use.peak_phase.value} for use in self.steps],
            "breakdown": [{"category": name, "num_bytes": size} for name, size in self.breakdown.items()],
            "modules": [{"module": name, "num_bytes": size} for name, size in self.modules.items()],
        }  # fmt: skip
        if of not in tables:
            raise ValueError(_("to_dataframe({of!r}): the tables are {tables}.", of=of, tables=", ".join(tables)))
        return data_frame(tables[of])

    def save_snapshot(self, path: str | Path) -> None:
        """Write the run as a memory snapshot that pytorch.org/memory_viz opens."""
        write_snapshot(self.timeline, self.settings, path, self.device.name, self.device.total_bytes)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> MemoryReport:
        """The report that ``to_dict`` described."""
        values = {key: value for key, value in plain.items() if key not in ("device_total_bytes", "cards")}
        device = dict(values["device"])
        device.update({name: tuple(device[name]) for name in _PAIRS if device.get(name)})
        values.update(
            device=Device(**device),
            breakdown=Breakdown(values["breakdown"]),
            modules=Breakdown(values["modules"]),
            lines=tuple(LineUsage(**{**use, "line": SourceLine(**use["line"])}) for use in values["lines"]),
            steps=tuple(StepUsage(**{**use, "peak_phase": Phase(use["peak_phase"])}) for use in values["steps"]),
            holders=tuple(NamedHolder(**item) for item in values["holders"]),
            assumptions=tuple(
                Assumption(**{**item, "line": _source_line(item["line"])}) for item in values["assumptions"]
            ),
            timeline=Timeline.from_dict(values["timeline"]),
            peak_line=_source_line(values["peak_line"]),
            peak_phase=Phase(values["peak_phase"]),
            settings=AllocatorSettings(**values["settings"]),
            out_of_memory=_out_of_memory(values["out_of_memory"]),
            all_cards=tuple(cls.from_dict(card) for card in plain.get("cards", ())),
            transient=tuple((position, num_bytes) for position, num_bytes in plain.get("transient", ())),
            freed_late=tuple(plain.get("freed_late", ())),
        )
        return cls(**values)


def _source_line(plain: Mapping[str, Any] | None) -> SourceLine | None:
    return None if plain is None else SourceLine(**plain)


def _out_of_memory(plain: Mapping[str, Any] | None) -> OutOfMemory | None:
    if plain is None:
        return None
    read = {"phase": Phase(plain["phase"]), "category": Category(plain["category"])}
    return OutOfMemory(**{**plain, **read, "line": SourceLine(**plain["line"])})


def _line_of(timeline: Timeline, allocation: int) -> SourceLine | None:
    if allocation < 0 or timeline.line[allocation] == 0:
        return None
    return timeline.lines[int(timeline.line[allocation])]


def _kept_bytes(timeline: Timeline, replayed: Replay) -> int:
    if not timeline.num_events:
        return 0
    before = replayed.block_bytes[timeline.category == CATEGORIES.index(Category.BEFORE)].sum()
    return int(replayed.allocated_bytes[-1] - before)


def _highest(timeline: Timeline, replayed: Replay) -> Breakdown:
    events = timeline.order
    made = np.where(events >= 0, events, ~events)
    sizes = np.where(events >= 0, 1, -1) * replayed.block_bytes[made]
    categories = timeline.category[made]
    return Breakdown(
        {
            category.value: int(np.where(categories == number, sizes, 0).cumsum().max(initial=0))
            for number, category in enumerate(CATEGORIES)
        }
    )


def _sums(keys: IntArray, sizes: IntArray, length: int) -> IntArray:
    totals = np.zeros(length, dtype=np.int64)
    np.add.at(totals, keys, sizes)
    return totals


def _by_category(categories: IntArray, sizes: IntArray) -> Breakdown:
    totals = _sums(categories, sizes, len(CATEGORIES))
    return Breakdown({category.value: int(total) for category, total in zip(CATEGORIES, totals, strict=True)})


def _by_name(names: tuple[str, ...], numbers: IntArray, sizes: IntArray) -> Breakdown:
    """Sizes by the name that ``numbers`` point at, largest first."""
    ranked = sorted(zip(names, _sums(numbers, sizes, len(names)).tolist(), strict=True), key=lambda item: -item[1])
    return Breakdown(dict(ranked))


def _by_line(timeline: Timeline, replayed: Replay, live: IntArray, sizes: IntArray) -> tuple[LineUsage, ...]:
    totals = _sums(timeline.line[live], sizes, len(timeline.lines))
    rises = _rises(timeline, replayed)
    usages = [
        LineUsage(line if position else NOT_IN_YOUR_CODE, int(totals[position]), int(rises[position]))
        for position, line in enumerate(timeline.lines)
        if totals[position] or rises[position]
    ]
    return tuple(sorted(usages, key=lambda usage: (-usage.live_bytes, -usage.rise_bytes)))


def _rises(timeline: Timeline, replayed: Replay) -> IntArray:
    """Largest rise of allocated memory per line, over the stretches in which one line allocated."""
    rises = np.zeros(len(timeline.lines), dtype=np.int64)
    after = replayed.allocated_bytes
    events = timeline.order[: len(after)]
    made = np.flatnonzero(events >= 0)
    if not len(made):
        return rises
    lines = timeline.line[events[made]]
    starts = np.flatnonzero(np.concatenate(([True], lines[1:] != lines[:-1])))
    before = after[made[starts]] - replayed.block_bytes[events[made[starts]]]
    highest = np.maximum.reduceat(after[made], starts)
    np.maximum.at(rises, lines[starts], highest - before)
    return rises


def _by_step(timeline: Timeline, replayed: Replay) -> tuple[StepUsage, ...]:
    """One row per optimizer step that ended; the first begins with the first event."""
    length = len(replayed.allocated_bytes)
    positions = timeline.positions(MarkKind.STEP_END)
    ends = [position for position in positions if position <= length]
    steps: list[StepUsage] = []
    start = 0
    for number, end in enumerate(ends, 1):
        if end <= start:
            continue
        window = replayed.allocated_bytes[start:end]
        top = start + int(window.argmax())
        reserved = int(replayed.reserved_bytes[start:end].max())
        allocation = int(timeline.order[top])
        phase = PHASES[timeline.phase[allocation if allocation >= 0 else ~allocation]]
        steps.append(StepUsage(number, int(window.max()), reserved, phase))
        start = end
    return tuple(steps)


def data_frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A pandas DataFrame of these rows. Raises ImportError with the fix where pandas is not installed."""
    try:
        import pandas
    except ImportError:
        raise ImportError(_("to_dataframe() needs pandas: pip install pandas.")) from None
    return pandas.DataFrame(list(rows))
