"""The user's own cell rehearsed: what its run showed, its sizes, remedies tried in it, and their code."""

from __future__ import annotations

import ast
import contextlib
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.live.called import called_in
from oom_magic.explain.live.mending import is_in
from oom_magic.explain.remedies.executed_cell import ExecutedCell
from oom_magic.explain.remedies.own_code.loops import own_arguments
from oom_magic.explain.remedies.own_code.models import MadeInside, own_names
from oom_magic.explain.remedies.own_code.other_cells import (
    EVALUATES,
    arguments_of_earlier_cells,
    speaks_of_training,
)
from oom_magic.explain.remedies.own_code.precision import in_single_precision
from oom_magic.explain.remedies.own_code.rows.functions import COUNTED
from oom_magic.explain.remedies.own_code.rows.statements import leading_rows
from oom_magic.explain.remedies.own_code.waiting.data_on_host import BATCHES_MOVED
from oom_magic.explain.remedies.own_code.writing import (
    CodeWriter,
    accumulated_in_words,
    own_code,
)
from oom_magic.explain.remedies.rehearsal import (
    STEPS,
    MissingNameError,
    NotEvaluatedError,
    Variation,
    check_surveyed,
)
from oom_magic.explain.remedies.room import names_needed
from oom_magic.explain.remedies.sizes.inputs import dimensions_of, has_rows, sizes_of_inputs
from oom_magic.explain.remedies.sizes.kinds import SIZES
from oom_magic.explain.remedies.sizes.parameters import (
    SizeParameter,
    find_accumulation,
    find_compared_rows,
    find_rows,
    find_size_parameters,
    leading_names,
    sizes_called,
)

if TYPE_CHECKING:
    from oom_magic.explain.remedies.room import InTheWay
    from oom_magic.memory.report import MemoryReport
    from oom_magic.predict.instrumentation.training import ModelCall
    from oom_magic.predict.what_if.change import Change

_MOST_PARAMETERS = 4
_ALL_STEPS = sys.maxsize  # of training; loops that evaluate may still be cut short
_SECONDS_TO_THE_END = 10  # of computing, of a run without optimizer steps
_MOST_ROWS = 256  # of a model's inputs for one sample
_SIZE_OF = {
    **{size.shrinking.key: what for what, size in SIZES.items()},
    "smaller_evaluation": "batch",
    "later_evaluation": "evaluation",
}


class CellRehearsal(ExecutedCell):
    """A cell of the notebook, or any function, with remedies; for ``options`` see ``ExecutedCell``.

    ``find_in_the_way`` tells what earlier cells hold, but for names that are needed. With several cards, remedies are
    evaluated for the fullest.
    """

    def __init__(
        self,
        call: Callable[[ast.Module, dict[str, Any]], Any],
        tree: ast.Module,
        names: dict[str, Any],
        find_in_the_way: Callable[[Collection[str]], InTheWay | None] = lambda _: None,
        **options: Any,
    ) -> None:
        super().__init__(call, tree, names, **options)
        self._writer = CodeWriter(tree, names, self._arguments)
        self.is_of_job = self._card.get("num_processes") is not None
        self.has_failed = self._start is not None
        self._find_in_the_way = find_in_the_way
        self.parameters: dict[str, SizeParameter | None] = {}
        self._made_inside = MadeInside()
        self._fullest: ModelCall | None = None
        self._beside: list[ModelCall] = []  # the calls of its step that keep a graph
        self._later: ModelCall | None = None  # of the evaluation that took most in the last ``run_on``
        self._is_unwalked = False  # its graph: no backward walked it, though others
        self.sizes: Mapping[str, int] = {}
        self.accumulation, self.steps_differ = 1, False
        self.samples_compared, self.kept_by_turns, self._evaluates_between = 0, (0, 0), False

    def begin(self, changes: Sequence[Change], enough_bytes: int, is_brief: bool = False) -> MemoryReport:
        """Execute the unchanged cell on a pretend card; all variations are followed equally far."""
        self._num_steps, self._usable_bytes = STEPS, enough_bytes
        return self._begin(changes, enough_bytes=enough_bytes, leaves_like_steps=is_brief)

    def _begin(self, changes: Sequence[Change], **limits: Any) -> MemoryReport:
        from oom_magic.predict.what_if.survey import Survey

        self._made_inside = MadeInside()
        self._survey = Survey(changes, self._made_inside.note)
        report, training = self._execute((self._survey,), {}, **limits)
        if self._num_steps != "alike":
            num_steps = report.timeline.num_steps()
            self._num_steps = num_steps if report.timeline.was_left else _ALL_STEPS
            if report.timeline.was_left and not num_steps:
                self._num_steps, self.calls_followed = STEPS, len(training.model_calls)
        self._leaves_evaluations = training.stop_rule.leaves_evaluations
        self.steps_differ = report.timeline.was_left and training.sizes_differ and not self._largest.are_known
        self.samples_compared = self._largest.num_samples if self._largest.are_known else 0
        left = training.turns.left
        self.kept_by_turns = (0, 0) if left is None else left.kept(report.timeline)
        self._fullest = training.fullest_call(report)
        self._is_unwalked = self._fullest is not None and self._survey.is_unwalked(
            self._fullest, len(training.model_calls)
        )
        self._evaluates_between = training.evaluates_between(report)
        self._beside = training.calls_beside(report, self._fullest)
        self.sizes = {} if self._fullest is None else sizes_of_inputs(self._fullest.inputs)
        self.accumulation = self._survey.batches_per_step
        self._find_sample()
        if self._fullest is None and self._never_trains:
            self._find_rows()
        return report

    def begin_on(self, changes: Sequence[Change]) -> MemoryReport:
        """``begin`` with what follows like steps; all variations are followed as far, too."""
        self._num_steps = "alike"
        return self._begin(changes)

    def _find_sample(self) -> None:
        """Count samples as the user's code does where several rows of the model's inputs are one (beams, pairs), or
        where those do not show how many there are (``vmap`` takes each by itself)."""
        from oom_magic.predict.what_if.change import ExpectedInputs

        rows, number = self.sizes.get("batch", 1), 0 if self._fullest is None else self._fullest.number
        found = self._named_batches(rows)
        if any(one.label or rows == 1 for one in found):  # else calls to take in parts, which may be of other rows
            return
        for batch in sizes_called(self._tree, self._names, "batch") if rows == 1 else ():
            for parameter in self._named_batches(batch):
                self.parameters["batch"], self.sizes = parameter, {**self.sizes, "batch": batch}
                return
        possible = [one for one in range(1, min(rows // 2, _MOST_ROWS) + 1) if rows % one == 0]
        followed, self.calls_followed = self.calls_followed, number + 1  # where nothing is trained, no more has to run
        for several, parameter in ((each, one) for each in possible for one in self._named_batches(rows // each)):
            with contextlib.suppress(NotEvaluatedError):
                self._execute((ExpectedInputs(number, partial(has_rows, several)),), {parameter: 1})
                self.parameters["batch"], self.sizes = parameter, {**self.sizes, "batch": rows // several}
                break
        self.calls_followed = followed

    def _find_rows(self) -> None:
        """The rows that a cell computes something of without a model, such as queries of a corpus."""
        found = leading_rows(self._tree, self._names)
        for parameter in () if found is None else find_rows(self._tree, self._names, found[1], True):
            self.parameters["batch"], self.sizes = parameter, {"batch": found[1] if found else 0}
        for parameter in find_compared_rows(self._tree, self._names) if found is None else ():
            counted = self._count_rows(parameter)
            if counted > 1:
                self.parameters["batch"], self.sizes = parameter, {"batch": counted}
                return

    def _count_rows(self, parameter: SizeParameter) -> int:
        """How many rows there are where the code compares them; 0 where it cannot be followed."""
        from oom_magic.predict.what_if.change import InapplicableError

        def count(rows: Any) -> None:
            raise InapplicableError("size_not_set_there", count=len(rows))  # which ends the run

        self._names[COUNTED] = count
        try:
            self._execute((), {parameter: 0})
        except NotEvaluatedError as error:
            return int(error.reason.values.get("count", 0))
        finally:
            del self._names[COUNTED]
        return 0

    def _named_batches(self, value: int) -> list[SizeParameter]:
        """What is called a batch, or stands first in shapes, or are rows of a call to take in parts, of that number."""
        is_free = self._fullest is not None and self._fullest.only_evaluates
        found = find_size_parameters(self._tree, self._names, "batch", value, self._arguments, is_free)
        leading = leading_names(self._tree)
        return [one for one in found if one.is_named or one.label in leading or not one.label][:1]

    @property
    def is_evaluation(self) -> bool:
        """Whether a model in evaluation mode ran at the peak, and not one that is trained so; or any, where nothing is
        trained."""
        fullest = self._fullest
        if fullest is None:
            return "batch" in self.sizes and self._never_trains  # of rows
        is_trained = self._trains_at_peak or (fullest.has_gradients and self._trains_so)
        return not is_trained or self._never_trains or self._is_unwalked

    @property
    def is_step(self) -> bool:
        """Whether a model in training mode ran with a graph at the peak."""
        fullest = self._fullest
        return fullest is not None and fullest.is_training and fullest.has_gradients and not self._is_unwalked

    @property
    def _never_trains(self) -> bool:
        """Whether no backward was seen, and none is spoken of in the cell and what it calls."""
        if self._survey is None or self._survey.has_walked_back or self._survey.has_trained:
            return False
        return not speaks_of_training(self._tree, self._names)

    @property
    def runs_frozen(self) -> bool:
        """Whether a model in evaluation mode kept a graph beside one that was trained in the same step: a teacher."""
        return self._trains_at_peak and not all(call.is_training for call in self._beside)

    @property
    def _trains_at_peak(self) -> bool:
        return any(call.is_training for call in (self._fullest, *self._beside) if call is not None)

    @property
    def _trains_so(self) -> bool:
        """Whether models are trained that nobody put in training mode, as ``from_pretrained`` leaves them."""
        calls = self._training.model_calls if self._training is not None else []
        has_trained = self._survey is not None and self._survey.has_trained
        return has_trained and not any(call.is_training for call in calls if call.is_model)

    @property
    def keeps_no_graph(self) -> bool:
        """Whether gradients were off at the peak, and nothing waited for its backward."""
        return self._fullest is not None and not self._fullest.has_gradients and not self._beside

    @property
    def compares_samples(self) -> bool:
        """Whether the loss compares the samples of a batch with each other."""
        return self._survey is not None and self._survey.compares_samples

    def check(self, variation: Variation) -> None:
        """Whether the survey found a model that allows the changes, and the cell has the line to mend."""
        written = self._written(variation.changes)
        made = [one for one in variation.changes if one not in written or one.written_as == "single_weights"]
        check_surveyed(self._survey, made)
        if variation.mended is not None and not is_in(variation.mended, self._tree, self._names):
            raise NotEvaluatedError(Evidence("reason_line_elsewhere"))

    def run(self, variation: Variation) -> MemoryReport:
        """Execute the cell again, changed, and follow it as far: smaller batches make more steps."""
        before, batch = self._num_steps, variation.sizes.get("batch")
        if batch and self._evaluates_between and isinstance(before, int):
            self._num_steps = -(-before * self.sizes["batch"] // (batch * variation.batches[0]))
        try:
            return self._run(variation)
        finally:
            self._num_steps = before

    def _run(self, variation: Variation) -> MemoryReport:
        """Execute the cell again, changed; sizes by their parameters, else by slicing the model's inputs."""
        from oom_magic.predict.what_if.loop_changes import ShorterInputs

        overridden: dict[SizeParameter, int] = {}
        cut: list[ShorterInputs] = []
        dimensions = dimensions_of(() if self._fullest is None else self._fullest.inputs)
        for left, (what, value) in zip(reversed(range(len(variation.sizes))), variation.sizes.items(), strict=True):
            if what not in self.parameters:
                changed = replace(variation, parts=(*variation.parts, *((one, {}) for one in cut)))
                self.parameters[what], report = self._find_parameter(what, value, changed, overridden)
                if report is not None and not left:
                    return report
            parameter = self.parameters[what]
            if parameter is not None:
                overridden = {parameter: value, **overridden}  # where one sets both, the first size stays as it is
            else:
                is_later = what == "evaluation"
                before = self.sizes[what]
                cut += [ShorterInputs(one, before, value, without_gradients=is_later) for one in dimensions[what]]
        try:
            return self._execute((*variation.changes, *cut), overridden, variation.mended, variation.dropped)[0]
        except NotEvaluatedError as error:
            if self._has_tokens or all(one.dimension not in dimensions["seq"] for one in cut):
                raise
            raise NotEvaluatedError(error.reason, applies=False) from None

    @property
    def may_evaluate(self) -> bool:
        """Whether the cell, what it calls or a trainer's settings speak of an evaluation, which may come later."""
        codes = (self._tree, *(one.definition for one in called_in(self._tree, self._names)))
        settings = (getattr(getattr(one, "args", None), "eval_strategy", "no") for one in list(self._names.values()))
        return any(EVALUATES.search(ast.unparse(code)) for code in codes) or any(one != "no" for one in settings)

    def run_on(self, variation: Variation) -> MemoryReport:
        """The same, including what follows steps that are alike: evaluations, other loops."""
        before = self._num_steps, self.calls_followed
        self._num_steps, self.calls_followed, self._most_seconds = "alike", 0, _SECONDS_TO_THE_END
        try:
            report = self.run(variation)
        finally:
            self._num_steps, self.calls_followed = before
            self._most_seconds = math.inf
        if "evaluation" not in variation.sizes:
            self._find_evaluation(report)
        return report

    def _find_evaluation(self, report: MemoryReport) -> None:
        """The batch of the evaluation that took most, if one did: ``sizes["evaluation"]``."""
        self.sizes = {what: size for what, size in self.sizes.items() if what != "evaluation"}
        self.parameters.pop("evaluation", None)
        call = None if self._training is None else self._training.call_at(report.peak_position)
        if call is None or call.has_gradients:
            return
        calls = self._training.model_calls if self._training is not None else []
        self._later = next(one for one in calls if one.inputs == call.inputs and not one.has_gradients)
        self.sizes = {**self.sizes, "evaluation": sizes_of_inputs(call.inputs).get("batch", 1)}

    @property
    def _has_tokens(self) -> bool:
        """Whether the model's inputs are token ids, whose second dimension is a length and not channels."""
        inputs = () if self._fullest is None else self._fullest.inputs
        return any(len(shape) == 2 and is_integer for shape, is_integer in inputs)

    def without_unneeded(self) -> tuple[InTheWay, MemoryReport] | None:
        """The cell executed without the names that it does not read before it makes them, or only adds to."""
        return self._without_unneeded(*names_needed(self._tree, self._names))

    def _without_unneeded(self, needed: frozenset[str], added: frozenset[str]) -> tuple[InTheWay, MemoryReport] | None:
        found = self._find_in_the_way(needed)
        if found is None:
            return None
        found = replace(found, emptied=added.intersection(found.names))
        try:
            return found, self._execute((), {}, dropped=found)[0]
        except NotEvaluatedError as error:
            missed = frozenset({error.name}) if isinstance(error, MissingNameError) else found.emptied
            if missed.isdisjoint(found.names):
                raise
            return self._without_unneeded(needed | missed, added - missed)

    def label(self, what: str) -> str:
        """The name of a size in the user's code, if known."""
        parameter = self.parameters.get(what)
        if parameter is not None and parameter.is_named:
            return parameter.label
        return SIZES[what].usual_name if what in SIZES else "eval_batch_size"

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The names found in the cell; else, of models that it makes inside and that are gone, what was noted."""
        found = own_names(self._tree, self._names)
        return found if {"model", "recomputed"} & found.keys() else {**found, **self._made_inside.names}

    def own_code(self, key: str, values: Mapping[str, Any], /) -> str | None:
        """The cell's statements with the remedy; for a size, the statement that sets it."""
        what = _SIZE_OF.get(key)
        if what is None:
            if key == "no_grad":
                size = (self.parameters["batch"], values["after"]) if "after" in values else None
                may_train = self._survey is None or self._survey.has_trained
                unwalked = frozenset() if self._survey is None else self._survey.unwalked
                if (own := self._writer.no_grad(may_train, self.runs_frozen, size, unwalked)) is not None:
                    return own
            if key == "kept_classes":
                return self._writer.kept_classes()
            if key == BATCHES_MOVED:
                return "" if self._data_kept is None else self._data_kept.code(self._tree)
            if key.startswith("single_weights"):
                return in_single_precision(self._tree, self._names) or None
            if key == "drawn_edges" and self._survey is not None:
                values = {**values, "edges": self._survey.edges}
            own = self._writer.rewritten(lambda code, seen: own_code(code, seen, key, values))
            is_of_evaluation = key == "mixed_precision" and (self.keeps_no_graph or self._is_unwalked)
            own = "" if is_of_evaluation else own or self._writer.placed(key, values)
            return own or self._writer.beside(key, values, self.names)
        parameter = self.parameters.get(what)
        if parameter is None:
            inputs = () if self._fullest is None else self._fullest.inputs
            is_second = key == "shorter_sequences" and dimensions_of(inputs)["seq"] == (1,)
            return self._writer.shorter_rows(values["after"]) if is_second else ""
        if parameter.rows:
            return self._writer.in_parts(parameter.rows, values["after"], values["accumulation"])
        overridden, more = {parameter: values["after"]}, ""
        if key == "smaller_batch" and self.accumulation > 1:
            accumulation = find_accumulation(self._tree, self._names, self.accumulation)
            overridden |= {} if accumulation is None else {accumulation: values["accumulation"]}
            more = accumulated_in_words(values["accumulation"]) if accumulation is None else ""
        evaluation = self.parameters.get("evaluation")
        if "evaluation_after" in values and evaluation is not None:
            overridden[evaluation] = values["evaluation_after"]
        number = values["accumulation"] if key == "smaller_batch" else 1
        return "\n".join(filter(None, (self._writer.with_sizes(overridden, number, self.accumulation), more)))

    def own_arguments(self, code: str, /) -> str:
        """The TrainingArguments of the cell, or of an earlier one."""
        return own_arguments(self._tree, code) or arguments_of_earlier_cells(self._tree, self._names, code)

    def _find_parameter(
        self, what: str, value: int, variation: Variation, others: Mapping[SizeParameter, int]
    ) -> tuple[SizeParameter | None, MemoryReport | None]:
        """The parameter for a size, tried with ``value``, ``others`` and the changes, and the report of that trial."""
        from oom_magic.predict.what_if.change import ExpectedInputs
        from oom_magic.predict.what_if.model_changes import NoGradients

        is_later = what == "evaluation"
        kind, call = ("batch", self._later) if is_later else (what, self._fullest)
        drops_graph = any(isinstance(one, NoGradients) for one in variation.changes)
        is_free = call is not None and not call.is_training and (drops_graph or call.only_evaluates)
        found = find_size_parameters(self._tree, self._names, kind, self.sizes[what], self._arguments, is_free)
        if is_later:
            found.sort(key=lambda one: EVALUATES.search(one.label) is None)
        is_whole = kind == "batch" and not is_later and not is_free
        is_by_row = kind == "batch" and not is_later and is_free
        rows = find_rows(self._tree, self._names, self.sizes[what], is_free) if is_whole or is_by_row else ()
        for parameter in (*found[:_MOST_PARAMETERS], *rows):
            number = 0 if call is None else self._first_like(call).number
            expected = ExpectedInputs(number, lambda inputs: sizes_of_inputs(inputs).get(kind) == value)
            with contextlib.suppress(NotEvaluatedError):
                changes, overridden = (*variation.changes, expected), {parameter: value, **others}
                return parameter, self._execute(changes, overridden, variation.mended, variation.dropped)[0]
        return None, None

    def _first_like(self, call: ModelCall) -> ModelCall:
        """The first call of the same kind: with a changed size, more or fewer calls may come before the others."""
        calls = [] if self._training is None else self._training.model_calls
        return next((one for one in calls if one.inputs == call.inputs and one.is_training == call.is_training), call)
