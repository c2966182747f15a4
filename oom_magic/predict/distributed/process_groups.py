"""Process groups: one process is followed, and its messages to others arrive at once.

PyTorch's own ``torch.distributed`` runs, with the fake backend of its tests, in which the other processes do not exist.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch

from oom_magic.language import _
from oom_magic.predict import torch_private
from oom_magic.predict.distributed.collectives import Sent, collective_handlers, finished_work
from oom_magic.predict.distributed.sharding import shapes_found_aside, sharding_handlers
from oom_magic.predict.distributed.world import NOBODY, World
from oom_magic.predict.isolation.context import steps_hooked
from oom_magic.predict.isolation.patching import Patches, all_patched, patched
from oom_magic.predict.libraries.adapters import Adapter, Run

_NCCL_TIMEOUT = timedelta(minutes=10)  # torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp; a CPU build has none


@contextmanager
def _one_of_many(module: ModuleType, run: Run) -> Iterator[None]:
    """A group made here needs neither network nor NCCL; it ends with the run, and the session's next finds it again."""
    gpu = run.gpu
    theirs, hook = World.current(module), sys.excepthook
    changes = {
        "init_process_group": _begun_alone(module, run),
        "_new_process_group_helper": _made_alone(module),
        "rendezvous": _rendezvous,
        "is_nccl_available": lambda: True,
        "_verify_params_across_processes": _alike,
        "recv_object_list": _unknown_object,
        "batch_isend_irecv": _coalesced(module),
        "default_pg_nccl_timeout": module.default_pg_nccl_timeout or _NCCL_TIMEOUT,
    }
    shared = {name: change for name, change in changes.items() if hasattr(torch.distributed, name)}
    own = {name: change for name, change in changes.items() if hasattr(module, name)}
    sent = Sent(gpu, run.assume)
    handlers = gpu.operators.extended(collective_handlers(sent))
    try:
        with handlers, all_patched([(module, own), (torch.distributed, shared)]), steps_hooked(after=sent.look):
            if gpu.process_groups is not None:
                gpu.process_groups.enter(module)
            elif gpu.job is not None:
                NOBODY.enter(module)
            yield
    finally:
        sys.excepthook = hook  # init_process_group sets its own
        is_made = module._world.default_pg is not theirs.default
        gpu.process_groups = World.current(module) if is_made and module.is_initialized() else None
        theirs.enter(module)


def _begun_alone(module: ModuleType, run: Run) -> Callable[..., None]:
    """``init_process_group``; the report says which process was followed."""
    begin, gpu = module.init_process_group, run.gpu

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        torch_private.check(torch_private.DISTRIBUTED)
        if gpu.process_groups is not None and module.is_initialized():
            module.destroy_process_group()  # a cell that is rehearsed makes its group again
        begin(*args, **kwargs)
        gpu.process_groups = World.current(module)
        text = _(
            "process {rank} of {size} was followed; NCCL's own memory is not counted (published: 544-688 MB for one"
            " communicator on A100s, 1.06-4.34 GB with all-to-all on H100s)",
            rank=module.get_rank(),
            size=module.get_world_size(),
        )
        run.assume(text)

    return init_process_group


def _made_alone(module: ModuleType) -> Callable[..., Any]:
    """The replacement that makes a group for the devices of the requested backend, without other processes."""
    original = module._new_process_group_helper

    def _new_process_group_helper(
        group_size: int, group_rank: int, ranks: Any, backend: Any, store: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

        asked = module.BackendConfig(module.Backend(backend))
        devices = asked.get_device_backend_map()
        fake = ",".join(f"{device}:fake" for device in devices if device in ("cpu", "cuda"))
        options = {**kwargs, "backend_options": None, "device_id": None}
        made, made_store = original(group_size, group_rank, ranks, fake, store, *args[:1], **options)
        if isinstance(made, module.ProcessGroup):
            made._set_default_backend(module.ProcessGroup.BackendType.CUSTOM)
            module._world.pg_map[made] = (backend, made_store)
            module._world.pg_backend_config[made] = str(asked)
        return made, made_store

    return _new_process_group_helper


def _coalesced(module: ModuleType) -> Callable[[Any], list[Any]]:
    """``batch_isend_irecv``, whose single work holds no tensors (``ProcessGroupNCCL::endCoalescing``)."""

    def batch_isend_irecv(p2p_op_list: Any) -> list[Any]:
        module._check_p2p_op_list(p2p_op_list)
        for one in p2p_op_list:
            peer = "group_dst" if one.op is module.isend else "group_src"
            work = one.op(one.tensor, group=one.group, tag=one.tag, **{peer: one.group_peer})
            if work is not None:
                work.wait()
        return [finished_work(None)]

    return batch_isend_irecv


def _rendezvous(url: str, rank: int = -1, world_size: int = -1, **_unused: Any) -> Iterator[tuple[Any, int, int]]:
    """No other process is contacted: a store of this process alone, and rank and world size as given or as in the
    environment."""
    rank = int(os.environ.get("RANK", 0)) if rank < 0 else rank
    world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size < 0 else world_size
    yield torch._C._distributed_c10d.HashStore(), rank, world_size


def _alike(group: Any, tensors: Any, logger: Any = None) -> None:
    """In place of the reading of all processes' shapes (``verify_params_across_processes`` in c10d's reducer.cpp)."""


def _unknown_object(*_unused: Any, **__: Any) -> None:
    """Refuses objects of another process (``recv_object_list``), which are unknown."""
    raise RuntimeError(
        _("recv_object_list: what another process sends is known only to that process; a dry run follows one process")
    )


def _replicated(module: ModuleType, run: Run) -> Patches:
    """DDP checks before a communication hook in bfloat16 that this is a build with CUDA, and times its steps.

    Its timers know CPU and CUDA tensors only, and print so (torch/csrc/distributed/c10d/logger.cpp).
    """
    check = module.DistributedDataParallel._check_comm_hook

    def _check_comm_hook(self: Any, hook: Any) -> None:
        with patched(torch.version, {"cuda": torch.version.cuda or "13.0"}):
            check(self, hook)

    return [
        (module.DistributedDataParallel, {"_check_comm_hook": _check_comm_hook}),
        (module.dist.Logger, {"set_runtime_stats_and_log": lambda *_unused: None}),
    ]


@contextmanager
def _sharded(module: ModuleType, run: Run) -> Iterator[None]:
    """FSDP2's operators write into what is there; its parameters have no data and are on a GPU all the same."""
    with run.gpu.operators.extended(sharding_handlers()):
        yield


def _distributed_tensors(module: ModuleType, run: Run) -> Patches:
    torch_private.check(torch_private.SHARDED)
    return shapes_found_aside(module.ShardingPropagator)


@contextmanager
def _groups_forgotten(module: ModuleType, run: Run) -> Iterator[None]:
    """DeepSpeed keeps its groups, and objects made from them, in variables of modules."""
    before = {name: value for name, value in vars(module).items() if not callable(value)}
    try:
        yield
    finally:
        vars(module).update(before)


def _accelerator_found_anew(module: ModuleType, run: Run) -> Patches:
    """DeepSpeed detects the machine's devices once, often before there is a pretend GPU."""
    return [(module, {"ds_accelerator": None})]


def _stages_alone(module: ModuleType, run: Run) -> Patches:
    """``PipelineStage`` with neighbours that know the same shapes, and that return gradients of what they received.

    Source: torch/distributed/pipelining/stage.py. Stages first agree whether all of them were told their shapes, and
    send each other descriptions of what they exchange where some were not.
    """
    stage = module.PipelineStage
    if not hasattr(stage, "_recv_meta"):  # before PyTorch 2.13 shapes are sent as objects, which is refused
        return []

    changes: dict[str, Any] = {}
    if hasattr(stage, "_warmup_forward_vote"):  # PyTorch 2.13; later ones agree with one all_reduce
        votes: dict[int, int] = {}  # by stage; the others vote as this one does
        usual_vote, usual_result = stage._warmup_forward_vote, stage._warmup_backward_result

        def _warmup_forward_vote(self: Any, has_backward: bool, *args: Any, **kwargs: Any) -> torch.Tensor:
            is_dynamic = module.InferenceMode.needs_dynamic(self._user_meta, has_backward)
            votes[self.stage_index] = 0 if is_dynamic else 1
            return usual_vote(self, has_backward, *args, **kwargs).fill_(votes[self.stage_index])

        def _warmup_backward_result(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            return usual_result(self, *args, **kwargs).fill_(votes[self.stage_index])

        changes |= {"_warmup_forward_vote": _warmup_forward_vote, "_warmup_backward_result": _warmup_backward_result}

    def _recv_meta(self: Any, src_stage: int) -> Any:
        if src_stage > self.stage_index:
            return module._StageBackwardMeta(backward_metas=module._derive_grad_metas(self._stage_meta.outputs))
        if self._user_meta.inputs is None:
            raise RuntimeError(
                _(
                    "pipeline stage {number}: what the previous stage sends is known only in its process; pass"
                    " input_args and output_args to PipelineStage, or follow the process of stage 0",
                    number=self.stage_index,
                )
            )
        sent = [replace(meta, requires_grad=meta.dtype.is_floating_point) for meta in self._user_meta.inputs]
        return module._StageForwardMeta(forward_metas=tuple(sent))

    return [(stage, {**changes, "_recv_meta": _recv_meta})]


ADAPTERS: dict[str, Adapter] = {
    "deepspeed.accelerator.real_accelerator": _accelerator_found_anew,
    "deepspeed.comm.comm": _groups_forgotten,
    "deepspeed.utils.groups": _groups_forgotten,
    "torch.distributed.distributed_c10d": _one_of_many,
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": _sharded,
    "torch.distributed.pipelining.stage": _stages_alone,
    "torch.distributed.tensor._sharding_prop": _distributed_tensors,
    "torch.nn.parallel.distributed": _replicated,
}
