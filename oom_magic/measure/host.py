"""The machine around the GPU: memory, disk, and whose notebook it is."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

from oom_magic.units import KIB

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_CGROUP_USES = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


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
    known = _meminfo()
    total, available = known.get("MemTotal"), known.get("MemAvailable")
    limit, used = _first_number(_CGROUP_LIMITS), _first_number(_CGROUP_USES)
    if total is None or limit is None or limit >= total:
        return total, available
    free = limit - (used or 0)
    return limit, free if available is None else min(free, available)


def shared_memory_bytes() -> int | None:
    """Size of ``/dev/shm`` in bytes, through which DataLoader workers pass batches; None without one."""
    return shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None


def disk_free_bytes() -> int:
    """Free bytes on the disk of the working folder, where checkpoints usually go."""
    return shutil.disk_usage(Path.cwd()).free


def _meminfo() -> dict[str, int]:
    """``/proc/meminfo`` in bytes; empty where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {words[0].rstrip(":"): int(words[1]) * KIB for words in fields if words[-1] == "kB"}


def _first_number(paths: tuple[str, ...]) -> int | None:
    for path in paths:
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None  # "max": no limit
    return None
