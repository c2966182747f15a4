"""Which changes apply to a run, found while it is rehearsed unchanged, so that no rehearsal is wasted."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from oom_magic.predict.isolation.context import steps_hooked
from oom_magic.predict.isolation.patching import Patches, all_patched
from oom_magic.predict.what_if.change import ByHandError, Change, InapplicableError, inputs_of, tensors_given
from oom_magic.predict.what_if.kept_classes import KeptClasses, metrics_of_classes
from oom_magic.predict.what_if.load_changes import LoadChange
from oom_magic.predict.what_if.loop_changes import (
    BatchesMoved,
    DrawnEdges,
    DroppedOutputs,
    EdgesGiven,
    GatheredOnHost,
    ReleasedGradients,
    around_evaluations,
    edges_given,
    has_outputs,
)
from oom_magic.predict.what_if.model_changes import MixedPrecision, NoGradients
from oom_magic.user_code import Lines, running_lines

if TYPE_CHECKING:
    from oom_magic.predict.instrumentation.training import ModelCall


class Survey(Change):
    """Checks ``changes`` against each model that runs, and records what the loop does. Changes nothing.

    ``keeps_gradients``: the loop fills them with zeros. ``keeps_outputs``: a Hugging Face model's logits live until
    the optimizer's step. ``gathers_on_device``: a Trainer collects an evaluation there; ``keeps_logits``: its metrics
    read the classes of the logits alone. ``batches_per_step`` counts the batches before the first step: the calls of
    the model, where there is but one, or the backwards, if those are fewer (two calls may share one). A call that is
    given the tensors of the call before once more, with weights that were changed since, has the same batch (Foret et
    al. 2021: sharpness-aware minimization).
    ``edges`` are those of a graph, as a call with gradients is given them.
    ``compares_samples``: a loss has a product of all samples of a batch with each other. ``unwalked`` are the lines
    that called a model whose graph no backward walked though others were: an evaluation without ``no_grad``.
    """

    def __init__(self, changes: Iterable[Change], note: Callable[[torch.nn.Module], None] = lambda _: None) -> None:
        """``note`` is called with each outermost module before it runs for the first time."""
        self._note = note
        self._errors: dict[Change, InapplicableError | None] = {}
        self.keeps_gradients = False
        self.keeps_outputs = False
        self.gathers_on_device = self.keeps_logits = False
        self.compares_samples = False
        self.edges: EdgesGiven | None = None
        self._batches: set[int] = set()
        self._changes = tuple(changes)
        self._num_models = 0
        self._num_forwards = 0
        self._num_backwards = 0
        self._num_calls = 0
        self._num_training_calls = 0
        self._has_stepped = False
        self._logits: weakref.ref[torch.Tensor] | None = None
        self._given: list[weakref.ref[torch.Tensor]] = []  # by the last call, of which that before it was
        self._has_same = self._is_changed = False
        self._version = 0  # of the weights, at the last call
        self._graphs: dict[int, Lines] = {}  # of calls, by their number
        self._walked: set[int] = set()

    @property
    def batches_per_step(self) -> int:
        """Batches per optimizer step; 1 where unknown."""
        is_known = self._has_stepped and self._num_models == 1
        return max(min(self._num_forwards, self._num_backwards), 1) if is_known else 1

    @property
    def has_trained(self) -> bool:
        """Whether an optimizer stepped."""
        return self._has_stepped

    @property
    def has_walked_back(self) -> bool:
        """Whether a backward began."""
        return self._num_backwards > 0

    @property
    def unwalked(self) -> frozenset[Lines]:
        """Each with the lines that lead to it, as far as they tell it from those whose graphs were walked."""
        lines = [one for number, one in self._graphs.items() if number in self._walked]
        walked = {one[:end] for one in lines for end in range(1, len(one) + 1)}
        others = [one for number, one in self._graphs.items() if number not in self._walked and walked]
        ends = [(one, range(1, len(one) + 1)) for one in others]
        found = (next((one[:end] for end in possible if one[:end] not in walked), ()) for one, possible in ends)
        return frozenset(filter(None, found))

    def is_unwalked(self, call: ModelCall, num_calls: int) -> bool:
        """Whether no backward walked the graph of a call, of so many in the run."""
        is_known = num_calls == self._num_calls and call.number in self._graphs
        return is_known and bool(self._walked) and call.number not in self._walked

    def error(self, change: Change) -> InapplicableError | None:
        """Why a change does not apply to the run, or None."""
        if isinstance(change, ReleasedGradients):
            return None if self.keeps_gradients else InapplicableError("gradients_released_already")
        if isinstance(change, DroppedOutputs):
            return None if self.keeps_outputs else InapplicableError("outputs_dropped_already")
        if isinstance(change, GatheredOnHost):
            return None if self.gathers_on_device else InapplicableError("nothing_gathered")
        if isinstance(change, KeptClasses):
            return None if self.keeps_logits else InapplicableError("nothing_gathered")
        if isinstance(change, DrawnEdges):
            return None if self.edges is not None else InapplicableError("no_edges")
        if isinstance(change, BatchesMoved):
            return InapplicableError("so_already")  # where the user's statements do not show them
        if isinstance(change, LoadChange):
            is_trained = self._has_stepped or self._num_forwards > 0
            return InapplicableError("weights_are_trained") if change.is_frozen and is_trained else None
        return self._errors.get(change, InapplicableError("no_model_ran"))

    def prepare(self, model: torch.nn.Module) -> None:
        """Ask each change whether it applies to this model."""
        self._num_models += 1
        self._note(model)
        for change in self._changes:
            self._ask(change, model)

    def _ask(self, change: Change, model: torch.nn.Module) -> None:
        try:
            change.check(model)
            self._errors[change] = None
        except InapplicableError as error:
            error.with_traceback(None)  # its frames hold the outputs
            known = self._errors.setdefault(change, error)
            if known is not None and isinstance(error, ByHandError):  # found only with the second model
                self._errors[change] = error

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same; records how many samples there are, and which argument has edges."""
        if self.edges is None and torch.is_grad_enabled():
            self.edges = edges_given(args, kwargs)
        self._batches |= {shape[0] for shape, _ in inputs_of(args, kwargs) if shape}
        given = tensors_given(args, kwargs)
        before = [one() for one in self._given]
        self._has_same = bool(given) and list(map(id, before)) == list(map(id, given))
        self._given = list(map(weakref.ref, given))
        return args, kwargs

    def around_call(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Nothing; counts the calls, those of losses too, as ``NoGradients`` does."""
        self._num_calls += 1
        before, self._version = self._version, next((one._version for one in model.parameters()), 0)
        self._is_changed = before != self._version
        return nullcontext()

    def result(self, result: Any) -> Any:
        """The same; records whether it has logits."""
        number = self._num_calls - 1
        made = tensors_given(result if isinstance(result, tuple) else (result,), {})
        for node in {one.grad_fn for one in made if one.grad_fn is not None}:
            self._graphs[number] = self._graphs.get(number) or running_lines()
            node.register_prehook(lambda *_, number=number: self._walked.add(number))
        is_again = self._has_same and self._is_changed
        self._num_forwards += torch.is_grad_enabled() and not (self._has_stepped or is_again)
        if has_outputs(result):
            self._logits = weakref.ref(result["logits"])
        return result

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """Records optimizer steps, backwards and ``zero_grad``."""

        def before_step(*_: Any) -> None:
            self._has_stepped = True
            self._num_training_calls = self._num_calls
            self.keeps_outputs |= self._logits is not None and self._logits() is not None

        table: Patches = [
            (torch.optim.Optimizer, {"zero_grad": self._noting(torch.optim.Optimizer.zero_grad)}),
            (torch.nn.Module, {"zero_grad": self._noting(torch.nn.Module.zero_grad)}),
            (torch.autograd, {"backward": self._counting(torch.autograd.backward)}),
            *around_evaluations(self._evaluating),
        ]
        try:
            with all_patched(table), steps_hooked(before_step):
                yield
        finally:
            for change in self._changes:
                if isinstance(change, NoGradients):
                    change.num_training_calls, change.unwalked = self._num_training_calls, self.unwalked
                elif isinstance(change, MixedPrecision):
                    change.trains = self._has_stepped or self.has_walked_back

    def _evaluating(self, trainer: Any, loop: Callable[[], Any]) -> Any:
        self.gathers_on_device |= trainer.args.eval_accumulation_steps is None
        self.keeps_logits |= metrics_of_classes(trainer) is not None
        return loop()

    def _counting(self, backward: Callable[..., None]) -> Callable[..., None]:
        def run(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self._num_backwards += not self._has_stepped
            if not self._has_stepped:
                sides = {number * rows for rows in self._batches - {1} for number in (1, 2)}  # two views of each
                self.compares_samples |= any(side in sides for side in _squares(tensors))
            backward(tensors, *args, **kwargs)

        return run

    def _noting(self, zero_grad: Callable[..., None]) -> Callable[..., None]:
        def run(owner: Any, set_to_none: bool = True) -> None:
            self.keeps_gradients |= not set_to_none
            zero_grad(owner, set_to_none)

        return run


def _squares(tensors: Any) -> Iterator[int]:
    """The sides of square products of matrices that no weight is one of, in the graphs of these tensors."""
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    waiting = [one.grad_fn for one in roots if one.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        sizes: list[tuple[int, ...]]
        sizes = [getattr(node, f"_saved_{name}_sym_sizes", ()) for name in ("self", "mat2")]
        left, right = sizes
        if len(left) == len(right) == 2 and left[0] == right[1] and not any(map(_is_weight, node.next_functions)):
            yield int(left[0])
        later = [one for one, _ in node.next_functions if one is not None and one not in seen]
        seen.update(later)
        waiting += later


def _is_weight(edge: tuple[Any, int]) -> bool:
    """Whether a matrix is made from one parameter alone, such as its transpose, or needs no gradient."""
    node = edge[0]
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node is None or hasattr(node, "variable")
