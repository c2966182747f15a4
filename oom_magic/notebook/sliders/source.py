"""What the sliders price: a training function or a TrainingSetup, traced once for each choice and card."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from oom_magic.language import _
from oom_magic.memory.report import MemoryReport
from oom_magic.notebook.sliders.background import count_run, run_in_kernel_thread
from oom_magic.notebook.sliders.cards import SliderCard, SliderMachine
from oom_magic.notebook.sliders.fit_map import Cells, Grid
from oom_magic.notebook.sliders.ranges import (
    ACCUMULATION,
    BATCHES,
    as_choices,
    closest,
    first_of,
    inferred_ranges,
    setup_ranges,
    start_of,
    without_the_stiff,
)
from oom_magic.notebook.sliders.view import Estimate, Largest, WayOut, error_blocks
from oom_magic.predict.setups.hardware import Hardware
from oom_magic.predict.sizing.fingerprint import fingerprint
from oom_magic.predict.sizing.ranges import Ranges
from oom_magic.predict.sizing.sizes import Sizes
from oom_magic.predict.sizing.store import stored
from oom_magic.views.blocks import Block

if TYPE_CHECKING:
    from oom_magic.predict.setups.setup import TrainingSetup


class Estimator:
    """Asks the sizes, and keeps what does not change from move to move."""

    def __init__(self, sizer: Sizer, grid: Grid | None) -> None:
        self.sizer = sizer
        self.grid = grid
        self._largest: dict[tuple[Any, ...], Largest] = {}
        self._cells: dict[tuple[Any, ...], Cells] = {}
        self._reports: dict[tuple[Any, ...], MemoryReport] = {}  # of settings that were looked at

    def quick(self, sizes: Sizes, values: Values) -> Estimate:
        """Without the allocator, unless it was replayed for this setting before; a few milliseconds."""
        report = self.replayed(sizes, values)
        return Estimate(
            values=dict(values),
            device=sizes.device,
            breakdown=sizes.breakdown(**self.sizer.point(values)),
            arguments=self.sizer.arguments(values),
            notes=self.sizer.notes,
            largest=self._quick_largest(sizes, values),
            report=report,
            assumptions=sizes.assumptions if report is None else report.assumptions,
        )

    def exact(self, sizes: Sizes, values: Values, estimate: Estimate | None = None) -> Estimate:
        """With the report of a run: the allocator replayed where the function is known, else run at this very point."""
        report = self.replayed(sizes, values)
        if report is None:
            report = self._reports[self.key(sizes, values)] = self._report(sizes, values)
            _drop_oldest(self._reports, _MOST_REPORTS)
        return replace(estimate or self.quick(sizes, values), report=report, assumptions=report.assumptions)

    def replayed(self, sizes: Sizes, values: Values) -> MemoryReport | None:
        """The report of a setting that was looked at before."""
        return self._reports.get(self.key(sizes, values))

    def with_largest(self, sizes: Sizes, values: Values, estimate: Estimate) -> Estimate:
        """With the largest batch found by replaying the allocator; not where each point would have to be run."""
        name = self._searched(values)
        if name is None or not self.sizer.is_known(sizes, values) or not sizes.is_exact(**self.sizer.point(values)):
            return estimate
        key = self.key(sizes, values, name)
        if key not in self._largest:
            rest = {other: value for other, value in self.sizer.point(values).items() if other != name}
            value = sizes.largest(name, **rest)
            self._largest[key] = Largest(name, value, int(self.sizer.ranges.axes[name][-1]), True)
        return replace(estimate, largest=self._largest[key])

    def with_way_out(self, values: Values, card: SliderCard, estimate: Estimate) -> Estimate:
        """With other choices that fit, where these do not; each is run at this point only."""
        if estimate.fits:
            return estimate
        others: dict[str, Any] = {}
        for name, value in self.sizer.ways_out(values):
            others[name] = value
            changed = {**values, **others}
            try:
                report = self._report(self.sizer.sizes(changed, card), changed)
            except (TraceFailed, ValueError):
                del others[name]
                continue
            if report.out_of_memory is None:
                return replace(estimate, way_out=WayOut(others, report.peak_reserved_bytes))
        return estimate

    def _report(self, sizes: Sizes, values: Values) -> MemoryReport:
        point = self.sizer.point(values)
        return sizes.report(**point) if self.sizer.is_known(sizes, values) else sizes.report_of_run(**point)

    def cells(self, sizes: Sizes, values: Values) -> Cells | None:
        """The map, with the replayed numbers of this setting once they are there. None until the function is known."""
        if self.grid is None or not self.sizer.is_known(sizes, values):
            return None
        key = self.key(sizes, values, *self.grid.names)
        if key not in self._cells:
            self._cells[key] = self.grid.cells(sizes, self.sizer.point(values))
            _drop_oldest(self._cells, _MOST_MAPS)
        cell, report = self.grid.cell(values), self.replayed(sizes, values)
        if cell is not None and report is not None:
            self._cells[key].note(cell, report)
        return self._cells[key]

    def check_cell(self, sizes: Sizes, values: Values, cells: Cells, cell: int) -> None:
        """Replay the allocator for a cell of the map, unless that was done, or the cell would have to be run."""
        assert self.grid is not None
        point = {**self.sizer.point(values), **self.grid.values(cell)}
        if cells.needed.flat[cell] != cells.peaks.flat[cell] or not sizes.is_exact(**point):
            return
        cells.note(cell, sizes.report(**point))

    def key(self, sizes: Sizes, values: Values, *but: str) -> tuple[Any, ...]:
        """What decides the sizes, ``but`` for some arguments."""
        rest = [(name, repr(value)) for name, value in self.sizer.point(values).items() if name not in but]
        return (*rest, sizes.device)

    def _quick_largest(self, sizes: Sizes, values: Values) -> Largest | None:
        """What was searched for before, else the last value whose sum of sizes is within the card."""
        name = self._searched(values)
        if name is None or not self.sizer.is_known(sizes, values):
            return None
        known = self._largest.get(self.key(sizes, values, name))
        if known is not None:
            return known
        axis = self.sizer.ranges.axes[name]
        peaks = sizes.map(**{**self.sizer.point(values), name: axis})
        fitting = axis[peaks <= sizes.device.usable_bytes]
        return Largest(name, int(fitting.max(initial=0)), int(axis[-1]), False)

    def _searched(self, values: Values) -> str | None:
        """The argument whose largest value is looked for: the batch, else the first number."""
        axes = self.sizer.axes(values)
        return first_of(axes, BATCHES) or next(iter(axes), None)


Values = Mapping[str, Any]
_MOST_REPORTS, _MOST_MAPS = 16, 64
_CHANGES = (("activation_checkpointing", True), ("loss", "chunked"), ("method", "qlora"))


class TraceFailed(Exception):  # noqa: N818 - what happened, to be shown and not to be caught by the user
    """The function could not be followed; ``blocks`` say why, and where."""

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        super().__init__()
        self.blocks = blocks


class Sizer(ABC):
    """What is sized, at many points. ``ranges`` has what varies, ``starts`` where each begins."""

    notes: tuple[str, ...] = ()  # what to say of what does not vary

    def __init__(self, label: str, ranges: Ranges, defaults: Values, machine: SliderMachine) -> None:
        self.label = label
        self.machine = machine
        self.ranges = ranges
        self.starts: dict[str, Any] = {name: start_of(axis, defaults.get(name)) for name, axis in ranges.axes.items()}
        for name, options in ranges.choices.items():
            default = defaults.get(name)
            self.starts[name] = default if default in options else options[0]
        self._sizes: dict[tuple[Any, ...], Sizes] = {}
        self._failed: dict[tuple[Any, ...], tuple[Block, ...]] = {}

    def sizes(self, values: Values, card: SliderCard) -> Sizes:
        """The sizes for the choices among ``values``, as far as they were traced. TraceFailed where that failed."""
        key = self._key(values, card)
        if key not in self._sizes and key not in self._failed:
            try:
                self._check(values, card)
                self._sizes[key] = self._untraced(values, card)
                self._sizes[key].runs.call_in_thread = run_in_kernel_thread
                self._sizes[key].runs.on_trace = count_run
            except Exception as error:
                self._failed[key] = error_blocks(error)
        if key in self._failed:
            raise TraceFailed(self._failed[key])
        return self._sizes[key].with_device(card.device)

    def trace(self, sizes: Sizes, values: Values, card: SliderCard) -> None:
        """Trace the choices among ``values``, for all numbers. A failure is remembered."""
        if self.is_known(sizes, values):
            return
        try:
            close = self.sizes_elsewhere(values, card)
            if close is not None:
                sizes.take_over(close)
            sizes.trace(**self._choices(values))
        except Exception as error:
            self._failed[self._key(values, card)] = error_blocks(error)
            raise TraceFailed(error_blocks(error)) from None

    def is_known(self, sizes: Sizes, values: Values) -> bool:
        """Whether ``sizes`` answers for all numbers at once."""
        return sizes.is_known(**self._choices(values))

    def sizes_elsewhere(self, values: Values, card: SliderCard) -> Sizes | None:
        """Sizes for these choices that are known for another kind of card, with the memory of this one."""
        *choices, kind = self._key(values, card)
        alike = (sizes for (*others, other), sizes in self._sizes.items() if others == choices and other != kind)
        known = (sizes for sizes in alike if sizes.is_known(**self._choices(values)))
        sizes = next(known, None)
        return None if sizes is None else sizes.with_device(card.device)

    @property
    def title(self) -> str:
        """What is sized, and on which of several cards."""
        return self.machine.named(self.label)

    def axes(self, values: Values) -> list[str]:  # noqa: ARG002 - for a setup they matter
        """The numbers that matter with these choices."""
        return list(self.ranges.axes)

    def point(self, values: Values) -> dict[str, Any]:
        """What ``sizes`` takes of ``values``."""
        return {name: values[name] for name in (*self.axes(values), *self.ranges.choices)}

    def ways_out(self, values: Values) -> list[tuple[str, Any]]:  # noqa: ARG002 - of a function nobody knows any
        """Choices that take less memory than these, the one that costs least first."""
        return []

    @abstractmethod
    def arguments(self, values: Values) -> dict[str, Any]:
        """All that is known by name: these values, and what does not vary."""

    @abstractmethod
    def code(self, values: Values) -> str:
        """What to paste for these values."""

    @abstractmethod
    def _size(self, card: SliderCard, ranges: dict[str, Any]) -> Sizes:
        """It on a card, not traced yet."""

    @abstractmethod
    def _check(self, values: Values, card: SliderCard) -> None:
        """Raise ValueError if these choices do not go with the card."""

    def _key(self, values: Values, card: SliderCard) -> tuple[Any, ...]:
        return (*map(repr, self._choices(values).values()), card.kind)

    def _choices(self, values: Values) -> dict[str, Any]:
        point = self.point(values)
        return {name: point[name] for name in self.ranges.choices}

    def _untraced(self, values: Values, card: SliderCard) -> Sizes:
        ranges: dict[str, Any] = dict(self.ranges.fixed)
        for name in self.axes(values):
            axis = self.ranges.axes[name]
            ranges[name] = (int(axis[0]), int(axis[-1]), int(axis[1] - axis[0]))
        return self._size(card, {**ranges, **{name: [value] for name, value in self._choices(values).items()}})


class FunctionSizer(Sizer):
    """A function of the user's."""

    def __init__(self, fn: Callable[..., Any], given: Values, card: SliderCard, machine: SliderMachine) -> None:
        if not callable(fn):
            raise TypeError(
                _(
                    "sliders needs a function or a TrainingSetup, not {kind} {fn!r}; wrap the code in a function.",
                    kind=type(fn).__name__,
                    fn=fn,
                )
            )
        notes: tuple[str, ...] = ()
        if not given:
            given, notes = _varying(fn, card, machine)
        ranges = Ranges.parse(fn, as_choices(given))
        parameters = inspect.signature(fn).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items() if name not in given}
        starts = {name: parameters[name].default for name in ranges.axes if name in parameters}
        label = f"{getattr(fn, '__name__', type(fn).__name__)}()"
        super().__init__(label, ranges, {**defaults, **starts}, machine)
        self.fn = fn
        self.notes = notes
        self.defaults = {name: parameter.default for name, parameter in parameters.items()}

    def arguments(self, values: Values) -> dict[str, Any]:
        """The function's."""
        return {**self.defaults, **self.ranges.fixed, **values}

    def code(self, values: Values) -> str:
        """The call."""
        arguments = {**self.ranges.fixed, **values}
        return f"{self.label[:-1]}{', '.join(f'{name}={value!r}' for name, value in arguments.items())})"

    def _check(self, values: Values, card: SliderCard) -> None:
        """A run says for itself."""

    def _size(self, card: SliderCard, ranges: dict[str, Any]) -> Sizes:
        parsed = Ranges.parse(self.fn, ranges)
        hardware = Hardware.of(card.gpu, card.memory_bytes, self.machine.num_gpus, self.machine.num_processes)
        return Sizes(self.fn, parsed, hardware, card=self.machine.card)


class SetupSizer(Sizer):
    """A TrainingSetup; its fields are the arguments."""

    def __init__(self, setup: TrainingSetup, given: Values) -> None:
        given = as_choices(given) if given else setup_ranges(setup)
        _check_names(setup, given)
        ranges = Ranges.parse(_any_arguments, given)
        for name, axis in ranges.axes.items():
            for end in (int(axis[0]), int(axis[-1])):
                _check_end(setup, name, end)
        starts = {name: getattr(setup, name) for name in ranges.names}
        super().__init__(setup.source.label, ranges, starts, SliderMachine(**setup.machine))
        self.base = setup

    def axes(self, values: Values) -> list[str]:
        """The numbers that matter: the rank only where there are adapters."""
        is_full = values.get("method", self.base.method) == "full"
        return [name for name in self.ranges.axes if not (is_full and name == "rank")]

    def ways_out(self, values: Values) -> list[tuple[str, Any]]:
        """Of those that are offered and not chosen."""
        choices = self.ranges.choices
        return [one for one in _CHANGES if one[1] in choices.get(one[0], ()) and values[one[0]] != one[1]]

    def arguments(self, values: Values) -> dict[str, Any]:
        """The setup's fields."""
        setup = self.setup(values)
        known = {field.name: getattr(setup, field.name) for field in fields(setup)}
        if setup.source.task == "image-classification":
            del known["seq_len"]
        return known

    def code(self, values: Values) -> str:
        """The training code that is sized."""
        return self.setup(values).code()

    def point(self, values: Values) -> dict[str, Any]:
        """With all accumulation followed as two times: the third microbatch finds what the second found."""
        point = super().point(values)
        return {**point, ACCUMULATION: min(point[ACCUMULATION], 2)} if ACCUMULATION in point else point

    def setup(self, values: Values) -> TrainingSetup:
        """The setup with these values."""
        return self.base.replace(**{**self.ranges.fixed, **super().point(values)})

    def _check(self, values: Values, card: SliderCard) -> None:
        self.setup(values).replace(gpu=card.gpu, memory=card.memory_bytes)

    def _size(self, card: SliderCard, ranges: dict[str, Any]) -> Sizes:
        return self.base.replace(gpu=card.gpu, memory=card.memory_bytes).untraced_sizes(**ranges)


def _varying(
    fn: Callable[..., Any], card: SliderCard, machine: SliderMachine
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The inferred ranges of what can vary, and what to say of the rest; kept on disk, as it takes some runs."""
    read: set[str] = set()

    def known_by() -> Any:
        identity = None if read else fingerprint(fn)
        return None if identity is None else ("varying", identity, card.gpu, card.memory_bytes, machine)

    def found() -> tuple[dict[str, Any], tuple[str, ...]]:
        from oom_magic.predict.isolation.files.boundary import reads_noted  # loads PyTorch

        with reads_noted() as files:
            varying = without_the_stiff(fn, inferred_ranges(fn), partial(_run_once, fn, card, machine))
        read.update(files)
        return varying

    return stored(known_by, found)


def _run_once(fn: Callable[..., Any], card: SliderCard, machine: SliderMachine, arguments: dict[str, Any]) -> None:
    from oom_magic.predict.dry_run import dry_run
    from oom_magic.predict.silence import silenced

    number: dict[str, Any] = {"num_gpus": machine.num_gpus, "num_processes": machine.num_processes}
    with silenced():
        dry_run(fn, gpu=card.gpu, stop_after_steps=1, **number, **arguments)


def _drop_oldest(known: dict[Any, Any], most: int) -> None:
    while len(known) > most:
        del known[next(iter(known))]


def _any_arguments(**_arguments: Any) -> None:
    """Stands for a setup's training code where only the names of arguments count."""


def _check_names(setup: TrainingSetup, given: Values) -> None:
    known = [field.name for field in fields(setup)]
    for name in given:
        if name not in known:
            raise TypeError(_("TrainingSetup has no field {name!r}.{offer}", name=name, offer=closest(name, known)))


def _check_end(setup: TrainingSetup, name: str, end: int) -> None:
    """Raise ValueError for an end of a range that the setup does not allow."""
    try:
        setup.replace(**{name: end})
    except ValueError as error:
        raise ValueError(_("The range of {name} reaches {end}: {error}", name=name, end=end, error=error)) from None
