"""The machine around the GPU: memory, disk, and whose notebook it is."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from oom_magic.units import KIB

CGROUPS = Path("/sys/fs/cgroup")
# Versions 2 and 1 of control groups.
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_USES = ("memory.current", "memory.usage_in_bytes")
_EVENTS = ("memory.events", "memory.oom_control")


def notebook_platform(environment: Mapping[str, str] = os.environ) -> str:
    """``"Colab"``, ``"Kaggle"``, ``"WSL"``, or the operating system's name (Linux, Windows, Darwin)."""
    if "COLAB_RELEASE_TAG" in environment or "COLAB_GPU" in environment:
        return "Colab"
    if "KAGGLE_KERNEL_RUN_TYPE" in environment:
        return "Kaggle"
    return "WSL" if "microsoft" in platform.uname().release.lower() else platform.system()


def host_memory() -> tuple[int | None, int | None]:
    """Bytes of host memory that this process may have in all, and bytes free of it now (None: not known).

    A container's limit counts where it is below what the machine has.
    """
    known = meminfo()
    total, available = known.get("MemTotal"), known.get("MemAvailable")
    for limit, used in _limits():
        if total is None or limit < total:
            total = limit
        free = max(limit - used, 0)
        available = free if available is None else min(free, available)
    return total, available


def num_oom_kills() -> int:
    """How many processes of this control group the kernel has killed for lack of memory."""
    for folder in control_groups():
        words = _read(folder, _EVENTS).split()
        if "oom_kill" in words[:-1]:
            return int(words[words.index("oom_kill") + 1])
    return 0


def shared_memory_bytes() -> int | None:
    """Size of ``/dev/shm`` in bytes, through which DataLoader workers pass batches; None without one."""
    return shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None


def disk_free_bytes() -> int:
    """Free bytes on the disk of the working folder, where checkpoints usually go."""
    return shutil.disk_usage(Path.cwd()).free


def meminfo() -> dict[str, int]:
    """``/proc/meminfo`` in bytes; empty where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {words[0].rstrip(":"): int(words[1]) * KIB for words in fields if words[-1] == "kB"}


def _limits() -> Iterator[tuple[int, int]]:
    """Limit and use in bytes of each control group around this process that limits memory."""
    for folder in control_groups():
        limit, used = _read(folder, _LIMITS), _read(folder, _USES)
        if limit.isdigit():  # "max": none
            yield int(limit), max(int(used) - _reclaimable(folder), 0) if used.isdigit() else 0


def _reclaimable(folder: Path) -> int:
    """Bytes of files read before, which count as used but are given up for a process that needs memory."""
    words = _read(folder, ("memory.stat",)).split()
    known = dict(zip(words[::2], words[1::2], strict=False))
    return int(known.get("total_inactive_file", known.get("inactive_file", 0)))  # version 1 has both, the first in all


def control_groups() -> Iterator[Path]:
    """Folders of the control groups around this process, the innermost first; in a container it is the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = CGROUPS / controllers
            folder = root / path.lstrip("/")
            yield from (one for one in (folder, *folder.parents) if one == root or root in one.parents)


def _read(folder: Path, names: tuple[str, ...]) -> str:
    for name in names:
        with suppress(OSError):
            return (folder / name).read_text().strip()
    return ""
