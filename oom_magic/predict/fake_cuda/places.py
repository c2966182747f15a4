"""Places of fake tensors, and the interface of the fake GPU for operators."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from enum import Enum
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch._ops import OpOverload

from oom_magic.memory.categories import Category
from oom_magic.memory.timeline import Phase
from oom_magic.memory.workspaces import Owner
from oom_magic.predict.fake_cuda.streams import Threads
from oom_magic.predict.instrumentation.recorder import Recorder, SizeExpression
from oom_magic.predict.setups.gpus import GPU

META = torch.device("meta")
HOST_REAL_BYTES = 1 << 20  # a host tensor above this is fake too
HOST_REAL_INTEGER_BYTES = 1 << 27  # integers and booleans decide branches, so larger ones stay real


class Place(Enum):
    """The device of a fake tensor, as the user's code sees it."""

    GPU = "cuda"
    HOST = "cpu"
    META = "meta"


class Location(NamedTuple):
    """A place and, on the GPU, which card."""

    place: Place
    card: int = 0

    @property
    def device(self) -> torch.device:
        """The ``device`` of a tensor there."""
        return torch.device("cuda", self.card) if self.place is Place.GPU else torch.device(self.place.value)


class Storage(weakref.ref):  # type: ignore[type-arg]
    """A fake storage: its place, its size, and the number of its allocation on its card (-1: none)."""

    __slots__ = ("allocation", "card", "key", "num_bytes", "place")
    key: int
    place: Place
    card: int
    allocation: int
    num_bytes: int


class FakeDevice(Protocol):
    """The interface of the fake GPU for the code of operators; ``FakeGPU`` implements it."""

    card: GPU
    current: int
    recorder: Recorder
    streams: Any
    threads: Threads
    tried_convolutions: set[Hashable]
    values: Any

    @property
    def workspaces(self) -> dict[Owner, int]:
        """The allocations of workspaces that the current card keeps, by library."""

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where a fake tensor is; None for a real one."""

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator."""

    def take(
        self,
        num_bytes: int,
        operator: str,
        phase: Phase,
        category: Category = Category.TEMPORARY,
        expression: SizeExpression | None = None,
    ) -> int:
        """Take memory on the current card; the number of the allocation."""

    def copy_to(self, tensor: torch.Tensor, place: Place, operator: str) -> torch.Tensor:
        """A fake copy of a tensor, at ``place``."""

    def results_of(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], known: Any) -> Any:
        """The results of an operator on the current card whose values, and so sizes, are known."""

    def adopt_on_gpu(self, tensor: torch.Tensor, operator: str, phase: Phase, num_bytes: int | None = None) -> None:
        """Allocate the memory of an output."""

    def __enter__(self) -> Any:
        """Turn the mode on."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Turn the mode off."""


# What runs instead of an operator: called with the fake GPU, the operator and its arguments.
Handler = Callable[[Any, OpOverload, tuple[Any, ...], dict[str, Any]], Any]


def identity(tensor: torch.Tensor) -> int:
    """An identity that tensors over the same memory share; a sparse tensor has no single storage."""
    has_storage = tensor.layout in (torch.strided, torch.jagged)
    return tensor.untyped_storage()._cdata if has_storage else tensor._cdata


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments, in order, lists of tensors included."""
    found = []
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += [item for item in arg if isinstance(item, torch.Tensor)]
    return found


def tensors_written(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes into."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tensors_in((value,), {})
    return found


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` (an operator's argument, or a tuple of them) with ``change`` applied to each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def to_meta(value: Any) -> Any:
    """A real tensor with dimensions as a meta tensor, and each of a list; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return map_tensors(value, lambda tensor: tensor if tensor.is_meta else tensor.to(META))
    if isinstance(value, torch.Tensor) and not value.is_meta and value.dim():
        return value.to(META)
    return value


def is_large(tensor: torch.Tensor) -> bool:
    """Whether a host tensor of this shape and type is fake rather than real."""
    limit = HOST_REAL_BYTES if tensor.is_floating_point() or tensor.is_complex() else HOST_REAL_INTEGER_BYTES
    return tensor.numel() * tensor.element_size() > limit


def as_class_of(tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """An operator's result on a tensor subclass has that class, unless the class says otherwise, as parameters do."""
    kind = type(tensor)
    if kind.__torch_function__ is torch._C._disabled_torch_function_impl or kind is torch.Tensor:
        return made
    return made.as_subclass(kind)
