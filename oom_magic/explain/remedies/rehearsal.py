"""Rehearsing the user's own run with a change: the memory that a remedy saves."""

from __future__ import annotations

import ast
import contextlib
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

from oom_magic.errors import InvalidSettingError
from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.live.growth import Growth, is_in, mended
from oom_magic.explain.remedies.code import IN_A_LOOP, names_model
from oom_magic.explain.remedies.own_code import own_arguments, own_code, own_names
from oom_magic.explain.remedies.size_parameters import SizeParameter, find_accumulation, find_size_parameters
from oom_magic.predict.compiled import CudaGraphsError
from oom_magic.predict.silence import in_silence

if TYPE_CHECKING:
    from oom_magic.explain.remedies.room import InTheWay
    from oom_magic.memory.report import MemoryReport
    from oom_magic.predict.instrumentation.decided_names import DecidedNames
    from oom_magic.predict.instrumentation.rebound_names import Leaves
    from oom_magic.predict.instrumentation.starting_point import StartingPoint
    from oom_magic.predict.instrumentation.training import ModelCall, Training
    from oom_magic.predict.session import DrySession
    from oom_magic.predict.setups.gpus import GPU
    from oom_magic.predict.setups.setup import TrainingSetup
    from oom_magic.predict.what_if.change import Change, Inputs
    from oom_magic.predict.what_if.survey import Survey

_STEPS = 2  # the first makes the optimizer's state, the second is like all others
_MOST_PARAMETERS = 4
_SIZES = ("batch", "seq")
_SIZE_OF = {"smaller_batch": "batch", "smaller_evaluation": "batch", "shorter_sequences": "seq"}


@dataclass(frozen=True)
class Variation:
    """A variation of the run: changes, each with the equivalent fields of a setup; other sizes; a line of the user's
    rewritten to keep less (``mended``); memory of earlier cells that is ``dropped`` first."""

    parts: tuple[tuple[Change, Mapping[str, Any]], ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    mended: Growth | None = None
    dropped: InTheWay | None = None

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes to model, optimizer and loop."""
        return tuple(change for change, _ in self.parts)

    def with_(self, other: Variation) -> Variation:
        """Both together."""
        mended, dropped = self.mended or other.mended, self.dropped or other.dropped
        return Variation((*self.parts, *other.parts), {**self.sizes, **other.sizes}, mended, dropped)


class NotEvaluatedError(Exception):
    """The reason why a variation cannot be rehearsed; ``applies`` is False where it would change nothing."""

    def __init__(self, reason: Evidence, applies: bool = True) -> None:
        super().__init__(reason.key)
        self.reason = reason
        self.applies = applies


class MissingNameError(NotEvaluatedError):
    """The code read an undefined name."""

    def __init__(self, reason: Evidence, name: str) -> None:
        super().__init__(reason)
        self.name = name


class Rehearsal(Protocol):
    """A training run that can be repeated with variations, on a card that never runs out."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """``"batch"`` and ``"seq"``, where they are known."""

    @property
    def accumulation(self) -> int:
        """Batches per optimizer step."""

    @property
    def is_of_job(self) -> bool:
        """Whether the run is one of several processes with a GPU each."""

    def begin(self, changes: Sequence[Change], enough_bytes: int, /) -> MemoryReport:
        """The report of the run as it is, followed at least until it takes ``enough_bytes``, as far as it can be.

        Finds which of ``changes`` it would allow. Raises NotEvaluatedError.
        """

    @property
    def steps_differ(self) -> bool:
        """Whether the run was ended while its steps still had new sizes; known from ``begin`` on."""

    @property
    def is_evaluation(self) -> bool:
        """Whether a model in evaluation mode ran at the peak; known from ``begin`` on."""

    @property
    def keeps_no_graph(self) -> bool:
        """Whether gradients were off then."""

    def check(self, variation: Variation) -> None:
        """Raise NotEvaluatedError where the survey showed that it does not apply to the run."""

    def run(self, variation: Variation) -> MemoryReport:
        """The report of the run so changed. Raises NotEvaluatedError."""

    def without_unneeded(self) -> tuple[InTheWay, MemoryReport] | None:
        """Memory of earlier cells that the run does not use, and the report of the run without it; or None."""

    def label(self, what: str) -> str:
        """The name of a size in the user's code."""

    @property
    def names(self) -> Mapping[str, str]:
        """Other names in the user's code, for code to paste; see ``own_names``."""

    def own_code(self, key: str, values: Mapping[str, Any], /) -> str | None:
        """The user's own statements with a remedy written into them; None where a template applies, "" where the remedy
        cannot be written."""

    def own_arguments(self, code: str, /) -> str:
        """The user's own TrainingArguments with what ``code`` sets in them; "" where there are none."""


class SetupRehearsal:
    """The training code that a TrainingSetup writes."""

    is_evaluation = keeps_no_graph = is_of_job = steps_differ = False

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup
        self._survey: Survey | None = None

    @property
    def sizes(self) -> Mapping[str, int]:
        """The microbatch and the length of its sequences."""
        return {"batch": self.setup.microbatch_size, "seq": self.setup.seq_len}

    @property
    def accumulation(self) -> int:
        """As the setup has it."""
        return self.setup.gradient_accumulation_steps

    def without_unneeded(self) -> None:
        """There were no earlier cells."""

    def label(self, what: str) -> str:
        """The setup's name for a size."""
        return {"batch": "microbatch_size", "seq": "seq_len"}[what]

    @property
    def names(self) -> Mapping[str, str]:
        """There is no code of the user's."""
        return {}

    def own_code(self, _key: str, _values: Mapping[str, Any], /) -> None:
        """There is no code of the user's."""

    def own_arguments(self, _code: str, /) -> str:
        """There is no code of the user's."""
        return ""

    def begin(self, changes: Sequence[Change], _enough_bytes: int, /) -> MemoryReport:
        """Dry-run the unchanged setup: its steps are alike."""
        from oom_magic.predict.what_if.survey import Survey

        self._survey = Survey(changes)
        return self._dry_run(self.setup, (self._survey,))

    def check(self, variation: Variation) -> None:
        """Whether the setup has other values for it, or its run allows the change."""
        setup, changes = self._changed(variation)
        _check_surveyed(self._survey, variation.changes)
        if setup == self.setup and not changes and not variation.sizes:
            raise NotEvaluatedError(Evidence("reason_so_already"), applies=False)

    def run(self, variation: Variation) -> MemoryReport:
        """Dry-run the setup with fields replaced; changes without a field are made in its run."""
        return self._dry_run(*self._changed(variation))

    def _changed(self, variation: Variation) -> tuple[TrainingSetup, tuple[Change, ...]]:
        setup, changes = self.setup, []
        for change, fields in variation.parts:
            if fields:
                setup = _replaced(setup, fields)
            else:
                changes.append(change)
        sizes = {self.label(what): value for what, value in variation.sizes.items() if value}
        return _replaced(setup, sizes), tuple(changes)

    def _dry_run(self, setup: TrainingSetup, changes: tuple[Change, ...]) -> MemoryReport:
        from oom_magic.predict.session import DrySession

        session = DrySession(setup.gpu, setup.memory, stop_after_steps=_STEPS, changes=changes, **_UNLIMITED)
        return _run(lambda: session.run(setup.train))


def _replaced(setup: TrainingSetup, fields: Mapping[str, Any]) -> TrainingSetup:
    try:
        return setup.replace(**fields)
    except InvalidSettingError as error:
        values = {"error_key": f"refusal_{error.key}", **error.values}
        raise NotEvaluatedError(Evidence("reason_setup_refused", values)) from None


def _check_surveyed(survey: Survey | None, changes: Sequence[Change]) -> None:
    """Raise NotEvaluatedError for the first change that does not apply to the run."""
    from oom_magic.predict.what_if.change import ByHandError

    assert survey is not None, "begin comes first"
    for change in changes:
        refusal = survey.refusal(change)
        if refusal is not None:
            is_by_hand = isinstance(refusal, ByHandError)
            raise NotEvaluatedError(Evidence(f"reason_{refusal.key}", refusal.values), applies=is_by_hand)


class CellRehearsal:
    """A cell of the notebook with the names it sees, or any function.

    ``origin`` is the dry session the cell failed in, ``start`` what it found on a real device: it starts from there.
    ``decided`` are names that each dry run decides again. ``call(tree, names)`` executes the cell; what
    it does to ``names`` is undone each time. ``find_in_the_way`` tells what earlier cells hold, but for names that are
    needed. ``machine`` are the settings ``num_gpus``, ``num_processes`` and ``rank`` of a dry session; of several cards
    prices are those of the fullest. ``arguments`` is the command line of the script that the cell runs, as it reads it.
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
        find_in_the_way: Callable[[Collection[str]], InTheWay | None] = lambda _: None,
        decided: DecidedNames | None = None,
        machine: Mapping[str, Any] | None = None,
        arguments: list[str] | None = None,
    ) -> None:
        self._arguments = arguments or []
        self._decided = None if decided is None else [decided]
        self._call = call
        self._tree = tree
        self._names = names
        self._card: dict[str, Any] = {"gpu": gpu, "memory": memory, **(machine or {})}
        self.is_of_job = self._card.get("num_processes") is not None
        self._origin = origin
        self._start = start
        self._find_in_the_way = find_in_the_way
        self._num_steps: int | None = _STEPS
        self.parameters: dict[str, SizeParameter | None] = {}
        self._survey: Survey | None = None
        self._fullest: ModelCall | None = None
        self.sizes: Mapping[str, int] = {}
        self.accumulation = 1
        self.steps_differ = False

    def begin(self, changes: Sequence[Change], enough_bytes: int) -> MemoryReport:
        """Execute the unchanged cell on a pretend card; all variations are followed equally far."""
        from oom_magic.predict.what_if.survey import Survey

        self._survey = Survey(changes)
        report, training = self._execute((self._survey,), {}, enough_bytes=enough_bytes)
        self._num_steps = report.timeline.num_steps() if report.timeline.was_left else None
        self.steps_differ = report.timeline.was_left and training.of_a_new_size
        self._fullest = training.call_at(report.peak_position)
        self.sizes = {} if self._fullest is None else _sizes(self._fullest.inputs)
        self.accumulation = self._survey.batches_per_step
        return report

    @property
    def is_evaluation(self) -> bool:
        """Whether a model that evaluates ran when most was taken."""
        return self._fullest is not None and not self._fullest.is_training

    @property
    def keeps_no_graph(self) -> bool:
        """Whether gradients were off then."""
        return self._fullest is not None and not self._fullest.has_gradients

    def check(self, variation: Variation) -> None:
        """Whether the survey found a model that allows the changes, and the cell has the line to mend."""
        _check_surveyed(self._survey, variation.changes)
        if variation.mended is not None and not is_in(variation.mended, self._tree, self._names):
            raise NotEvaluatedError(Evidence("reason_line_elsewhere"))

    def run(self, variation: Variation) -> MemoryReport:
        """Execute the cell again, changed; sizes by their parameters, else by slicing the model's inputs."""
        from oom_magic.predict.what_if.change import ShorterInputs

        overridden: dict[SizeParameter, int] = {}
        cut: list[ShorterInputs] = []
        for what, value in variation.sizes.items():
            if what not in self.parameters:
                self.parameters[what], report = self._find_parameter(what, value, variation)
                if report is not None and len(variation.sizes) == 1:
                    return report
            parameter = self.parameters[what]
            if parameter is not None:
                overridden[parameter] = value
            else:
                cut.append(ShorterInputs(_SIZES.index(what), self.sizes[what], value))
        try:
            return self._execute((*variation.changes, *cut), overridden, variation.mended, variation.dropped)[0]
        except NotEvaluatedError as refusal:
            if self._has_tokens or all(_SIZES[one.dimension] != "seq" for one in cut):
                raise
            raise NotEvaluatedError(refusal.reason, applies=False) from None

    @property
    def _has_tokens(self) -> bool:
        """Whether the model's inputs are token ids, whose second dimension is a length and not channels."""
        inputs = () if self._fullest is None else self._fullest.inputs
        return any(len(shape) == 2 and is_integer for shape, is_integer in inputs)

    def without_unneeded(self) -> tuple[InTheWay, MemoryReport] | None:
        """The cell executed without the names that it does not read before it makes them."""
        names = [node for node in ast.walk(self._tree) if isinstance(node, ast.Name)]
        made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        return self._without_unneeded(frozenset({node.id for node in names} - made))

    def _without_unneeded(self, needed: frozenset[str]) -> tuple[InTheWay, MemoryReport] | None:
        found = self._find_in_the_way(needed)
        if found is None:
            return None
        try:
            return found, self._execute((), {}, dropped=found)[0]
        except MissingNameError as error:
            if error.name not in found.names:
                raise
            return self._without_unneeded(needed | {error.name})

    def label(self, what: str) -> str:
        """The name of a size in the user's code, if known."""
        parameter = self.parameters.get(what)
        return (
            parameter.label
            if parameter is not None and parameter.is_named
            else {"batch": "batch_size", "seq": "seq_len"}[what]
        )

    @property
    def names(self) -> Mapping[str, str]:
        """The names found in the cell."""
        return own_names(self._tree, self._names)

    def own_code(self, key: str, values: Mapping[str, Any], /) -> str | None:
        """The cell's statements with the remedy; for a size, the statement that sets it."""
        what = _SIZE_OF.get(key)
        if what is None:
            if key == "no_grad" and (self._survey is None or self._survey.has_trained):
                return ""
            own = own_code(self._tree, self._names, key, values)
            is_foreign = key in IN_A_LOOP or (names_model(key) and "model" not in self.names)
            return own or ("" if is_foreign else None)
        parameter = self.parameters.get(what)
        if parameter is None:
            return ""
        overridden = {parameter: values["after"]}
        if key == "smaller_batch" and self.accumulation > 1:
            accumulation = find_accumulation(self._tree, self._names, self.accumulation)
            overridden |= {} if accumulation is None else {accumulation: values["accumulation"]}
        return self._with_sizes(key, values, overridden)

    def _with_sizes(self, key: str, values: Mapping[str, Any], overridden: Mapping[SizeParameter, int]) -> str:
        """The statements changed by sizes, and assignments for those that other cells set."""
        before, words = list(map(ast.unparse, self._tree.body)), list(self._arguments)
        with contextlib.ExitStack() as stack:
            for parameter, value in overridden.items():
                stack.enter_context(parameter.override(self._tree, self._names, value))
            pairs = zip(self._tree.body, before, strict=True)
            changed = [ast.unparse(one) for one, old in pairs if ast.unparse(one) != old]
            simple = [one for one in changed if isinstance(ast.parse(one).body[0], (ast.Assign, ast.Expr))]
            targets = [f"{one.target} = {value}" for one, value in overridden.items() if one.target]
            if self._arguments != words:
                return f"%run {shlex.join(self._arguments)}"
            setting = "\n".join([*simple, *targets])
            inside = own_code(self._tree, self._names, key, {**values, "setting": setting})
        return inside or "\n".join([*targets, *changed])

    def own_arguments(self, code: str, /) -> str:
        """The TrainingArguments of the cell."""
        return own_arguments(self._tree, code)

    def _find_parameter(
        self, what: str, value: int, variation: Variation
    ) -> tuple[SizeParameter | None, MemoryReport | None]:
        """The parameter for a size, tried with ``value`` and the rest of the variation, and the report of that
        trial."""
        from oom_magic.predict.what_if.change import ExpectedInputs

        found = find_size_parameters(self._tree, self._names, what, self.sizes[what], self._arguments)
        for parameter in found[:_MOST_PARAMETERS]:
            number = 0 if self._fullest is None else self._fullest.number
            expected = ExpectedInputs(number, lambda inputs: _sizes(inputs).get(what) == value)
            with contextlib.suppress(NotEvaluatedError):
                changes = (*variation.changes, expected)
                return parameter, self._execute(changes, {parameter: value}, variation.mended, variation.dropped)[0]
        return None, None

    @cached_property
    def _leaves(self) -> Leaves:
        """Of graphs that there were before the first run."""
        from oom_magic.predict.instrumentation.rebound_names import leaves_of_graphs

        return leaves_of_graphs()

    @cached_property
    def _alike(self) -> dict[str, Any]:
        """The settings of all sessions; results of operators in one are reused by the next."""
        from oom_magic.predict.operators.known_outputs import KnownOutputs

        known = KnownOutputs() if self._origin is None else self._origin.known_outputs
        shared = {"origin": self._origin, "start": self._start, "known_outputs": known}
        return {**self._card, **_UNLIMITED, **shared}

    def _execute(
        self,
        changes: Sequence[Change],
        overridden: Mapping[SizeParameter, int],
        growth: Growth | None = None,
        dropped: InTheWay | None = None,
        enough_bytes: int = 0,
    ) -> tuple[MemoryReport, Training]:
        from oom_magic.predict.instrumentation.rebound_names import ReboundNames
        from oom_magic.predict.session import DrySession

        def call() -> None:
            for name in () if dropped is None else dropped.names:
                self._names.pop(name, None)
            with contextlib.ExitStack() as stack:
                if growth is not None:
                    stack.enter_context(mended(growth, self._tree, self._names))
                for parameter, value in overridden.items():
                    stack.enter_context(parameter.override(self._tree, self._names, value))
                rebound = ReboundNames(self._names, session.fake_gpu, leaves)
                self._call(rebound.watched(self._tree), self._names)

        leaves = self._leaves
        namespaces = [self._names, *(names.namespace for names in self._decided or ())]
        while True:
            session = DrySession(
                **self._alike,
                stop_after_steps=self._num_steps,
                changes=changes,
                absent=frozenset() if dropped is None else dropped.objects,
            )
            session.training.enough_bytes = enough_bytes
            try:
                report = _run(partial(session.run, call, namespaces, self._decided))
            except MissingNameError as error:
                if self._start is None or not self._start.keep(error.name):
                    raise
            else:
                return report, session.training


_UNLIMITED: Mapping[str, Any] = {"is_lasting": False, "is_limited": False, "has_bar": False, "places": False}


def _sizes(inputs: Inputs) -> dict[str, int]:
    """Batch and length of what a model was called with: token ids, or hidden states of three dimensions."""
    for shape, is_integer in inputs:
        if (len(shape) == 2 and is_integer) or len(shape) == 3:
            return {"batch": shape[0], "seq": shape[1]}
    return {"batch": inputs[0][0][0]} if inputs and inputs[0][0] else {}


def _run(run: Callable[[], MemoryReport]) -> MemoryReport:
    """Run in silence; any exception becomes a reason."""
    from oom_magic.predict.what_if.change import InapplicableError

    try:
        with in_silence():
            return run()
    except InapplicableError as refusal:
        raise NotEvaluatedError(Evidence(f"reason_{refusal.key}", refusal.values), applies=False) from None
    except NameError as error:
        raise MissingNameError(_failed(error), error.name or "") from None
    except CudaGraphsError:
        raise NotEvaluatedError(Evidence("reason_cuda_graphs")) from None
    except Exception as error:
        raise NotEvaluatedError(_failed(error)) from None


def _failed(error: Exception) -> Evidence:
    return Evidence("reason_failed", {"error": f"{type(error).__name__}: {_first_sentence(str(error))}"})


def _first_sentence(text: str) -> str:
    return (text.splitlines() or [""])[0].partition(". ")[0]
