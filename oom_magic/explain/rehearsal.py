"""Rehearsing the user's own run with something changed: what a remedy would really save."""

from __future__ import annotations

import ast
import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from oom_magic.explain.knobs import Knob, find_knobs

if TYPE_CHECKING:
    from oom_magic.memory.report import MemoryReport
    from oom_magic.predict.changes import Change
    from oom_magic.predict.session import DrySession
    from oom_magic.predict.setups.setup import TrainingSetup

Inputs = tuple[tuple[tuple[int, ...], bool], ...]  # of the first model: shape, whether integer
_STEPS = 2  # the first makes the optimizer's state, the second is like all others


@dataclass(frozen=True)
class Variation:
    """What is different in a rehearsal: changes to model and optimizer, other sizes, a setup's fields."""

    changes: tuple[Change, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    def with_(self, other: Variation) -> Variation:
        """Both together."""
        sizes, fields = {**self.sizes, **other.sizes}, {**self.fields, **other.fields}
        return Variation((*self.changes, *other.changes), sizes, fields)


class NotPricedError(Exception):
    """Why a variation cannot be rehearsed, in words."""


class Rehearsal(Protocol):
    """A training run that can be repeated with variations, on a card that never runs out."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """``"batch"`` and ``"seq"``, where they are known."""

    def run(self, variation: Variation) -> MemoryReport:
        """The report of the run so changed. Raises NotPricedError."""


class SetupRehearsal:
    """The training code that a TrainingSetup writes."""

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup

    @property
    def sizes(self) -> Mapping[str, int]:
        """The microbatch and the length of its sequences."""
        return {"batch": self.setup.microbatch_size, "seq": self.setup.seq_len}

    def run(self, variation: Variation) -> MemoryReport:
        """Dry-run the setup with fields replaced."""
        from oom_magic.predict.session import DrySession

        if variation.changes and not variation.fields:
            raise NotPricedError("a setup has no field for it")
        names = {"batch": "microbatch_size", "seq": "seq_len"}
        fields = {**variation.fields, **{names[key]: value for key, value in variation.sizes.items()}}
        try:
            setup = self.setup.replace(**fields)
        except ValueError as error:
            raise NotPricedError(str(error)) from None
        session = DrySession(
            setup.gpu,
            setup.memory,
            stop_after_steps=_STEPS,
            is_lasting=False,
            is_limited=False,
            has_bar=False,
        )
        return _run(lambda: session.run(setup.train))


class CellRehearsal:
    """A cell of the notebook with the names it sees, or any function.

    ``origin`` is the dry session the cell failed in, if it did; the cell then starts from what that held
    before. ``call(tree, names)`` executes the cell; what it does to ``names`` is undone each time.
    """

    def __init__(
        self,
        call: Callable[[ast.Module, dict[str, Any]], Any],
        tree: ast.Module,
        names: dict[str, Any],
        *,
        gpu: str | None = None,
        memory: int | None = None,
        origin: DrySession | None = None,
    ) -> None:
        self._call = call
        self._tree = tree
        self._names = names
        self._card = (gpu, memory)
        self._origin = origin
        self._knobs: dict[str, Knob | None] = {}
        self.inputs: Inputs = ()

    @property
    def sizes(self) -> Mapping[str, int]:
        """What the model was called with in the first rehearsal."""
        return _sizes(self.inputs)

    def run(self, variation: Variation) -> MemoryReport:
        """Execute the cell again on a pretend card."""
        if variation.fields and not variation.changes and not variation.sizes:
            raise NotPricedError("it changes how the model is loaded; give setup= to price it")
        if variation.sizes:
            return self._run_resized(variation)
        report, inputs = self._execute(variation.changes, {})
        self.inputs = self.inputs or inputs
        return report

    def _run_resized(self, variation: Variation) -> MemoryReport:
        """With other sizes: by the knob that sets them, else by cutting what the model is called with."""
        from oom_magic.predict.changes import ShorterInputs

        turned: dict[Knob, int] = {}
        cut: list[Change] = []
        for what, value in variation.sizes.items():
            knob = self._knob(what, value)
            if knob is not None:
                turned[knob] = value
            else:
                cut.append(ShorterInputs(("batch", "seq").index(what), self.sizes[what], value))
        return self._execute((*variation.changes, *cut), turned)[0]

    def _knob(self, what: str, value: int) -> Knob | None:
        """The knob for a size, tried once with ``value``."""
        if what not in self._knobs:
            self._knobs[what] = self._find_knob(what, value)
        return self._knobs[what]

    def _find_knob(self, what: str, value: int) -> Knob | None:
        before = self.sizes.get(what)
        if before is None:
            raise NotPricedError(f"the {what} size of the run is not known")
        for knob in find_knobs(self._tree, self._names, what, before)[:4]:
            with contextlib.suppress(NotPricedError):
                _, inputs = self._execute((), {knob: value})
                if _sizes(inputs).get(what) == value:
                    return knob
        return None

    def label(self, what: str) -> str:
        """How the user's code calls a size, as far as it is known."""
        knob = self._knobs.get(what)
        return knob.label if knob is not None and knob.is_named else {"batch": "batch_size", "seq": "seq_len"}[what]

    def _execute(self, changes: Sequence[Change], turned: Mapping[Knob, int]) -> tuple[MemoryReport, Inputs]:
        from oom_magic.predict.session import DrySession

        session = DrySession(
            *self._card,
            stop_after_steps=_STEPS,
            is_lasting=False,
            is_limited=False,
            has_bar=False,
            changes=changes,
            origin=self._origin,
        )

        def call() -> None:
            with contextlib.ExitStack() as stack:
                for knob, value in turned.items():
                    stack.enter_context(knob.turn(self._tree, self._names, value))
                self._call(self._tree, self._names)

        return _run(lambda: session.run(call, [self._names])), session.training.model_inputs


def _sizes(inputs: Inputs) -> dict[str, int]:
    """Batch and length of what a model was called with: token ids, or hidden states of three dimensions."""
    for shape, is_integer in inputs:
        if (len(shape) == 2 and is_integer) or len(shape) == 3:
            return {"batch": shape[0], "seq": shape[1]}
    return {"batch": inputs[0][0][0]} if inputs and inputs[0][0] else {}


def _run(run: Callable[[], MemoryReport]) -> MemoryReport:
    """Run without letting the user's prints through; whatever goes wrong is a reason, not an error."""
    from oom_magic.predict.changes import InapplicableError

    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return run()
    except InapplicableError as refusal:
        raise NotPricedError(str(refusal)) from None
    except Exception as error:
        raise NotPricedError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from None
