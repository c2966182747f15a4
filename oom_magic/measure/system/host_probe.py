"""The machine around the GPU: memory, swap, limits of a container, shared memory, disk."""

from __future__ import annotations

import platform

from oom_magic.measure.device import host
from oom_magic.measure.system.findings import Finding, Seen
from oom_magic.units import GIB, MIB, format_bytes

_LEAST_HOST_BYTES = 2 * GIB
_LEAST_SHARED_BYTES = 128 * MIB  # Docker gives 64 MiB unless told
_LEAST_DISK_BYTES = 5 * GIB


def probe_platform() -> Seen:
    """Whose notebook it is, and the Python."""
    return Seen([("platform", host.notebook_platform()), ("Python", platform.python_version())])


def probe_memory() -> Seen:
    """Host memory, swap, and what a container leaves of them."""
    total, available = host.host_memory()
    known = host.meminfo()
    seen = Seen([("host memory", f"{_size(available)} free of {_size(total)}")])
    if "SwapTotal" in known:
        seen.rows.append(("swap", f"{_size(known.get('SwapFree'))} free of {_size(known['SwapTotal'])}"))
    if total is not None and total < known.get("MemTotal", total):
        seen.rows.append(("limit of the container", f"{_size(total)} of the machine's {_size(known['MemTotal'])}"))
    if available is not None and available < _LEAST_HOST_BYTES:
        why = "A checkpoint passes through host memory when it is loaded; the kernel may be killed then."
        fix = "Close other programs, or use fewer DataLoader workers."
        seen.findings.append(Finding(f"Only {_size(available)} of host memory are free.", why, fix))
    return seen


def probe_kills() -> Seen:
    """Whether the kernel has killed processes here for lack of host memory."""
    kills = host.num_oom_kills()
    if not kills:
        return Seen()
    processes = "a process" if kills == 1 else f"{kills} processes"
    what = f"The system has killed {processes} here for lack of host memory."
    why = "A kernel that dies without a message has most likely been killed so; the GPU had no part in it."
    return Seen(findings=[Finding(what, why, "Use fewer DataLoader workers, stream the data, or raise the limit.")])


def probe_shared_memory() -> Seen:
    """``/dev/shm``, through which DataLoader workers pass batches."""
    size = host.shared_memory_bytes()
    seen = Seen([("shared memory (/dev/shm)", _size(size))] if size is not None else [])
    if size is not None and size < _LEAST_SHARED_BYTES:
        what = f"/dev/shm has only {_size(size)}."
        fix = "Use num_workers=0, or start the container with --shm-size=8g."
        seen.findings.append(Finding(what, "DataLoader workers die with a bus error when it is full.", fix))
    return seen


def probe_disk() -> Seen:
    """The disk of the working folder."""
    free = host.disk_free_bytes()
    seen = Seen([("disk, free", _size(free))])
    if free < _LEAST_DISK_BYTES:
        what = f"Only {_size(free)} of disk are free."
        why = "A checkpoint with AdamW's state takes three times the weights; a run may end when it saves one."
        seen.findings.append(Finding(what, why, "Make room, or save less often (save_total_limit)."))
    return seen


def _size(num_bytes: int | None) -> str:
    return "not known" if num_bytes is None else format_bytes(num_bytes)
