"""What is wrong with the cards, the driver and torch's build."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from oom_magic.language import _
from oom_magic.measure.device.cards import Card, driver_reading, own_process
from oom_magic.measure.device.host import notebook_platform
from oom_magic.measure.device.nvml import CardReading, name_cards
from oom_magic.measure.system.host_probe import Finding, Seen
from oom_magic.units import MIB

_NOTICEABLE_BYTES = 512 * MIB
_CONTEXT_BYTES = 512 * MIB  # at most what a process holds outside of torch's allocator
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NONE_LEFT = "No CUDA GPUs are available"  # torch/csrc/cuda/Module.cpp, c10/cuda/CUDAFunctions.cpp
# Compute capabilities of P100, V100, A100, H100, B200 and B300, whose memory has room of its own for the codes.
_WITH_HBM = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0), (10, 3)}
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
        name = cards[0] if cards else _("an NVIDIA card")
        seen.findings.append(
            Finding(
                _("torch is a CPU-only build beside {name}.", name=name),
                _("It cannot use the card: training runs in host memory, and many times slower."),
                _("Install a CUDA build with the command that pytorch.org/get-started shows, then restart the kernel."),
                "bad",
            )
        )
    elif build == "CPU only":
        fix = _(
            "om.dry_run and om.sliders predict for any card; to train, take a GPU runtime and a CUDA build of torch."
        )
        seen.findings.append(
            Finding(_("No GPU, and a CPU build of torch."), _("Nothing can be trained on a GPU here."), fix)
        )
    else:
        fix = _("Check the driver (nvidia-smi), CUDA_VISIBLE_DEVICES, or choose a GPU runtime.")
        seen.findings.append(
            Finding(
                _("torch sees no GPU: {reason}", reason=_why_none()), _("Training would run on the CPU."), fix, "bad"
            )
        )
    return seen


def probe_card(card: Card, reading: CardReading) -> Seen:
    """One card and who is on it."""
    name = f"GPU {card.index}"
    device = card.device
    sizes = {"total_bytes": device.total_bytes, "free_bytes": card.free_bytes}
    seen = Seen([(name, _("{name}, {free_bytes} free of {total_bytes}", name=device.name, **sizes))])
    if device.capability is not None:
        seen.rows.append((_("{name}, compute capability", name=name), "{}.{}".format(*device.capability)))
    seen.rows += [(f"{name}, {what}", value) for what, value in _state(reading)]
    seen.findings += _findings(name, card, reading)
    return seen


def probe_order(cards: tuple[Card, ...]) -> Seen:
    """Whether torch numbers the cards as nvidia-smi does."""
    numbers = [driver_reading(card.index).number for card in cards]
    others = [(card, number) for card, number in zip(cards, numbers, strict=True) if number not in (card.index, None)]
    seen = Seen([(_("GPU {index}, in nvidia-smi", index=card.index), f"GPU {number}") for card, number in others])
    wished = [one.strip() for one in os.environ.get(_VISIBLE, "").split(",") if one.strip()]
    if 0 < len(cards) < len(wished):
        values = {"variable": _VISIBLE, "named": len(wished), "seen": len(cards)}
        what = _("{variable} names {named} GPUs; torch sees {seen}.", **values)
        why = _("CUDA goes no further than the first entry that is none of its GPUs.")
        seen.findings.append(Finding(what, why, _("nvidia-smi -L lists their numbers and UUIDs.")))
    named = wished if wished else [str(card.index) for card in cards]
    for card, number, name in zip(cards, numbers, named, strict=False):
        if number is not None and name.isdigit() and int(name) != number:
            seen.findings.append(_other_number(card, number, name))
            break
    return seen


def _other_number(card: Card, number: int, name: str) -> Finding:
    return Finding(
        _(
            "torch's GPU {index} ({card}) is nvidia-smi's GPU {number}, not {name}.",
            index=card.index,
            card=card.device.name,
            number=number,
            name=name,
        ),
        _("CUDA puts the fastest card first, so a number may mean another card, with other memory."),
        _('os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID" before torch is first used numbers alike.'),
    )


def probe_fallback() -> Seen:
    """Windows moves GPU memory to the host instead of failing."""
    if notebook_platform() not in ("Windows", "WSL"):
        return Seen()
    fix = _('In the NVIDIA Control Panel set "CUDA - Sysmem Fallback Policy" to "Prefer No Sysmem Fallback".')
    why = _("A run that does not fit gets many times slower instead of failing with a message.")
    return Seen(findings=[Finding(_("The Windows driver moves GPU memory to host memory when it is full."), why, fix)])


def _state(reading: CardReading) -> Iterator[tuple[str, str]]:
    if reading.driver_version:
        yield _("driver"), reading.driver_version
    if reading.temperature is not None:
        yield _("temperature"), f"{reading.temperature} °C"
    if reading.power_limit_watts is not None:
        yield _("power limit"), f"{reading.power_limit_watts} W"
    if reading.has_ecc is not None:
        yield "ECC", _("on") if reading.has_ecc else _("off")
    if reading.is_instance:
        yield "MIG", _("on: the memory is that of one instance")


def _findings(name: str, card: Card, reading: CardReading) -> Iterator[Finding]:
    hidden = _hidden_bytes(card, reading)
    if card.device.other_bytes - hidden > _NOTICEABLE_BYTES:
        others = card.device.other_bytes - hidden
        fix = _("Shut down idle kernels and other programs; the table of processes says which.")
        yield Finding(
            _("Other processes hold {other_bytes} of {name}.", other_bytes=others, name=name),
            _("That much less is left for training."),
            fix,
        )
    if card.problem:
        fix = "pip install nvidia-ml-py" if "pip install" in card.problem else _("Restart the machine or its driver.")
        yield Finding(f"{name}: {card.problem}.", _("Other processes' memory is not known."), fix)
    if hidden > _NOTICEABLE_BYTES:
        yield Finding(
            _(
                "{name}: {hidden_bytes} are held by processes that the driver does not name here.",
                name=name,
                hidden_bytes=hidden,
            ),
            _("A container sees its own processes only; what others hold is not free all the same."),
            _("Look at nvidia-smi on the host."),
        )
    if reading.has_ecc and card.device.capability not in _WITH_HBM:
        why = _("On cards without HBM the codes are kept in the memory itself and take up to 6 % of it.")
        fix = _("nvidia-smi -e 0 and a restart give it back; errors of the memory then pass unnoticed.")
        yield Finding(_("{name} keeps error-correcting codes (ECC) in its memory.", name=name), why, fix)
    if reading.temperature is not None and reading.temperature >= _HOT:
        why = _("The card slows down; a machine may switch off under load, which looks like a crash for memory.")
        yield Finding(
            _("{name} has {temperature} °C.", name=name, temperature=reading.temperature),
            why,
            _("Check its fans, or lower its power: nvidia-smi -pl."),
        )


def _hidden_bytes(card: Card, reading: CardReading) -> int:
    """What processes hold that the driver does not list; 0 where it lists some without their sizes (Windows, WSL)."""
    if reading.used_bytes is None or any(process.num_bytes is None for process in reading.processes):
        return 0
    hidden = reading.used_bytes - sum(process.num_bytes or 0 for process in reading.processes)
    if own_process(reading, reading.used_bytes) is None:
        hidden -= card.reserved_bytes + _CONTEXT_BYTES
    return max(hidden, 0)


def _has_driver() -> bool:
    cards = Path("/proc/driver/nvidia/gpus")
    return (cards.is_dir() and any(cards.iterdir())) or shutil.which("nvidia-smi") is not None


def _why_none() -> str:
    visible = os.environ.get(_VISIBLE)
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever torch says
        if visible is not None and (visible in ("", "-1") or _NONE_LEFT in str(error)):
            return _('{variable}="{value}" hides all.', variable=_VISIBLE, value=visible)
        return (str(error).strip().splitlines() or [_("no reason given.")])[0]
    return _("no reason given.")
