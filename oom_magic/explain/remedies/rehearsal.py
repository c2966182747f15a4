"""Rehearsing the user's own run with a change: the memory that a remedy saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from oom_magic.computing_time import computing_seconds
from oom_magic.errors import InvalidSettingError
from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.live.growth import Growth
from oom_magic.language import _
from oom_magic.predict.silence import silenced

if TYPE_CHECKING:
    from oom_magic.explain.remedies.room import InTheWay
    from oom_magic.memory.report import MemoryReport
    from oom_magic.predict.instrumentation.training import Training
    from oom_magic.predict.setups.setup import TrainingSetup
    from oom_magic.predict.what_if.change import Change
    from oom_magic.predict.what_if.largest_samples import LargestSamples
    from oom_magic.predict.what_if.survey import Survey

# Rehearsals end before this many seconds of computing, if a further one would take as long as the longest so far.
PATIENCE_SECONDS = 55
# On a busy machine rehearsals may take this many times longer.
_BUSY = 4
# What PyTorch and Python raise for types and shapes that do not go together; of what a dry run cannot follow there are
# classes of its own.
_OF_CODE = (RuntimeError, TypeError, ValueError, IndexError)
STEPS = 2  # the first makes the optimizer's state, the second is like all others
# The settings of a dry run for which only the memory it takes matters.
UNLIMITED: Mapping[str, Any] = {"is_lasting": False, "is_limited": False, "has_bar": False, "places": False}


@dataclass(frozen=True)
class Variation:
    """A variation of the run: changes, each with the equivalent fields of a setup; other sizes; a line of the user's
    rewritten to keep less (``mended``); memory of earlier cells that is ``dropped`` first. ``batches`` of a step, over
    which gradients are accumulated: those that are followed, and how many more would come."""

    parts: tuple[tuple[Change, Mapping[str, Any]], ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    mended: Growth | None = None
    dropped: InTheWay | None = None
    batches: tuple[int, int] = (1, 0)

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes to model, optimizer and loop."""
        return tuple(change for change, _ in self.parts)

    def with_(self, other: Variation) -> Variation:
        """A variation with the changes of both."""
        mended, dropped = self.mended or other.mended, self.dropped or other.dropped
        batches = max(self.batches, other.batches)
        return Variation((*self.parts, *other.parts), {**self.sizes, **other.sizes}, mended, dropped, batches)


class Patience:
    """How long the rehearsals of one explanation may take."""

    def __init__(self) -> None:
        self._start = time.monotonic(), computing_seconds()
        self._longest = 0.0

    def timed(self, run: Callable[[], MemoryReport]) -> MemoryReport:
        """What ``run`` returns; a further one is expected to take as long as the longest."""
        start = self._elapsed()
        try:
            return run()
        finally:
            self._longest = max(self._longest, self._elapsed() - start)

    @property
    def is_over(self) -> bool:
        """Whether a further one would take too long."""
        return self._elapsed() + self._longest > PATIENCE_SECONDS

    def _elapsed(self) -> float:
        """Seconds of computing since the start; where others keep the machine busy, a part of those on the wall."""
        start, start_of_computing = self._start
        return max(computing_seconds() - start_of_computing, (time.monotonic() - start) / _BUSY)


class NotEvaluatedError(Exception):
    """The reason why a variation cannot be rehearsed; ``applies`` is False where it would change nothing.

    ``is_of_code``: the user's code, or PyTorch for it, raised.
    """

    def __init__(self, reason: Evidence, applies: bool = True, is_of_code: bool = False) -> None:
        super().__init__(reason.key)
        self.reason = reason
        self.applies = applies
        self.is_of_code = is_of_code


class MissingNameError(NotEvaluatedError):
    """The code read an undefined name."""

    def __init__(self, reason: Evidence, name: str) -> None:
        super().__init__(reason)
        self.name = name


class Rehearsal(Protocol):
    """A training run that can be repeated with variations, on a card that never runs out."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """``"batch"`` and ``"seq"``, where they are known; ``"evaluation"``: see ``run_on``."""

    @property
    def has_failed(self) -> bool:
        """Whether the run as it is ran out of memory on this card."""

    @property
    def accumulation(self) -> int:
        """Batches per optimizer step."""

    @property
    def is_of_job(self) -> bool:
        """Whether the run is one of several processes with a GPU each."""

    def begin(self, changes: Sequence[Change], enough_bytes: int, is_brief: bool, /) -> MemoryReport:
        """The report of the run as it is, followed at least until it takes ``enough_bytes``, as far as it can be; if it
        ``is_brief``, no further than to steps that take the same.

        Finds which of ``changes`` it would allow. Raises NotEvaluatedError.
        """

    def begin_on(self, changes: Sequence[Change], /) -> MemoryReport:
        """``begin`` with what follows like steps, as ``run`` then has it, too. Raises NotEvaluatedError."""

    @property
    def steps_differ(self) -> bool:
        """Whether steps had batches of different sizes, the largest perhaps still to come; known from ``begin`` on."""

    @property
    def samples_compared(self) -> int:
        """Samples of the data that differ in size, of which the largest is in most batches; 0: none do."""

    @property
    def calls_followed(self) -> int:
        """After so many calls of outermost modules a run is left whose optimizers never step; 0: it is not."""

    @property
    def kept_by_turns(self) -> tuple[int, int]:
        """How many turns its loop has where such a run is left, and the bytes that each more leaves; (0, 0): none."""

    @property
    def is_evaluation(self) -> bool:
        """Whether a model in evaluation mode ran at the peak; known from ``begin`` on."""

    @property
    def is_step(self) -> bool:
        """Whether a model in training mode ran with a graph at the peak; known from ``begin`` on."""

    @property
    def runs_frozen(self) -> bool:
        """Whether a model in evaluation mode kept a graph beside one that was trained; known from ``begin`` on."""

    @property
    def keeps_no_graph(self) -> bool:
        """Whether gradients were off then."""

    @property
    def compares_samples(self) -> bool:
        """Whether the loss compares the samples of a batch with each other; known from ``begin`` on."""

    def check(self, variation: Variation) -> None:
        """Raise NotEvaluatedError where the survey showed that it does not apply to the run."""

    def run(self, variation: Variation) -> MemoryReport:
        """The report of the run with these changes. Raises NotEvaluatedError."""

    @property
    def may_evaluate(self) -> bool:
        """Whether an evaluation may follow the steps that ``run`` follows."""

    def run_on(self, variation: Variation) -> MemoryReport:
        """``run`` including what follows steps that are alike. Raises NotEvaluatedError.

        If an evaluation then takes most, its batch is in ``sizes`` from then on.
        """

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

    is_evaluation = keeps_no_graph = is_of_job = steps_differ = may_evaluate = compares_samples = False
    is_step = runs_frozen = has_failed = False
    calls_followed = samples_compared = 0
    kept_by_turns = 0, 0

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

    def begin(self, changes: Sequence[Change], _enough_bytes: int = 0, _is_brief: bool = False, /) -> MemoryReport:
        """Dry-run the unchanged setup: its steps are alike."""
        from oom_magic.predict.what_if.survey import Survey

        self._survey = Survey(changes)
        return self._dry_run(self.setup, (self._survey,))

    def begin_on(self, changes: Sequence[Change], /) -> MemoryReport:
        """It only trains."""
        return self.begin(changes)

    def check(self, variation: Variation) -> None:
        """Whether the setup has other values for it, or its run allows the change."""
        setup, changes = self._changed(variation)
        check_surveyed(self._survey, variation.changes)
        if setup == self.setup and not changes and not variation.sizes:
            raise NotEvaluatedError(Evidence("reason_so_already"), applies=False)

    def run(self, variation: Variation) -> MemoryReport:
        """Dry-run the setup with fields replaced; changes without a field are made in its run."""
        return self._dry_run(*self._changed(variation))

    run_on = run  # it only trains

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

        session = DrySession(setup.gpu, setup.memory, stop_after_steps=STEPS, changes=changes, **UNLIMITED)
        return rehearse(lambda: session.run(setup.train))


def _replaced(setup: TrainingSetup, fields: Mapping[str, Any]) -> TrainingSetup:
    try:
        return setup.replace(**fields)
    except InvalidSettingError as error:
        values = {"error_key": f"refusal_{error.key}", **error.values}
        raise NotEvaluatedError(Evidence("reason_setup_refused", values)) from None


def check_surveyed(survey: Survey | None, changes: Sequence[Change]) -> None:
    """Raise NotEvaluatedError for the first change that does not apply to the run."""
    from oom_magic.predict.what_if.change import ByHandError

    assert survey is not None, "begin comes first"
    for change in changes:
        error = survey.error(change)
        if error is not None:
            is_by_hand = isinstance(error, ByHandError)
            raise NotEvaluatedError(Evidence(f"reason_{error.key}", error.values), applies=is_by_hand)


def marked(report: MemoryReport, training: Training, largest: LargestSamples) -> MemoryReport:
    """The report of a run, a lower bound where later steps may have larger batches: where it is not known which samples
    are the ``largest``."""
    from oom_magic.memory.report import Assumption

    if not (report.timeline.was_left and training.has_new_sizes) or largest.are_known:
        return report
    text = _("the batches of the steps that were followed have different sizes; later ones may take more")
    return replace(report, assumptions=(*report.assumptions, Assumption(text, is_lower_bound=True)))


def rehearse(run: Callable[[], MemoryReport]) -> MemoryReport:
    """Run in silence; any exception becomes a reason."""
    from oom_magic.predict.what_if.change import InapplicableError

    try:
        with silenced():
            return run()
    except InapplicableError as error:
        raise NotEvaluatedError(Evidence(f"reason_{error.key}", error.values), applies=False) from None
    except NameError as error:
        raise MissingNameError(_failed(error), error.name or "") from None
    except Exception as error:
        raise NotEvaluatedError(_failed(error), is_of_code=type(error) in _OF_CODE) from None


def _failed(error: Exception) -> Evidence:
    return Evidence("reason_failed", {"error": f"{type(error).__name__}: {_first_sentence(str(error))}"})


def _first_sentence(text: str) -> str:
    return (text.splitlines() or [""])[0].partition(". ")[0]
