"""The user's own objects during a dry run: usable inside it, exactly as before after it.

Every real tensor of the process is exchanged for a pretended double while the dry run lasts
(``torch._C._swap_tensor_impl``, the mechanism under ``torch.utils.swap_tensors``), so whoever holds the tensor sees the
double and no data is touched.
What Python code may change besides (a module's mode, an optimizer's state, global variables) is noted and put back.
"""

from __future__ import annotations

import builtins
import itertools
import operator
import os
import random
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oom_magic.memory.categories import Category
from oom_magic.memory.timeline import Phase
from oom_magic.predict.fake_cuda.fake_gpu import META, FakeGPU, Place, is_large
from oom_magic.predict.instrumentation.starting_point import StartingPoint, TensorWas
from oom_magic.predict.isolation.live_objects import LiveObjects, find_live_objects

_DICTS = (dict, OrderedDict, defaultdict)
_ANOTHER_SEED = 104_729  # nobody's
_CONTAINERS = (*_DICTS, list, set, deque)


@dataclass(frozen=True, slots=True)
class _Noted:
    """A container, where it lies in which object, and what it held."""

    owner: Any
    path: tuple[Hashable, ...]
    container: Any
    contents: Any


@dataclass(frozen=True, slots=True)
class _Change:
    """What a container of an object held afterwards that it did not hold before, and which keys it lacked."""

    owner: weakref.ref[Any]
    changed: Any  # of a dict only what differs: more would keep the user's objects alive
    lacking: frozenset[Any] = frozenset()

    def apply(self, container: Any) -> None:
        """Make it so."""
        if isinstance(container, dict):
            for key in self.lacking:
                container.pop(key, None)
            container.update(self.changed)
        else:
            _fill(container, self.changed)


Changes = dict[tuple[int, tuple[Hashable, ...]], _Change]  # by the identity of the owner, and the path in it


class Snapshot:
    """What some containers hold, nested ones included, to be put back in place."""

    def __init__(self) -> None:
        self._entries: list[_Noted] = []
        self._seen: set[int] = {id(vars(builtins))}  # every module's globals lead there

    def add(self, container: Any, depth: int, owner: Any = None, path: tuple[Hashable, ...] = ()) -> None:
        """Note ``container`` and the containers in it, ``depth`` levels deep. ``owner`` is the object it is part of."""
        if depth == 0 or type(container) not in _CONTAINERS or id(container) in self._seen:
            return
        self._seen.add(id(container))
        contents = dict(container) if isinstance(container, dict) else list(container)
        self._entries.append(_Noted(owner, path, container, contents))
        for key, item in contents.items() if isinstance(contents, dict) else enumerate(contents):
            if type(item) in _CONTAINERS:
                self.add(item, depth - 1, owner, (*path, key if type(key) in (str, int) else id(key)))

    def changes(self) -> Changes:
        """What the containers that have an owner hold now and did not. The owners are not kept alive."""
        found = {}
        for one in self._entries:
            change = _change(one) if one.owner is not None else None
            if change is not None:
                found[id(one.owner), one.path] = change
        return found

    def apply(self, changes: Changes) -> None:
        """Make changes that were found between two other moments."""
        for one in self._entries:
            change = changes.get((id(one.owner), one.path))
            if change is not None and change.owner() is one.owner:
                change.apply(one.container)

    def restore(self) -> None:
        """Put back what was noted."""
        for one in self._entries:
            _fill(one.container, one.contents)


def _fill(container: Any, contents: Any) -> None:
    container.clear()
    container.update(contents) if isinstance(container, (dict, set)) else container.extend(contents)


def _change(noted: _Noted) -> _Change | None:
    before, now = noted.contents, noted.container
    if isinstance(now, dict):
        changed = {key: value for key, value in now.items() if key not in before or before[key] is not value}
        lacking = frozenset(before.keys() - now.keys())
        return _Change(weakref.ref(noted.owner), changed, lacking) if changed or lacking else None
    kept = list(now)
    is_same = len(kept) == len(before) and all(map(operator.is_, kept, before))
    return None if is_same else _Change(weakref.ref(noted.owner), kept)


class TensorExchange:
    """Exchanges the user's tensors and notes the rest, around each run of a session.

    What the pretended code did to the user's objects is kept, if ``lasting``, for the next run of the same session.
    With an ``origin`` the first run starts from what that session's last run found, with a ``start`` from what is noted
    there; both stay as they are. Tensors with the identities ``absent`` take nothing.
    """

    def __init__(
        self,
        gpu: FakeGPU,
        lasting: bool,
        origin: TensorExchange | None = None,
        start: StartingPoint | None = None,
        absent: Collection[int] = frozenset(),
    ) -> None:
        self.gpu = gpu
        self._lasting = lasting
        self._origin = origin
        self._start = start
        self._absent = absent
        self._kept: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._pretended: Changes = {} if origin is None else origin._found
        self._found: Changes = self._pretended  # by the last run

    @contextmanager
    def exchanged(self, namespaces: list[dict[str, Any]]) -> Iterator[None]:
        """While a dry run lasts. ``namespaces`` are the global variables that its code may change."""
        live = find_live_objects()
        real = _snapshot(live, namespaces)
        self._found = self._pretended
        real.apply(self._found)
        if self._start is not None:
            self._start.restore(real.add)
        tensors = self._exchangeable(live.tensors)
        del live
        grads = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
        tensors += self._exchangeable([grad for _, grad in grads], {id(tensor) for tensor in tensors})
        if self._start is not None:
            grads = [(tensor, grad) for tensor, grad in grads if self._start.had_grad(tensor)]
        doubles = _FakeCopies(self.gpu, self._origin, {id(grad) for _, grad in grads}, self._start, self._absent)
        pairs = [(tensor, _held(self._kept, tensor, doubles.make)) for tensor in tensors]
        for tensor, double in pairs:
            # C++ alone may hold it, as a view its base: this hands it to Python; before 2.10 swapping loses the owner
            tensor.requires_grad_(tensor.requires_grad)
            torch._C._swap_tensor_impl(tensor, double)
        for tensor, grad in grads:
            if id(tensor) not in self._kept:
                tensor.grad = grad
        try:
            yield
        finally:
            if self._lasting:
                self._pretended = real.changes()
            real.restore()
            for tensor, double in pairs:
                torch._C._swap_tensor_impl(tensor, double)
            if self._lasting:
                # Small host tensors are copied anew each time: kept copies would be copied by other sessions.
                self._kept = {id(tensor): (weakref.ref(tensor), double) for tensor, double in pairs if double.is_meta}
            # An exception that somebody keeps holds this frame: its doubles would be doubled by every later run.
            del tensors, doubles, pairs, grads, real

    def template(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stood for a tensor at the end of this session's last run: a double, or the tensor itself."""
        return _held(self._kept, tensor, lambda itself: itself)

    def _exchangeable(self, tensors: list[torch.Tensor], known: set[int] = frozenset()) -> list[torch.Tensor]:  # type: ignore[assignment]
        origin = self._origin
        doubles = {id(double) for _, double in self._kept.values()}
        if origin is not None:
            doubles |= {id(double) for _, double in origin._kept.values()}
        return [
            tensor
            for tensor in tensors
            if _is_plain(tensor)
            and id(tensor) not in doubles
            and id(tensor) not in known
            and (not tensor.is_meta or (origin is not None and origin.gpu.place(tensor) is not None))
        ]


def _held(
    kept: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]],
    tensor: torch.Tensor,
    otherwise: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    found = kept.get(id(tensor))
    return found[1] if found is not None and found[0]() is tensor else otherwise(tensor)


class _FakeCopies:
    """Pretended doubles of real tensors; tensors that share a storage keep sharing one."""

    def __init__(
        self,
        gpu: FakeGPU,
        origin: TensorExchange | None,
        grads: set[int],
        start: StartingPoint | None,
        absent: Collection[int],
    ) -> None:
        self._absent = absent
        self._gpu = gpu
        self._origin = origin
        self._grads = grads
        self._start = start
        self._storages: dict[int, torch.UntypedStorage] = {}

    def make(self, tensor: torch.Tensor) -> torch.Tensor:
        was = None
        if id(tensor) in self._absent:
            return self._made_since(tensor, None)
        if self._start is not None and id(tensor) not in self._grads:
            was = self._start.tensor(tensor)
            if was is None or (was.device, was.dtype) != (tensor.device.type, tensor.dtype):
                return self._made_since(tensor, was)
        source = tensor if self._origin is None else self._origin.template(tensor)
        storage = source.untyped_storage()
        is_trained = tensor.requires_grad or id(tensor) in self._grads
        is_pretended = is_trained or source.device.type != "cpu" or is_large(source)
        double = self._storages.get(storage._cdata)
        if double is None:
            double = torch.UntypedStorage(storage.nbytes(), device=META) if is_pretended else storage.clone()
            self._storages[storage._cdata] = double
        made: torch.Tensor = torch.empty(0, dtype=source.dtype, device=double.device)
        made = made.set_(double, source.storage_offset(), source.size(), source.stride())  # type: ignore[call-overload]
        if made.is_meta:
            self._adopt(made, source, isinstance(tensor, torch.nn.Parameter))
        return made.requires_grad_((tensor if was is None else was).requires_grad)

    def _made_since(self, tensor: torch.Tensor, was: TensorWas | None) -> torch.Tensor:
        """The double of a tensor that the failed run made, which takes nothing yet, or moved: it is where it was."""
        dtype = tensor.dtype if was is None else was.dtype
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=META)
        place = Place.META if was is None else Place.HOST if was.device == "cpu" else Place.GPU
        self._gpu.adopt(made, place, "", Phase.OTHER)
        self._gpu.assign(made, Category.PARAMETER if isinstance(tensor, torch.nn.Parameter) else Category.BEFORE)
        is_differentiable = made.is_floating_point() or made.is_complex()
        return made.requires_grad_(is_differentiable and (tensor if was is None else was).requires_grad)

    def _adopt(self, made: torch.Tensor, source: torch.Tensor, is_weight: bool) -> None:
        place = Place.HOST if source.device.type == "cpu" else Place.GPU
        if source.is_meta and self._origin is not None:
            place = self._origin.gpu.place(source) or Place.META
            if place is Place.GPU and not self._origin.gpu.was_there_before(source):
                place = Place.META  # made by the run that failed; a new run makes its own
        with self._gpu.on_card(self._card_of(source)):
            self._gpu.adopt(made, place, "", Phase.OTHER)
        self._gpu.assign(made, Category.PARAMETER if is_weight else Category.BEFORE)

    def _card_of(self, source: torch.Tensor) -> int:
        """The card of the user's tensor, or of its double in the session this one starts from."""
        spot = self._origin.gpu.spot(source) if source.is_meta and self._origin is not None else None
        index = source.device.index or 0 if spot is None else spot.card
        return min(index, len(self._gpu.recorders) - 1)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has strides and no dispatch of its own."""
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


def _snapshot(live: LiveObjects, namespaces: list[dict[str, Any]]) -> Snapshot:
    """What a dry run may change in the user's objects, and how deep it lies."""
    snapshot = Snapshot()
    for module in live.modules:
        snapshot.add(vars(module), 2, module)
        for value in vars(module).values():
            if "config" in type(value).__name__.lower() and hasattr(value, "__dict__"):
                snapshot.add(vars(value), 2, value)  # a Hugging Face model's configuration
    for tool in live.tools:
        snapshot.add(vars(tool), 4, tool)
    for namespace in namespaces:
        snapshot.add(namespace, 3)
    return snapshot


@contextmanager
def other_random_numbers() -> Iterator[None]:
    """Draw other numbers than the code would: shows whether it depends on them. A dry run puts generators back."""
    with process_state_kept():
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(_ANOTHER_SEED)
        yield


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Restore what is global to the process: random generators, default types, modes, the environment."""
    environment = dict(os.environ)
    python_random, numpy_random = random.getstate(), np.random.get_state()
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu")}
    is_cached = torch.is_autocast_cache_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    is_checked = torch.is_anomaly_enabled()
    flags = {name: getattr(torch.backends.cuda, f"{name}_enabled")() for name in _ATTENTION_FLAGS}
    device = _default_device()
    hooks = Snapshot()
    for owner, name in itertools.product((torch.nn.modules.module, _OPTIMIZER), _GLOBAL_HOOKS):
        hooks.add(getattr(owner, name, None), 1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        hooks.restore()
        if _default_device() != device:
            torch.set_default_device(device)
            if device is None:  # as if none had ever been named: PyTorch 2.6 asks None for its device
                del torch._GLOBAL_DEVICE_CONTEXT.device_context  # type: ignore[attr-defined]
        os.environ.clear()
        os.environ.update(environment)
        random.setstate(python_random)
        np.random.set_state(numpy_random)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        for kind, (is_on, autocast_dtype) in autocast.items():
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, autocast_dtype)
        torch.set_autocast_cache_enabled(is_cached)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        torch.autograd.set_detect_anomaly(is_checked)
        for name, is_on in flags.items():
            getattr(torch.backends.cuda, f"enable_{name.removesuffix('_sdp')}_sdp")(is_on)


def _default_device() -> torch.device | None:
    """What ``torch.set_default_device`` named; None: nothing."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # type: ignore[attr-defined]
    return None if context is None else context.device


_OPTIMIZER = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides the name of the module
_GLOBAL_HOOKS = (
    "_global_buffer_registration_hooks", "_global_module_registration_hooks", "_global_parameter_registration_hooks",
    "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks",
    "_global_forward_hooks_always_called", "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks",
)  # fmt: skip
_ATTENTION_FLAGS = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
