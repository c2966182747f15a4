"""Functions that start several processes from one: a notebook's launcher, ``mp.spawn``. One of the processes is
followed.

Sources: torch/distributed/launcher/api.py (``elastic_launch``, behind accelerate's ``notebook_launcher``) and
torch/multiprocessing/spawn.py (``start_processes``, behind ``mp.spawn`` and Lightning's launchers).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.multiprocessing

from oom_magic.language import _
from oom_magic.predict.isolation.patching import Patches
from oom_magic.predict.libraries.adapters import Adapter, Run
from oom_magic.predict.setups.hardware import Job


@contextmanager
def _process_of(run: Run, num_processes: int) -> Iterator[Job]:
    """The job's process that is followed, for as long as its function runs; its process groups end with it."""
    job = Job(num_processes, 0 if run.gpu.job is None else min(run.gpu.job.rank, num_processes - 1))
    before = dict(os.environ)
    run.gpu.job, run.gpu.process_groups = job, None
    try:
        with run.gpu.on_card(run.gpu.current):
            yield job
    finally:
        if run.gpu.process_groups is None:  # what makes groups says it
            run.assume(
                _(
                    "process {rank} of the {num_processes} started here was followed",
                    rank=job.rank,
                    num_processes=num_processes,
                )
            )
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def _elastic(module: ModuleType, run: Run) -> Patches:
    """``elastic_launch(config, function)(*args)``: the function, as the agent's worker finds its environment."""

    def launch(self: Any, *args: Any) -> dict[int, Any]:
        config, function = self._config, self._entrypoint
        with _process_of(run, config.nproc_per_node * config.max_nodes) as job:
            job.set_environment()
            return {job.rank: function(*args)}

    return [(module.elastic_launch, {"__call__": launch})]


class _Ended:
    """The result of ``start_processes``, with all processes finished."""

    processes: tuple[Any, ...] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """True: the processes have ended."""
        return True

    def pids(self) -> list[int]:
        """None: no process was started."""
        return []


def _spawned(module: ModuleType, run: Run) -> Patches:
    """``mp.spawn(function, args, nprocs)``: the function with the number of the process that is followed."""

    def start_processes(
        fn: Callable[..., Any], args: Any = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
    ) -> _Ended | None:
        with _process_of(run, nprocs) as job:
            fn(job.rank, *args)
        return None if join else _Ended()

    return [(owner, {"start_processes": start_processes}) for owner in (module, torch.multiprocessing)]


ADAPTERS: dict[str, Adapter] = {
    "torch.distributed.launcher.api": _elastic,
    "torch.multiprocessing.spawn": _spawned,
}
