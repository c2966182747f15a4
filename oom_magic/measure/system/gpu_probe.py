"""What is wrong with the cards, the driver and torch's build."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from oom_magic.measure.device import Card
from oom_magic.measure.host import notebook_platform
from oom_magic.measure.nvml import CardReading, name_cards
from oom_magic.measure.system.findings import Finding, Seen
from oom_magic.units import MIB, format_bytes

_NOTICEABLE_BYTES = 512 * MIB
_HOT = 85  # degrees Celsius; consumer cards slow down from here


def torch_build() -> str:
    """``"cuda 13.0"``, ``"hip 6.3"``, ``"xpu 2025"`` or ``"CPU only"``."""
    for name in ("cuda", "hip", "xpu"):
        version = getattr(torch.version, name, None)
        if version:
            return f"{name} {version}"
    return "CPU only"


def probe_torch() -> Seen:
    """Whether torch can use a GPU at all and, if not, why."""
    build = torch_build()
    seen = Seen([("torch", f"{torch.__version__} ({build})")])
    if torch.accelerator.is_available():
        return seen
    cards = name_cards()
    if build == "CPU only" and (cards or _has_driver()):
        name = cards[0] if cards else "an NVIDIA card"
        seen.findings.append(
            Finding(
                f"torch is a CPU-only build beside {name}.",
                "It cannot use the card: training runs in host memory, and many times slower.",
                "Install a CUDA build with the command that pytorch.org/get-started shows, then restart the kernel.",
                "bad",
            )
        )
    elif build == "CPU only":
        fix = "om.dry_run and om.sliders predict for any card; to train, take a GPU runtime and a CUDA build of torch."
        seen.findings.append(Finding("No GPU, and a CPU build of torch.", "Nothing can be trained on a GPU here.", fix))
    else:
        fix = "Check the driver (nvidia-smi), CUDA_VISIBLE_DEVICES, or choose a GPU runtime."
        seen.findings.append(Finding(f"torch sees no GPU: {_why_none()}", "Training would run on the CPU.", fix, "bad"))
    return seen


def probe_card(card: Card, reading: CardReading) -> Seen:
    """One card and who is on it."""
    name = f"GPU {card.index}"
    device = card.device
    total, free = format_bytes(device.total_bytes), format_bytes(card.free_bytes)
    seen = Seen([(name, f"{device.name}, {free} free of {total}")])
    if device.capability is not None:
        seen.rows.append((f"{name}, compute capability", "{}.{}".format(*device.capability)))
    seen.rows += [(f"{name}, {what}", value) for what, value in _state(reading)]
    seen.findings += _findings(name, card, reading)
    return seen


def probe_order(cards: tuple[Card, ...]) -> Seen:
    """Whether torch numbers the cards as nvidia-smi does."""
    drivers = name_cards()
    ours = tuple(card.device.name for card in cards)
    seen = Seen()
    if len(drivers) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and ours != drivers[: len(ours)]:
        seen.findings.append(
            Finding(
                f"torch's GPU 0 ({ours[0] if ours else 'none'}) is not nvidia-smi's GPU 0 ({drivers[0]}).",
                "CUDA puts the fastest card first, so a number may mean another card, with other memory.",
                'os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID" before torch is first used numbers alike.',
            )
        )
    return seen


def probe_fallback() -> Seen:
    """Windows moves GPU memory to the host instead of failing."""
    if notebook_platform() not in ("Windows", "WSL"):
        return Seen()
    fix = 'In the NVIDIA Control Panel set "CUDA - Sysmem Fallback Policy" to "Prefer No Sysmem Fallback".'
    why = "A run that does not fit gets many times slower instead of failing with a message."
    return Seen(findings=[Finding("The Windows driver moves GPU memory to host memory when it is full.", why, fix)])


def _state(reading: CardReading) -> Iterator[tuple[str, str]]:
    if reading.driver_version:
        yield "driver", reading.driver_version
    if reading.temperature is not None:
        yield "temperature", f"{reading.temperature} °C"
    if reading.power_limit_watts is not None:
        yield "power limit", f"{reading.power_limit_watts} W"
    if reading.has_ecc is not None:
        yield "ECC", "on" if reading.has_ecc else "off"
    if reading.has_mig:
        yield "MIG", "on: the memory is that of one instance"


def _findings(name: str, card: Card, reading: CardReading) -> Iterator[Finding]:
    if card.device.other_bytes > _NOTICEABLE_BYTES:
        others = format_bytes(card.device.other_bytes)
        fix = "Shut down idle kernels and other programs; the table of processes says which."
        yield Finding(f"Other processes hold {others} of {name}.", "That much less is left for training.", fix)
    if card.problem:
        fix = "pip install nvidia-ml-py" if "not installed" in card.problem else "Restart the machine or its driver."
        yield Finding(f"{name}: {card.problem}.", "Other processes' memory is not known.", fix)
    listed = sum(process.num_bytes or 0 for process in card.processes)
    hidden = (reading.used_bytes or 0) - listed
    if not card.problem and hidden > card.device.context_bytes + _NOTICEABLE_BYTES:
        yield Finding(
            f"{name}: {format_bytes(hidden)} are held by processes that the driver does not name here.",
            "A container sees its own processes only; what others hold is not free all the same.",
            "Look at nvidia-smi on the host.",
        )
    if reading.temperature is not None and reading.temperature >= _HOT:
        why = "The card slows down; a machine may switch off under load, which looks like a crash for memory."
        yield Finding(
            f"{name} has {reading.temperature} °C.", why, "Check its fans, or lower its power: nvidia-smi -pl."
        )


def _has_driver() -> bool:
    cards = Path("/proc/driver/nvidia/gpus")
    return (cards.is_dir() and any(cards.iterdir())) or shutil.which("nvidia-smi") is not None


def _why_none() -> str:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all."
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever torch says
        return (str(error).strip().splitlines() or ["no reason given"])[0]
    return "no reason given."
