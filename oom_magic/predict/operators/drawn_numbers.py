"""Random numbers of real tensors on the host, drawn once for many dry runs in a row.

Each such run begins with the same state of PyTorch's generator, draws the same, and would spend a fifth of its time on
the initial values of adapters and small layers; to copy them takes a twentieth of that.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU

_LEAST_NUMBERS = 1 << 14  # fewer are drawn faster than the generator's state is compared
_MOST_BYTES = 1 << 29
_KINDS = (torch.float32, torch.float64)


class Draws:
    """What was drawn, as arrays and bytes, since a tensor would count as one of the user's."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[np.ndarray[Any, Any], bytes]] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        """How many tensors have been drawn."""
        return len(self._kept)

    def draw(self, gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The tensor with the numbers that the operator draws, and the generator in the state that it leaves."""
        tensor, generator = args[0], torch.default_generator
        how = (func, args[1:], tuple(kwargs.items()), tensor.dtype, tensor.size(), tensor.stride())
        key = (generator.get_state().numpy().tobytes(), how)
        known = self._kept.get(key)
        if known is not None:
            values, state = known
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
            return tensor.copy_(torch.from_numpy(values))
        drawn = gpu.run(func, args, kwargs)
        if self._num_bytes + tensor.nbytes <= _MOST_BYTES:
            self._num_bytes += tensor.nbytes
            self._kept[key] = np.array(tensor.detach().numpy()), generator.get_state().numpy().tobytes()
        return drawn


_draws: list[Draws] = []  # one, while runs follow each other


@contextmanager
def draws_kept() -> Iterator[Draws]:
    """For many dry runs in a row that begin with the same state of the generator: what they draw."""
    if _draws:
        yield _draws[0]
        return
    _draws.append(Draws())
    try:
        yield _draws[0]
    finally:
        _draws.clear()


def draw_on_host(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Numbers drawn into a real tensor by an operator like ``uniform_``."""
    tensor = args[0]
    is_kept = _draws and tensor.numel() >= _LEAST_NUMBERS and tensor.dtype in _KINDS and tensor.device.type == "cpu"
    if not is_kept or kwargs.get("generator") is not None or not all(map(_is_number, args[1:])):
        return gpu.run(func, args, kwargs)
    return _draws[0].draw(gpu, func, args, kwargs)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
