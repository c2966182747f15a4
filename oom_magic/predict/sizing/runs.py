"""Dry runs of a function at points of its ranges: in this process, and in copies of it on cores that would be idle.

What makes dry runs is loaded when there is something to run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

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
_Made = tuple[Trace, bool]  # and whether files were read
_OTHER_RANDOM_NUMBERS = -1  # in place of a number of layers: all of them, from other random numbers
_begun: set[bool] = set()  # once a dry run was made here: its libraries are loaded, which copies need not do again
_EXPECTED = 10  # of a function with two arguments and one structure


@dataclass(eq=False)
class Runs:
    """Traces of a function at places of its ranges; the options are the session's, the number is that of the card.

    With ``elsewhere`` dry runs are made by it: it calls what it is given in the thread that dry runs belong to.
    ``tell`` is called when one more trace is there.
    """

    _fn: Callable[..., Any]
    _label: str
    _ranges: Ranges
    _options: dict[str, Any]
    _number: int
    _layers: Layers | None
    elsewhere: Callable[[Callable[[], Any]], Any] | None = None
    tell: Callable[[], None] = lambda: None
    has_read: bool = False  # files, whose contents decide, too
    count: int = 0
    _copies: Forks[_Job, _Made] | None = None
    _bar: Any = None

    def __post_init__(self) -> None:
        self._layered = LayeredRuns(self._trace, self._ahead, self._layers)

    @contextmanager
    def under_way(self, has_bar: bool = True) -> Iterator[None]:
        """Dry runs inside share copies of this process; made in the main thread, they advance a bar."""
        if self._copies is not None:
            yield
            return
        from oom_magic.predict.forks import Forks

        with ExitStack() as stack:
            is_main = threading.current_thread() is threading.main_thread()
            self._copies = Forks(self._dry_run, self._at_rest, most_copies, works=is_main)
            stack.callback(self._end)
            if is_main:
                stack.enter_context(self._bar_shown(has_bar))
            yield

    def expect(self, places: Iterable[Place]) -> None:
        """These will be traced."""
        self._layered.expect(places)

    def expect_again(self, place: Place, then: Place) -> None:
        """A place will be traced again, and then another for the first time."""
        self._ahead([(place, _OTHER_RANDOM_NUMBERS), (then, None)])

    def trace(self, place: Place) -> Trace:
        """The trace at a place. Raises ValueError if the function fails there."""
        return self._layered.trace(place)

    def trace_again(self, place: Place) -> Trace:
        """The same from other random numbers, with the layers that the function has."""
        return self._trace(place, _OTHER_RANDOM_NUMBERS)

    def call(self, place: Place) -> str:
        """The call that is made at a place."""
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

    def _ahead(self, jobs: Iterable[_Job]) -> None:
        if self._copies is not None and _begun:
            self._copies.ahead(jobs)

    def _trace(self, place: Place, num_layers: int | None) -> Trace:
        job = place, num_layers
        copies = self._copies if _begun else None
        trace, has_read = self._made(job) if copies is None else copies.made(job, self._made)
        self.count += 1
        self.tell()
        self.has_read |= has_read and self._layers is None  # what a preset reads is in its identity
        if self._bar is not None:
            self._bar.total = max(self._bar.total, self._bar.n + 2)
            self._bar.update()
        return trace

    def _made(self, job: _Job) -> _Made:
        made: _Made = self._at_rest(partial(self._dry_run, job))
        _begun.add(True)
        return made

    def _at_rest(self, call: Callable[[], Any]) -> Any:
        """What a call returns, made in the thread that dry runs belong to when none is under way."""
        return call() if self.elsewhere is None else self.elsewhere(call)

    def _varied(self, num_layers: int | None) -> AbstractContextManager[None]:
        if num_layers == _OTHER_RANDOM_NUMBERS:
            from oom_magic.predict.isolation.process.process_state import other_random_numbers

            return other_random_numbers()
        return nullcontext() if num_layers is None or self._layers is None else self._layers.only(num_layers)

    def _dry_run(self, job: _Job) -> _Made:
        """The trace of one run, of which nothing is left: the next would take its model for one of the user's."""
        from oom_magic.predict.isolation.interrupts import collect_garbage
        from oom_magic.predict.isolation.live_objects import are_set_aside, heap_set_aside

        with heap_set_aside(collects=False):
            try:
                return self._run_once(job)
            finally:
                if are_set_aside():
                    collect_garbage()

    def _run_once(self, job: _Job) -> _Made:
        from oom_magic.predict.isolation.files.boundary import reads_noted
        from oom_magic.predict.session import DrySession, namespaces_of
        from oom_magic.predict.silence import in_silence

        place, num_layers = job
        alone: dict[str, Any] = {"is_lasting": False, "is_limited": False, "keeps_empty": True, "has_bar": False}
        with self._varied(num_layers):
            session = DrySession(**self._options, **alone, follows_compile=False)
            arguments = self._ranges.arguments(*place)
            try:
                with reads_noted() as files, in_silence():  # the code is run many times, and is not asked for its words
                    report = session.run(lambda: self._fn(**arguments), namespaces_of(self._fn))
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
