"""What a device's memory is doing at this moment: for the live monitor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oom_magic.description import Describable, Description, Part, Parts
from oom_magic.measure.device import current_device
from oom_magic.memory.report import Device


def is_available() -> bool:
    """Whether torch has a CUDA device here."""
    return torch.cuda.is_available()


@dataclass(frozen=True, repr=False)
class DeviceMemory(Describable):
    """One look at a device. Sizes in bytes."""

    device: Device
    allocated_bytes: int
    reserved_bytes: int

    def describe(self) -> Description:
        """The card's memory in parts that add up to its capacity."""
        device = self.device
        known = self.reserved_bytes + device.context_bytes + device.other_bytes
        parts = (
            Part("allocated", self.allocated_bytes, "parameter"),
            Part("reserved beyond it", self.reserved_bytes - self.allocated_bytes, "cached"),
            Part("outside PyTorch", device.context_bytes, "outside"),
            Part("other processes", device.other_bytes, "other"),
            Part("free", max(device.total_bytes - known, 0), "free"),
        )
        return Description(f"{device.name} now", (Parts("", parts, "capacity", device.total_bytes),))


def read_device_memory(index: int | None = None) -> DeviceMemory:
    """Look at a CUDA device (default: the current one); nothing is reset, emptied or waited for."""
    index = torch.cuda.current_device() if index is None else index
    return DeviceMemory(
        current_device(index),
        torch.cuda.memory_allocated(index),
        torch.cuda.memory_reserved(index),
    )
