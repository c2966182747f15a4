"""Process groups: one process is followed, and what it sends to others arrives at once.

PyTorch's own ``DistributedDataParallel`` runs, its reducer and gradient buckets included.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.isolation.patching import patched
from oom_magic.predict.libraries.adapters import Adapter, Run


@contextmanager
def _one_of_many(module: ModuleType, run: Run) -> Iterator[None]:
    """A group made here needs neither network nor NCCL; it ends with the run, and the session's next finds it again."""
    gpu = run.gpu

    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        **_: Any,
    ) -> None:
        rank = int(os.environ.get("RANK", 0)) if rank < 0 else rank
        world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size < 0 else world_size
        if gpu.process_group is not None:
            usual_end()  # a cell that is rehearsed makes its group again
        begin(rank, world_size)
        gpu.process_group = rank, world_size
        run.assume(f"process {rank} of {world_size} was followed; NCCL's own memory is not counted")

    def destroy_process_group(group: Any = None) -> None:
        usual_end(group)
        if not module.is_initialized():
            gpu.process_group = None

    begin, usual_end = _beginning_alone(module), module.destroy_process_group
    changes = {"init_process_group": init_process_group, "destroy_process_group": destroy_process_group}
    collectives = {torch.ops.c10d.allreduce_.default: _all_reduce}
    before = dict(gpu.handlers)
    gpu.handlers.update(collectives)
    try:
        with (
            patched(module, changes),
            patched(torch.distributed, {**changes, "_verify_params_across_processes": _alike}),
        ):
            if module.is_initialized():
                gpu.process_group = None  # the user's own is there
            elif gpu.process_group is not None:
                begin(*gpu.process_group)
            yield
    finally:
        gpu.handlers = before
        if gpu.process_group is not None:
            usual_end()


def _beginning_alone(module: ModuleType) -> Callable[[int, int], None]:
    """What makes a default group whose other processes do not exist, as PyTorch's tests have it."""
    usual = module.init_process_group

    def begin(rank: int, world_size: int) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        usual("fake", store=FakeStore(), rank=rank, world_size=world_size)

    return begin


def _alike(group: Any, tensors: Any, logger: Any = None) -> None:
    """In place of the reading of all processes' shapes (``verify_params_across_processes`` in c10d's reducer.cpp)."""


def _all_reduce(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums in place, done at once: the work that a pretended tensor gets from PyTorch has no result for the reducer."""
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_result(args[0])
    return args[0], _create_work_from_future(done).boxed()


ADAPTERS: dict[str, Adapter] = {"torch.distributed.distributed_c10d": _one_of_many}
