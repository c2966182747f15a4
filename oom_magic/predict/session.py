"""A session of dry runs: ordinary training code for "cuda", executed on a pretend GPU that lasts from run to run."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils.dlpack

from oom_magic.errors import describe_error
from oom_magic.interrupts import collect_garbage
from oom_magic.language import _, load_language
from oom_magic.memory.allocator.caching_allocator import AllocatorOutOfMemory, CachingAllocator
from oom_magic.memory.allocator.replay import failure_message
from oom_magic.memory.report import Assumption, Device, MemoryReport, OutOfMemory
from oom_magic.memory.timeline import Phase, SourceLine, Timeline
from oom_magic.predict.caught_failures import CaughtFailures
from oom_magic.predict.compiled.calls import compile_followed
from oom_magic.predict.fake_cuda import transfers
from oom_magic.predict.fake_cuda.device_view import DeviceView
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.torch_cuda import Cards
from oom_magic.predict.instrumentation.attribution import Attribution
from oom_magic.predict.instrumentation.decided.decided_names import DecidedNames, decided_sentence, undecided_sentence
from oom_magic.predict.instrumentation.loop_code import loops_known
from oom_magic.predict.instrumentation.loops import Loops
from oom_magic.predict.instrumentation.recorder import Recorder
from oom_magic.predict.instrumentation.starting_point import StartingPoint
from oom_magic.predict.instrumentation.stop_rule import Finished, StopAfter, StopRule
from oom_magic.predict.instrumentation.training import Training
from oom_magic.predict.isolation.context import (
    checkpoints_compared_alike,
    checkpoints_ended,
    only_one,
    parametrizations_cached_apart,
)
from oom_magic.predict.isolation.files.effects import isolated
from oom_magic.predict.isolation.files.open_files import compressed_written_out
from oom_magic.predict.isolation.files.substitution import imported_names_followed
from oom_magic.predict.isolation.live_objects import find_live_objects
from oom_magic.predict.isolation.objects.finalizers import Finalizers
from oom_magic.predict.isolation.patching import all_patched
from oom_magic.predict.isolation.process.operators import operators_taken_out
from oom_magic.predict.isolation.process.process_state import process_state_restored
from oom_magic.predict.isolation.process.pytorch_state import pytorch_state_restored
from oom_magic.predict.isolation.process.standard_library import subclasses_taken_out
from oom_magic.predict.isolation.reach import Reach
from oom_magic.predict.isolation.run_threads import RunThreads, of_run
from oom_magic.predict.isolation.tensor_exchange import TensorExchange
from oom_magic.predict.kernels import composed, recurrent
from oom_magic.predict.kernels.rules import kernel_rules
from oom_magic.predict.libraries import libraries_followed
from oom_magic.predict.operators import derivatives, sparse, type_checks
from oom_magic.predict.operators.autocast import Autocast
from oom_magic.predict.operators.known_outputs import KnownOutputs
from oom_magic.predict.operators.known_values import readers
from oom_magic.predict.operators.known_values.values import Values
from oom_magic.predict.operators.registration import cuda_operators
from oom_magic.predict.setups.gpus import GPU
from oom_magic.predict.setups.hardware import Hardware
from oom_magic.predict.torch_patches import torch_patches
from oom_magic.predict.what_if.change import Change, InapplicableError
from oom_magic.user_code import cell_name, source_text

_HANDLERS = {  # operators that the pretend GPU implements itself
    **transfers.HANDLERS,
    **type_checks.HANDLERS,
    **readers.HANDLERS,
    **sparse.HANDLERS,
    **recurrent.HANDLERS,
    **composed.HANDLERS,
    **derivatives.HANDLERS,
}


class DrySession:
    """A pretend GPU that persists: a run finds on it what the session's last run left.

    ``gpu``, ``memory``, ``num_gpus``, ``num_processes``, ``rank``, ``stop_after_steps``: as in ``dry_run``; ``gpu`` may
    also be a card that is not in the catalogue.
    ``is_lasting``: what a run does to the user's objects, such as moving a model to the GPU, holds for the next run.
    ``is_limited``: the card can run out of memory.
    ``keeps_empty``: allocations of no bytes are recorded, too.
    ``has_bar``: a progress bar is shown.
    ``changes``: changes to the model, optimizer or loop that are made to the code.
    ``follows_compile``: what ``torch.compile`` makes is run; else its code is run eagerly.
    ``origin``: start from what was there before the last run of this other session.
    ``start``: start from what was on a real device.
    ``absent``: identities of tensors that are taken not to exist.
    ``known_outputs``: a cache to share with other sessions on the same kind of card.
    ``places``: allocations are attributed to lines and modules.
    """

    def __init__(
        self,
        gpu: str | GPU | None = None,
        memory: str | int | None = None,
        *,
        num_gpus: int = 1,
        num_processes: int | None = None,
        rank: int = 0,
        stop_after_steps: StopAfter = "alike",
        is_lasting: bool = True,
        is_limited: bool = True,
        keeps_empty: bool = False,
        has_bar: bool = True,
        changes: Sequence[Change] = (),
        origin: DrySession | None = None,
        follows_compile: bool = True,
        start: StartingPoint | None = None,
        absent: Collection[int] = frozenset(),
        known_outputs: KnownOutputs | None = None,
        places: bool = True,
    ) -> None:
        self.hardware = hardware = Hardware.of(gpu, memory, num_gpus, num_processes, rank)
        self.gpu = hardware.gpu
        capacity = max(hardware.total_bytes - self.gpu.context_bytes, 0) if is_limited else None
        self.recorders = tuple(
            Recorder(CachingAllocator(capacity, hardware.settings), keeps_empty=keeps_empty)
            for _unused in range(hardware.num_cards)
        )
        self.follows_compile = follows_compile
        self.attribution = Attribution({}, places)
        self.decided: list[DecidedNames] = []  # by the last run
        self._freed_of_failure = ""  # the assumption that ``free_failed_run`` adds to the next run
        self._forget_last_run()
        loops = Loops(lambda text, line, is_part: self._note_assumption(text, line, is_lower_bound=is_part))
        self.known_outputs = known_outputs or KnownOutputs()
        self.fake_gpu = self._make_fake_gpu(loops, origin)
        self.training = Training(self.fake_gpu, changes, StopRule(after_steps=stop_after_steps), has_bar, loops)
        self._exchange: TensorExchange = TensorExchange(
            self.fake_gpu, is_lasting, None if origin is None else origin._exchange, start, absent
        )

    def _make_fake_gpu(self, loops: Loops, origin: DrySession | None) -> FakeGPU:
        rules = kernel_rules(self.gpu)
        fake_gpu = FakeGPU(self.recorders, self.attribution, self.gpu, _HANDLERS, rules, self._fail, self.known_outputs)
        fake_gpu.values = Values(fake_gpu, self.assume, loops.read)
        fake_gpu.job = self.hardware.job
        if origin is not None:
            fake_gpu.process_groups = origin.fake_gpu.process_groups
            fake_gpu.states_left = origin.fake_gpu.states_before
        return fake_gpu

    def _forget_last_run(self) -> None:
        self.report: MemoryReport | None = None
        self.exception: BaseException | None = None
        self._assumptions: dict[Assumption, None] = {}
        self._out_of_memory: OutOfMemory | None = None
        self.caught: CaughtFailures | None = None
        self._allocated_before = [recorder.allocator.allocated_bytes for recorder in self.recorders]

    def assume(self, text: str, is_upper_bound: bool = False, is_lower_bound: bool = False) -> None:
        """Note what could not be followed exactly, with the user's current line."""
        bounds = {"is_upper_bound": is_upper_bound, "is_lower_bound": is_lower_bound}
        self._note_assumption(text, self.attribution.line(), **bounds)

    def _note_assumption(self, text: str, line: SourceLine | None = None, **kind: bool) -> None:
        self._assumptions.setdefault(Assumption(text, line, **kind))

    def _assume_in_users_code(self, text: str) -> None:
        """Note an assumption, unless PyTorch's compiler is running the code by itself."""
        if self.fake_gpu.traces is None:
            self.assume(text)

    def run(
        self,
        function: Callable[[], Any],
        namespaces: Sequence[dict[str, Any]] = (),
        decided: Sequence[DecidedNames] | None = None,
    ) -> MemoryReport:
        """Run ``function`` on the pretend GPU and return the report.

        The function may use the user's modules, optimizers and tensors; they are afterwards as before, and so are the
        global variables in ``namespaces``. ``decided`` are names such as ``device`` whose values were computed without
        a GPU, to be computed again with one (default: found in ``namespaces`` by their source).
        A simulated out-of-memory error is in the report, and in ``exception`` if the session is lasting. The function's
        own exceptions are raised; ``report`` then holds what was traced so far.
        """
        error = ""
        self.decided = DecidedNames.in_all(namespaces, decided)
        if any(recorder.blocks for recorder in self.recorders):
            collect_garbage()  # free garbage on the card before this run, not during it
        self._restart()
        load_language()
        try:
            self._execute(function, namespaces)
            self._note_caught_failure()
        except Finished:
            self._note_caught_failure()
        except torch.OutOfMemoryError as exception:
            if self._out_of_memory is None:
                error = describe_error(exception)
                raise
            if (
                self._exchange.is_lasting
            ):  # its frames lead to a graph that no collector sees, and that leads here: hooks in C++
                self.exception = exception
        except Exception as exception:
            if not self.training.has_seen_like_steps or isinstance(exception, InapplicableError):
                error = describe_error(exception)
                raise
            self._note_assumption(_ended_by(exception))
        except BaseException as exception:
            error = describe_error(exception)
            raise
        finally:
            self.report = self._make_report(error)
        self.training.check_changes()
        return self.report

    def _execute(self, function: Callable[[], Any], namespaces: Sequence[dict[str, Any]]) -> None:
        """Run the user's code on the pretend GPU; an interrupt is raised only in it."""
        interrupts, values = self.fake_gpu.interrupts, self._exchange.context_values
        with (
            interrupts.waiting(),
            self._loops_known(function, namespaces),
            self._active(function, list(namespaces)),
            pytorch_state_restored(),
            checkpoints_ended(),
            self.training.changed(),
        ):
            context, finalizers = values.context(), Finalizers()
            try:
                self._exchange.settings.begin()
                self._decide_again()
                self._exchange.settings.note_decided()
                self.fake_gpu.collector.begin()
                interrupts.users_code(partial(context.run, function))
            finally:
                values.note(context)
                self._exchange.settings.end()
                finalizers.end(closes_generators=not self._exchange.is_lasting)
                self.training.assign_modules()
                for names in self.decided:
                    names.give_back()
                for text in filter(None, (self._freed_of_failure, self.fake_gpu.what_waits())):
                    self._note_assumption(text)
                self._freed_of_failure = ""

    def _loops_known(
        self, function: Callable[[], Any], namespaces: Sequence[dict[str, Any]]
    ) -> AbstractContextManager[None]:
        return nullcontext() if self.training.stop_rule.after_steps is None else loops_known(function, namespaces)

    def copy(self, **options: Any) -> DrySession:
        """A session on the same hardware that starts from what was there before this one's last run.

        Without other ``options`` its card has no limit, it leaves the user's objects as they are and shows no progress.
        """
        defaults = {"is_lasting": False, "is_limited": False, "has_bar": False, "origin": self}
        options = {
            **self.hardware.options,
            "stop_after_steps": self.training.stop_rule.after_steps,
            **defaults,
            **options,
        }
        return DrySession(self.gpu.name, self.hardware.total_bytes, **options)

    def free_failed_run(self, names: Mapping[str, Any]) -> None:
        """If the last run failed, free what it allocated and only its error still refers to, not ``names``.

        On a real card that stays until the next error or ``%oom_free``. But the run was not real: a cell with a smaller
        batch is to start from where the failed one started.
        """
        if self.report is None or not (self.report.error or self.report.out_of_memory):
            return
        reach = Reach()
        reach.walk(names.values())
        tensors = [tensor for tensor in find_live_objects().tensors if tensor in reach]
        storages = [self.fake_gpu.storage_of(self._exchange.template(tensor)) for tensor in tensors]
        num_bytes = self.fake_gpu.free_made({storage.key for storage in storages if storage is not None})
        if not num_bytes:
            return
        self._freed_of_failure = _(
            "{num_bytes} held only by the error of the last run is not counted; on a GPU, %oom_free frees it",
            num_bytes=num_bytes,
        )
        for recorder in self.recorders:
            recorder.empty_cache()

    @property
    def start_of_run(self) -> StartingPoint | None:
        """What the last run found of what earlier ones made; None: they made nothing."""
        return self._exchange.start_of_run

    @property
    def names_read(self) -> frozenset[str]:
        """The variables that the code of the next run reads: what earlier ones put there is told if not kept."""
        return self._exchange.contents.names_read

    @names_read.setter
    def names_read(self, names: frozenset[str]) -> None:
        self._exchange.contents.names_read = names

    def storage_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Identity and bytes of a tensor's storage on the pretend GPU, or of its fake copy's; None if there is none."""
        found = self.fake_gpu.storage_of(self._exchange.template(tensor))
        return None if found is None or found.allocation < 0 else (found.key, found.num_bytes)

    @property
    def found_memory(self) -> bool:
        """Whether anything was on the pretend GPU before the last run."""
        return any(recorder.num_before for recorder in self.recorders)

    def was_there_before(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, or its fake copy, was on the pretend GPU before the last run."""
        return self.fake_gpu.was_there_before(self._exchange.template(tensor))

    def _decide_again(self) -> None:
        """Compute names again that were computed without a GPU; tensors moved by them count as there before the run."""
        if sum(names.follow(self._exchange.is_exchanged) for names in self.decided):
            self._restart()
            self._note_assumption(decided_sentence(self.decided))
        undecided = [name for names in self.decided for name in names.undecided]
        if undecided:
            self._note_assumption(undecided_sentence(undecided))

    def _note_caught_failure(self) -> None:
        """Drop a simulated out-of-memory error that the code caught: the report is of a run that went on."""
        if self._out_of_memory is not None:
            found, self._out_of_memory = self._out_of_memory, None
            text = _(
                "{requested_bytes} did not fit once; the code caught the error and continued",
                requested_bytes=found.requested_bytes,
            )
            self._note_assumption(text, found.line)

    def _restart(self) -> None:
        self.fake_gpu.restart()
        self.attribution.begin()
        self.fake_gpu.job = self.hardware.job
        self._forget_last_run()

    def _make_report(self, error: str) -> MemoryReport:
        cards: Sequence[int] = range(len(self.recorders))
        job = self.fake_gpu.job  # also for processes that the code started itself
        if job is not None:  # the machine has a card for each process; this one uses its own
            cards = [card for card in cards if self.recorders[card].columns] or [job.rank]
        return MemoryReport.of_cards([self._report_of(card, error) for card in cards])

    def _report_of(self, card: int, error: str) -> MemoryReport:
        recorder, begins_at = self.recorders[card], self.training.begins_at
        job = self.fake_gpu.job
        has_context = bool(recorder.columns) or len(self.recorders) == 1  # CUDA makes it on cards that are used
        device = Device(
            self.gpu.name,
            self.hardware.total_bytes,
            self.gpu.context_bytes if has_context else 0,
            capability=self.gpu.capability,
            index=card,
            context_range=self.gpu.context_range if has_context else None,
            rank=None if job is None else (job.rank, job.num_processes),
        )
        timeline, is_whole = self._with_later_turns(recorder.timeline(), card)
        failed = self._out_of_memory
        has_failed = failed is not None and failed.device_index == card
        if failed is not None and not has_failed:
            error = f"OutOfMemoryError on cuda:{failed.device_index}"
        return MemoryReport.from_timeline(
            timeline.since(begins_at[card]) if begins_at else timeline,
            device,
            settings=self.hardware.settings,
            replayed=None if begins_at or not is_whole else recorder.replayed(),
            transient=() if begins_at else tuple(recorder.transient.items()),
            freed_late=() if begins_at else tuple(sorted(recorder.freed_late)),
            kept_bytes=recorder.allocator.allocated_bytes - self._allocated_before[card],
            out_of_memory=failed if has_failed else None,
            assumptions=tuple(self._assumptions),
            torch_version=torch.__version__,
            error=error,
        )

    def _with_later_turns(self, timeline: Timeline, card: int) -> tuple[Timeline, bool]:
        """A card's timeline with the turns of a loop that was left without training, or behind it, and whether it had
        them all."""
        loop = self.training.turns.left
        if loop is None:
            return timeline, True
        later, is_behind = loop.continued(timeline, card), timeline.num_steps() > 0
        if later is timeline or (later is None and is_behind and not loop.is_rising(timeline, card)):
            return timeline, True
        line = None if loop.line is None else SourceLine(cell_name(loop.line[0]), loop.line[1], source_text(*loop.line))
        if later is None:
            text = _(
                "only the first {num_turns} iterations of this loop were followed; what later ones take is not known",
                num_turns=loop.num_turns,
            )
        else:
            text = _(
                "the first {num_turns} iterations of this loop were followed; the other {num_left} were taken to go on"
                " like the last ones, with sizes that grow on as theirs did; what comes after the loop was not"
                " followed",
                num_turns=loop.num_turns,
                num_left=loop.num_left,
            )
        # What collects behind a training is used behind its loop, too, which nothing has followed.
        self._note_assumption(text, line, is_lower_bound=later is None or is_behind)
        return later or timeline, later is None

    @contextmanager
    def _active(self, function: Callable[[], Any], namespaces: list[dict[str, Any]]) -> Iterator[None]:
        """All patches and modes of the pretend GPU, inside the block."""
        autocast = self.fake_gpu.autocast = Autocast(self.fake_gpu)
        with ExitStack() as stack:
            stack.enter_context(only_one())
            stack.enter_context(of_run())
            stack.enter_context(self.fake_gpu.collector.active())
            stack.enter_context(process_state_restored())
            if self.hardware.job is not None:
                self.hardware.job.set_environment()
            write_out = compressed_written_out()
            above = [names.above for names in self.decided]
            stack.enter_context(self._exchange.exchanged(function, namespaces, self._note_assumption, above))
            isolation = stack.enter_context(isolated(self._assume_in_users_code, namespaces, function))
            stack.callback(write_out)  # what the run compressed is discarded with the restored file
            cards = Cards(self.fake_gpu, self.hardware.total_bytes, self.gpu.context_bytes)
            view = DeviceView(self.fake_gpu)
            stack.enter_context(all_patched(torch_patches(cards, view, self.assume)))
            stack.enter_context(checkpoints_compared_alike())
            stack.enter_context(cuda_operators(self.fake_gpu, self.gpu, autocast))
            for apart in (operators_taken_out, subclasses_taken_out, parametrizations_cached_apart):
                stack.enter_context(apart())
            stack.enter_context(self.training.followed())
            note = self.training.turns.note_calls_left
            stack.enter_context(libraries_followed(self.fake_gpu, self.assume, isolation, note))
            stack.enter_context(compile_followed(self.fake_gpu, self.assume, self.training.show, self.follows_compile))
            threads = RunThreads(self._on_thread, (Finished, torch.OutOfMemoryError), self._assume_in_users_code)
            stack.enter_context(all_patched(threads.patches()))
            stack.enter_context(threads.queues_watched())
            stack.enter_context(imported_names_followed(namespaces, self._exchange.functions_held))
            stack.enter_context(view)
            stack.enter_context(self.fake_gpu)
            stack.callback(self._exchange.end_copies, self._note_assumption)
            try:
                yield
            finally:
                threads.wait()
                self.fake_gpu.ending = Finished
                threads.end()
            for error in threads.ended_by:
                raise error

    @contextmanager
    def _on_thread(self) -> Iterator[None]:
        """The pretend GPU on a thread that the user's code starts."""
        self.fake_gpu.lock = self.fake_gpu.lock or threading.RLock()
        with DeviceView(self.fake_gpu), self.fake_gpu:
            try:
                yield
            except Finished:
                self.fake_gpu.ending = Finished  # on all threads
                raise

    def limit_where_caught(self, capacity_bytes: int, cell: ast.Module, most: int | None = None) -> None:
        """To be called in a run: from here on its cards run out of memory only where ``CaughtFailures`` says."""
        self.caught = CaughtFailures(self.fake_gpu, self.training.begin_anew, capacity_bytes, cell, most)

    def _fail(self, error: AllocatorOutOfMemory, operator: str, phase: Phase) -> BaseException | None:
        card = self.fake_gpu.current
        limit = self.recorders[card].allocator.limit_bytes
        message = failure_message(error, self.hardware.total_bytes, self.gpu.context_bytes, limit, card)
        if self.caught is not None:
            return torch.OutOfMemoryError(message) if self.caught.goes_on(DrySession._execute.__code__) else None
        self.training.assign_modules()
        self._out_of_memory = OutOfMemory(
            message=message,
            requested_bytes=error.segment_bytes,
            tensor_bytes=error.requested_bytes,
            step=self.recorders[card].step,
            phase=phase,
            operator=operator,
            line=self.attribution.line() or SourceLine("", 0),
            module=self.attribution.module(phase),
            num_calls=self.training.num_calls,
            device_index=card,
        )
        return torch.OutOfMemoryError(message)


def _ended_by(exception: Exception) -> str:
    """The assumption of a run that failed after its three like steps."""
    return _(
        "the code after the steps was followed up to an error that unknown values may have caused: {error}",
        error=describe_error(exception),
    )
