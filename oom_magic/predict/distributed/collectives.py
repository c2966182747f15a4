"""Messages between processes arrive at once, and have the content that this process would have sent.

NCCL's own buffers are outside PyTorch; the memory that its process group takes from PyTorch's allocator is taken here.
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

Tensors = Sequence[torch.Tensor]

# The effect of an operator on its arguments. It returns the tensors that its work holds as long as the work exists,
# then those that it holds until somebody waits for it.
_Collective = Callable[[FakeGPU, OpOverload, tuple[Any, ...]], tuple[Any, ...]]


class Sent:
    """The tensors that asynchronous collectives hold until it is known that they have finished.

    ``WorkNCCL`` holds its tensors until somebody waits for it, or, when the process group's watchdog found it done,
    which looks every 0.1 s, until the next collective. DDP waits for the future instead, so the buckets of a first step
    may still be held when it has made its second, better ones, and copies that a hook sent until the next look. The
    watchdog is assumed to look at the end of the following step; if it looks between the two steps, nothing is held.
    """

    def __init__(self, gpu: FakeGPU, assume: Callable[[str], None]) -> None:
        self._gpu = gpu
        self._assume = assume
        self._works: dict[Any, int] = {}  # the step in which each work was made

    def work(self, outputs: Any, until_waited: Sequence[Any]) -> Any:
        """A Work that nobody has waited for yet."""
        made = _work_type()(outputs, until_waited, self._works)
        self._works[made] = self._gpu.recorder.step
        return made.boxed()

    def look(self, *_unused: Any) -> None:
        """The watchdog's check, after a step of an optimizer."""
        step = self._gpu.recorder.step  # the next
        allocator = self._gpu.recorder.allocator
        before = allocator.allocated_bytes
        for work in [work for work, sent_in in self._works.items() if sent_in < step - 1]:
            del self._works[work]
        work = None
        if before > allocator.allocated_bytes:
            self._assume(
                _(
                    "DDP: the {num_bytes} that a backward pass sent is assumed to stay allocated until the end of"
                    " the next step; NCCL's watchdog, which polls every 0.1 s, frees it earlier if steps are"
                    " slow, later if they are fast",
                    num_bytes=before - allocator.allocated_bytes,
                )
            )


@cache
def _work_type() -> type:
    from torch._C._distributed_c10d import Work

    class HoldingWork(Work):  # type: ignore[misc]
        """A finished collective: it holds its outputs and, until somebody waits for it, its inputs.

        Source: ``outputs_`` and ``stashed_for_allocator_safety_`` of ``WorkNCCL``. ``Sent`` keeps this object until
        then: C++ code calls the methods defined here only as long as the Python object lives.
        """

        def __init__(self, outputs: Any, until_waited: Sequence[Any], works: dict[Any, int]) -> None:
            super().__init__()
            self._future = _over(outputs)
            self._until_waited = until_waited
            self._works = works

        def is_completed(self) -> bool:
            return True

        def wait(self, timeout: Any = None) -> bool:
            self._until_waited = ()
            self._works.pop(self, None)
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
    """A future that already has its result."""
    future = _FutureOnCards()
    future.set_result(result)
    return future


def finished_work(outputs: Any) -> Any:
    """The Work of a finished collective, which holds the outputs."""
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    return _create_work_from_future(_over(outputs))


def _handler(sent: Sent, collective: _Collective) -> Handler:
    """The replacement of an operator: it returns the tensors written to, where the schema says so, then the work."""

    def run(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs, *until_waited = collective(gpu, func, args)
        returned = func._schema.returns
        if not returned:
            return None
        position = _position_of_async(func)
        is_async = args[position] if len(args) > position else kwargs.get("async_op", True)
        work = sent.work(outputs, until_waited) if is_async else finished_work(outputs).boxed()
        return work if len(returned) == 1 else (args[0], work)

    return run


@cache
def _position_of_async(func: OpOverload) -> int:
    """The position of the argument that makes the call asynchronous; one past the last where there is none."""
    names = [argument.name for argument in func._schema.arguments]
    return names.index("async_op") if "async_op" in names else len(names)


def _in_place(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sums and broadcasts: every process has what this one has."""
    return args[0], args[0]


def _all_gather(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Lists of outputs are gathered into one tensor first, and copied from there."""
    outputs, inputs = args[0], args[1]
    flat = []
    for received, sent in zip(outputs, inputs, strict=True):
        if all(tensor.shape == sent.shape for tensor in received):
            flat.append(_flat(gpu, func, received))
        _copy_to_each(gpu, sent, received)
    return outputs, inputs, flat


def _gather(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inputs are sent one by one."""
    for received, sent in zip(args[0], args[1], strict=False):
        _copy_to_each(gpu, sent, received)
    return args[0], args[1]


def _reduce_scatter(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Lists of inputs are copied into one tensor first."""
    outputs, inputs = args[0], args[1]
    flat = []
    for received, sent in zip(outputs, inputs, strict=True):
        if all(tensor.shape == received.shape for tensor in sent):
            flat.append(_flat(gpu, func, sent))
        _forget(gpu, [received])
    return outputs, inputs, flat


def _scatter(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Received one by one; the sender sends what this process would send, so this process's lists are what is held."""
    outputs, inputs = args[0], args[1]
    group_rank = torch.distributed.ProcessGroup.unbox(args[2]).rank()
    for received, sent in zip(outputs, inputs, strict=False):
        _copy_to_each(gpu, sent[group_rank], [received])
    return inputs, outputs


def _into_tensor(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gathers into one tensor; allocates nothing."""
    _write_whole(gpu, args[0], args[1])
    return args[0], args[1]


def _into_tensors(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Each tensor into its own output: every process sends to this one what this one sends."""
    for received, sent in zip(args[0], args[1], strict=True):
        _write_whole(gpu, received, sent)
    return args[0], args[1]


def _gather_lists(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    for received in args[0]:
        for target, sent in zip(received, args[1], strict=True):
            _copy_to_each(gpu, sent, [target])
    return args[0], args[1]


def _barrier(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A sum of one number on the GPU (``ProcessGroupNCCL::barrier``)."""
    return (_made(gpu, func, 1, torch.float32) if gpu.place(args[0]) is Place.GPU else None,)


def _received(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A tensor from another process, whose values are unknown."""
    _forget(gpu, args[0])
    return args[0], args[0]


def _flat(gpu: FakeGPU, func: OpOverload, tensors: Tensors) -> torch.Tensor | None:
    """The one tensor that holds all of a list (``newLikeFlat``)."""
    is_on_gpu = gpu.place(tensors[0]) is Place.GPU
    return _made(gpu, func, sum(tensor.numel() for tensor in tensors), tensors[0].dtype) if is_on_gpu else None


def _made(gpu: FakeGPU, func: OpOverload, numel: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty(numel, dtype=dtype, device="meta")
    gpu.adopt(made, Place.GPU, func.name())
    return made


def _copy_to_each(gpu: FakeGPU, source: torch.Tensor, targets: Tensors) -> None:
    for target in targets:
        if target.shape == source.shape:
            gpu.values.copy(source, target)
        else:
            _forget(gpu, [target])


def _write_whole(gpu: FakeGPU, target: torch.Tensor, source: torch.Tensor) -> None:
    """``target`` becomes copies of ``source``, if its size is a multiple; else its values are unknown."""
    times = target.numel() // max(source.numel(), 1)
    value = gpu.values.get(source) if gpu.place(target) is not None else source
    if times * source.numel() != target.numel():
        _forget(gpu, [target])
    elif value is None:
        gpu.values.repeat(source, target, times)
    elif not target.is_meta:
        target.copy_(gpu.values.read(source).reshape(-1).repeat(times).view(target.shape))
    elif gpu.values.get(target) is not None:
        gpu.values.put(target, value.reshape(-1).repeat(times).view(target.shape))


def _forget(gpu: FakeGPU, tensors: Tensors) -> None:
    for tensor in tensors:
        if tensor.is_meta:
            gpu.values.forget(tensor.untyped_storage()._cdata)


_COLLECTIVES: dict[str, _Collective] = {
    "broadcast_": _in_place,
    "reduce_": _in_place,
    "allreduce_": _in_place,
    "allreduce_coalesced_": _in_place,
    "send": _in_place,
    "monitored_barrier_": _in_place,
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
    "alltoall_base_": _into_tensor,
    "alltoall_": _into_tensors,
}


def _wrapped(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a collective that is under way (torch/distributed/_functional_collectives.py)."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(args[0])


def collective_handlers(sent: Sent) -> dict[OpOverload, Handler]:
    """The handlers of ``torch.distributed``'s operators."""
    c10d = torch.ops.c10d
    handlers = {
        getattr(c10d, name).default: _handler(sent, collective)
        for name, collective in _COLLECTIVES.items()
        if hasattr(c10d, name)
    }
    functional = torch.ops._c10d_functional
    handlers[functional.wait_tensor.default] = lambda gpu, func, args, kwargs: args[0]
    if hasattr(functional, "_wrap_tensor_autograd"):
        handlers[functional._wrap_tensor_autograd.default] = _wrapped
    return handlers
