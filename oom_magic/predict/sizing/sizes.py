"""Sizes as exact functions: a training function, dry-run at a few points, then known for all of its arguments.

What makes dry runs is loaded when there is something to run; sizes kept on disk are read without PyTorch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from oom_magic.inputs import parse_bytes
from oom_magic.language import _
from oom_magic.memory.allocator.replay import Replay, replay
from oom_magic.memory.categories import Breakdown
from oom_magic.memory.report import Assumption, Device, MemoryReport, StepUsage, data_frame
from oom_magic.memory.timeline import IntArray
from oom_magic.one_line_errors import OneLineErrors
from oom_magic.predict.setups.gpus import find_gpu
from oom_magic.predict.setups.hardware import Hardware
from oom_magic.predict.sizing.fingerprint import fingerprint
from oom_magic.predict.sizing.layered import Layers
from oom_magic.predict.sizing.pieces import (
    Explorer,
    Node,
    Piece,
    Trace,
    all_borders,
    all_pieces,
    all_steps,
    on_card,
    piece_at,
    pieces_at,
)
from oom_magic.predict.sizing.ranges import Ranges, label
from oom_magic.predict.sizing.regions import Point
from oom_magic.predict.sizing.runs import Place, Runs
from oom_magic.predict.sizing.store import recalled, stored, torch_version
from oom_magic.results import Result

if TYPE_CHECKING:
    from oom_magic.predict.instrumentation.stop_rule import StopAfter


def size(
    fn: Callable[..., Any],
    *,
    gpu: str | None = None,
    memory: str | int | None = None,
    stop_after_steps: StopAfter = "alike",
    num_gpus: int = 1,
    num_processes: int | None = None,
    card: int | None = None,
    **ranges: Any,
) -> Sizes:
    """The memory of ``fn`` as a function of its arguments; ``fn`` is ordinary training code for "cuda".

    Each argument is given a range ``(low, high)`` or ``(low, high, step)`` of whole numbers, a list of choices, or a
    fixed value: ``size(train, batch_size=(1, 64), seq_len=(128, 4096), precision=["fp32", "bf16"], layers=12)``.
    ``fn`` is dry-run at some points of the ranges, once more where its course changes; the further choices when first
    asked for. ``gpu``, ``memory``, ``stop_after_steps``, ``num_gpus`` and ``num_processes`` are those of ``dry_run``;
    of several cards ``card`` is the one whose memory is asked for, of several processes the first is followed.

    Raises ValueError or TypeError, naming argument, value and fix, for ranges that make no sense, and ValueError for a
    function that fails or does something else when run again.
    """
    with OneLineErrors("function"):
        parsed = Ranges.parse(fn, ranges)
        hardware = Hardware.of(gpu, memory, num_gpus, num_processes)
        sizes = Sizes(fn, parsed, hardware, stop_after_steps=stop_after_steps, card=card)
        sizes.trace()
    return sizes


class Sizes(Result):
    """What ``fn`` takes at any point of ``ranges``. Made by ``size``; all sizes in bytes.

    Where ``fn`` builds a model of many equal ``layers`` it is run with few of them. What was found is kept on disk by
    what ``identity`` returns, whose ``repr`` says all that decides what ``fn`` does (None: not kept).

    A point is given as keyword arguments: one value for each argument that varies. ``report`` is what ``dry_run`` would
    find there; the other methods are parts of it, and faster.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        ranges: Ranges,
        hardware: Hardware,
        *,
        stop_after_steps: StopAfter = "alike",
        card: int | None = None,
        layers: Layers | None = None,
        identity: Callable[[], Any] | None = None,
    ) -> None:
        self.label = label(fn)
        self.ranges = ranges
        self._fn = fn
        self._hardware = hardware
        self._stop_after_steps = stop_after_steps
        self._number = hardware.checked_card(card)
        self.device = Device(
            hardware.gpu.name,
            hardware.total_bytes,
            hardware.gpu.context_bytes,
            capability=hardware.gpu.capability,
            index=self._number,
        )
        self.settings = hardware.settings
        self._layers = layers
        self._identity = identity or partial(fingerprint, fn, ranges.fixed, ranges.choices)
        options = {"gpu": hardware.gpu, "memory": hardware.total_bytes, "stop_after_steps": stop_after_steps}
        self.runs = Runs(fn, self.label, ranges, options | hardware.options, self._number, layers)
        self._families: dict[tuple[int, ...], Node] = {}
        # Runs at single points, of pieces that are not exact or not known yet.
        self._alone: dict[Place, Piece] = {}
        self._traces: dict[Place, Trace] = {}  # of families that are not known yet

    @property
    def num_traces(self) -> int:
        """The number of dry runs made."""
        return self.runs.count

    def trace(self, **choices: Any) -> None:
        """Trace ``fn`` with these choices (the first of each, where none is given) now rather than when first asked."""
        self._family(self._setting(choices))

    def is_known(self, **choices: Any) -> bool:
        """Whether the function is known everywhere with these choices: traced before, or found on disk now."""
        setting = self._setting(choices)
        if setting not in self._families:
            found = recalled(self._known_by(setting))
            if found is not None:
                self._families[setting] = found
        return setting in self._families

    def expect(self, points: Iterable[Mapping[str, Any]]) -> None:
        """``report_of_run`` will be asked for these, in this order."""
        self.runs.expect(place for place in map(self.ranges.locate, points) if place not in self._alone)

    @property
    def has_runs(self) -> bool:
        """Whether runs at single points were made."""
        return bool(self._alone)

    def _setting(self, choices: Mapping[str, Any]) -> tuple[int, ...]:
        lowest = {name: self.ranges.lowest(name) for name in self.ranges.names}
        return self.ranges.locate({**lowest, **choices})[0]

    def on(self, gpu: str | None, memory: str | int | None = None) -> Sizes:
        """The same function on another card.

        What was traced serves there too, with the sizes that depend on the card, if runs at both ends of the ranges go
        the same way; else it is traced again when first asked for.
        """
        other = Sizes(
            self._fn,
            self.ranges,
            Hardware.of(gpu, memory, **self._hardware.options),
            stop_after_steps=self._stop_after_steps,
            card=self._number,
            layers=self._layers,
            identity=self._identity,
        )
        other.take_over(self)
        return other

    def with_device(self, device: Device) -> Sizes:
        """The same sizes on a card of the same kind with other memory."""
        other = copy(self)
        other.device = replace(device, index=self._number)
        return other

    def take_over(self, other: Sizes) -> None:
        """Take over the pieces that ``other`` found for the same function on another card, as ``on`` does."""
        for setting, family in other._families.items():
            moved = on_card(family, self._hardware.gpu)
            if any(all_steps(family)):
                continue
            if all(piece_at(moved, point).explains(point, self._trace(setting, point)) for point in self._ends()):
                self._families[setting] = moved

    def peak_allocated_bytes(self, **point: Any) -> int:
        """Peak allocated memory: sums of sizes and what the allocator typically adds, in well under a millisecond.

        Exact, and within some milliseconds, where only few blocks are large.
        """
        setting, at = self.ranges.locate(point)
        return self._piece(setting, at).peaks.at(_row(at))

    def peak_reserved_bytes(self, **point: Any) -> int:
        """Peak reserved memory, from the simulated allocator on the card."""
        return self._replay(*self.ranges.locate(point), self.device).peak_reserved_bytes

    def report(self, **point: Any) -> MemoryReport:
        """The report that ``dry_run`` would return; without a run if the sizes are exact (``is_exact``)."""
        setting, at = self.ranges.locate(point)
        return self._report(self._exact_piece(setting, at), at)

    def report_of_run(self, **point: Any) -> MemoryReport:
        """The report of a run at this point: for few points that is faster than tracing the ranges."""
        setting, at = self.ranges.locate(point)
        return self._report(self._alone.get((setting, at)) or self._run_at(setting, at), at)

    def _report(self, piece: Piece, at: Point) -> MemoryReport:
        timeline = piece.timeline(at)
        replayed = replay(timeline, capacity_bytes=self.device.usable_bytes, settings=self.settings)
        failure = replayed.failure
        if failure is not None:
            timeline = timeline.until(failure.position)
            replayed = replace(replayed, block_bytes=replayed.block_bytes[: timeline.num_allocations])
        return MemoryReport.from_timeline(
            timeline,
            self.device,
            settings=self.settings,
            replayed=replayed,
            out_of_memory=None if failure is None else piece.out_of_memory(failure, self.device),
            assumptions=piece.assumptions,
            torch_version=torch_version(),
        )

    def steps(self, **point: Any) -> tuple[StepUsage, ...]:
        """The peaks of each optimizer step."""
        return self.report(**point).steps

    def breakdown(self, **point: Any) -> Breakdown:
        """The peak by category; sums to ``peak_allocated_bytes``."""
        setting, at = self.ranges.locate(point)
        return self._piece(setting, at).peaks.breakdown(_row(at))

    def fits(self, memory: str | int | None = None, **point: Any) -> bool:
        """Whether a run ends without running out of ``memory`` (``"12GiB"``, a GPU's name; default: the card's)."""
        return self._fits(*self.ranges.locate(point), self._device(memory))

    def is_exact(self, **point: Any) -> bool:
        """Whether the sizes around a point are known to the byte; if not, ``report`` runs the function."""
        setting, at = self.ranges.locate(point)
        return piece_at(self._family(setting), at).is_exact

    def largest(self, name: str, /, *, memory: str | int | None = None, **rest: Any) -> int:
        """The largest value of argument ``name`` in its range that fits in ``memory``, or 0."""
        self.ranges.check_names(rest, but=name)
        if name not in self.ranges.axes:
            names = ", ".join(self.ranges.axes)
            raise TypeError(_("{name!r} has no range to search; these have one: {names}.", name=name, names=names))
        axis = self.ranges.axes[name]
        setting, at = self.ranges.locate({**rest, name: int(axis[0])})
        position = list(self.ranges.axes).index(name)
        device = self._device(memory)
        fitting, too_large = -1, len(axis)
        while too_large - fitting > 1:
            middle = (fitting + too_large) // 2
            if self._fits(setting, (*at[:position], int(axis[middle]), *at[position + 1 :]), device):
                fitting = middle
            else:
                too_large = middle
        return int(axis[fitting]) if fitting >= 0 else 0

    def map(self, **values: Any) -> IntArray:
        """``peak_allocated_bytes`` over a grid: one dimension for each argument that is given a sequence, in order."""
        grids = self._grids(values)
        setting, _unused = self.ranges.locate({**values, **{name: int(value[0]) for name, value in grids.items()}})
        for name, value in grids.items():
            for number in value:
                self.ranges.check_value(name, int(number))
        mesh = dict(zip(grids, np.meshgrid(*grids.values(), indexing="ij"), strict=True))
        shape = tuple(len(value) for value in grids.values())
        columns = [np.broadcast_to(mesh.get(name, values[name]), shape).ravel() for name in self.ranges.axes]
        return self._peaks(setting, np.stack(columns, axis=1).astype(np.int64)).reshape(shape)

    def to_dataframe(self, **values: Any) -> Any:
        """A pandas DataFrame of ``map``: a row for each point, with the arguments and ``peak_allocated_bytes``.

        Raises ImportError with the fix where pandas is not installed.
        """
        grids, peaks = self._grids(values), self.map(**values).ravel()
        points = [dict(zip(grids, map(int, point), strict=True)) for point in itertools.product(*grids.values())]
        rows = zip(points, map(int, peaks), strict=True)
        return data_frame({**values, **point, "peak_allocated_bytes": peak} for point, peak in rows)

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What could not be followed exactly, at any traced point."""
        pieces = [piece for family in self._families.values() for piece in all_pieces(family)]
        return tuple(dict.fromkeys(assumption for piece in pieces for assumption in piece.assumptions))

    @property
    def borders(self) -> tuple[str, ...]:
        """Where the function changes its behavior, in words such as ``"batch_size x seq_len <= 3072"``."""
        names = list(self.ranges.axes)
        found = [border for family in self._families.values() for border in all_borders(family)]
        texts = [step.text(names) for family in self._families.values() for step in all_steps(family)]
        return tuple(dict.fromkeys([*texts, *(border.text(names) for border in found)]))

    def ends(self) -> dict[str, dict[str, Any]]:
        """The ``"lowest"`` and the ``"highest"`` point, with the first of all choices."""
        lowest = {name: self.ranges.lowest(name) for name in self.ranges.names}
        highest = {**lowest, **{name: int(axis[-1]) for name, axis in self.ranges.axes.items()}}
        return {"lowest": lowest, "highest": highest}

    def to_dict(self) -> dict[str, Any]:
        """The ranges, the borders, and the peak at the ends of the ranges, as plain data."""
        return {
            "function": self.label,
            "device": asdict(self.device),
            "ranges": {
                name: [int(axis[0]), int(axis[-1]), int(axis[1] - axis[0])] for name, axis in self.ranges.axes.items()
            },
            "choices": {name: [str(option) for option in options] for name, options in self.ranges.choices.items()},
            "num_traces": self.num_traces,
            "borders": list(self.borders),
            "peak_bytes": {name: self.peak_allocated_bytes(**point) for name, point in self.ends().items()},
            "assumptions": [asdict(assumption) for assumption in self.assumptions],
        }

    # -- inside ---------------------------------------------------------------

    def _ends(self) -> tuple[Point, Point]:
        axes = self.ranges.axes.values()
        return tuple(int(axis[0]) for axis in axes), tuple(int(axis[-1]) for axis in axes)

    def _grids(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Of arguments with a range those that are given a sequence."""
        return {
            name: value
            for name, value in values.items()
            if isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str) and name in self.ranges.axes
        }

    def _peaks(self, setting: tuple[int, ...], points: IntArray) -> IntArray:
        peaks = np.zeros(len(points), dtype=np.int64)
        for piece, among in pieces_at(self._family(setting), points):
            peaks[among] = piece.peaks.about(points[among])
        return peaks

    def _piece(self, setting: tuple[int, ...], point: Point) -> Piece:
        """The piece that contains the point, or a run at the point if that is not known."""
        piece = self._alone.get((setting, point)) or piece_at(self._family(setting), point)
        return piece if piece.is_followed else self._run_at(setting, point)

    def _exact_piece(self, setting: tuple[int, ...], point: Point) -> Piece:
        """The piece that contains the point if it is exact, else a run at the point."""
        piece = self._piece(setting, point)
        return piece if piece.is_exact else self._run_at(setting, point)

    def _run_at(self, setting: tuple[int, ...], point: Point) -> Piece:
        def run() -> Node:
            return self._explorer(setting, [np.array([value]) for value in point], {}).explore()

        self._alone[setting, point] = piece_at(self._stored((setting, point), run), point)
        if setting in self._families:
            self._traces.pop((setting, point), None)
        return self._alone[setting, point]

    def _replay(self, setting: tuple[int, ...], point: Point, device: Device) -> Replay:
        timeline = self._exact_piece(setting, point).timeline(point)
        return replay(timeline, capacity_bytes=device.usable_bytes, settings=self.settings)

    def _fits(self, setting: tuple[int, ...], point: Point, device: Device) -> bool:
        at_least = self._exact_piece(setting, point).peaks.at_least(_row(point))[0]
        return bool(at_least <= device.usable_bytes) and self._replay(setting, point, device).failure is None

    def _device(self, memory: str | int | None) -> Device:
        if memory is None:
            return self.device
        try:
            return Device(self.device.name, parse_bytes(memory), self.device.context_bytes)
        except ValueError as error:
            try:
                card = find_gpu(str(memory))
            except ValueError:
                raise error from None
            return Device(card.name, card.total_bytes, card.context_bytes)

    def _family(self, setting: tuple[int, ...]) -> Node:
        found = self._families.get(setting)
        if found is None:
            found = self._families[setting] = self._stored(setting, lambda: self._explore(setting))
        return found

    def _stored(self, what: Any, make: Callable[[], Node]) -> Node:
        """What ``make`` returns, or returned before for a function with the same identity."""

        def ready() -> Node:
            found = make()
            for piece in all_pieces(found):
                vars(piece)["peaks"] = piece.peaks  # learned now, to be kept with the rest
            return found

        return stored(partial(self._known_by, what), ready)

    def _known_by(self, what: Any) -> Any:
        """The key of ``what``, without the environment; None if the function has no identity."""
        identity = None if self.runs.reads_files else self._identity()
        if identity is None:
            return None
        axes = [(name, *axis[[0, -1]].tolist(), len(axis)) for name, axis in self.ranges.axes.items()]
        given = axes, self.ranges.choices, self.ranges.fixed, self._stop_after_steps
        return identity, given, self._hardware, self.device.total_bytes, self._number, what

    def _explore(self, setting: tuple[int, ...]) -> Node:
        lowest, highest = self._ends()
        with self.runs.in_parallel():
            first = self._trace(setting, lowest)
            if self._layers is None:  # a preset is known to be deterministic
                self.runs.expect_again((setting, lowest), (setting, highest))
                self._check_same((setting, lowest), first, self.runs.trace_again((setting, lowest)))
            known = {point: trace for (where, point), trace in self._traces.items() if where == setting}
            found = self._explorer(setting, list(self.ranges.axes.values()), known).explore()
        self._traces = {where: trace for where, trace in self._traces.items() if where[0] != setting}
        return found

    def _explorer(self, setting: tuple[int, ...], axes: list[IntArray], known: dict[Point, Trace]) -> Explorer:
        def trace(point: Point) -> Trace:
            return self._trace(setting, point)

        def expect(points: Iterable[Point]) -> None:
            self.runs.expect((setting, point) for point in points)

        return Explorer(trace, expect, self.runs.in_parallel, axes, self._hardware.gpu, self.settings, known)

    def _trace(self, setting: tuple[int, ...], point: Point) -> Trace:
        """The trace at a point; kept until all points of the setting are known, as the search may be stopped."""
        if (setting, point) not in self._traces:
            self._traces[setting, point] = self.runs.trace((setting, point))
        return self._traces[setting, point]

    def _check_same(self, place: Place, first: Trace, again: Trace) -> None:
        difference = first.difference(again)
        if difference is not None:
            values = {"call": self.runs.call(place), "difference": difference}
            raise ValueError(
                _(
                    "{call} does not do the same twice ({difference}); make it deterministic, for example with a seed.",
                    **values,
                )
            )


def _row(point: Point) -> IntArray:
    return np.array([point], dtype=np.int64)
