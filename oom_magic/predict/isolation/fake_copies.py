"""The fake copies for which the user's tensors are exchanged: what they take, where they are, what shares memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from oom_magic.memory.categories import Category
from oom_magic.memory.timeline import Phase
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.places import META, Place, is_large
from oom_magic.predict.instrumentation.starting_point import StartingPoint, TensorState
from oom_magic.predict.isolation.between_runs.host_values import Written
from oom_magic.predict.operators.sparse import made_of_parts, parts_of


class EarlierExchange(Protocol):
    """The exchange of the session from whose last run another one starts."""

    gpu: FakeGPU

    def template(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a tensor at the end of that run."""

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether that run made a tensor."""


class FakeCopies:
    """Fake copies of real tensors; tensors that share a storage keep sharing one."""

    def __init__(
        self,
        gpu: FakeGPU,
        origin: EarlierExchange | None,
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
        """The copy of a tensor on the pretend GPU; one of large host tensors takes no memory."""
        was = None
        if id(tensor) in self._absent:
            return self._made_since(tensor, None)
        if self._start is not None and id(tensor) not in self._grads:
            was = self._start.tensor(tensor)
            if was is None or (was.device, was.dtype) != (tensor.device, tensor.dtype):
                return self._made_since(tensor, was)
        if self._origin is not None and id(tensor) not in self._grads and self._origin.has_made(tensor):
            return self._made_since(tensor, None)
        source = tensor if self._origin is None else self._origin.template(tensor)
        is_trained = tensor.requires_grad or id(tensor) in self._grads
        is_weight = isinstance(tensor, torch.nn.Parameter)
        if source.layout is torch.sparse_coo:
            indices, values = (self._copied(part, is_trained, is_weight) for part in parts_of(source))
            made = self._of_parts(source, indices, values)
        else:
            made = self._copied(source, is_trained, is_weight)
        return made.requires_grad_((tensor if was is None else was).requires_grad)

    def again(self, written: Written) -> torch.Tensor:
        """A copy of what an earlier run left of a host tensor, values included."""
        storage = self._storages.setdefault(written.storage._cdata, written.storage.clone())
        return written.made(storage)

    def _of_parts(self, like: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """A sparse tensor of copies of another's indices and values."""
        self._gpu.has_sparse = True
        return made_of_parts(like, indices, values, like.is_coalesced())

    def _copied(self, source: torch.Tensor, is_trained: bool, is_weight: bool) -> torch.Tensor:
        storage = source.untyped_storage()
        is_fake = is_trained or source.device.type != "cpu" or is_large(source)
        copy = self._storages.get(storage._cdata)
        if copy is None:
            copy = torch.UntypedStorage(storage.nbytes(), device=META) if is_fake else storage.clone()
            self._storages[storage._cdata] = copy
        made: torch.Tensor = torch.empty(0, dtype=source.dtype, device=copy.device)
        made = made.set_(copy, source.storage_offset(), source.size(), source.stride())  # type: ignore[call-overload]
        if made.is_meta:
            self._adopt(made, source, is_weight)
        return made

    def _made_since(self, tensor: torch.Tensor, was: TensorState | None) -> torch.Tensor:
        """The copy of a tensor that the failed run made, which takes nothing yet, or moved: it is where it was."""
        if tensor.layout is torch.sparse_coo:
            indices, values = (self._made_since(part, None) for part in parts_of(tensor))
            return self._of_parts(tensor, indices, values)
        dtype = tensor.dtype if was is None else was.dtype
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=META)
        _place_as_it_was(self._gpu, made, was, isinstance(tensor, torch.nn.Parameter))
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
        """The card of the user's tensor, or of its copy in the session this one starts from."""
        location = self._origin.gpu.location(source) if source.is_meta and self._origin is not None else None
        return _card_named(self._gpu, source.device.index if location is None else location.card)


def _card_named(gpu: FakeGPU, index: int | None) -> int:
    """The card of this number, as far as there are so many."""
    return min(index or 0, len(gpu.recorders) - 1)


def _place_as_it_was(gpu: FakeGPU, made: torch.Tensor, was: TensorState | None, is_weight: bool = False) -> None:
    """Put a fake tensor where one was; one that was not there yet takes nothing."""
    place = Place.META if was is None else Place.HOST if was.device.type == "cpu" else Place.GPU
    with gpu.on_card(0 if was is None else _card_named(gpu, was.device.index)):
        gpu.adopt(made, place, "", Phase.OTHER)
    gpu.assign(made, Category.PARAMETER if is_weight else Category.BEFORE)


def made_anew(gpu: FakeGPU, was: TensorState) -> torch.Tensor:
    """A fake tensor like one that is gone."""
    made = torch.empty(was.shape, dtype=was.dtype, device=META)
    _place_as_it_was(gpu, made, was)
    return made.requires_grad_(was.requires_grad and not was.is_result)
