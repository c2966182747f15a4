"""Operators by name, and one operator's call: its memory, taken and given back in the order of CUDA's kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from oom_magic.memory.categories import Category
from oom_magic.memory.timeline import Phase
from oom_magic.predict.instrumentation.recorder import SizeExpression, SizeFunction

if TYPE_CHECKING:
    from oom_magic.predict.fake_cuda.places import FakeDevice

aten = torch.ops.aten
Kernel = Callable[..., Any]
T = TypeVar("T")
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))  # (2, 13)


def find_overload(name: str) -> OpOverload | None:
    """The operator ``"softmax.int"`` or ``"mm"`` of aten; None where this PyTorch has none."""
    packet, _, overload = name.partition(".")
    found: OpOverload | None = getattr(getattr(aten, packet, None), overload or "default", None)
    return found


def original(op: OpOverload) -> Kernel:
    """The kernel that PyTorch itself would run for ``op`` at the autograd key."""
    for key in (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd):
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
            return lambda *args, **kwargs: op._op_dk(key, *args, **kwargs)
    raise LookupError(f"{op.name()} has no autograd kernel; remove it from the list.")


def existing(table: dict[str, T]) -> dict[OpOverload, T]:
    """``table`` by operator, without those that this PyTorch does not have."""
    found = {find_overload(name): value for name, value in table.items()}
    return {overload: value for overload, value in found.items() if overload is not None}


class Call:
    """A call with known outputs that have no memory yet.

    A rule (``Rule``) says what the kernel does: ``take`` scratch, make an ``output``, ``give_back``. When it returns,
    the remaining outputs are made in order; then the remaining scratch is freed, the last taken first.
    """

    def __init__(
        self,
        gpu: FakeDevice,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        operator: str,
        phase: Phase,
    ) -> None:
        self.gpu = gpu
        self.args = args
        self.kwargs = kwargs
        self.outputs = [result] if isinstance(result, torch.Tensor) else list(result or ())
        self._operator = operator
        self._phase = phase
        self._scratch: list[int] = []

    def argument(self, position: int, default: Any = None) -> Any:
        """The positional argument there, or ``default`` if the call left it out."""
        return self.args[position] if position < len(self.args) else default

    def take(self, num_bytes: int) -> int:
        """Take scratch memory; a number to give it back by (-1: nothing was needed)."""
        if num_bytes <= 0:
            return -1
        number = self.gpu.take(num_bytes, self._operator, self._phase)
        self._scratch.append(number)
        return number

    def allocate_scratch(self, size_function: SizeFunction, *numbers: int) -> int:
        """``take`` of ``size_function(card, *numbers)`` bytes, perhaps none.

        For sizes that are not sums of products of dimensions: with thresholds, rounding, or what a card has. ``size``
        calls the function again with other numbers: it must be defined at module level, and all that varies must be in
        the numbers.
        """
        num_bytes = size_function(self.gpu.card, *numbers)
        if num_bytes <= 0 and not self.gpu.recorder.keeps_empty:
            return -1
        number = self.gpu.take(
            num_bytes, self._operator, self._phase, expression=SizeExpression(size_function, numbers)
        )
        self._scratch.append(number)
        return number

    def take_like(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
        """Take scratch for a tensor of this shape."""
        return self.take(tensor.numel() * (dtype or tensor.dtype).itemsize)

    def give_back(self, *numbers: int) -> None:
        """Give scratch back before the end."""
        for number in numbers:
            if number >= 0:
                self._scratch.remove(number)
                self.gpu.recorder.free(number)

    def give_back_all(self) -> None:
        """Give all scratch back, the last taken first."""
        self.give_back(*reversed(self._scratch))

    def keep_by(self, size_function: SizeFunction, *numbers: int, operator: str, category: Category) -> int:
        """Take memory that outlives the call, by a size function; the number of the allocation."""
        num_bytes = size_function(self.gpu.card, *numbers)
        return self.gpu.take(num_bytes, operator, self._phase, category, SizeExpression(size_function, numbers))

    def output(self, position: int, num_bytes: int | None = None) -> None:
        """Make an output now; ``num_bytes`` where its storage is not what its shape needs (0: none)."""
        tensor = self.outputs[position]
        if isinstance(tensor, torch.Tensor):
            self.gpu.adopt_on_gpu(tensor, self._operator, self._phase, num_bytes)

    def end(self) -> None:
        """Make the remaining outputs, and free all scratch."""
        for position in range(len(self.outputs)):
            self.output(position)
        self.give_back_all()
