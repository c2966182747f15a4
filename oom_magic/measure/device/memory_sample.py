"""What a device's memory is doing at this moment, read so that nothing is disturbed: for the live monitor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from oom_magic.measure.device.cards import driver_address
from oom_magic.measure.device.host import host_memory
from oom_magic.measure.device.nvml import CardReading, open_card


@dataclass(frozen=True, slots=True)
class MemorySample:
    """One look at a device, or at the host where there is none. Sizes in bytes.

    ``outside_bytes`` are this process's besides what torch reserved, ``other_bytes`` those of all others. ``problem``
    says why only torch's own counters are known.
    """

    total_bytes: int
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    outside_bytes: int = 0
    other_bytes: int = 0
    problem: str = ""

    @property
    def used_bytes(self) -> int:
        """What is not free."""
        return self.reserved_bytes + self.outside_bytes + self.other_bytes

    @property
    def used_fraction(self) -> float:
        """The share of the device that is not free, from 0 to 1."""
        return self.used_bytes / max(self.total_bytes, 1)


def is_available() -> bool:
    """Whether torch has a CUDA device here."""
    return torch.cuda.is_available()


def default_device() -> int:
    """The number of torch's current CUDA device."""
    return torch.cuda.current_device()


@contextmanager
def open_sampler(index: int) -> Iterator[tuple[str, Callable[[], MemorySample]]]:
    """A CUDA device's name, and a function that looks at it; the driver's library is open as long.

    The look takes no memory, waits for no kernel and may be called in another thread.
    """
    properties = torch.cuda.get_device_properties(index)
    with open_card(*driver_address(index)) as read:
        yield properties.name, lambda: _sample(index, properties.total_memory, read())


def sample_host() -> MemorySample:
    """The host's memory, or what the container may have of it."""
    total, available = host_memory()
    return MemorySample(total or 0, other_bytes=max((total or 0) - (available or 0), 0))


def _sample(index: int, total_bytes: int, reading: CardReading) -> MemorySample:
    allocated, reserved = _counters(index)
    used = reading.used_bytes or reserved
    listed = {process.pid: process.num_bytes for process in reading.processes}
    own = max(listed.get(os.getpid()) or 0, reserved)
    return MemorySample(total_bytes, allocated, reserved, own - reserved, max(used - own, 0), reading.problem)


def _counters(index: int) -> tuple[int, int]:
    """Bytes allocated and reserved. torch's own functions are not asked: a dry run lets them speak for its GPU."""
    if not torch.cuda._initialized:
        return 0, 0
    stats = torch._C._cuda_memoryStats(index)
    return stats["allocated_bytes"]["all"]["current"], stats["reserved_bytes"]["all"]["current"]
