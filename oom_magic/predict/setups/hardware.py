"""The cards and processes of a dry run: which and how many, from names and numbers alone, before PyTorch is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from oom_magic.errors import InvalidSettingError
from oom_magic.inputs import parse_bytes
from oom_magic.language import _
from oom_magic.memory.allocator import addresses
from oom_magic.memory.allocator.settings import AllocatorSettings
from oom_magic.predict.setups.gpus import DEFAULT_GPU, GPU, checked_num_gpus, counted, find_gpu

_MOST_CARDS = 10_000  # each has an allocator of its own: a million take minutes to make


@dataclass(frozen=True, slots=True)
class Job:
    """``num_processes`` processes on one machine, each with a GPU; process ``rank`` is the one that runs here."""

    num_processes: int
    rank: int = 0

    def __post_init__(self) -> None:
        """Raises InvalidSettingError for impossible numbers."""
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


@dataclass(frozen=True)
class Hardware:
    """``num_cards`` cards like ``gpu`` of ``total_bytes``, seen by one process or each by a process of ``job``."""

    gpu: GPU
    total_bytes: int
    num_cards: int
    job: Job | None
    settings: AllocatorSettings

    @classmethod
    def of(
        cls,
        gpu: str | GPU | None,
        memory: str | int | None,
        num_gpus: int = 1,
        num_processes: int | None = None,
        rank: int = 0,
    ) -> Hardware:
        """The hardware that these options of ``dry_run`` describe. Raises ValueError with the fix."""
        number, name = (num_gpus, gpu) if isinstance(gpu, GPU) else counted(gpu or DEFAULT_GPU, num_gpus)
        card = name if isinstance(name, GPU) else find_gpu(name)
        job = None if num_processes is None else Job(num_processes, rank)
        settings = replace(
            AllocatorSettings.parse(_allocator_options()), is_by_address=addresses.matter(version("torch"))
        )
        total_bytes = card.total_bytes if memory is None else parse_bytes(memory)
        num_cards = checked_num_gpus(number)
        if job is not None and 1 < num_cards < job.num_processes:
            counts = {"processes": job.num_processes, "cards": number}
            raise ValueError(
                _("{processes} processes need one card each, but only {cards} are given; give more.", **counts)
            )
        num_cards = max(num_cards, 1 if job is None else job.num_processes)
        if num_cards > _MOST_CARDS:
            raise ValueError(_("{number} GPUs: at most {most} are supported.", number=num_cards, most=_MOST_CARDS))
        return cls(card, total_bytes, num_cards, job, settings)

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``dry_run`` for this number of cards, or for this process of the job."""
        if self.job is None:
            return {"num_gpus": self.num_cards}
        return {"num_processes": self.job.num_processes, "rank": self.job.rank}

    def checked_card(self, card: int | None) -> int:
        """The number of the card to size. Raises ValueError if there are several and ``card`` is None."""
        if self.job is not None:
            return 0
        num_cards = self.num_cards
        known = ", ".join(f"card={number}" for number in range(num_cards))
        if card is None and num_cards > 1:
            raise ValueError(
                _(
                    "{num_cards} cards: sizes are those of one card; choose it: {known} (the report of om.dry_run"
                    " shows in .cards which one is full).",
                    num_cards=num_cards,
                    known=known,
                )
            )
        if card is not None and card not in range(num_cards):
            raise ValueError(_("card={card!r} does not exist; give one of {known}.", card=card, known=known))
        return card or 0


def _allocator_options() -> str:
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
