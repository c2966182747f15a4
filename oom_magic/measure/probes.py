"""The probes of the system check: the machine, the settings and packages, the cards, the driver, torch's build."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

from oom_magic.errors import first_line
from oom_magic.language import Sentences, _, ngettext, translated
from oom_magic.measure.device import host
from oom_magic.measure.device.cards import Card, driver_reading, own_process
from oom_magic.measure.device.host import notebook_platform
from oom_magic.measure.device.nvml import CardReading, name_cards
from oom_magic.memory.allocator.settings import AllocatorSettings
from oom_magic.units import GIB, MIB, format_bytes

_LEAST_HOST_BYTES = 2 * GIB
_LEAST_SHARED_BYTES = 128 * MIB  # Docker gives 64 MiB unless told
_LEAST_DISK_BYTES = 5 * GIB
_NEW, _OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
SETTINGS = (
    _NEW, _OLD, "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "CUDA_MODULE_LOADING",
)  # fmt: skip
_NEW_NAME_SINCE = (2, 9)  # the version of torch from which on it reads PYTORCH_ALLOC_CONF
_NOTICEABLE_BYTES = 512 * MIB
_CONTEXT_BYTES = 512 * MIB  # at most what a process holds outside of torch's allocator
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NO_GPU_MESSAGE = "No CUDA GPUs are available"  # torch/csrc/cuda/Module.cpp, c10/cuda/CUDAFunctions.cpp
# Compute capabilities of P100, V100, A100, H100, B200 and B300, whose memory stores ECC codes separately.
_HBM_CAPABILITIES = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0), (10, 3)}
_HOT_CELSIUS = 85  # degrees Celsius; consumer cards slow down from here


@dataclass(frozen=True, slots=True)
class Finding:
    """Something worth changing: what it is, why it matters for memory, how to fix it. ``bad``: training cannot work."""

    what: str
    why: str
    fix: str
    tone: Literal["warning", "bad"] = "warning"


@dataclass(slots=True)
class ProbeResult:
    """What one probe found: facts as rows of label and value, and findings."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def probe_platform() -> ProbeResult:
    """Where the notebook runs (Colab, Kaggle, Windows, ...), and the version of Python."""
    return ProbeResult([(_("platform"), host.notebook_platform()), ("Python", platform.python_version())])


def probe_memory() -> ProbeResult:
    """Host memory, swap, and the limits that a container sets on them."""
    total, available = host.host_memory()
    known = host.meminfo()
    result = ProbeResult([(_("host memory"), _free_text(available, total))])
    if "SwapTotal" in known:
        result.rows.append((_("swap"), _free_text(known.get("SwapFree"), known["SwapTotal"])))
    if total is not None and total < known.get("MemTotal", total):
        sizes = {"limit_bytes": total, "machine_bytes": known["MemTotal"]}
        result.rows.append((_("container limit"), _("{limit_bytes} of the machine's {machine_bytes}", **sizes)))
    if available is not None and available < _LEAST_HOST_BYTES:
        why = _("Loading a checkpoint passes it through host memory; the kernel may be killed then.")
        fix = _("Close other programs, or use fewer DataLoader workers.")
        result.findings.append(
            Finding(
                _("Only {available_bytes} of host memory (RAM) are free.", available_bytes=_size_text(available)),
                why,
                fix,
            )
        )
    return result


def probe_kills() -> ProbeResult:
    """Processes that the Linux kernel killed here for lack of host memory."""
    kills = host.num_oom_kills()
    if not kills:
        return ProbeResult()
    what = ngettext(
        "The system has killed a process here because host memory (RAM) ran out.",
        "The system has killed {count} processes here because host memory (RAM) ran out.",
        kills,
    )
    why = _(
        "A kernel that dies without a message was most likely killed for this reason; GPU memory was not the cause."
    )
    return ProbeResult(
        findings=[Finding(what, why, _("Use fewer DataLoader workers, stream the data, or raise the limit."))]
    )


def probe_shared_memory() -> ProbeResult:
    """``/dev/shm``, through which DataLoader workers pass batches."""
    size = host.shared_memory_bytes()
    result = ProbeResult([(_("shared memory (/dev/shm)"), _size_text(size))] if size is not None else [])
    if size is not None and size < _LEAST_SHARED_BYTES:
        what = _("/dev/shm has only {size_bytes}.", size_bytes=_size_text(size))
        fix = _("Use num_workers=0, or start the container with --shm-size=8g.")
        result.findings.append(Finding(what, _("DataLoader workers die with a bus error when it is full."), fix))
    return result


def probe_disk() -> ProbeResult:
    """Free space on the disk of the working folder."""
    free = host.disk_free_bytes()
    result = ProbeResult([(_("free disk space"), _size_text(free))])
    if free < _LEAST_DISK_BYTES:
        what = _("Only {free_bytes} of disk space are free.", free_bytes=_size_text(free))
        why = _(
            "A checkpoint with AdamW's state takes three times the size of the weights; a run may fail when"
            " it saves one."
        )
        result.findings.append(Finding(what, why, _("Free some space, or save less often (save_total_limit).")))
    return result


def _free_text(free: int | None, total: int | None) -> str:
    return _("{free_bytes} free of {total_bytes}", free_bytes=_size_text(free), total_bytes=_size_text(total))


def _size_text(num_bytes: int | None) -> str:
    return _("unknown") if num_bytes is None else format_bytes(num_bytes)


def probe_settings(environment: Mapping[str, str] = os.environ) -> ProbeResult:
    """Environment variables that change how torch uses memory, and what is wrong with them."""
    found = {name: environment[name] for name in SETTINGS if name in environment}
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    return ProbeResult(list(found.items()), [*_allocator_findings(found, version), *_other_findings(found)])


def _allocator_findings(found: Mapping[str, str], version: tuple[int, ...]) -> Iterator[Finding]:
    why = _("The allocator's options decide how much memory is lost to fragmentation.")
    if _NEW in found and _OLD in found:
        yield Finding(_("Both {new} and {old} are set.", new=_NEW, old=_OLD), why, _("Keep only one."))
    if _NEW in found and version < _NEW_NAME_SINCE:
        yield Finding(
            _("torch {version} does not read {name}.", version=torch.__version__, name=_NEW),
            why,
            _("Set {name} instead.", name=_OLD),
        )
    for name in (_NEW, _OLD):
        if name not in found:
            continue
        try:
            settings = AllocatorSettings.parse(found[name])
        except ValueError as error:
            yield Finding(
                f"{name}={found[name]}: {error}", _("torch may refuse to start with it."), _("Correct it."), "bad"
            )
            continue
        if settings.expandable_segments and notebook_platform() == "Windows":
            yield Finding(
                _("{name} sets expandable_segments.", name=name), _("Windows does not support it."), _("Remove it.")
            )
        if settings.expandable_segments and settings.max_split_size_bytes is not None:
            both = _(
                "Both reduce fragmentation; the limit prevents large blocks from being reused for smaller tensors."
            )
            yield Finding(
                _("{name} sets expandable_segments and max_split_size_mb.", name=name),
                both,
                _("Keep expandable_segments."),
            )
        if not was_set_at_start(name):
            late = _("It takes effect only if it was set before torch first used the GPU.")
            yield Finding(
                _("{name} was set after this kernel started.", name=name), late, _("Set it in the first cell.")
            )


def _other_findings(found: Mapping[str, str]) -> Iterator[Finding]:
    if found.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") not in ("", "0"):
        why = _("Every tensor is requested from the driver: slow, and torch's reserved memory is meaningless.")
        yield Finding(_("{name} is set.", name="PYTORCH_NO_CUDA_MEMORY_CACHING"), why, _("Unset it."))
    if found.get("CUDA_LAUNCH_BLOCKING") == "1":
        why = _("Training is slow; memory use does not change.")
        yield Finding(_("{name} is set.", name="CUDA_LAUNCH_BLOCKING=1"), why, _("Unset it unless you are debugging."))


def was_set_at_start(name: str) -> bool:
    """Whether the variable was set when this process started; True if that is not known."""
    with suppress(OSError):
        variables = Path("/proc/self/environ").read_bytes().split(b"\0")
        return any(variable.startswith(name.encode() + b"=") for variable in variables)
    return True


_PACKAGES = ("transformers", "peft", "accelerate", "bitsandbytes")
_OLD_BEFORE = {"transformers": (5, 0), "bitsandbytes": (0, 46, 1)}
_WHY: Sentences = {
    "transformers": (
        "from_pretrained loads float32 weights whatever the dtype of the checkpoint: twice the memory of"
        " 16-bit weights."
    ),
    "bitsandbytes": "transformers refuses to create 4-bit layers with this version, so QLoRA does not work.",
}
_FIX: Sentences = {
    "transformers": "Pass dtype=torch.bfloat16 (torch_dtype before 4.56), or upgrade.",
    "bitsandbytes": "pip install -U bitsandbytes",
}


def probe_packages() -> ProbeResult:
    """Installed libraries, and versions of them that take more memory or fail."""
    result = ProbeResult()
    for name in _PACKAGES:
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        result.rows.append((name, installed))
        if name in _OLD_BEFORE and _version_numbers(installed) < _OLD_BEFORE[name]:
            values = {"name": name, "installed": installed, "since": _version_text(_OLD_BEFORE[name])}
            what = _("{name} {installed} is older than {since}.", **values)
            result.findings.append(Finding(what, translated(_WHY[name]), translated(_FIX[name])))
    return result


def _version_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def _version_text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def torch_build() -> str:
    """``"cuda 13.0"``, ``"hip 6.3"``, ``"xpu 2025"`` or ``"CPU only"``."""
    for name in ("cuda", "hip", "xpu"):
        version = getattr(torch.version, name, None)
        if version:
            return f"{name} {version}"
    return "CPU only"


def probe_torch() -> ProbeResult:
    """Whether torch can use a GPU at all and, if not, why."""
    build = torch_build()
    result = ProbeResult([("torch", f"{torch.__version__} ({build})")])
    if torch.accelerator.is_available():
        return result
    cards = name_cards()
    if build == "CPU only" and (cards or has_driver()):
        name = cards[0] if cards else _("an NVIDIA card")
        result.findings.append(
            Finding(
                _("torch is a CPU-only build, although this machine has {name}.", name=name),
                _("It cannot use the card: training runs in host memory, many times slower."),
                _("Install a CUDA build with the command from pytorch.org/get-started, then restart the kernel."),
                "bad",
            )
        )
    elif build == "CPU only":
        fix = _(
            "om.dry_run and om.sliders predict for any card; to train, use a GPU runtime and a CUDA build of torch."
        )
        result.findings.append(
            Finding(_("No GPU, and a CPU-only build of torch."), _("Nothing can be trained on a GPU here."), fix)
        )
    else:
        fix = _("Check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES, or choose a GPU runtime.")
        result.findings.append(
            Finding(
                _("torch sees no GPU: {reason}", reason=_no_gpu_reason()),
                _("Training would run on the CPU."),
                fix,
                "bad",
            )
        )
    return result


def probe_card(card: Card, reading: CardReading) -> ProbeResult:
    """One card: its memory, state, settings, and other processes on it."""
    name = f"GPU {card.index}"
    device = card.device
    sizes = {"total_bytes": device.total_bytes, "free_bytes": card.free_bytes}
    result = ProbeResult([(name, _("{name}, {free_bytes} free of {total_bytes}", name=device.name, **sizes))])
    if device.capability is not None:
        result.rows.append((_("{name}, compute capability", name=name), "{}.{}".format(*device.capability)))
    result.rows += [(f"{name}, {what}", value) for what, value in _card_rows(reading)]
    result.findings += _card_findings(name, card, reading)
    return result


def probe_order(cards: tuple[Card, ...]) -> ProbeResult:
    """Whether torch numbers the cards as nvidia-smi does."""
    numbers = [driver_reading(card.index).number for card in cards]
    others = [(card, number) for card, number in zip(cards, numbers, strict=True) if number not in (card.index, None)]
    result = ProbeResult(
        [(_("GPU {index}, in nvidia-smi", index=card.index), f"GPU {number}") for card, number in others]
    )
    requested = [name.strip() for name in os.environ.get(_VISIBLE, "").split(",") if name.strip()]
    if 0 < len(cards) < len(requested):
        values = {"variable": _VISIBLE, "named": len(requested), "seen": len(cards)}
        what = _("{variable} lists {named} GPUs; torch sees {seen}.", **values)
        why = _("CUDA stops at the first entry that is not one of its GPUs.")
        result.findings.append(Finding(what, why, _("nvidia-smi -L lists their indices and UUIDs.")))
    names = requested or [str(card.index) for card in cards]
    for card, number, name in zip(cards, numbers, names, strict=False):
        if number is not None and name.isdigit() and int(name) != number:
            result.findings.append(_order_finding(card, number, name))
            break
    return result


def _order_finding(card: Card, number: int, name: str) -> Finding:
    return Finding(
        _(
            "torch's GPU {index} ({card}) is nvidia-smi's GPU {number}, not {name}.",
            index=card.index,
            card=card.device.name,
            number=number,
            name=name,
        ),
        _("CUDA orders cards fastest first, so an index may refer to another card, with other memory."),
        _('Set os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID" before torch is first used to number them alike.'),
    )


def probe_fallback() -> ProbeResult:
    """Windows' driver, which moves GPU memory to the host instead of failing."""
    if notebook_platform() not in ("Windows", "WSL"):
        return ProbeResult()
    fix = _('In the NVIDIA Control Panel set "CUDA - Sysmem Fallback Policy" to "Prefer No Sysmem Fallback".')
    why = _("A run that does not fit becomes many times slower instead of failing with a message.")
    return ProbeResult(
        findings=[Finding(_("The Windows driver moves GPU memory to host memory when it is full."), why, fix)]
    )


def _card_rows(reading: CardReading) -> Iterator[tuple[str, str]]:
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


def _card_findings(name: str, card: Card, reading: CardReading) -> Iterator[Finding]:
    hidden = _hidden_bytes(card, reading)
    if card.device.other_bytes - hidden > _NOTICEABLE_BYTES:
        others = card.device.other_bytes - hidden
        fix = _("Shut down idle kernels and other programs; the table of processes lists them.")
        yield Finding(
            _("Other processes hold {other_bytes} of {name}.", other_bytes=others, name=name),
            _("That much less is left for training."),
            fix,
        )
    if card.problem:
        fix = "pip install nvidia-ml-py" if "pip install" in card.problem else _("Restart the machine or its driver.")
        yield Finding(f"{name}: {card.problem}.", _("The memory of other processes is unknown."), fix)
    if hidden > _NOTICEABLE_BYTES:
        yield Finding(
            _(
                "{name}: {hidden_bytes} are held by processes that the driver does not list here.",
                name=name,
                hidden_bytes=hidden,
            ),
            _("A container sees only its own processes; memory that others hold is still not free."),
            _("Look at nvidia-smi on the host."),
        )
    if reading.has_ecc and card.device.capability not in _HBM_CAPABILITIES:
        why = _("Cards without HBM keep the codes in the memory itself, where they take up to 6 % of it.")
        fix = _("nvidia-smi -e 0 and a restart free it; memory errors then go unnoticed.")
        yield Finding(_("{name} stores error-correcting codes (ECC) in its memory.", name=name), why, fix)
    if reading.temperature is not None and reading.temperature >= _HOT_CELSIUS:
        why = _("The card slows down; a machine may power off under load, which looks like an out-of-memory crash.")
        yield Finding(
            _("{name} is at {temperature} °C.", name=name, temperature=reading.temperature),
            why,
            _("Check its fans, or lower its power limit: nvidia-smi -pl."),
        )


def _hidden_bytes(card: Card, reading: CardReading) -> int:
    """Memory in use by processes that the driver does not list; 0 where it lists some without sizes (Windows, WSL)."""
    if reading.used_bytes is None or any(process.num_bytes is None for process in reading.processes):
        return 0
    hidden = reading.used_bytes - sum(process.num_bytes or 0 for process in reading.processes)
    if own_process(reading, reading.used_bytes) is None:
        hidden -= card.reserved_bytes + _CONTEXT_BYTES
    return max(hidden, 0)


def has_driver() -> bool:
    """Whether NVIDIA's driver or its tool is installed."""
    cards = Path("/proc/driver/nvidia/gpus")
    return (cards.is_dir() and any(cards.iterdir())) or shutil.which("nvidia-smi") is not None


def _no_gpu_reason() -> str:
    visible = os.environ.get(_VISIBLE)
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever torch says
        if visible is not None and (visible in ("", "-1") or _NO_GPU_MESSAGE in str(error)):
            return _('{variable}="{value}" hides all GPUs.', variable=_VISIBLE, value=visible)
        return first_line(error) or _("no reason given.")
    return _("no reason given.")
