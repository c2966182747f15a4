"""Following a training loop: running modules, optimizer steps, and categories of tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from oom_magic.computing_time import computing_seconds
from oom_magic.half_built import is_built
from oom_magic.language import _
from oom_magic.memory.allocator.replay import replay
from oom_magic.memory.categories import Category
from oom_magic.memory.timeline import PHASES, MarkKind, Phase
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.instrumentation import stop_rule
from oom_magic.predict.instrumentation.loops import LIKE_STEPS, LOOPS, Loops, Usage
from oom_magic.predict.instrumentation.stop_rule import Finished, StopRule, Turns
from oom_magic.predict.isolation.context import steps_hooked
from oom_magic.predict.isolation.live_objects import find_live_objects
from oom_magic.predict.isolation.patching import patched
from oom_magic.predict.isolation.run_threads import is_of_run
from oom_magic.predict.progress_bar import ProgressBar
from oom_magic.predict.what_if.change import Change, InapplicableError, Inputs, inputs_of

if TYPE_CHECKING:
    from oom_magic.memory.report import MemoryReport


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of an outermost module.

    ``number`` counts such calls from 0, ``position`` is the event of the recorder at which it began. A loss function
    that is a module is called, too, but has no parameters and is no model.
    """

    number: int
    position: int
    inputs: Inputs
    is_training: bool
    has_gradients: bool
    is_model: bool

    @property
    def only_evaluates(self) -> bool:
        """Whether the rows of its inputs are independent: no batch statistics, no graph."""
        return not (self.is_training or self.has_gradients)


class Training:
    """The training loop of a dry run: counts steps, categorizes memory, applies ``changes``, ends by ``stop_rule``."""

    def __init__(
        self, gpu: FakeGPU, changes: Sequence[Change], stop_rule: StopRule, has_bar: bool, loops: Loops
    ) -> None:
        self.stop_rule = stop_rule
        self.model_calls: list[ModelCall] = []
        self.num_calls = 0  # of models with gradients, since the last optimizer step
        self.begins_at: tuple[int, ...] = ()  # by card: the event where the run begins, if a change applies at loading
        self._began_anew = False
        self.has_seen_like_steps = False
        self.has_new_sizes = False  # in the last step a model was called with inputs of a size not seen before
        self._gpu = gpu
        self._loops = loops
        self._changes = tuple(changes)
        self._errors: dict[Change, InapplicableError | None] = {}
        self._prepared: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # models the changes were made to
        self._numbers = count()
        self._serials: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.sizes_differ = False  # between steps: in one a model was called with inputs of other sizes than before
        self._sizes_seen: set[Inputs] = set()
        self._num_calls_seen = 0
        self.turns = Turns(loops)
        self._start, self._deadline = 0.0, 0.0  # seconds of computing
        self._num_steps: dict[int, int] = {}  # by identity of the optimizer
        self._usage_at: list[tuple[int, int]] = []  # by card: events and allocations at the last call of ``_usage``
        self._alike: tuple[Usage | None, int] = None, 0  # the last step's usage, and how many steps had the same
        self._has_bar = has_bar
        self._bar: Any = None

    def call_at(self, position: int) -> ModelCall | None:
        """The call of a model that an event belongs to: the last that began before it, or else the first."""
        calls = [call for call in self.model_calls if call.is_model]
        first = self.begins_at[0] if self.begins_at else 0
        begun = [call for call in calls if call.position <= position + first]
        return begun[-1] if begun else next(iter(calls), None)

    def fullest_call(self, report: MemoryReport) -> ModelCall | None:
        """The call that made most of what is alive at a report's peak, of those in its step with the last one's mode.

        The last call itself may be a small one, such as that for a boundary condition.
        """
        position = report.peak_position
        last, first = self.call_at(position), self.begins_at[0] if self.begins_at else 0
        if last is None:
            return None
        timeline, phase = report.timeline, PHASES.index(Phase.FORWARD)
        calls = self.calls_of_peak(report)
        begun = np.array([call.position - first for call in calls])
        live = timeline.live_at(position)
        live = live[timeline.phase[live] == phase]
        made_after = np.searchsorted(begun, np.flatnonzero(timeline.order >= 0)[live], side="right")
        alive = np.bincount(made_after, timeline.requested_bytes[live], len(calls) + 1)[1:]
        mode = last.is_training, last.has_gradients
        alike = [at for at, call in enumerate(calls) if (call.is_training, call.has_gradients) == mode]
        return calls[max(reversed(alike), key=lambda at: alive[at])] if alike else last

    def calls_of_peak(self, report: MemoryReport) -> list[ModelCall]:
        """The calls of models in the step of a report's peak, up to it."""
        position, first = report.peak_position, self.begins_at[0] if self.begins_at else 0
        ends = report.timeline.positions(MarkKind.STEP_END)
        ended = max((end for end in ends if end <= position), default=0)
        return [call for call in self.model_calls if call.is_model and ended <= call.position - first <= position]

    def calls_beside(self, report: MemoryReport, fullest: ModelCall | None) -> list[ModelCall]:
        """The calls with gradients in the step of a report's peak; where ``fullest`` has none, as a reference between
        the forward and the backward of what is trained, those whose backward is still to come."""
        calls = [call for call in self.calls_of_peak(report) if call.has_gradients]
        if fullest is None or fullest.has_gradients:
            return calls
        timeline, first = report.timeline, self.begins_at[0] if self.begins_at else 0
        made = np.flatnonzero(timeline.order[: report.peak_position + 1] >= 0)
        walked = made[timeline.phase[timeline.order[made]] == PHASES.index(Phase.BACKWARD)]
        return [call for call in calls if call.position - first > walked.max(initial=-1)]

    def evaluates_between(self, report: MemoryReport) -> bool:
        """Whether a model was called in evaluation mode before a report's peak, which is not in one of the first
        steps: that many had to be followed to see what an evaluation between them takes."""
        first, peak = self.begins_at[0] if self.begins_at else 0, report.peak_position
        num_ended = sum(end <= peak for end in report.timeline.positions(MarkKind.STEP_END))
        calls = (call for call in self.model_calls if call.is_model and not call.is_training)
        return num_ended >= LIKE_STEPS and any(call.position - first <= peak for call in calls)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the training loop while the user's code runs in the block."""
        self._forget_steps()
        self._watch(None)
        with ExitStack() as stack:
            stack.enter_context(patched(torch.nn.Module, {"__call__": self._module_call()}))
            stack.enter_context(self._optimizer_hooks())
            stack.enter_context(self._progress())
            if self.stop_rule.after_steps is not None:
                self._loops.leaves_steps = self.stop_rule.after_steps == "alike"
                stack.enter_context(LOOPS.followed(self._loops))
            yield

    def _forget_steps(self) -> None:
        """Count steps and calls from here on."""
        self._num_steps.clear()
        self._usage_at = []
        self._alike = None, 0
        self.model_calls.clear()
        self._sizes_seen.clear()
        self.sizes_differ = False
        self._num_calls_seen = 0
        self.turns.clear()
        self._start = computing_seconds()
        self.num_calls = 0
        self.has_seen_like_steps = False

    def begin_anew(self) -> None:
        """The run that counts begins here: what was tried before has failed, and the code goes on."""
        self._forget_steps()
        self.begins_at = tuple(len(recorder.order) for recorder in self._gpu.recorders)
        self._began_anew = True
        for recorder in self._gpu.recorders:
            recorder.step = 0
            recorder.marks.clear()

    @contextmanager
    def changed(self) -> Iterator[None]:
        """What the changes do around the user's code.

        To be left before the state of PyTorch's core is restored, which closes what is still open: a block of autocast
        that is closed twice would leave the process at -1 blocks.
        """
        with ExitStack() as stack:
            for change in self._changes:
                stack.enter_context(change.around_run())
            yield

    def check_changes(self) -> None:
        """Raise InapplicableError if a change applied to none of the models that ran."""
        for error in self._errors.values():
            if error is not None:
                raise error

    def assign_modules(self) -> None:
        """Categorize what live modules hold as parameters and gradients, whether they ran or not.

        The gradient of a real tensor is not read: another thread may be writing it.
        """
        for module in find_live_objects().modules:
            for tensor in filter(self._gpu.storage_of, _weights_of(module)):
                self._gpu.assign(tensor, Category.PARAMETER)
                if isinstance(tensor, torch.nn.Parameter) and tensor.grad is not None:
                    self._gpu.assign(tensor.grad, Category.GRADIENT)

    @contextmanager
    def _progress(self) -> Iterator[None]:
        """A bar over the optimizer steps, for runs of more than two seconds."""
        self._expect_step()
        options: dict[str, Any] = {"desc": "dry run", "unit": "step", "delay": 2, "leave": False}
        total = self.stop_rule.after_steps if isinstance(self.stop_rule.after_steps, int) else None
        with ProgressBar(total=total, disable=not self._has_bar, **options) as bar:
            self._bar = bar
            try:
                yield
            finally:
                self._bar = None

    def show(self, activity: str) -> None:
        """Show in the progress bar what takes long now; "" removes it."""
        if self._bar is not None:
            self._bar.set_postfix_str(activity)
            self._bar.delay = 0  # the bar is on the screen now, so it must be wiped off at its end

    def _module_call(self) -> Callable[..., Any]:
        call = torch.nn.Module.__call__
        where = self._gpu.attribution

        def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if where.modules or torch._C._current_graph_task_id() != -1:
                with where.inside(module):
                    return call(module, *args, **kwargs)
            self._begin(module, args, kwargs)
            with ExitStack() as stack:
                for change in self._changes:
                    args, kwargs = change.arguments(args, kwargs)
                    stack.enter_context(change.around_call(module))
                stack.enter_context(where.inside(module))
                for recorder in () if torch.is_grad_enabled() else self._gpu.recorders:
                    stack.enter_context(recorder.without_graph())
                result = call(module, *args, **kwargs)
            for change in self._changes if _is_model(module) else ():  # a loss is no model
                result = change.result(result)
            return result

        return __call__

    def _begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The outermost module is about to run."""
        if not self._num_steps or self.has_seen_like_steps:
            self.turns.begin(tuple(len(recorder.order) for recorder in self._gpu.recorders))
        if not self._num_steps and self.stop_rule.is_met_without_steps(
            len(self.model_calls), self._seconds(), self._has_enough, self._will_have_enough
        ):
            self.turns.leave()
            self.leave()
        self.num_calls += torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        self._prepare(module)
        if not torch.is_grad_enabled() and _is_model(module):
            taken = tuple(recorder.live_bytes for recorder in self._gpu.recorders)
            is_enough = self.stop_rule.leaves_evaluations and self._has_enough()
            is_like = self._loops.call(self._serial(module), (taken, inputs_of(args, kwargs)), is_enough)
            self.stop_rule.leaves_evaluations &= is_enough or not is_like
        self._gpu.num_noted += 3  # the call, its inputs, and the shape of one
        self.model_calls.append(
            ModelCall(
                len(self.model_calls),
                len(self._gpu.recorder.order),
                inputs_of(args, kwargs),
                getattr(module, "training", False),  # one of TorchScript that is frozen has none
                torch.is_grad_enabled(),
                _is_model(module),
            )
        )
        for tensor in (*module.parameters(), *module.buffers()):
            self._gpu.assign(tensor, Category.PARAMETER)
        for recorder in self._gpu.recorders:
            recorder.step = max(recorder.step, 1)

    def _prepare(self, module: torch.nn.Module) -> None:
        """Make the changes to a model that runs for the first time."""
        if module in self._prepared or not _is_model(module):
            return
        self._prepared.add(module)
        for change in self._changes:
            self._try(change, module)

    def _try(self, change: Change, module: torch.nn.Module) -> None:
        try:
            change.check(module)
            change.prepare(module)
            self._errors[change] = None
            if change.applies_at_load and (not self.begins_at or self._began_anew):
                self._began_anew = False
                self.begins_at = tuple(len(recorder.order) for recorder in self._gpu.recorders)
        except InapplicableError as error:
            self._errors.setdefault(change, error.with_traceback(None))  # its frames hold the outputs

    @contextmanager
    def _optimizer_hooks(self) -> Iterator[None]:
        where = self._gpu.attribution

        def before(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            if not is_of_run():
                return
            where.in_optimizer = True
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._gpu.assign(parameter, Category.PARAMETER)
                    if parameter.grad is not None:
                        self._gpu.assign(parameter.grad, Category.GRADIENT)

        def after(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            if not is_of_run():
                return
            where.in_optimizer = False
            for state in optimizer.state.values():
                for value in state.values():
                    for one in value if isinstance(value, list) else (value,):  # a list: the history of LBFGS
                        if isinstance(one, torch.Tensor):
                            self._gpu.assign(one, Category.OPTIMIZER_STATE)
            self._count_step(optimizer)

        try:
            with steps_hooked(before, after):
                yield
        finally:
            where.in_optimizer = False

    def _count_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step ends when an optimizer has stepped more often than any had before."""
        number = self._num_steps[id(optimizer)] = self._num_steps.get(id(optimizer), 0) + 1
        is_alike = self.stop_rule.after_steps == "alike"
        is_in_loop = is_alike and self._loops.step(self._serial(optimizer), self._usage())
        if number < max(self._gpu.recorder.step, 1):
            return
        self.num_calls = 0
        self._note_input_sizes()
        self._mark(MarkKind.STEP_END)
        for recorder in self._gpu.recorders:
            recorder.step = number + 1
        self._expect_step()
        if self._bar is not None:
            self._bar.update()
        if is_alike:
            self._after_like_steps(number, is_in_loop)
        elif self.stop_rule.is_met_by_step(
            number, self._seconds(), self._count_alike(), self._has_enough(), self._may_grow
        ):
            self.leave()

    def _count_alike(self) -> int:
        """How many steps up to this one took the same, where that may end the run."""
        if self.stop_rule.leaves_like_steps:
            usage = self._usage()
            self._alike = usage, self._alike[1] + 1 if usage == self._alike[0] else 1
        return self._alike[1]

    def _note_input_sizes(self) -> None:
        """Note the sizes of inputs with which models were called in the step that ends."""
        calls = self.model_calls[self._num_calls_seen :]
        sizes = {call.inputs for call in calls if call.has_gradients and call.is_model}
        self.has_new_sizes = not sizes <= self._sizes_seen
        self.sizes_differ |= self.has_new_sizes and bool(self._sizes_seen)
        self._sizes_seen |= sizes
        self._num_calls_seen = len(self.model_calls)

    def _usage(self) -> Usage:
        """Memory in use now, and that since the last call, on all cards."""
        peak = requested = 0
        now = [(len(recorder.allocated), len(recorder.columns)) for recorder in self._gpu.recorders]
        for recorder, (event, number) in zip(self._gpu.recorders, self._usage_at or [(0, 0)] * len(now), strict=True):
            peak += max(recorder.allocated[event:], default=recorder.allocator.allocated_bytes)
            requested += sum(columns[0] for columns in recorder.columns[number:])
        self._usage_at = now
        return Usage(sum(recorder.allocator.allocated_bytes for recorder in self._gpu.recorders), peak, requested)

    def _serial(self, owner: Any) -> int:
        """A serial number of an optimizer or a module: a later one may have the same address."""
        return self._serials.setdefault(owner, next(self._numbers))

    def leave(self) -> None:
        """End the run here, though the user's code would go on."""
        self._watch(None)
        self._mark(MarkKind.LEFT)
        raise Finished

    def _after_like_steps(self, number: int, is_in_loop: bool) -> None:
        """With the third step a loop ends and the run goes on; without a loop that can end, the run ends."""
        if number >= LIKE_STEPS and not self.has_seen_like_steps:
            if not is_in_loop:
                self.leave()
            self.has_seen_like_steps = True
            self.turns.clear()
            self._deadline = computing_seconds() + max(stop_rule.FOLLOWING_SECONDS, self._seconds())
            self._watch(self._leave_in_time)

    def _leave_in_time(self) -> None:
        if computing_seconds() > self._deadline:
            seconds = max(stop_rule.FOLLOWING_SECONDS, round(self._deadline - self._start) // 2)
            self._gpu.values.assume(
                _(
                    "the code after three similar steps was followed for {seconds} s of compute time and then"
                    " skipped; stop_after_steps=None (--steps all) follows it to the end",
                    seconds=seconds,
                )
            )
            if self.turns.have_begun:
                self.turns.leave()
            self.leave()

    def _watch(self, watch: Callable[[], None] | None) -> None:
        for recorder in self._gpu.recorders:
            recorder.watch = watch

    def _seconds(self) -> float:
        """Seconds of computing since the run began."""
        return computing_seconds() - self._start

    def _has_enough(self) -> bool:
        """Whether the run has reserved as much memory as it is known to."""
        enough, recorders = self.stop_rule.enough_bytes, self._gpu.recorders
        firsts = self.begins_at or (0,) * len(recorders)
        reserved = (one.reserved[first:] for one, first in zip(recorders, firsts, strict=True))
        return not enough or max(max(one, default=0) for one in reserved) >= enough

    def _will_have_enough(self) -> bool:
        """Whether the loop that runs is known to reserve so much, with the turns that are still to come."""
        loop = self.turns.under_way()
        later = [loop.continued(recorder.timeline(), card) for card, recorder in enumerate(self._gpu.recorders)]
        enough = self.stop_rule.enough_bytes
        return any(one is not None and replay(one).peak_reserved_bytes >= enough for one in later)

    def _may_grow(self) -> bool:
        """Whether later steps may need more: inputs have new sizes, or an optimizer's state is still to be made."""
        return self.has_new_sizes or self._awaits_optimizer()

    def _awaits_optimizer(self) -> bool:
        """Whether models that ran have weights whose optimizer has yet to step, as a generator's beside its critic."""
        optimizers = [
            one for one in find_live_objects().tools if isinstance(one, torch.optim.Optimizer) and is_built(one)
        ]
        least = stop_rule.STEPS_OF_EACH_OPTIMIZER
        stepped = {id(one) for one in optimizers if self._num_steps.get(id(one), 0) >= least}
        weights: dict[bool, set[int]] = {True: set(), False: set()}
        for one in optimizers:
            weights[id(one) in stepped].update(id(weight) for group in one.param_groups for weight in group["params"])
        ran = {id(weight) for module in self._prepared for weight in module.parameters()}
        return bool(weights[False] & ran - weights[True])

    def _mark(self, kind: MarkKind) -> None:
        for recorder in self._gpu.recorders:
            recorder.mark(kind)

    def _expect_step(self) -> None:
        for recorder in self._gpu.recorders:
            recorder.expect_step()


def _is_model(module: torch.nn.Module) -> bool:
    return next(iter(module.parameters()), None) is not None  # a class of the user's may return a list


def _weights_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """A module's own parameters and buffers; none while it is still being built."""
    own = vars(module)
    tensors = (*own.get("_parameters", {}).values(), *own.get("_buffers", {}).values())
    return [tensor for tensor in tensors if tensor is not None]
