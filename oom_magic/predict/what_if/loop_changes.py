"""Changes to a loop around the model's calls: what it keeps, how it clears gradients, how long its inputs are."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oom_magic.predict.isolation.patching import Patches, all_patched
from oom_magic.predict.what_if.change import Change, InapplicableError, tensors_given
from oom_magic.predict.what_if.optimizer_changes import optimizers_of

_LEAST_NODES = 3  # a batch of two texts has as many rows as edges have ends


class ReleasedGradients(Change):
    """``zero_grad(set_to_none=True)``, whatever argument the loop passes."""

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """``zero_grad`` sets gradients to None."""
        owners = (torch.optim.Optimizer, torch.nn.Module)
        with all_patched([(owner, {"zero_grad": _releasing(owner.zero_grad)}) for owner in owners]):
            yield


class AccumulatedGradients(Change):
    """Several smaller batches make up a step: after the first step each takes two, the fewest that show what all of
    them hold.

    A call of ``step`` with a closure, which computes the gradients itself, is made each time, but for Lightning's,
    whose closures compute those of one batch. ``is_one_step``: the run has no later step, so its one batch is taken for
    the second of two, beside the gradients of the first.
    """

    def __init__(self, is_one_step: bool = False) -> None:
        self._is_one_step = is_one_step

    def prepare(self, model: torch.nn.Module) -> None:
        """Give what is trained the gradients of a batch before, where the run has one step."""
        if not self._is_one_step:
            return
        with suppress(InapplicableError):
            trained = [one for each in optimizers_of(model) for group in each.param_groups for one in group["params"]]
            for parameter in trained:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
            with torch.enable_grad():  # cuBLAS keeps a workspace for the backward's thread
                one = torch.ones(1, 1, device=trained[0].device, requires_grad=True)
                torch.autograd.grad(one @ one, one)

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """Every second step and what clears gradients after it are left out; losses are halved.

        The others clear the gradients at once, wherever the loop does: so has the code to paste, and an evaluation that
        follows finds none.
        """
        turns = _Turns(self._is_one_step)
        optimizers = [kind for kind in _subclasses(torch.optim.Optimizer) if "step" in vars(kind)]
        owners: tuple[Any, ...] = (torch.optim.Optimizer, torch.nn.Module)
        table: Patches = [
            *((kind, {"step": turns.stepping(kind.step)}) for kind in optimizers),
            *((owner, {"zero_grad": turns.clearing(owner.zero_grad)}) for owner in owners),
            (torch.Tensor, {"backward": _of_its_part(torch.Tensor.backward)}),
        ]
        with all_patched(table):
            yield


class _Turns:
    """Decides which calls of an optimizer are skipped: every second one, with the ``zero_grad`` after it; one before
    the first is where a batch came before (``is_begun``)."""

    def __init__(self, is_begun: bool) -> None:
        self._is_begun = is_begun
        self._sets_to_none = True  # as the loop clears them
        self._numbers: dict[int, int] = {}
        self._is_left_out = False
        self._is_inside = False  # of one optimizer that wraps another, as accelerate's does

    def stepping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step``, except for skipped calls."""

        def run(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            batch = _batch_of_lightning(*args, **kwargs)
            if self._is_inside or ((args or kwargs) and batch is None):
                return step(optimizer, *args, **kwargs)
            number = self._numbers[id(optimizer)] = self._numbers.get(id(optimizer), 0) + 1
            if number % 2 == 0:
                result = None if batch is None else batch()
                self._is_begun, self._is_left_out = False, True
                _forget_unscaling(optimizer)
                return result
            self._is_inside = True
            try:
                result = step(optimizer, *args, **kwargs)
            finally:
                self._is_inside = self._is_begun = self._is_left_out = False
            optimizer.zero_grad(set_to_none=self._sets_to_none)
            return result

        return run

    def clearing(self, zero_grad: Callable[..., None]) -> Callable[..., None]:
        """``zero_grad``, except after a skipped step, or a batch."""

        def run(owner: Any, set_to_none: bool = True) -> None:
            self._sets_to_none = set_to_none
            if not (self._is_left_out or self._is_begun):
                zero_grad(owner, set_to_none)

        return run


def _batch_of_lightning(*args: Any, **kwargs: Any) -> Callable[[], Any] | None:
    """The closure with which Lightning has an optimizer's step compute the gradients of one batch; None of others,
    which may compute them several times."""
    given = next(iter((*args, *kwargs.values())), None)
    inner = getattr(given, "func", given)  # a partial of its precision's
    module = str(getattr(inner, "__module__", None) or type(inner).__module__)
    return given if callable(given) and module.partition(".")[0] in ("pytorch_lightning", "lightning") else None


def _forget_unscaling(optimizer: Any) -> None:
    """Accelerate's optimizer steps its scaler, which raises if gradients are unscaled twice before that."""
    scaler = getattr(optimizer, "scaler", None)
    if scaler is not None:
        with suppress(AssertionError):  # nothing was unscaled
            scaler.update()


def _of_its_part(backward: Callable[..., None]) -> Callable[..., None]:
    """``backward`` for a loss divided by the number of batches."""

    def run(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        backward(loss / 2, *args, **kwargs)

    return run


def _subclasses(kind: Any) -> Iterator[Any]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _releasing(zero_grad: Callable[..., None]) -> Callable[..., None]:
    def run(owner: Any, set_to_none: bool = True) -> None:
        zero_grad(owner, True)

    return run


class FetchedTogether(Change):
    """Transformers' Trainer fetches all batches of a step before the first runs: so many more than without the change.

    Those are copies of the ones that it fetches.
    """

    def __init__(self, times: int) -> None:
        self._times = times

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """Copies of a step's batches stay alive as long as the batches."""
        trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
        if trainer is None or not hasattr(trainer, "get_batch_samples"):  # before transformers 4.46
            yield
            return
        original = trainer.get_batch_samples
        copies: list[Any] = []

        @functools.wraps(original)
        def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
            samples, number = original(*args, **kwargs)
            copies[:] = [_copy_of(samples) for _ in range(self._times - 1)]  # those of the last step live until then
            return samples, number

        with all_patched([(trainer, {"get_batch_samples": get_batch_samples})]):
            yield
        copies.clear()


def _copy_of(batch: Any) -> Any:
    """The tensors of batches, copied, in lists."""
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return [_copy_of(part) for part in parts]


class GatheredOnHost(Change):
    """Transformers' Trainer moves an evaluation's predictions to the host after each batch."""

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """Set ``eval_accumulation_steps`` to 1 during evaluations."""

        def looping(trainer: Any, loop: Callable[[], Any]) -> Any:
            before, trainer.args.eval_accumulation_steps = trainer.args.eval_accumulation_steps, 1
            try:
                return loop()
            finally:
                trainer.args.eval_accumulation_steps = before

        with all_patched(around_evaluations(looping)):
            yield


def around_evaluations(run: Callable[[Any, Callable[[], Any]], Any]) -> Patches:
    """Calls ``run(trainer, loop)`` instead of the loop in which a Trainer evaluates or predicts."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is None:
        return []
    original = trainer.evaluation_loop

    @functools.wraps(original)
    def evaluation_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, functools.partial(original, self, *args, **kwargs))

    return [(trainer, {"evaluation_loop": evaluation_loop})]


class ShorterInputs(Change):
    """The model called with less along one dimension (0: fewer samples, 1: shorter sequences).

    Where calls differ in size, those that are longer than ``after`` are cut to it, too. ``without_gradients``: calls
    with gradients stay as they are.
    """

    def __init__(self, dimension: int, before: int, after: int, *, without_gradients: bool = False) -> None:
        self._without_gradients = without_gradients
        self.dimension = dimension
        self.before = before
        self.after = after

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with each tensor cut along the dimension in which it is as long as this call's inputs."""
        if self._without_gradients and torch.is_grad_enabled():
            return args, kwargs
        tensors = tensors_given(args, kwargs)
        lengths = [tensor.shape[self.dimension] for tensor in tensors if tensor.dim() > self.dimension]
        length = self.before if self.before in lengths else next(iter(lengths), 0)
        return tuple(self._cut(value, length) for value in args), {
            name: self._cut(value, length) for name, value in kwargs.items()
        }

    @contextmanager
    def around_call(self, model: torch.nn.Module) -> Iterator[None]:
        """A model that raises takes inputs of one size only, as one with learnt positions does."""
        try:
            yield
        except RuntimeError:
            if any(True for _ in model.parameters()):  # not a loss, whose other input may be longer
                raise InapplicableError("one_size") from None
            raise

    def _cut(self, value: Any, length: int) -> Any:
        if isinstance(value, MutableMapping):
            made = copy(value)
            made.update({key: self._cut(one, length) for key, one in value.items()})
            return made
        if type(value) in (list, tuple) and any(isinstance(one, MutableMapping) for one in value):
            return type(value)(self._cut(one, length) for one in value)
        if not isinstance(value, torch.Tensor) or value.dim() <= self.dimension:
            return value
        if value.shape[self.dimension] != length or length <= self.after:
            return value
        return value.narrow(self.dimension, 0, self.after)

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """What a Trainer's metrics compare with predictions is as long as those are: the labels come from the data."""

        def looping(trainer: Any, loop: Callable[[], Any]) -> Any:
            before = trainer.compute_metrics
            if before is not None:
                trainer.compute_metrics = lambda prediction, *args, **kwargs: before(
                    _with_labels_cut(prediction), *args, **kwargs
                )
            try:
                return loop()
            finally:
                trainer.compute_metrics = before

        with all_patched(around_evaluations(looping)):
            yield


def _with_labels_cut(prediction: Any) -> Any:
    """An ``EvalPrediction`` with labels cut to the lengths of its predictions."""
    made = prediction.predictions
    shape = getattr(made[0] if isinstance(made, tuple) else made, "shape", ())
    if isinstance(prediction.label_ids, np.ndarray):
        cut = tuple(map(slice, shape[: prediction.label_ids.ndim]))
        prediction.label_ids = prediction.label_ids[cut]
    return prediction


@dataclass(frozen=True)
class EdgesGiven:
    """The argument of a model's call that has a graph's edges: ``place`` is its number or its name.

    They are pairs of nodes, ``[2, edges]`` as PyTorch Geometric has them, or else (``is_matrix``) a sparse matrix.
    """

    place: int | str
    is_matrix: bool


def edges_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> EdgesGiven | None:
    """Which argument the edges are, beside what is given of the nodes; None: none is."""
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    tensors = {place: one for place, one in given if isinstance(one, torch.Tensor) and one.dim()}
    for place, one in tensors.items():
        others = [len(other) for other in tensors.values() if other is not one]
        is_matrix = one.layout is torch.sparse_coo and one.is_coalesced() and one.shape[0] == one.shape[1]
        is_pairs = one.dtype is torch.int64 and one.dim() == 2 and len(one) == 2
        if (is_matrix or is_pairs) and min(others, default=0) >= _LEAST_NODES:
            return EdgesGiven(place, is_matrix)
    return None


class DrawnEdges(Change):
    """A graph network is trained on one in so many of the edges, drawn anew for each step (DropEdge, Rong et al. 2020).

    ``values`` say how many ``parts`` there are.
    """

    def __init__(self, parts: int) -> None:
        self.values = {"parts": parts}

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the edges that are drawn, and what there is of each of them."""
        found = edges_given(args, kwargs) if torch.is_grad_enabled() else None
        if found is None:
            return args, kwargs
        edges = args[found.place] if isinstance(found.place, int) else kwargs[found.place]
        number = (edges.indices() if found.is_matrix else edges).shape[1]
        drawn = torch.randperm(number)[: number // self.values["parts"]]
        drawn = drawn.sort().values if found.is_matrix else drawn

        def draw(value: Any) -> Any:
            if value is edges:
                return _entries(edges, drawn) if found.is_matrix else edges[:, drawn]
            return value[drawn] if isinstance(value, torch.Tensor) and value.shape[:1] == (number,) else value

        return tuple(map(draw, args)), {name: draw(value) for name, value in kwargs.items()}


def _entries(matrix: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        matrix.indices()[:, drawn], matrix.values()[drawn], matrix.shape, is_coalesced=True, check_invariants=False
    )


class DroppedOutputs(Change):
    """A Hugging Face model returns only the loss: the logits are freed before the backward."""

    def result(self, result: Any) -> Any:
        """The loss alone, if the result also has logits."""
        return type(result)(loss=result["loss"]) if has_outputs(result) else result


def has_outputs(result: Any) -> bool:
    """Whether a model returned a loss and its logits."""
    return isinstance(result, dict) and result.get("loss") is not None and result.get("logits") is not None


class BatchesMoved(Change):
    """Data that wait in the host's memory, each batch moved in its turn: only the user's own statements can have it."""

    written_as = "batches_moved"
