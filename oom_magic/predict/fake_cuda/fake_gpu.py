"""The pretend GPU: tensors without data whose memory is taken from the simulated allocator.

A tensor on the pretend GPU is a ``meta`` tensor whose storage is listed here; so is a host tensor too large
to be worth having. Small host tensors stay real, so that masks, lengths and labels keep their values. This mode sees
every operator below autograd, on any build of PyTorch, and notes each new storage and its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunction  # type: ignore[attr-defined]
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from oom_magic.memory.allocator.replay import AllocatorOutOfMemory
from oom_magic.memory.categories import Category
from oom_magic.memory.timeline import Phase
from oom_magic.predict.fake_cuda.calls import Call
from oom_magic.predict.fake_cuda.fallbacks import find_fallback, storage_under
from oom_magic.predict.fake_cuda.gradients import counts_when_unheld, reused_gradient
from oom_magic.predict.fake_cuda.known_outputs import KnownOutputs
from oom_magic.predict.instrumentation.attribution import Attribution
from oom_magic.predict.instrumentation.recorder import Recorder, SizeExpression
from oom_magic.predict.setups.gpus import GPU

if TYPE_CHECKING:
    from oom_magic.predict.fake_cuda.autocast import Autocast
    from oom_magic.predict.fake_cuda.values import Values

META = torch.device("meta")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_WITH_HOST_LENGTHS = {
    torch.ops.aten._pack_padded_sequence.default,
    torch.ops.aten._ctc_loss.Tensor,
    torch.ops.aten._ctc_loss_backward.Tensor,
}
HOST_REAL_BYTES = 1 << 20  # a host tensor above this is pretended too
HOST_REAL_INTEGER_BYTES = 1 << 24  # integers and booleans decide branches, so more of them are real


class Place(Enum):
    """Where the user's code believes a pretended tensor to be."""

    GPU = "cuda"
    HOST = "cpu"
    META = "meta"


class _Storage(weakref.ref):  # type: ignore[type-arg]
    """A pretended storage: its place, its size, and the number of its allocation on the GPU (-1: none)."""

    __slots__ = ("allocation", "key", "num_bytes", "place")
    key: int
    place: Place
    allocation: int
    num_bytes: int


Handler = Callable[["FakeGPU", OpOverload, tuple[Any, ...], dict[str, Any]], Any]
Rule = Callable[[Call], None]


class FakeGPU(TorchDispatchMode):
    """The dispatch mode. ``handlers`` run instead of an operator; ``rules`` say how CUDA's takes memory."""

    values: Values
    autocast: Autocast

    def __init__(
        self,
        recorder: Recorder,
        attribution: Attribution,
        card: GPU,
        handlers: dict[OpOverload, Handler],
        rules: dict[OpOverload, Rule],
        fail: Callable[[AllocatorOutOfMemory, str, Phase], BaseException],
    ) -> None:
        super().__init__()
        self.recorder = recorder
        self.attribution = attribution
        self.card = card
        self.creating: Place | None = None
        self.fused: dict[OpOverload, Callable[..., Any]] = {}  # outputs of what is one kernel on CUDA only
        self.kernels: dict[OpOverload, Callable[..., Any]] = {}  # for inference mode, which passes autograd by
        self.handlers = handlers
        self._rules = rules
        self._known_outputs = KnownOutputs()
        self._fail = fail
        self.workspaces: dict[Hashable, int] = {}  # allocations of libraries, by owner
        self.process_group: tuple[int, int] | None = None  # rank and size of the one that code on it made
        self._storages: dict[int, _Storage] = {}
        self._composite: dict[OpOverload, bool] = {}
        counts_when_unheld()  # looked up now, before the modes are on

    # -- what is where --------------------------------------------------------

    def storage_of(self, tensor: torch.Tensor) -> _Storage | None:
        """What is known of a pretended tensor's storage; None for a real tensor."""
        with DisableTorchFunction():
            return self._storages.get(storage_under(tensor)._cdata) if tensor.is_meta else None

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where a pretended tensor is; None for a real one."""
        storage = self.storage_of(tensor)
        return None if storage is None else storage.place

    def live_storages(self) -> Iterator[_Storage]:
        """All storages on the pretend GPU that are alive."""
        return (storage for storage in list(self._storages.values()) if storage.allocation >= 0)

    def restart(self) -> None:
        """Begin a new trace; what is alive stays."""
        numbers = self.recorder.restart()
        for storage in self.live_storages():
            storage.allocation = numbers[storage.allocation]
        self.workspaces = {owner: numbers[number] for owner, number in self.workspaces.items()}

    def clear_workspaces(self) -> None:
        """Give back what libraries keep between their calls; it is taken again at need."""
        for number in self.workspaces.values():
            self.recorder.free(number)
        self.workspaces.clear()

    def was_there_before(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory was taken before the trace began."""
        storage = self.storage_of(tensor)
        return storage is not None and 0 <= storage.allocation < self.recorder.num_before

    @contextmanager
    def creating_on(self, place: Place) -> Iterator[None]:
        """New tensors made inside without a tensor argument are at ``place``."""
        before, self.creating = self.creating, place
        try:
            yield
        finally:
            self.creating = before

    def assign(self, tensor: torch.Tensor, category: Category) -> None:
        """Say what a tensor's memory is for."""
        storage = self.storage_of(tensor)
        if storage is not None and storage.allocation >= 0:
            self.recorder.assign(storage.allocation, category)

    # -- taking and giving memory ---------------------------------------------

    def adopt(self, tensor: torch.Tensor, place: Place, operator: str, phase: Phase | None = None) -> None:
        """List a tensor's storage, if it is new, and take its memory."""
        if place is Place.GPU:
            self.adopt_on_gpu(tensor, operator, phase or self.attribution.phase(False))
        else:
            self._list(tensor.untyped_storage(), place, -1)

    def adopt_on_gpu(self, tensor: torch.Tensor, operator: str, phase: Phase, num_bytes: int | None = None) -> None:
        """``adopt`` on the GPU, taking ``num_bytes`` (default: what the storage has)."""
        storage = storage_under(tensor)
        known = self._storages.get(storage._cdata)
        if known is None:
            num_bytes = storage.nbytes() if num_bytes is None else num_bytes
            self.recorder.dims.extend(tensor.shape)
            self._list(storage, Place.GPU, self.take(num_bytes, operator, phase) if num_bytes else -1)
        elif storage.nbytes() > known.num_bytes and known.place is Place.GPU:
            before, known.num_bytes = known.allocation, storage.nbytes()
            known.allocation = self.take(known.num_bytes, operator, phase)
            if before >= 0:
                self.recorder.free(before)

    def _list(self, storage: torch.UntypedStorage, place: Place, allocation: int) -> None:
        if storage._cdata not in self._storages:
            entry = _Storage(storage, self._forget)
            entry.key, entry.place, entry.allocation = storage._cdata, place, allocation
            entry.num_bytes = storage.nbytes()
            self._storages[entry.key] = entry

    def take(
        self,
        num_bytes: int,
        operator: str,
        phase: Phase,
        category: Category = Category.TEMPORARY,
        reckoning: SizeExpression | None = None,
    ) -> int:
        """Take memory on the pretend GPU; the number of the allocation. Raises the simulated OutOfMemoryError."""
        line, module = self.attribution.line(), self.attribution.module(phase)
        try:
            return self.recorder.allocate(num_bytes, operator, phase, line, module, category, reckoning)
        except AllocatorOutOfMemory as error:
            failure = self._fail(error, operator, phase)
        raise failure  # outside of the except: the allocator's own error is no part of what the user sees

    def _forget(self, entry: _Storage) -> None:
        if self._storages.get(entry.key) is entry:
            del self._storages[entry.key]
            self.values.forget(entry.key)
        if entry.allocation >= 0:
            self.recorder.free(entry.allocation)

    # -- operators ------------------------------------------------------------

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with DisableTorchFunction():
            handler = self.handlers.get(func)
            if handler is not None:
                return handler(self, func, args, kwargs or {})
            return self.run(func, args, kwargs or {})

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on pretended tensors, taking the memory that CUDA's would."""
        is_composite = self._is_composite(func)
        if (func.is_view and not is_composite) or func.overloadpacket is torch.ops.aten.set_:  # type: ignore[attr-defined]
            return func(*args, **kwargs)  # a composite one, such as reshape, may copy
        tensors = tensors_in(args, kwargs)
        if not tensors:
            return self.create(func, args, kwargs)
        pretended = [tensor for tensor in tensors if tensor.is_meta]
        if not pretended and not (self.creating and kwargs.get("device") == META):
            return func(*args, **kwargs)
        kernel = self.kernels.get(func)
        if kernel is not None and (is_composite or self.autocast.is_on):
            with self:
                return kernel(*args, **kwargs)
        if is_composite:
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        if self.creating is not None and kwargs.get("device") is not None:
            place = self.creating
        else:
            place = self._common_place(func, tensors, pretended)
        if place is Place.HOST and len(pretended) < len(tensors):
            args, kwargs = map_tensors(args, to_meta), {key: to_meta(value) for key, value in kwargs.items()}
        if place is not Place.GPU:
            out = func(*args, **kwargs)
            self.adopt_all(out, place, "", Phase.OTHER)
            return out
        return self._run_on_gpu(func, args, kwargs, tensors)

    def _run_on_gpu(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        name = func.name()
        phase = self.attribution.phase(torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        reused = reused_gradient(func, args)
        out = self._kernel(func, args, kwargs) if reused is None else reused
        rule = self._rules.get(func)
        if rule is None:
            self.adopt_all(out, Place.GPU, name, phase)
        else:
            call = Call(self, args, kwargs, out, name, phase)
            rule(call)
            call.end()
        self.values.follow(func, args, kwargs, tensors, out)
        return out

    def _kernel(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._known_outputs.of(func, args, kwargs, self.fused.get(func, func))
        except (NotImplementedError, RuntimeError) as error:
            run = find_fallback(error)
            if run is None:
                raise
            return run(self, func, args, kwargs)

    def copy_to(self, tensor: torch.Tensor, place: Place, operator: str) -> torch.Tensor:
        """A tensor like ``tensor`` on the pretend device ``place``, with its values where they are known."""
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)
        self.adopt(made, place, operator)
        self.values.copy(tensor, made)
        return made

    def adopt_all(self, out: Any, place: Place, operator: str, phase: Phase) -> None:
        """``adopt`` every tensor of an operator's result."""
        if isinstance(out, torch.Tensor):
            self.adopt(out, place, operator, phase)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self.adopt(item, place, operator, phase)

    def create(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that has no tensor argument, at the place its device means."""
        device = kwargs.get("device")
        if device is not None and device.type == "meta":
            place = self.creating or Place.GPU
            out = func(*args, **kwargs)
            self.adopt_all(out, place, func.name(), self.attribution.phase(False))
            self.values.follow_creation(func, args, kwargs, out)
            return out
        if device is not None and device.type != "cpu":
            with self.creating_on(Place.GPU):
                return self.create(func, args, {**kwargs, "device": META})
        if "device" not in kwargs and not any(argument.name == "device" for argument in func._schema.arguments):
            return func(*args, **kwargs)
        out = func(*args, **{**kwargs, "device": META})
        if isinstance(out, torch.Tensor) and is_large(out):
            self.adopt(out, Place.HOST, "")
            return out
        return func(*args, **kwargs)

    def _is_composite(self, func: OpOverload) -> bool:
        """Whether the operator is made of others for autograd; such come here only in inference mode."""
        known = self._composite.get(func)
        if known is None:
            known = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)
            known = self._composite[func] = known and func not in self.fused
        return known

    def _common_place(self, func: OpOverload, tensors: list[torch.Tensor], pretended: list[torch.Tensor]) -> Place:
        """Where the operator runs. Raises what CUDA raises for arguments on two devices."""
        places = {self.place(tensor) for tensor in pretended}
        if Place.GPU not in places:
            return Place.META if Place.META in places else Place.HOST
        if len(tensors) > 1 and func not in _WITH_HOST_LENGTHS:
            elsewhere = [t for t in tensors if t.dim() and self.place(t) is not Place.GPU]
            if elsewhere:
                other = "cpu" if self.place(elsewhere[0]) is not Place.META else "meta"
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"cuda:0 and {other}! (when checking arguments for {func.name()})"
                )
        return Place.GPU


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments, in order, lists of tensors included."""
    found = []
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += [item for item in arg if isinstance(item, torch.Tensor)]
    return found


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` (an operator's argument, or a tuple of them) with ``change`` applied to each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def to_meta(value: Any) -> Any:
    """A real tensor with dimensions as a meta tensor; anything else as it is."""
    if isinstance(value, torch.Tensor) and not value.is_meta and value.dim():
        return value.to(META)
    return value


def is_large(tensor: torch.Tensor) -> bool:
    """Whether a host tensor of this shape and type is pretended rather than real."""
    limit = HOST_REAL_BYTES if tensor.is_floating_point() or tensor.is_complex() else HOST_REAL_INTEGER_BYTES
    return tensor.numel() * tensor.element_size() > limit
