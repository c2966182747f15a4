"""Gradients from before the run that its code drops: their memory is free then, as in a real run.

The exchange keeps their tensors, to give them back afterwards, and with each the memory of its copy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache

import torch

from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU

_OWN_REFERENCES = 4  # to a gradient that nobody else has: the exchange's, and in ``release`` a list's and two of names


def has_own_memory(grad: torch.Tensor) -> bool:
    """Whether no other tensor, also none of C++ such as a bucket of gradients, lies in the same memory."""
    try:
        return num_uses(grad) == 1
    except (RuntimeError, NotImplementedError):  # sparse gradients have no storage
        return False


def num_uses(tensor: torch.Tensor) -> int:
    """How many tensors, also of C++, lie in the memory of one."""
    return _num_references(tensor) - _own_uses()


def _num_references(tensor: torch.Tensor) -> int:
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
    return uses


@cache
def _own_uses() -> int:
    """The references that the call itself has, which differ between versions of PyTorch: none in 2.6."""
    return _num_references(torch.empty(0, device="meta")) - 1


class GradientsFromBefore:
    """Leaves and their gradients, exchanged, each with memory of its own."""

    def __init__(self, gpu: FakeGPU, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._gpu = gpu
        self._held = list(pairs)

    def release(self) -> None:
        """Free what has been dropped and no object or name has; all are looked at once the first has been dropped."""
        if not self._held:
            return
        with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
            if self._held[0][0].grad is self._held[0][1]:
                return
            dropped = [grad for leaf, grad in self._held if leaf.grad is not grad]
            self._held = [one for one in self._held if one[0].grad is one[1]]
            for grad in dropped:
                storage = self._gpu.storage_of(grad)
                if storage is not None and sys.getrefcount(grad) <= _OWN_REFERENCES:
                    self._gpu.free_early(storage)
