"""The card that torch uses, and the check of the whole system."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

from oom_magic.description import Block as DescriptionBlock
from oom_magic.description import Code, Describable, Description, Sentence, Table
from oom_magic.measure import host
from oom_magic.measure.advice import advise, recommend
from oom_magic.measure.nvml import CardReading, DeviceProcess, read_card
from oom_magic.memory.report import Device
from oom_magic.units import format_bytes

SETTINGS = (
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "CUDA_MODULE_LOADING",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU as torch numbers it, and what the driver says of it (``problem``: why it says nothing)."""

    index: int
    device: Device
    reserved_bytes: int
    processes: tuple[DeviceProcess, ...]
    driver_version: str
    problem: str

    @property
    def free_bytes(self) -> int:
        """What nobody holds now."""
        return max(self.device.usable_bytes - self.reserved_bytes, 0)


@dataclass(frozen=True, repr=False)
class SystemCheck(Describable):
    """What decides how much memory a training run can have here. Sizes in bytes; None means not known."""

    platform: str
    python_version: str
    torch_version: str
    torch_build: str
    host_total_bytes: int | None
    host_available_bytes: int | None
    shared_memory_bytes: int | None
    disk_free_bytes: int
    cards: tuple[Card, ...]
    settings: tuple[tuple[str, str], ...]
    advice: tuple[str, ...]
    recommended: str

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, ready for JSON."""
        return asdict(self)

    def describe(self) -> Description:
        """The check as a table, what to change, and a configuration to paste."""
        blocks: list[DescriptionBlock] = [Table(("what", "value"), self._rows())]
        for card in self.cards:
            rows = tuple((str(one.pid), one.name, _size(one.num_bytes)) for one in card.processes)
            title = f"Processes on GPU {card.index}"
            blocks += [Table(("pid", "process", "memory"), rows, title=title)] if rows else []
        blocks += [Sentence(text, "warning") for text in self.advice]
        if not self.advice:
            blocks.append(Sentence("Nothing to change.", "good"))
        blocks.append(Code(self.recommended))
        return Description("System check", tuple(blocks))

    def _rows(self) -> tuple[tuple[str, str], ...]:
        rows = [
            ("platform", self.platform),
            ("Python", self.python_version),
            ("torch", f"{self.torch_version} ({self.torch_build})"),
            ("host memory", f"{_size(self.host_available_bytes)} free of {_size(self.host_total_bytes)}"),
            ("shared memory (/dev/shm)", _size(self.shared_memory_bytes)),
            ("disk, free", _size(self.disk_free_bytes)),
        ]
        for card in self.cards:
            total, free = format_bytes(card.device.total_bytes), format_bytes(card.free_bytes)
            driver = card.problem or f"driver {card.driver_version}"
            rows.append((f"GPU {card.index}", f"{card.device.name}, {free} free of {total}, {driver}"))
        return tuple(rows + list(self.settings))


def doctor() -> SystemCheck:
    """Check the machine, the GPUs, the driver, torch and its settings. Works without a GPU, too."""
    index = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    cards = tuple(map(_read_card, index))
    settings = tuple((name, os.environ[name]) for name in SETTINGS if name in os.environ)
    total, available = host.host_memory()
    known: dict[str, Any] = {
        "platform": host.notebook_platform(),
        "torch_build": _torch_build(),
        "host_available_bytes": available,
        "shared_memory_bytes": host.shared_memory_bytes(),
        "disk_free_bytes": host.disk_free_bytes(),
        "cards": cards,
        "settings": settings,
    }
    return SystemCheck(
        **known,
        python_version=platform.python_version(),
        torch_version=str(torch.__version__),
        host_total_bytes=total,
        advice=advise(**known),
        recommended=recommend(known["platform"], [card.device for card in cards]),
    )


def current_device(index: int | None = None) -> Device:
    """The card with torch's number ``index`` (default: the current one) as it is now, sizes in bytes.

    Context and other processes come from the driver. Where it does not name this process (a container has
    its own process numbers; WSL and Windows do not say), all that is outside PyTorch is counted as context.
    """
    index = torch.cuda.current_device() if index is None else index
    return _device(index, driver_reading(index))


def _device(index: int, reading: CardReading) -> Device:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    reserved = torch.cuda.memory_reserved(index)
    outside = max(total - free - reserved, 0)
    own = _own_process(reading, total - free)
    context = outside
    if own is not None and own.num_bytes is not None:
        context = min(max(own.num_bytes - reserved, 0), outside)
    return Device(properties.name, total, context, outside - context, (properties.major, properties.minor))


def driver_reading(index: int) -> CardReading:
    """What the driver says of torch's device ``index``."""
    properties = torch.cuda.get_device_properties(index)
    parts = ("domain", "bus", "device")
    domain, bus, slot = (int(getattr(properties, f"pci_{part}_id", 0)) for part in parts)
    return read_card(str(getattr(properties, "uuid", "")), f"{domain:08X}:{bus:02X}:{slot:02X}.0")


def _own_process(reading: CardReading, used_bytes: int) -> DeviceProcess | None:
    """This process on the card: by its number, or the only one there if it accounts for what is used."""
    by_number = [process for process in reading.processes if process.pid == os.getpid()]
    if by_number:
        return by_number[0]
    if len(reading.processes) == 1 and (reading.processes[0].num_bytes or 0) >= used_bytes // 2:
        return reading.processes[0]
    return None


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


def _torch_build() -> str:
    for name in ("cuda", "hip", "xpu"):
        version = getattr(torch.version, name, None)
        if version:
            return f"{name} {version}"
    return "CPU only"


def _size(num_bytes: int | None) -> str:
    return "not known" if num_bytes is None else format_bytes(num_bytes)
