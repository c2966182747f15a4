"""The pretend GPU: operators on tensors without data, whose memory is taken from the simulated allocator.

This mode sees every operator below autograd, on any build of PyTorch, and notes each new storage and its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunction  # type: ignore[attr-defined]
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from oom_magic.interrupts import Interrupts
from oom_magic.language import _
from oom_magic.memory.allocator.caching_allocator import AllocatorOutOfMemory
from oom_magic.memory.timeline import Phase
from oom_magic.predict.fake_cuda.fake_memory import FakeMemory
from oom_magic.predict.fake_cuda.operator_table import Operator, OperatorTable, Rule
from oom_magic.predict.fake_cuda.places import (
    META,
    Handler,
    Location,
    Place,
    is_large,
    map_tensors,
    tensors_in,
    tensors_written,
    to_meta,
)
from oom_magic.predict.fake_cuda.streams import Threads
from oom_magic.predict.instrumentation.attribution import Attribution
from oom_magic.predict.instrumentation.autograd_order import number_when_made
from oom_magic.predict.instrumentation.collector import Collector
from oom_magic.predict.instrumentation.recorder import Recorder
from oom_magic.predict.operators.calls import Call
from oom_magic.predict.operators.fallbacks import find_fallback, is_wrapper, storage_under
from oom_magic.predict.operators.gradients import reference_counts_in_autograd, reused_gradient
from oom_magic.predict.operators.known_outputs import KnownOutputs
from oom_magic.predict.operators.sparse import is_sparse, run_sparse
from oom_magic.predict.operators.type_checks import QUANTIZED, quantized_on_host
from oom_magic.predict.setups.gpus import GPU

if TYPE_CHECKING:
    from oom_magic.predict.distributed.world import World
    from oom_magic.predict.operators.autocast import Autocast
    from oom_magic.predict.setups.hardware import Job
_aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_WITH_HOST_LENGTHS = {
    _aten._pack_padded_sequence.default,
    _aten._ctc_loss.Tensor,
    _aten._ctc_loss_backward.Tensor,
}
_TWO_DEVICES = (
    "Expected all tensors to be on the same device, but found at least two devices, {} and {}! "
    "(when checking arguments for {})"
)


class FakeGPU(FakeMemory, TorchDispatchMode):
    """The dispatch mode. ``handlers`` run instead of an operator; ``rules`` say how CUDA's takes memory."""

    autocast: Autocast
    # What the last run left in a library's singletons, with what was there before it; the same of the run before.
    states_left: dict[str, tuple[dict[str, Any], dict[str, Any]]]
    states_before: dict[str, tuple[dict[str, Any], dict[str, Any]]]

    def __init__(
        self,
        recorders: Sequence[Recorder],
        attribution: Attribution,
        card: GPU,
        handlers: Mapping[OpOverload, Handler],
        rules: Mapping[OpOverload, Rule],
        fail: Callable[[AllocatorOutOfMemory, str, Phase], BaseException | None],
        known_outputs: KnownOutputs,
    ) -> None:
        super().__init__(recorders, attribution, fail)
        self.card = card
        self.operators = OperatorTable(handlers, rules)
        self.kernels: dict[OpOverload, Callable[..., Any]] = {}  # for inference mode, which bypasses autograd
        self.threads = Threads()
        self.background_streams: dict[int, Any] = {}  # of nn.DataParallel, by card
        self.job: Job | None = None  # of which this is one process
        self.process_groups: World | None = None  # objects that code made on it, kept between runs
        self.states_left = self.states_before = {}
        self.has_compiled = self.has_sparse = False  # whether this run compiled anything, or has a sparse tensor
        self.tried_convolutions: set[Hashable] = set()  # for which cuDNN has found the fastest algorithm
        self.timed: dict[str, Any] = {}  # what Inductor timed, by its keys
        self.triton_kernels: dict[str, Any] = {}  # that it loaded, by their source
        self.collector = Collector(self._num_containers, self._on_collected)
        self.num_noted = 0  # Python containers made to follow the training loop
        self.lock: threading.RLock | None = None  # once the user's code has started threads
        self.ending: type[BaseException] | None = None  # raised by threads of the run at their next operator
        self.interrupts = Interrupts(FakeGPU._handle, FakeGPU._forget)
        self._known_outputs = known_outputs
        self._in_place: OpOverload | None = None
        self._cards_of_nodes: dict[int, int] = {}  # by autograd's sequence number
        self._gradients_come: dict[tuple[int, int], list[int]] = {}  # their bytes, by backward and card
        self._is_inside = False  # an operator, by which others are run
        self._depth = 0  # modes on the stack, with this one
        self._has_watcher = False  # a mode of the user's around the backward that runs
        reference_counts_in_autograd()  # looked up now, before the modes are on

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: ``Compilation`` keeps Dynamo out of this mode, without a wrapper around each operator."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: while ``torch.compile`` compiles this mode is off, and what was compiled runs under it."""
        return True

    def __enter__(self) -> FakeGPU:
        """Modes that are entered later are the user's."""
        super().__enter__()
        if not self._is_inside:
            self._depth = torch._C._len_torch_dispatch_stack()  # type: ignore[attr-defined]
        return self

    @property
    def is_watched(self) -> bool:
        """Whether a dispatch mode of the user's code sees each operator: PyTorch then makes a new tensor where it else
        would write into one (aten/src/ATen/TensorSubclassLikeUtils.h, ``isTensorSubclassLike``). Outside of operators.
        """
        depth: int = torch._C._len_torch_dispatch_stack()  # type: ignore[attr-defined]
        return depth > self._depth

    def noting_watchers(self, run_backward: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.autograd._engine_run_backward``, whose operators do not see the modes around it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self._has_watcher = self._has_watcher, self.is_watched
            try:
                return run_backward(*args, **kwargs)
            finally:
                self._has_watcher = before

        return run

    def restart(self) -> None:
        """Begin a new trace; live tensors stay."""
        super().restart()
        self.lock = self.ending = None
        self._is_inside = self.has_compiled = False
        self.attribution.generated.clear()
        self._cards_of_nodes.clear()
        self._gradients_come.clear()

    @contextmanager
    def writing_in_place(self, func: OpOverload) -> Iterator[None]:
        """``func`` writes into its first argument inside the block: C++ code avoids that for tensors without data."""
        before, self._in_place = self._in_place, func
        try:
            yield
        finally:
            self._in_place = before

    def _num_containers(self) -> int:
        """The number of Python containers that the dry run itself holds: for each allocation its row, its block and its
        known values."""
        used = [self.recorders[card] for card in self._cards_in_use]
        rows = sum(len(one.columns) + len(one.blocks) + len(one.marks) for one in used)
        return rows + 3 * len(self._storages) + self.num_noted

    def _on_collected(self, num_freed: int) -> None:
        if num_freed > 0:
            self.values.assume(
                _(
                    "tensors held only by reference cycles are freed when Python's garbage collector runs: here"
                    " by CPython's object counts; a real run may collect a few objects earlier or later"
                )
            )

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The operator's result without data; the memory of CUDA's operator is recorded. One thread at a time."""
        if types and any(map(is_wrapper, types)):
            return NotImplemented  # a wrapper handles the operator itself; its inner tensors come here
        with DisableTorchFunction():
            operator = self.operators.of(func)
            if operator.is_query:
                return func(*args, **(kwargs or {}))
            if self.lock is not None:
                with self.lock:
                    return self._dispatch(operator, func, args, kwargs or {})
            return self._dispatch(operator, func, args, kwargs or {})

    def _dispatch(self, operator: Operator, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_inside:
            return self._handle(operator, func, args, kwargs)
        self._is_inside = True
        try:
            self.collector.collect_if_due()
            result = self._handle(operator, func, args, kwargs)
        finally:
            self._is_inside = False
        self.interrupts.deliver()
        return result

    def _handle(self, operator: Operator, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.untouchable and operator.is_mutable:
            self.check_written(*tensors_written(func, args, kwargs))
        if self._overwritten and not operator.returns_alias:
            self.check_overwritten(args, kwargs)
        if self.has_sparse and is_sparse(args, kwargs):
            return run_sparse(self, func, args, kwargs)
        if operator.handler is None:
            return self._run(operator, func, args, kwargs)
        with self.on_card_among(args, kwargs):
            return operator.handler(self, func, args, kwargs)

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on fake tensors, taking the memory that CUDA's would."""
        return self._run(self.operators.of(func), func, args, kwargs)

    def _run(self, operator: Operator, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_composite = operator.is_composite
        if not self.uses_current_card_only and torch._C._current_graph_task_id() == -1:
            self._note_node(args, kwargs)
        if operator.is_view:
            return func(*args, **kwargs)
        tensors = tensors_in(args, kwargs)
        if not tensors:
            return self.create(func, args, kwargs)
        fakes = [tensor for tensor in tensors if tensor.is_meta]
        is_moved = self.creating is not None and kwargs.get("device") == META
        if not (fakes or is_moved or (is_composite and _names_cuda(*args, *kwargs.values()))):
            if self.untouchable:  # what stayed real on a card would take real memory of it
                self.check_written(*(tensor for tensor in tensors if tensor.device.type == "cuda"))
            return func(*args, **kwargs)
        kernel = self.kernels.get(func) if is_composite or self.autocast.is_on else None
        if kernel is not None:
            with self:
                return kernel(*args, **kwargs)
        if is_composite:
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        if self.creating is not None and kwargs.get("device") is not None:
            place, card = self.creating, self.creating_card
        else:
            place, card = self._common_location(func, tensors, fakes)
        if place is Place.HOST and len(fakes) < len(tensors):
            args, kwargs = tuple(map(to_meta, args)), {key: to_meta(value) for key, value in kwargs.items()}
        if func.namespace == "prims" and place is Place.GPU:  # PyTorch infers the shape of zeros with it
            return self.without_memory(func(*args, **kwargs), place)
        if place is not Place.GPU:
            out = self._or_fallback(partial(func, *args, **kwargs), func, args, kwargs)
            self.adopt_all(out, place, "", Phase.OTHER)
            return out
        if card < 0:
            return self._run_one_by_one(func, args, kwargs)
        with self.on_card(card):
            return self._run_on_gpu(operator, func, args, kwargs, tensors)

    def _run_on_gpu(
        self,
        operator: Operator,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        phase = self.attribution.phase(torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        if func is self._in_place:
            reused: torch.Tensor | None = _alias(args[0])
        elif operator.may_be_in_place and not self._has_watcher:
            reused = reused_gradient(func, args, self._sums_itself)
        else:
            reused = None
        out = self._kernel(operator, func, args, kwargs) if reused is None else reused
        self._take_memory(operator, args, kwargs, out, phase)
        self.values.follow(func, args, kwargs, tensors, out)
        return out

    def _sums_itself(self, tensor: torch.Tensor) -> bool:
        storage = self.storage_of(tensor)
        return storage is not None and self.running_node.sums_itself(storage.card, storage.allocation)

    def _take_memory(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, phase: Phase
    ) -> None:
        """Take memory of the current card for an operator's results, and for what its kernel needs meanwhile."""
        if operator.rule is None:
            self.adopt_all(out, Place.GPU, operator.name, phase)
            return
        call = Call(self, args, kwargs, out, operator.name, phase)
        operator.rule(call)
        call.end()

    def _kernel(self, operator: Operator, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operator.check is not None:
            operator.check(args)

        def made() -> Any:
            known = self._known_outputs.of(func, operator.name, args, kwargs, self.operators.fused)
            if operator.is_uncounted:
                self.values.assume_uncounted(func)
            return known

        return self._or_fallback(made, func, args, kwargs)

    def _or_fallback(
        self, make: Callable[[], Any], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What ``make`` returns, or what stands for it where PyTorch cannot tell a shape without data."""
        try:
            return make()
        except (NotImplementedError, RuntimeError) as error:
            run = find_fallback(error)
            if run is None:
                raise
            return run(self, func, args, kwargs)

    def results_of(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], known: Any) -> Any:
        """The results of an operator on the current card whose values, and so sizes, are known."""

        def like(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)

        made = map_tensors(known, like)
        self._take_memory(self.operators.of(func), args, kwargs, made, self.attribution.phase(False))
        for value, tensor in zip(tensors_in((known,), {}), tensors_in((made,), {}), strict=True):
            self.values.copy(value, tensor)
        return made

    def copy_to(self, tensor: torch.Tensor, place: Place, operator: str) -> torch.Tensor:
        """A tensor like ``tensor`` on the pretend device ``place``, with its values where they are known."""
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)
        self.adopt(made, place, operator)
        self.values.copy(tensor, made)
        return made

    def create(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator without tensor arguments, at the place that its device argument means."""
        device = kwargs.get("device")
        if kwargs.get("dtype") in QUANTIZED:
            return quantized_on_host(func, args, kwargs)
        if device is not None and device.type == "meta":
            place = self.meant_by_meta()
            out = func(*args, **kwargs)
            if func is _aten._efficientzerotensor.default:  # aten/src/ATen/native/TensorFactories.cpp
                return self.without_memory(out, place)
            with self.on_card(self.creating_card if self.creating else self._unnamed_card()):
                if place is Place.GPU:
                    self._take_memory(self.operators.of(func), args, kwargs, out, self.attribution.phase(False))
                else:
                    self.adopt_all(out, place, "", Phase.OTHER)
            self.values.follow_creation(func, args, kwargs, out)
            return out
        if device is not None and device.type != "cpu":
            with self.creating_on(Place.GPU):
                return self.create(func, args, {**kwargs, "device": META})
        if "device" not in kwargs and not any(argument.name == "device" for argument in func._schema.arguments):
            return func(*args, **kwargs)
        if func is not _aten.from_file.default:  # it has no fake one, and no memory before it is read
            out = func(*args, **{**kwargs, "device": META})
            if isinstance(out, torch.Tensor) and is_large(out):
                self.adopt(out, Place.HOST, "")
                return out
        return func(*args, **kwargs)

    def _note_node(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the card of the operator to which autograd's newest node belongs."""
        node = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        location = next(filter(None, map(self.location, tensors_in(args, kwargs))), None)
        if location is not None and location.place is Place.GPU:
            self._cards_of_nodes[node] = location.card

    def note_gradient(self, gradient: torch.Tensor, card: int) -> None:
        """Remember a gradient that a backward brings to another card (DeviceView's ``ToCopyBackward0``)."""
        node = torch._C._current_autograd_node()
        if node is not None and node.name() == "_MovedBackward":
            backward = torch._C._current_graph_task_id()
            self._gradients_come.setdefault((backward, card), []).append(gradient.untyped_storage().nbytes())

    def what_waits(self) -> str:
        """What to say of gradients that may come to a card before their turn; "" where at most one comes.

        Autograd computes on a thread for each card (torch/csrc/autograd/engine.cpp), here one after the other.
        """
        num_bytes = max((sum(sizes) - max(sizes) for sizes in self._gradients_come.values()), default=0)
        text = _(
            "the backward pass runs on one thread per card; gradients that arrive early can take up to"
            " {num_bytes} more, depending on timing",
            num_bytes=num_bytes,
        )
        return text if num_bytes else ""

    def _unnamed_card(self) -> int:
        """The card for a tensor that C++ code makes "like" another one: in the backward, the card of the node's
        forward."""
        node = None if self.uses_current_card_only else torch._C._current_autograd_node()
        if node is None:
            return self.current
        number = number_when_made(node)
        return self._cards_of_nodes.get(number, self.first_card if number < self.alone_until else self.current)

    def _common_location(self, func: OpOverload, tensors: list[torch.Tensor], fakes: list[torch.Tensor]) -> Location:
        """Where the operator runs; card -1: on several, a tensor at a time. Raises what CUDA raises for two devices."""
        if self.uses_current_card_only and len(fakes) == len(tensors) and all(map(self._is_on_card, fakes)):
            return Location(Place.GPU, self.current)
        locations = list(dict.fromkeys(filter(None, map(self.location, fakes))))
        cards = [location for location in locations if location.place is Place.GPU]
        if not cards:
            return Location(Place.META if Location(Place.META) in locations else Place.HOST)
        if len(cards) > 1:
            if func.name().startswith("aten::_foreach_"):
                return Location(Place.GPU, -1)
            raise RuntimeError(_TWO_DEVICES.format(cards[0].device, cards[1].device, func.name()))
        if len(tensors) > 1 and func not in _WITH_HOST_LENGTHS:
            elsewhere = [t for t in tensors if t.dim() and self.place(t) is not Place.GPU]
            if elsewhere:
                self.check_written(*(one for one in elsewhere if one.device.type == "cuda"))  # it stayed real
                other = "cpu" if self.place(elsewhere[0]) is not Place.META else "meta"
                fix = "" if self.fix_for_host is None else "".join(map(self.fix_for_host, elsewhere[:1]))
                raise RuntimeError(_TWO_DEVICES.format(cards[0].device, other, func.name()) + fix)
        return cards[0]

    def _is_on_card(self, fake: torch.Tensor) -> bool:
        storage = self._storages.get(storage_under(fake)._cdata)
        return storage is not None and storage.place is Place.GPU

    def _run_one_by_one(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """aten/src/ATen/native/ForeachOpsKernels.cpp: lists with tensors of several devices go the slow way."""
        length = next(len(argument) for argument in args if isinstance(argument, (list, tuple)))

        def at(value: Any, position: int) -> Any:
            is_list = isinstance(value, (list, tuple)) and len(value) == length
            return [value[position]] if is_list else value

        made = [
            self.run(func, tuple(at(value, i) for value in args), {key: at(value, i) for key, value in kwargs.items()})
            for i in range(length)
        ]
        return [item for items in made for item in items] if func._schema.returns else None


def _names_cuda(*values: Any) -> bool:
    """Whether an argument is a card, as where code names one that torch-function modes do not see."""
    return any(isinstance(value, torch.device) and value.type == "cuda" for value in values)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor on the same memory."""
    made: torch.Tensor = torch.empty(0, dtype=tensor.dtype, device=META)
    storage = tensor.untyped_storage()
    return made.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]
