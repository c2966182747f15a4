"""What a probe finds, and the machine around the GPU: memory, swap, limits of a container, shared memory, disk."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from typing import Literal

from oom_magic.language import _, ngettext
from oom_magic.measure.device import host
from oom_magic.units import GIB, MIB, format_bytes

_LEAST_HOST_BYTES = 2 * GIB
_LEAST_SHARED_BYTES = 128 * MIB  # Docker gives 64 MiB unless told
_LEAST_DISK_BYTES = 5 * GIB


@dataclass(frozen=True, slots=True)
class Finding:
    """Something worth changing: what it is, why it matters for memory, what to do. ``bad``: training cannot work."""

    what: str
    why: str
    fix: str
    tone: Literal["warning", "bad"] = "warning"


@dataclass(slots=True)
class Seen:
    """What one probe saw: rows of what and value, and findings."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def probe_platform() -> Seen:
    """Whose notebook it is, and the Python."""
    return Seen([(_("platform"), host.notebook_platform()), ("Python", platform.python_version())])


def probe_memory() -> Seen:
    """Host memory, swap, and what a container leaves of them."""
    total, available = host.host_memory()
    known = host.meminfo()
    seen = Seen([(_("host memory"), _free_of(available, total))])
    if "SwapTotal" in known:
        seen.rows.append((_("swap"), _free_of(known.get("SwapFree"), known["SwapTotal"])))
    if total is not None and total < known.get("MemTotal", total):
        sizes = {"limit_bytes": total, "machine_bytes": known["MemTotal"]}
        seen.rows.append((_("limit of the container"), _("{limit_bytes} of the machine's {machine_bytes}", **sizes)))
    if available is not None and available < _LEAST_HOST_BYTES:
        why = _("A checkpoint passes through host memory when it is loaded; the kernel may be killed then.")
        fix = _("Close other programs, or use fewer DataLoader workers.")
        seen.findings.append(
            Finding(_("Only {available_bytes} of host memory are free.", available_bytes=_size(available)), why, fix)
        )
    return seen


def probe_kills() -> Seen:
    """Whether the kernel has killed processes here for lack of host memory."""
    kills = host.num_oom_kills()
    if not kills:
        return Seen()
    what = ngettext(
        "The system has killed a process here for lack of host memory.",
        "The system has killed {count} processes here for lack of host memory.",
        kills,
    )
    why = _("A kernel that dies without a message has most likely been killed so; the GPU had no part in it.")
    return Seen(findings=[Finding(what, why, _("Use fewer DataLoader workers, stream the data, or raise the limit."))])


def probe_shared_memory() -> Seen:
    """``/dev/shm``, through which DataLoader workers pass batches."""
    size = host.shared_memory_bytes()
    seen = Seen([(_("shared memory (/dev/shm)"), _size(size))] if size is not None else [])
    if size is not None and size < _LEAST_SHARED_BYTES:
        what = _("/dev/shm has only {size_bytes}.", size_bytes=_size(size))
        fix = _("Use num_workers=0, or start the container with --shm-size=8g.")
        seen.findings.append(Finding(what, _("DataLoader workers die with a bus error when it is full."), fix))
    return seen


def probe_disk() -> Seen:
    """The disk of the working folder."""
    free = host.disk_free_bytes()
    seen = Seen([(_("disk, free"), _size(free))])
    if free < _LEAST_DISK_BYTES:
        what = _("Only {free_bytes} of disk are free.", free_bytes=_size(free))
        why = _("A checkpoint with AdamW's state takes three times the weights; a run may end when it saves one.")
        seen.findings.append(Finding(what, why, _("Make room, or save less often (save_total_limit).")))
    return seen


def _free_of(free: int | None, total: int | None) -> str:
    return _("{free_bytes} free of {total_bytes}", free_bytes=_size(free), total_bytes=_size(total))


def _size(num_bytes: int | None) -> str:
    return _("not known") if num_bytes is None else format_bytes(num_bytes)
