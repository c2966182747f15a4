"""The user's own cell executed on a pretend card, as often as is asked for, with what a remedy changes."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from oom_magic.explain.live.growth import Growth
from oom_magic.explain.remedies.own_code.other_cells import handler_of_out_of_memory
from oom_magic.explain.remedies.own_code.placement import own_placement
from oom_magic.explain.remedies.own_code.precision import in_single_precision
from oom_magic.explain.remedies.own_code.waiting.data_on_host import BATCHES_MOVED, DataKept, data_kept_on_host
from oom_magic.explain.remedies.own_code.writing import chains_in, rewritten_cell
from oom_magic.explain.remedies.rehearsal import (
    STEPS,
    UNLIMITED,
    MissingNameError,
    NotEvaluatedError,
    marked,
    rehearse,
)
from oom_magic.explain.remedies.sizes.parameters import SizeParameter

if TYPE_CHECKING:
    from oom_magic.explain.remedies.room import InTheWay
    from oom_magic.memory.report import MemoryReport
    from oom_magic.predict.instrumentation.decided.decided_names import DecidedNames
    from oom_magic.predict.instrumentation.rebound_names import Leaves
    from oom_magic.predict.instrumentation.starting_point import StartingPoint
    from oom_magic.predict.instrumentation.stop_rule import StopAfter, StopRule
    from oom_magic.predict.instrumentation.training import Training
    from oom_magic.predict.session import DrySession
    from oom_magic.predict.setups.gpus import GPU
    from oom_magic.predict.what_if.change import Change
    from oom_magic.predict.what_if.largest_samples import LargestSamples
    from oom_magic.predict.what_if.survey import Survey

_BY_HAND = "balanced_layers"


class ExecutedCell:
    """A cell of the notebook with the names it sees, or any function.

    ``origin`` is the dry session the cell failed in, ``start`` what it found on a real device: it starts from there.
    ``decided`` are names that each dry run decides again. ``call(tree, names)`` executes the cell; what it does to
    ``names`` is undone each time. ``machine`` are the settings ``num_gpus``, ``num_processes`` and ``rank`` of a dry
    session. ``arguments`` is the command line of the script that the cell runs, as it reads it. Tensors with the
    identities ``absent`` take nothing: only earlier failures hold them. ``never_fails``: memory does not run out where
    the code would go on after it either, as it is asked what the part that failed needs.
    """

    def __init__(
        self,
        call: Callable[[ast.Module, dict[str, Any]], Any],
        tree: ast.Module,
        names: dict[str, Any],
        *,
        gpu: str | GPU | None = None,
        memory: int | None = None,
        origin: DrySession | None = None,
        start: StartingPoint | None = None,
        decided: DecidedNames | None = None,
        machine: Mapping[str, Any] | None = None,
        arguments: list[str] | None = None,
        absent: frozenset[int] = frozenset(),
        never_fails: bool = False,
    ) -> None:
        self._absent, self._arguments, self._never_fails = absent, arguments or [], never_fails
        self._decided = None if decided is None else [decided]
        self._call, self._tree, self._names = call, tree, names
        self._card: dict[str, Any] = {"gpu": gpu, "memory": memory, **(machine or {})}
        self._origin, self._start = origin, start
        self._num_steps: StopAfter = STEPS
        self._usable_bytes = 0  # where the code goes on where memory runs out, it runs out at so much; 0: never
        self._survey: Survey | None = None
        self._training: Training | None = None  # of the last run
        self._leaves_evaluations, self.calls_followed = True, 0
        self._most_seconds = math.inf
        self._most_failures: int | None = None  # of tries before the last, where none of the run as it is fits

    def _execute(
        self,
        changes: Sequence[Change],
        overridden: Mapping[SizeParameter, int],
        growth: Growth | None = None,
        dropped: InTheWay | None = None,
        **limits: Any,
    ) -> tuple[MemoryReport, Training]:
        from oom_magic.predict.instrumentation.rebound_names import ReboundNames
        from oom_magic.predict.session import DrySession

        def call() -> None:
            """The cell, changed; what it does to the names is undone by the session."""
            if dropped is not None:
                dropped.leave(self._names)
            with rewritten_cell(self._tree, self._names, overridden, growth, written, kept):
                tree = ReboundNames(self._names, session.fake_gpu, leaves).watched(self._tree)
                if self._usable_bytes and self._goes_on and not self._never_fails:
                    session.limit_where_caught(self._usable_bytes, tree, most_failures)
                self._call(tree, self._names)

        written = self._written(changes)
        made = [change for change in changes if change not in written]
        leaves, most_failures = self._leaves, None if overridden else self._most_failures
        kept, absent = self._data_kept if written else None, self._absent_with(dropped, written)
        namespaces = [self._names, *(names.namespace for names in self._decided or ())]
        while True:
            session = DrySession(**self._alike, changes=(*made, self._largest), absent=absent)
            session.training.stop_rule = self._stop_rule(**limits)
            try:
                report = rehearse(partial(session.run, call, namespaces, self._decided))
            except MissingNameError as error:
                if self._found is None or not self._found.keep(error.name):
                    raise
            except NotEvaluatedError:
                if session.caught is None or not session.caught.num:
                    raise
                most_failures = session.caught.num - 1  # nothing that it tries fits: the last try is followed
                self._most_failures = self._most_failures if overridden else most_failures
            else:
                self._training = session.training
                return marked(report, session.training, self._largest), session.training

    def _written(self, changes: Sequence[Change]) -> list[Change]:
        """Those that are not made while the cell runs, but written into it: a split by hand in a known form, types."""
        from oom_magic.predict.what_if.change import ByHandError

        assert self._survey is not None, "begin comes first"
        found = [change for change in changes if isinstance(self._survey.error(change), ByHandError)]
        own = [one for one in changes if one.written_as and self._is_written(one.written_as)]
        chains = chains_in(self._names)
        return [*own, *(one for one in found if own_placement(self._tree, _BY_HAND, one.values, chains))]

    def _is_written(self, key: str) -> bool:
        if key == BATCHES_MOVED:
            return self._data_kept is not None
        return bool(in_single_precision(self._tree, self._names))

    @cached_property
    def _data_kept(self) -> DataKept | None:
        """Asked for before a run: in it, names have stand-ins, of which it is not known what is on the device."""
        return data_kept_on_host(self._tree, self._names, self._is_on_device)

    def _is_on_device(self, tensor: Any) -> bool:
        if self._origin is None:
            return bool(tensor.is_cuda)
        from oom_magic.predict.fake_cuda.places import Place

        return self._origin.fake_gpu.place(tensor) is Place.GPU

    def _absent_with(self, dropped: InTheWay | None, written: Sequence[Change]) -> frozenset[int]:
        """What takes nothing, by identity: also what is dropped, or taken back by what is written into the cell."""
        absent = self._absent if dropped is None else self._absent | dropped.objects
        is_moved = any(one.written_as == BATCHES_MOVED for one in written)
        return absent | self._data_kept.gone if is_moved and self._data_kept is not None else absent

    @cached_property
    def _leaves(self) -> Leaves:
        """Of graphs that there were before the first run."""
        from oom_magic.predict.instrumentation.rebound_names import Leaves

        return Leaves()

    @property
    def _found(self) -> StartingPoint | None:
        """What the failed run found of the user's objects."""
        return self._start if self._origin is None else self._origin.start_of_run

    @cached_property
    def _alike(self) -> dict[str, Any]:
        """The settings of all sessions; results of operators in one are reused by the next."""
        from oom_magic.predict.operators.known_outputs import KnownOutputs

        known = KnownOutputs() if self._origin is None else self._origin.known_outputs
        shared = {"origin": self._origin, "start": self._start, "known_outputs": known}
        return {**self._card, **UNLIMITED, **shared}

    @cached_property
    def _goes_on(self) -> bool:
        return bool(handler_of_out_of_memory(self._tree, self._names))

    @cached_property
    def _largest(self) -> LargestSamples:
        from oom_magic.predict.what_if.largest_samples import LargestSamples

        return LargestSamples()

    def _stop_rule(self, **limits: Any) -> StopRule:
        from oom_magic.predict.instrumentation.stop_rule import StopRule

        return StopRule(
            after_steps=self._num_steps,
            after_calls=self.calls_followed or None,
            most_seconds=self._most_seconds,
            leaves_evaluations=self._leaves_evaluations,
            **limits,
        )
