"""``nn.DataParallel``: PyTorch's own Python code runs; its parts in C++ and in threads are replaced here.

Source: torch/csrc/cuda/comm.cpp and torch/nn/parallel/parallel_apply.py. Replicas run one after the other, which is the
same for each card's allocator. NCCL is assumed to be available; it copies without memory of the allocator.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.nccl
import torch.nn.parallel.comm
from torch.nn.parallel._functions import Broadcast

from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.isolation.patching import Patches

Tensors = Sequence[torch.Tensor]


def data_parallel_followed(gpu: FakeGPU) -> Patches:
    """In the block, models are replicated over the pretend machine's cards."""
    return [
        (torch.nn.parallel.comm, {"broadcast": broadcast, "broadcast_coalesced": broadcast_coalesced}),
        (torch.nn.parallel.comm, {"scatter": scatter, "gather": gather}),
        (torch.cuda.nccl, {"is_available": lambda tensors: True, "reduce": lambda *args, **kwargs: None}),
        (sys.modules["torch.nn.parallel.parallel_apply"], {"threading": _threads_in_turn(gpu)}),
        (
            sys.modules["torch.nn.parallel._functions"],
            {"_get_stream": _background_streams(gpu), "Broadcast": _Broadcast},
        ),
    ]


class _Broadcast(Broadcast):
    """``Broadcast`` that makes the zeros for outputs without a gradient on each output's card.

    The engine's own zeros would all be on one card: it takes their device from the outputs, which are "meta" here
    (torch/csrc/autograd/python_function.cpp, ``PyNode::apply``).
    """

    @staticmethod
    def forward(ctx: Any, devices: Any, *tensors: torch.Tensor) -> Any:
        """Copies of the tensors on each device."""
        ctx.set_materialize_grads(False)
        outputs = Broadcast.forward(ctx, devices, *tensors)
        ctx.likes = [(output.size(), output.dtype, output.device) for output in outputs]
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """The sums of the gradients on the first device."""
        given = [
            torch.zeros(size, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (size, dtype, device) in zip(gradients, ctx.likes, strict=True)
        ]
        del gradients
        return Broadcast.backward(ctx, *given)


def _background_streams(gpu: FakeGPU) -> Callable[[torch.device], Any]:
    """``_get_stream``: one for each card, for copies from the host."""

    def stream(device: torch.device) -> Any:
        card = _number(device)
        if card not in gpu.background_streams:
            gpu.background_streams[card] = torch.cuda.Stream(card)  # type: ignore[no-untyped-call]
        return gpu.background_streams[card]

    return stream


def broadcast(tensor: torch.Tensor, devices: Sequence[Any] | None = None, *, out: Any = None) -> tuple[Any, ...]:
    """A copy on each device; on its own device the tensor itself (``broadcast``)."""
    if devices is None:
        return tuple(out)
    numbers = [_number(device) for device in devices]
    return tuple(
        tensor
        if tensor.is_cuda and tensor.get_device() == number
        else torch.empty(tensor.size(), dtype=tensor.dtype, device=torch.device("cuda", number))
        for number in numbers
    )


def broadcast_coalesced(tensors: Tensors, devices: Sequence[Any], buffer_size: int = 10485760) -> list[list[Any]]:
    """Copies of many tensors, in buffers of at least ``buffer_size`` bytes; on the first device themselves."""
    outputs: list[list[Any]] = [list(tensors), *([None] * len(tensors) for _ in devices[1:])]
    for positions in _groups(tensors, buffer_size):
        likes = [tensors[position] for position in positions]
        for output, copies in zip(outputs[1:], _copies(likes, devices), strict=True):
            for position, copy in zip(positions, copies, strict=True):
                output[position] = copy
    return outputs


def _copies(tensors: Tensors, devices: Sequence[Any]) -> list[list[torch.Tensor]]:
    """The copies on every device except the first, made through one buffer that holds all tensors."""
    sizes = [tensor.numel() for tensor in tensors]
    return [
        [piece.view(like.size()).data for piece, like in zip(buffer.split(sizes), tensors, strict=True)]
        for buffer in broadcast(_flat(tensors), devices)[1:]
    ]


def _groups(tensors: Tensors, size_limit: int) -> Iterator[list[int]]:
    """Positions by type, a group being closed when it reaches the limit (tensor_flatten.cpp, ``take_tensors``)."""
    groups: dict[torch.dtype, list[int]] = defaultdict(list)
    sizes: dict[torch.dtype, int] = defaultdict(int)
    for position, tensor in enumerate(tensors):
        groups[tensor.dtype].append(position)
        sizes[tensor.dtype] += tensor.numel() * tensor.element_size()
        if sizes[tensor.dtype] >= size_limit:
            yield groups.pop(tensor.dtype)
            sizes[tensor.dtype] = 0
    yield from groups.values()


def _flat(tensors: Tensors) -> torch.Tensor:
    rows = [tensor.contiguous().view(-1) for tensor in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def scatter(
    tensor: torch.Tensor,
    devices: Sequence[Any] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Sequence[Any] | None = None,
    *,
    out: Any = None,
) -> tuple[torch.Tensor, ...]:
    """A piece on each device; a piece that stays on its device is a view."""
    if out is not None:
        return tuple(out)
    assert devices is not None
    chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    made = []
    for position, chunk in enumerate(chunks):
        with torch.cuda.stream(streams[position] if streams else None):  # type: ignore[arg-type]
            made.append(chunk.to(torch.device("cuda", _number(devices[position])), non_blocking=True))
    return tuple(made)


def gather(tensors: Tensors, dim: int = 0, destination: Any = None, *, out: Any = None) -> torch.Tensor:
    """The pieces concatenated on the destination (-1: the host)."""
    if out is not None:
        return out  # type: ignore[no-any-return]
    size = list(tensors[0].size())
    size[dim] = sum(tensor.size(dim) for tensor in tensors)
    is_last = all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors if tensor.dim() == 4)
    layout = torch.channels_last if is_last and len(size) == 4 else torch.contiguous_format
    is_host = destination == -1 or (destination is not None and torch.device(destination).type == "cpu")
    device = torch.device("cpu") if is_host else torch.device("cuda", _number(destination))
    made = torch.empty(size, dtype=tensors[0].dtype, device=device, memory_format=layout)
    start = 0
    for tensor in tensors:
        made.narrow(dim, start, tensor.size(dim)).copy_(tensor, non_blocking=True)
        start += tensor.size(dim)
    return made


def _number(device: Any) -> int:
    """The card of a device; the current one if it has no index."""
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def _threads_in_turn(gpu: FakeGPU) -> SimpleNamespace:
    """``threading`` for ``parallel_apply``: a thread's work is done when it is started."""

    class Thread:
        def __init__(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
            self._target, self._args = target, args

        def start(self) -> None:
            with gpu.threads.started(), gpu.on_card(gpu.current), _as_in_a_new_thread():
                self._target(*self._args)
            del self._target, self._args

        def join(self) -> None: ...

    return SimpleNamespace(Thread=Thread, Lock=threading.Lock)


@contextmanager
def _as_in_a_new_thread() -> Iterator[None]:
    """A thread begins with gradients on, autocast off and float16 as its type (c10's and ATen's thread-locals)."""
    is_recorded, dtype = torch.is_grad_enabled(), torch.get_autocast_dtype("cuda")
    is_on = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", torch.float16)
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.set_grad_enabled(is_recorded)
        torch.set_autocast_enabled("cuda", is_on)
        torch.set_autocast_dtype("cuda", dtype)
