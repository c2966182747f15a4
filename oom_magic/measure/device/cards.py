"""The cards that torch uses, and how much memory of one is in use now, read without side effects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from oom_magic.measure.device.host import host_memory
from oom_magic.measure.device.nvml import CardReading, DeviceProcess, open_card, read_card
from oom_magic.memory.report import Device


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU as torch numbers it, and what the driver reports (``problem``: why it reports nothing)."""

    index: int
    device: Device
    reserved_bytes: int
    processes: tuple[DeviceProcess, ...]
    driver_version: str
    problem: str

    @property
    def free_bytes(self) -> int:
        """Bytes that are in use by no process."""
        return max(self.device.usable_bytes - self.reserved_bytes, 0)


def read_cards() -> tuple[Card, ...]:
    """The CUDA devices that torch sees, as they are now."""
    return tuple(map(_read_card, range(read_num_cards())))


def read_num_cards() -> int:
    """How many CUDA devices torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def current_device(index: int | None = None) -> Device:
    """The card with torch's number ``index`` (default: the current one) as it is now, sizes in bytes.

    Context and other processes come from the driver. Where it does not name this process (a container has
    its own process numbers; WSL and Windows do not say), all that is outside PyTorch is counted as context.
    """
    index = torch.cuda.current_device() if index is None else index
    return _device(index, driver_reading(index))


def _device(index: int, reading: CardReading) -> Device:
    properties = torch.cuda.get_device_properties(index)
    reserved = torch.cuda.memory_reserved(index)
    is_here = True  # this process is on the card
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError:
        # A card that others have filled has no room for the context that CUDA's own reading needs; after an error on
        # the device it answers nothing.
        total = properties.total_memory
        free = max(total - (reading.used_bytes or total), 0)
        is_here = reserved > 0
    outside = max(total - free - reserved, 0)
    own = own_process(reading, total - free) if is_here else _named_process(reading)
    context = outside if is_here else 0
    if own is not None and own.num_bytes is not None:
        context = min(max(own.num_bytes - reserved, 0), outside)
    return Device(properties.name, total, context, outside - context, (properties.major, properties.minor))


def num_multiprocessors(index: int) -> int:
    """Of the card with torch's number ``index``."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def driver_reading(index: int) -> CardReading:
    """The driver's reading of torch's device ``index``."""
    return read_card(*driver_address(index))


def driver_address(index: int) -> tuple[str, str]:
    """The UUID and the PCI address of torch's device ``index``, by which the driver knows it."""
    properties = torch.cuda.get_device_properties(index)
    parts = ("domain", "bus", "device")
    domain, bus, slot = (int(getattr(properties, f"pci_{part}_id", 0)) for part in parts)
    return str(getattr(properties, "uuid", "")), f"{domain:08X}:{bus:02X}:{slot:02X}.0"


def own_process(reading: CardReading, used_bytes: int) -> DeviceProcess | None:
    """This process on the card: by its number, or the only one there if it accounts for the memory in use."""
    named = _named_process(reading)
    if named is None and len(reading.processes) == 1 and (reading.processes[0].num_bytes or 0) >= used_bytes // 2:
        return reading.processes[0]
    return named


def _named_process(reading: CardReading) -> DeviceProcess | None:
    return next((process for process in reading.processes if process.pid == os.getpid()), None)


def _read_card(index: int) -> Card:
    reading = driver_reading(index)
    return Card(
        index,
        _device(index, reading),
        torch.cuda.memory_reserved(index),
        reading.processes,
        reading.driver_version,
        reading.problem,
    )


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The memory of a device at one moment, or of the host if there is no device. Sizes in bytes."""

    total_bytes: int
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    outside_bytes: int = 0  # of this process, outside torch
    other_bytes: int = 0  # of other processes
    problem: str = ""  # why only torch's own counters are known

    @property
    def used_bytes(self) -> int:
        """All memory that is not free."""
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
    """A CUDA device's name, and a function that reads its memory; the driver's library stays open meanwhile.

    Reading takes no memory, waits for no kernel and may be done in another thread.
    """
    properties = torch.cuda.get_device_properties(index)
    with open_card(*driver_address(index)) as read:
        yield properties.name, lambda: _sample(index, properties.total_memory, read())


def sample_host() -> MemorySample:
    """The host's memory, or what the container may have of it."""
    total, available = host_memory()
    return MemorySample(total or 0, other_bytes=max((total or 0) - (available or 0), 0))


def _sample(index: int, total_bytes: int, reading: CardReading) -> MemorySample:
    allocated, reserved = allocator_counters(index)
    used = reading.used_bytes or reserved
    listed = {process.pid: process.num_bytes for process in reading.processes}
    own = max(listed.get(os.getpid()) or 0, reserved)
    return MemorySample(total_bytes, allocated, reserved, own - reserved, max(used - own, 0), reading.problem)


def allocator_counters(index: int) -> tuple[int, int]:
    """Bytes allocated and reserved. Not by torch's public functions: a dry run replaces them."""
    if not torch.cuda._initialized:
        return 0, 0
    stats = torch._C._cuda_memoryStats(index)
    return stats["allocated_bytes"]["all"]["current"], stats["reserved_bytes"]["all"]["current"]
