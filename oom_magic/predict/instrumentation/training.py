"""Following a training loop: running modules, optimizer steps, and categories of tensors."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from oom_magic.language import _
from oom_magic.memory.categories import Category
from oom_magic.memory.timeline import PHASES, MarkKind, Phase
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.instrumentation.loops import LIKE_STEPS, LOOPS, Loops, Usage
from oom_magic.predict.isolation.context import steps_hooked
from oom_magic.predict.isolation.live_objects import find_live_objects
from oom_magic.predict.isolation.patching import patched
from oom_magic.predict.isolation.run_threads import is_of_run
from oom_magic.predict.progress_bar import ProgressBar
from oom_magic.predict.what_if.change import Change, InapplicableError, Inputs, inputs_of

if TYPE_CHECKING:
    from oom_magic.memory.report import MemoryReport

STEPS_OF_EACH = 2  # optimizer: the first makes its state
MOST_STEPS = 20
MOST_SECONDS = 8
MOST_SECONDS_OF_SLOW_STEPS = 10
SECONDS_WITHOUT_STEPS = 5  # of computing, of a run that took what it is said to take
MOST_SECONDS_WITHOUT_STEPS = 40
FOLLOWING_SECONDS = 10  # of computing after three like steps, or as long as those took
StopAfter = int | Literal["alike"] | None


class Finished(BaseException):
    """Enough optimizer steps were followed."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of an outermost module: how many came before it, the event it began at, its input tensors and its mode.

    A loss is such a module, too, but no model (``is_model``).
    """

    number: int
    position: int
    inputs: Inputs
    is_training: bool
    has_gradients: bool
    is_model: bool

    @property
    def only_evaluates(self) -> bool:
        """Whether the rows of its inputs have nothing to do with one another: no statistics over them, no graph."""
        return not (self.is_training or self.has_gradients)


class Training:
    """The training loop of a dry run: counts steps, categorizes memory, applies ``changes``.

    ``model_calls`` are all calls of outermost modules. ``begins_at``
    is the event of each card from which the run counts, where a change says that the model would be loaded so.
    ``num_calls`` counts the calls of models with gradients since the last optimizer step. ``stop_after_steps`` of them
    end a run (None: its own end does; "alike": loops end after three, and the run with what follows them, for
    ``FOLLOWING_SECONDS`` of computing or as long as the steps took). One that never had ``enough_bytes`` by then goes
    on until it has, for ``MOST_STEPS`` and as many more as ``MOST_SECONDS`` allow, or for
    ``MOST_SECONDS_OF_SLOW_STEPS``; so does, for one of both, one whose
    last step was ``of_a_new_size``: the model was called with gradients as in no step before, and one in which an
    optimizer of a model that ran has not made ``STEPS_OF_EACH``. One that is said to take so much and whose optimizers
    never step is left after ``stop_after_calls`` of outermost modules, or after some time; any without steps after
    ``most_seconds`` of computing. ``leaves_evaluations``:
    loops of like calls without gradients end after three; False once one needed more turns to have ``enough_bytes``.
    """

    def __init__(
        self, gpu: FakeGPU, changes: Sequence[Change], stop_after_steps: StopAfter, has_bar: bool, loops: Loops
    ) -> None:
        self.model_calls: list[ModelCall] = []
        self.begins_at: tuple[int, ...] = ()
        self.num_calls = 0
        self._gpu = gpu
        self._changes = tuple(changes)
        self._errors: dict[Change, InapplicableError | None] = {}
        self._prepared: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.stop_after_steps = stop_after_steps
        self.has_seen_like_steps = False
        self.left_at = 0.0  # seconds of computing
        self._loops = loops
        self._numbers = count()
        self._serials: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.enough_bytes = 0
        self.stop_after_calls: int | None = None
        self.most_seconds = math.inf
        self.leaves_evaluations = True
        self.of_a_new_size = False
        self._sizes_seen: set[Inputs] = set()
        self._num_calls_seen = 0
        self._start = 0.0
        self._steps_of: dict[int, int] = {}
        self._asked_at: list[tuple[int, int]] = []  # by card: events and allocations when ``_usage`` was last asked
        self._has_bar = has_bar
        self._bar: Any = None

    def call_at(self, position: int) -> ModelCall | None:
        """The call of a model that an event belongs to: the last that had begun, if any had."""
        calls = [call for call in self.model_calls if call.is_model]
        first = self.begins_at[0] if self.begins_at else 0
        begun = [call for call in calls if call.position <= position + first]
        return begun[-1] if begun else next(iter(calls), None)

    def fullest_call(self, report: MemoryReport) -> ModelCall | None:
        """Of the calls like the last before a report's peak, in its step: the one after which, up to the next, the
        forward made most of what is alive then. A small call may come last, such as that for a boundary."""
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
        ends = (mark.position for mark in report.timeline.marks if mark.kind is MarkKind.STEP_END)
        ended = max((end for end in ends if end <= position), default=0)
        return [call for call in self.model_calls if call.is_model and ended <= call.position - first <= position]

    @contextmanager
    def followed(self) -> Iterator[None]:
        """While the user's code runs."""
        self._steps_of.clear()
        self._asked_at = []
        self.model_calls.clear()
        self._sizes_seen.clear()
        self._num_calls_seen = 0
        self._start = time.process_time()
        self.num_calls = 0
        self.has_seen_like_steps = False
        self._watch(None)
        with ExitStack() as stack:
            stack.enter_context(patched(torch.nn.Module, {"__call__": self._module_call()}))
            stack.enter_context(self._optimizer_hooks())
            stack.enter_context(self._progress())
            if self.stop_after_steps is not None:
                self._loops.leaves_steps = self.stop_after_steps == "alike"
                stack.enter_context(LOOPS.followed(self._loops))
            yield

    @contextmanager
    def changed(self) -> Iterator[None]:
        """What the changes do around the user's code. They end before the state of PyTorch's core is restored, which
        closes what is still open: a block of autocast that is closed twice would leave the process at -1 blocks."""
        with ExitStack() as stack:
            for change in self._changes:
                stack.enter_context(change.around_run())
            yield

    def check_changes(self) -> None:
        """Raise InapplicableError if a change was possible in none of the models that ran."""
        for error in self._errors.values():
            if error is not None:
                raise error

    def assign_modules(self) -> None:
        """Call what live modules hold parameters and gradients, also where none of them ran.

        A real tensor is not asked for its gradient, which another thread may be writing.
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
        total = self.stop_after_steps if isinstance(self.stop_after_steps, int) else None
        with ProgressBar(total=total, disable=not self._has_bar, **options) as bar:
            self._bar = bar
            try:
                yield
            finally:
                self._bar = None

    def show(self, doing: str) -> None:
        """Say in the bar what takes long now; "" once the steps go on."""
        if self._bar is not None:
            self._bar.set_postfix_str(doing)
            self._bar.delay = 0  # it is on the screen: at its end it is wiped off

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
                result = call(module, *args, **kwargs)
            for change in self._changes if _is_model(module) else ():  # a loss is no model
                result = change.result(result)
            return result

        return __call__

    def _begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The outermost module is about to run."""
        if not self._steps_of and self._was_followed_enough():
            self.leave()
        self.num_calls += torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        self._prepare(module)
        if not torch.is_grad_enabled() and _is_model(module):
            taken = tuple(recorder.allocator.allocated_bytes for recorder in self._gpu.recorders)
            is_enough = self.leaves_evaluations and self._has_enough()
            is_like = self._loops.call(self._serial(module), (taken, inputs_of(args, kwargs)), is_enough)
            self.leaves_evaluations &= is_enough or not is_like
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

    def _was_followed_enough(self) -> bool:
        """Whether a run without an optimizer's step has been followed as far as it is to be."""
        if self.stop_after_calls is not None:
            return len(self.model_calls) >= self.stop_after_calls
        seconds = time.process_time() - self._start
        if not self.enough_bytes or seconds < SECONDS_WITHOUT_STEPS:
            return seconds > self.most_seconds
        return seconds > MOST_SECONDS_WITHOUT_STEPS or self._has_enough()

    def _prepare(self, module: torch.nn.Module) -> None:
        """Make the changes to a model that is about to run first."""
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
            if change.applies_at_load and not self.begins_at:
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
                    if isinstance(value, torch.Tensor):
                        self._gpu.assign(value, Category.OPTIMIZER_STATE)
            self._count_step(optimizer)

        try:
            with steps_hooked(before, after):
                yield
        finally:
            where.in_optimizer = False

    def _count_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step ends when an optimizer has stepped more often than any had before."""
        number = self._steps_of[id(optimizer)] = self._steps_of.get(id(optimizer), 0) + 1
        is_in_loop = self.stop_after_steps == "alike" and self._loops.step(self._serial(optimizer), self._usage())
        if number < max(self._gpu.recorder.step, 1):
            return
        self.num_calls = 0
        self._look_at_sizes()
        self._mark(MarkKind.STEP_END)
        for recorder in self._gpu.recorders:
            recorder.step = number + 1
        self._expect_step()
        if self._bar is not None:
            self._bar.update()
        if self.stop_after_steps == "alike":
            self._after_like_steps(number, is_in_loop)
        elif self.stop_after_steps is not None and number >= self.stop_after_steps and self._has_seen_enough(number):
            self.leave()

    def _look_at_sizes(self) -> None:
        """Record the inputs with which the model was called in the ending step."""
        calls = self.model_calls[self._num_calls_seen :]
        sizes = {call.inputs for call in calls if call.has_gradients and call.is_model}
        self.of_a_new_size = not sizes <= self._sizes_seen
        self._sizes_seen |= sizes
        self._num_calls_seen = len(self.model_calls)

    def _usage(self) -> Usage:
        """Memory in use now, and that since the last call, on all cards."""
        peak = requested = 0
        now = [(len(recorder.allocated), len(recorder.columns)) for recorder in self._gpu.recorders]
        for recorder, (event, number) in zip(self._gpu.recorders, self._asked_at or [(0, 0)] * len(now), strict=True):
            peak += max(recorder.allocated[event:], default=recorder.allocator.allocated_bytes)
            requested += sum(columns[0] for columns in recorder.columns[number:])
        self._asked_at = now
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
            now = time.process_time()
            self.left_at = now + max(FOLLOWING_SECONDS, now - self._start)
            self._watch(self._leave_in_time)

    def _leave_in_time(self) -> None:
        if time.process_time() > self.left_at:
            seconds = max(FOLLOWING_SECONDS, round(self.left_at - self._start) // 2)
            self._gpu.values.assume(
                _(
                    "what follows three like steps was followed for {seconds} s of computing and left here; "
                    "stop_after_steps=None (--steps all) follows it to its end",
                    seconds=seconds,
                )
            )
            self.leave()

    def _watch(self, watch: Callable[[], None] | None) -> None:
        for recorder in self._gpu.recorders:
            recorder.watch = watch

    def _has_seen_enough(self, number: int) -> bool:
        """Whether enough steps were followed, or enough memory was taken in a step like an earlier one."""
        seconds = time.process_time() - self._start
        is_late = seconds > MOST_SECONDS
        if not self._has_enough():
            return (is_late and number >= MOST_STEPS) or seconds > MOST_SECONDS_OF_SLOW_STEPS
        if not self.enough_bytes or is_late or number >= MOST_STEPS:
            return True
        return not (self.of_a_new_size or self._has_one_to_come())

    def _has_enough(self) -> bool:
        """Whether as much memory was taken as the run is said to take at least."""
        taken = max(max(recorder.reserved, default=0) for recorder in self._gpu.recorders) if self.enough_bytes else 0
        return taken >= self.enough_bytes

    def _has_one_to_come(self) -> bool:
        """Whether models that ran have weights whose optimizer has yet to step, as a generator's beside its critic."""
        optimizers = [one for one in find_live_objects().tools if isinstance(one, torch.optim.Optimizer)]
        stepped = {id(one) for one in optimizers if self._steps_of.get(id(one), 0) >= STEPS_OF_EACH}
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
    return next(module.parameters(), None) is not None


def _weights_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """A module's own parameters and buffers; none while it is still being built."""
    own = vars(module)
    tensors = (*own.get("_parameters", {}).values(), *own.get("_buffers", {}).values())
    return [tensor for tensor in tensors if tensor is not None]
