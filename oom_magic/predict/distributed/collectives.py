"""What processes send each other arrives at once, and is what this one would have sent.

NCCL's own buffers lie outside PyTorch; what its process group takes from PyTorch's allocator is taken here.
Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp; the operators are those of c10d/Ops.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.language import _
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.places import Handler, Place
from oom_magic.predict.operators.calls import Call

Tensors = Sequence[torch.Tensor]


class Sent:
    """What asynchronous collectives hold until it is known that they are over.

    ``WorkNCCL`` holds its tensors until somebody waits for it, or, when the process group's watchdog found it done,
    which looks every 0.1 s, until the next collective. DDP waits for the future instead, so the buckets of a first
    step may still be held when it has made its second, better ones. The watchdog is taken to look at the end of the
    step after, which is the most that can be held; where it looks between the two steps, nothing is.
    """

    def __init__(self, gpu: FakeGPU, assume: Callable[[str], None]) -> None:
        self._gpu = gpu
        self._assume = assume
        self._held: list[tuple[int, Any]] = []  # by optimizer step

    def work(self, result: Any, tensors: Tensors) -> Any:
        """The work of a collective of ``tensors`` that nobody has waited for yet."""
        made = _work_type()(result, tensors)
        self._held.append((self._gpu.recorder.step, made))
        return made.boxed()

    def look(self, *_unused: Any) -> None:
        """What the watchdog does, when an optimizer has stepped."""
        step = self._gpu.recorder.step  # the next
        allocator = self._gpu.recorder.allocator
        before = allocator.allocated_bytes
        self._held = [(sent_in, work) for sent_in, work in self._held if sent_in >= step - 1]
        if before > allocator.allocated_bytes:
            self._assume(
                _(
                    "what DDP's first backward sent, {num_bytes}, is taken to be held to the end of the second step;"
                    " NCCL's watchdog, which looks every 0.1 s, lets go of it earlier where steps are slow",
                    num_bytes=before - allocator.allocated_bytes,
                )
            )


@cache
def _work_type() -> type:
    from torch._C._distributed_c10d import Work

    class HoldingWork(Work):  # type: ignore[misc]
        """A finished collective that holds tensors until somebody waits for it."""

        def __init__(self, result: Any, tensors: Tensors) -> None:
            super().__init__()
            self._future = _over(result)
            self._held: Tensors = tuple(tensors)

        def is_completed(self) -> bool:
            return True

        def wait(self, timeout: Any = None) -> bool:
            self._held = ()
            return True

        def get_future(self) -> torch.futures.Future[Any]:
            return self._future

    return HoldingWork


class _FutureOnCards(torch.futures.Future[Any]):
    """A finished future whose values are on GPUs: each callback runs at once, on a stream of the pool.

    Source: ATen/core/ivalue_inl.h (``Future::invokeCallback``); the callback's results are in use there.
    """

    def then(self, callback: Callable[[Any], Any]) -> Any:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            return _over(callback(self))


def _over(result: Any) -> Any:
    """The future of what is over."""
    future = _FutureOnCards()
    future.set_result(result)
    return future


def finished(result: Any = None) -> Any:
    """The work of a collective that is over."""
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    return _create_work_from_future(_over(result)).boxed()


def _reduced(sent: Sent) -> Handler:
    """Sums: every process has what this one has."""

    def all_reduce(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_async = args[4] if len(args) > 4 else kwargs.get("async_op", True)
        return args[0], sent.work(args[0], args[0]) if is_async else finished(args[0])

    return all_reduce


def _in_place(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Broadcasts: every process has what this one has."""
    return args[0], finished(args[0])


def _nothing(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sent to others, who need no answer."""
    return finished()


def _all_gather(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lists of outputs are gathered into one tensor first, and copied from there."""
    outputs, inputs = args[0], args[1]
    for received, sent in zip(outputs, inputs, strict=True):
        if all(tensor.shape == sent.shape for tensor in received):
            _flatten(gpu, func, received)
        _copy_to_each(gpu, sent, received)
    return outputs, finished(outputs)


def _gather(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sent one by one."""
    for received, sent in zip(args[0], args[1], strict=False):
        _copy_to_each(gpu, sent, received)
    return finished()


def _reduce_scatter(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lists of inputs are copied into one tensor first."""
    outputs, inputs = args[0], args[1]
    for received, sent in zip(outputs, inputs, strict=True):
        if all(tensor.shape == received.shape for tensor in sent):
            _flatten(gpu, func, sent)
        _forget(gpu, [received])
    return outputs, finished(outputs)


def _scatter(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Received one by one; whoever sends, sends to this process what it would."""
    outputs, inputs = args[0], args[1]
    group_rank = torch.distributed.ProcessGroup.unbox(args[2]).rank()
    for received, sent in zip(outputs, inputs, strict=False):
        _copy_to_each(gpu, sent[group_rank], [received])
    return outputs, finished(outputs)


def _into_tensor(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Into one tensor; nothing is taken."""
    _write_whole(gpu, args[0], args[1])
    return args[0], finished(args[0])


def _into_tensors(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for received, sent in zip(args[0], args[1], strict=True):
        _write_whole(gpu, received, sent)
    return finished(args[0])


def _gather_lists(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for received in args[0]:
        for target, sent in zip(received, args[1], strict=True):
            _copy_to_each(gpu, sent, [target])
    return finished()


def _exchange(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each process receives from the others what it sends them."""
    for received, sent in zip(args[0], args[1], strict=True):
        _write_whole(gpu, received, sent)
    return args[0], finished(args[0])


def _barrier(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum of one number on the GPU (``ProcessGroupNCCL::barrier``)."""
    if gpu.place(args[0]) is Place.GPU:
        call = Call(gpu, args, kwargs, None, func.name(), gpu.attribution.phase(False))
        call.take(4)
        call.end()
    return finished()


def _received(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What another process sent: nobody knows its values."""
    _forget(gpu, args[0])
    return finished()


def _flatten(gpu: FakeGPU, func: OpOverload, tensors: Tensors) -> None:
    """The one tensor that holds all of a list, for a moment (``newLikeFlat``)."""
    if gpu.place(tensors[0]) is Place.GPU:
        call = Call(gpu, (), {}, None, func.name(), gpu.attribution.phase(False))
        call.take(sum(tensor.numel() for tensor in tensors) * tensors[0].element_size())
        call.end()


def _copy_to_each(gpu: FakeGPU, source: torch.Tensor, targets: Tensors) -> None:
    for target in targets:
        if target.shape == source.shape:
            gpu.values.copy(source, target)
        else:
            _forget(gpu, [target])


def _write_whole(gpu: FakeGPU, target: torch.Tensor, source: torch.Tensor) -> None:
    """``target`` is as many times ``source`` as it is larger; its values are unknown where it is not."""
    times = target.numel() // max(source.numel(), 1)
    value = gpu.values.get(source) if gpu.place(target) is not None else source
    if value is None or times * source.numel() != target.numel():
        _forget(gpu, [target])
    elif not target.is_meta:
        target.copy_(gpu.values.read(source).reshape(-1).repeat(times).view(target.shape))
    elif gpu.values.get(target) is not None:
        gpu.values.put(target, value.reshape(-1).repeat(times).view(target.shape))


def _forget(gpu: FakeGPU, tensors: Tensors) -> None:
    for tensor in tensors:
        if tensor.is_meta:
            gpu.values.forget(tensor.untyped_storage()._cdata)


_HANDLERS: dict[str, Handler] = {
    "broadcast_": _in_place,
    "reduce_": _in_place,
    "allreduce_coalesced_": _nothing,
    "send": _nothing,
    "monitored_barrier_": _nothing,
    "barrier": _barrier,
    "recv_": _received,
    "recv_any_source_": _received,
    "allgather_": _all_gather,
    "allgather_coalesced_": _gather_lists,
    "gather_": _gather,
    "scatter_": _scatter,
    "reduce_scatter_": _reduce_scatter,
    "_allgather_base_": _into_tensor,
    "_reduce_scatter_base_": _into_tensor,
    "allgather_into_tensor_coalesced_": _into_tensors,
    "reduce_scatter_tensor_coalesced_": _into_tensors,
    "alltoall_base_": lambda gpu, func, args, kwargs: _into_tensor(gpu, func, args, kwargs)[1],
    "alltoall_": _exchange,
}


def _wrapped(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a collective that is under way (torch/distributed/_functional_collectives.py)."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(args[0])


def collective_handlers(sent: Sent) -> dict[OpOverload, Handler]:
    """What runs in place of each operator of ``torch.distributed``."""
    named = {**_HANDLERS, "allreduce_": _reduced(sent)}
    c10d = torch.ops.c10d
    handlers = {getattr(c10d, name).default: run for name, run in named.items() if hasattr(c10d, name)}
    functional = torch.ops._c10d_functional
    handlers[functional.wait_tensor.default] = lambda gpu, func, args, kwargs: args[0]
    if hasattr(functional, "_wrap_tensor_autograd"):
        handlers[functional._wrap_tensor_autograd.default] = _wrapped
    return handlers
