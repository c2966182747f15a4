"""What the system check finds worth changing, and the configuration it recommends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oom_magic.memory.report import Device
from oom_magic.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from oom_magic.measure.device import Card

_NOTICEABLE_BYTES = 512 * MIB


def advise(
    platform: str,
    torch_build: str,
    host_available_bytes: int | None,
    shared_memory_bytes: int | None,
    disk_free_bytes: int,
    cards: Sequence[Card],
    settings: Sequence[tuple[str, str]],
) -> tuple[str, ...]:
    """Sentences, each a finding and what to do about it; none if all is well."""
    advice = [*_about_cards(platform, torch_build, cards), *_about_settings(dict(settings))]
    if host_available_bytes is not None and host_available_bytes < 2 * GIB:
        free = format_bytes(host_available_bytes)
        advice.append(f"Only {free} of host memory are free: loading a checkpoint may kill the kernel.")
    if shared_memory_bytes is not None and shared_memory_bytes < 128 * MIB:
        advice.append(
            f"/dev/shm has {format_bytes(shared_memory_bytes)}: DataLoader workers die with a bus error; "
            "use num_workers=0 or start the container with --shm-size=8g."
        )
    if disk_free_bytes < 5 * GIB:
        advice.append(f"Only {format_bytes(disk_free_bytes)} of disk are free: saving a checkpoint may fail.")
    return tuple(advice)


def recommend(platform: str, devices: Sequence[Device]) -> str:
    """Code to run before torch is first used, for the cards that are here."""
    lines = ["import os"]
    if not devices:
        return "import oom_magic as om  # no GPU: om.dry_run(fn, gpu='A100 80GB') and om.sliders predict"
    if platform in ("Windows", "WSL"):
        lines.append('os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "garbage_collection_threshold:0.8"')
    else:
        lines.append('os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"')
    has_bf16 = all((device.capability or (0, 0)) >= (8, 0) for device in devices)
    lines += ["import torch", f"dtype = torch.{'bfloat16' if has_bf16 else 'float16'}"]
    lines[-1] += "" if has_bf16 else "  # this card has no fast bfloat16: use torch.amp.GradScaler, too"
    return "\n".join(lines)


def _about_cards(platform: str, torch_build: str, cards: Sequence[Card]) -> list[str]:
    if not cards:
        if torch_build == "CPU only":
            return ["This torch is a CPU build, which sees no GPU; see pytorch.org/get-started."]
        return ["torch sees no GPU: choose a GPU runtime, or check the driver and CUDA_VISIBLE_DEVICES."]
    advice = []
    for card in cards:
        if card.device.other_bytes > _NOTICEABLE_BYTES:
            others = format_bytes(card.device.other_bytes)
            advice.append(f"Other processes hold {others} of GPU {card.index}: shut down idle kernels.")
        if card.problem:
            advice.append(f"GPU {card.index}: other processes are not known; {card.problem}.")
    if platform in ("Windows", "WSL"):
        advice.append(
            "The Windows driver moves GPU memory to host memory instead of failing, which is many times "
            'slower: in the NVIDIA Control Panel set "CUDA - Sysmem Fallback Policy" to "Prefer No '
            'Sysmem Fallback".'
        )
    return advice


def _about_settings(settings: dict[str, str]) -> list[str]:
    advice = []
    if settings.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") not in ("", "0"):
        advice.append("PYTORCH_NO_CUDA_MEMORY_CACHING is set: every allocation is slow; unset it.")
    if settings.get("CUDA_LAUNCH_BLOCKING") == "1":
        advice.append("CUDA_LAUNCH_BLOCKING=1 makes training slow; unset it when you do not debug.")
    both = [name for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if name in settings]
    if len(both) == 2:
        advice.append("Both PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF are set; keep one.")
    return advice
