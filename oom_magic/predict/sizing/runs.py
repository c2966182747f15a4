"""Dry runs of a function at points of its ranges: in this process, and in copies of it on cores that would be idle.

The modules of dry runs are imported with the first run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from oom_magic.language import _
from oom_magic.predict.progress_bar import ProgressBar
from oom_magic.predict.sizing.layered import LayeredRuns, Layers
from oom_magic.predict.sizing.pieces import Trace
from oom_magic.predict.sizing.ranges import Ranges
from oom_magic.predict.sizing.regions import Point
from oom_magic.predict.sizing.structure import Structure, sizing_numbers

if TYPE_CHECKING:
    from oom_magic.predict.forks import Forks

most_copies = 3
Place = tuple[tuple[int, ...], Point]  # the choices, by position, and the point
_Job = tuple[Place, int | None]  # with so many layers, None: with those that there are
_Traced = tuple[Trace, bool]  # and whether files were read
_OTHER_RANDOM_NUMBERS = -1  # in place of a number of layers: all of them, from other random numbers
_EXPECTED = 10  # of a function with two arguments and one structure


@dataclass(eq=False)
class Runs:
    """Traces of a function at places of its ranges, on the card ``_number`` of a session with ``_options``.

    ``call_in_thread``: calls its argument in the thread that dry runs belong to (default: this one).
    ``on_trace``: called after each trace.
    """

    has_run: ClassVar[bool] = False  # in this process: its libraries are loaded, so copies need not load them again

    _fn: Callable[..., Any]
    _label: str
    _ranges: Ranges
    _options: dict[str, Any]
    _number: int
    _layers: Layers | None
    call_in_thread: Callable[[Callable[[], Any]], Any] | None = None
    on_trace: Callable[[], None] = lambda: None
    reads_files: bool = False  # so that sizes depend on their contents, too
    count: int = 0
    _copies: Forks[_Job, _Traced] | None = None
    _bar: Any = None

    def __post_init__(self) -> None:
        self._layered = LayeredRuns(self._trace, self._submit, self._layers)

    @contextmanager
    def in_parallel(self, has_bar: bool = True) -> Iterator[None]:
        """Dry runs in the block share copies of this process and, in the main thread, a progress bar."""
        if self._copies is not None:
            yield
            return
        from oom_magic.predict.forks import Forks

        with ExitStack() as stack:
            is_main = threading.current_thread() is threading.main_thread()
            self._copies = Forks(self._dry_run, self._call, most_copies, works=is_main)
            stack.callback(self._end)
            if is_main:
                stack.enter_context(self._bar_shown(has_bar))
            yield

    def expect(self, places: Iterable[Place]) -> None:
        """Begin to trace these places, as far as copies are idle."""
        self._layered.expect(places)

    def expect_again(self, place: Place, then: Place) -> None:
        """Begin to trace a place again, and then another for the first time."""
        self._submit([(place, _OTHER_RANDOM_NUMBERS), (then, None)])

    def trace(self, place: Place) -> Trace:
        """The trace at a place. Raises ValueError if the function fails there."""
        return self._layered.trace(place)

    def trace_again(self, place: Place) -> Trace:
        """The trace at a place with other random numbers, and with all layers."""
        return self._trace(place, _OTHER_RANDOM_NUMBERS)

    def call(self, place: Place) -> str:
        """The code of the call at a place, such as ``train(batch_size=8)``."""
        arguments = self._ranges.arguments(*place)
        return f"{self._label[:-1]}{', '.join(f'{name}={value!r}' for name, value in arguments.items())})"

    def _end(self) -> None:
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.close()

    @contextmanager
    def _bar_shown(self, has_bar: bool) -> Iterator[None]:
        from oom_magic.predict.isolation.live_objects import heap_set_aside

        options: dict[str, Any] = {"unit": "dry run", "delay": 2, "leave": False, "disable": not has_bar}
        options["desc"] = f"sizes of {self._label.removesuffix('()')}"
        try:
            with heap_set_aside(), ProgressBar(total=_EXPECTED, **options) as self._bar:
                yield
                self._bar.total = self._bar.n  # in a notebook a bar that ends short of its total stays, in red
        finally:
            self._bar = None

    def _submit(self, jobs: Iterable[_Job]) -> None:
        if self._copies is not None and Runs.has_run:
            self._copies.submit(jobs)

    def _trace(self, place: Place, num_layers: int | None) -> Trace:
        job = place, num_layers
        copies = self._copies if Runs.has_run else None
        trace, reads_files = self._run_here(job) if copies is None else copies.result(job, self._run_here)
        self.count += 1
        self.on_trace()
        self.reads_files |= reads_files and self._layers is None  # what a preset reads is in its identity
        if self._bar is not None:
            self._bar.total = max(self._bar.total, self._bar.n + 2)
            self._bar.update()
        return trace

    def _run_here(self, job: _Job) -> _Traced:
        traced: _Traced = self._call(partial(self._dry_run, job))
        Runs.has_run = True
        return traced

    def _call(self, function: Callable[[], Any]) -> Any:
        """What ``function`` returns, called in the thread that dry runs belong to, between two of them."""
        return function() if self.call_in_thread is None else self.call_in_thread(function)

    def _variation(self, num_layers: int | None) -> AbstractContextManager[None]:
        if num_layers == _OTHER_RANDOM_NUMBERS:
            from oom_magic.predict.isolation.process.process_state import other_random_numbers

            return other_random_numbers()
        return nullcontext() if num_layers is None or self._layers is None else self._layers.only(num_layers)

    def _dry_run(self, job: _Job) -> _Traced:
        """The trace of one run. Its objects are freed: the next run would take its model for one of the user's."""
        from oom_magic.interrupts import collect_garbage
        from oom_magic.predict.isolation.live_objects import are_set_aside, heap_set_aside

        with heap_set_aside(collects=False):
            try:
                return self._run_once(job)
            finally:
                if are_set_aside():
                    collect_garbage()

    def _run_once(self, job: _Job) -> _Traced:
        from oom_magic.predict.dry_run import call_followed
        from oom_magic.predict.isolation.files.boundary import reads_noted
        from oom_magic.predict.session import DrySession
        from oom_magic.predict.silence import silenced

        place, num_layers = job
        alone: dict[str, Any] = {"is_lasting": False, "is_limited": False, "keeps_empty": True, "has_bar": False}
        with self._variation(num_layers):
            session = DrySession(**self._options, **alone, follows_compile=False)
            arguments = self._ranges.arguments(*place)
            try:
                with reads_noted() as files, silenced():  # the code is run many times
                    report = session.run(*call_followed(self._fn, (), arguments))
            except Exception as error:
                values = {"call": self.call(place), "kind": type(error).__name__, "error": error}
                raise ValueError(_("{call} failed: {kind}: {error}", **values)) from error
        recorder, report = session.recorders[self._number], report.cards[self._number]
        expressions = recorder.expressions
        trace = Trace(
            Structure.of(report.timeline, expressions),
            sizing_numbers(report.timeline.requested_bytes, expressions),
            np.array(recorder.dims, dtype=np.int64),
            report.assumptions,
        )
        return trace, bool(files)
