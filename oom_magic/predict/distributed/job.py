"""A job of several processes, as ``torchrun`` starts it, one of which is followed."""

from __future__ import annotations

import os
from dataclasses import dataclass

from oom_magic.errors import InvalidSettingError


@dataclass(frozen=True, slots=True)
class Job:
    """``num_processes`` processes on one machine, each with a GPU; process ``rank`` is the one that runs here."""

    num_processes: int
    rank: int = 0

    def __post_init__(self) -> None:
        """Raises InvalidSettingError for numbers that no job has."""
        if not _is_whole(self.num_processes) or self.num_processes < 1:
            raise InvalidSettingError("not_a_count", name="num_processes", value=self.num_processes)
        if not _is_whole(self.rank) or not 0 <= self.rank < self.num_processes:
            raise InvalidSettingError("no_such_rank", rank=self.rank, last=self.num_processes - 1)

    def set_environment(self) -> None:
        """Set what ``torchrun --nproc-per-node`` sets (torch/distributed/elastic/agent/server/local_elastic_agent.py).

        A dry run puts the environment back when it ends.
        """
        rank, size = str(self.rank), str(self.num_processes)
        os.environ.update(
            RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0", ROLE_RANK=rank, ROLE_NAME="default",
            WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_WORLD_SIZE="1", ROLE_WORLD_SIZE=size,
            MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
            TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0",
            OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"),
        )  # fmt: skip


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
