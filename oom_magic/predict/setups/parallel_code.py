"""The part of training code that is about several GPUs: replicas in one process, replicas or shards in many."""

from __future__ import annotations

from typing import Protocol

_BLOCKS = "blocks = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)"


class Machine(Protocol):
    """What this code is written from: the settings of a TrainingSetup."""

    @property
    def num_gpus(self) -> int: ...
    @property
    def num_processes(self) -> int: ...
    @property
    def parallelism(self) -> str: ...


def imports_for(machine: Machine) -> list[str]:
    """The modules that the other lines need."""
    if machine.num_processes == 1:
        return []
    return ["os", "torch.distributed", *(["torch.distributed.fsdp"] if machine.parallelism == "fsdp2" else [])]


def opening(machine: Machine) -> list[str]:
    """The lines with which a process joins the job that ``torchrun`` started; none for one process."""
    if machine.num_processes == 1:
        return []
    return [
        f"# each of {machine.num_processes} processes: torchrun --nproc-per-node {machine.num_processes} train.py",
        'torch.distributed.init_process_group("nccl")',
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
    ]


def spreading(machine: Machine) -> list[str]:
    """The lines that spread a model which is on the GPU, before its optimizer is made."""
    if machine.num_processes == 1:
        return ["model = torch.nn.DataParallel(model)"] if machine.num_gpus > 1 else []
    if machine.parallelism == "fsdp2":
        return [
            _BLOCKS,
            "for block in blocks:",
            "    torch.distributed.fsdp.fully_shard(block)",
            "torch.distributed.fsdp.fully_shard(model)",
        ]
    return ["model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])"]
