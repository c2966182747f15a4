"""Bytes as text. Everywhere else in oom_magic a number of bytes is an ``int``."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def unit_for(most_bytes: float) -> tuple[int, str]:
    """The unit in bytes, and its name, for an axis or a table of numbers up to ``most_bytes``."""
    return (GIB, "GiB") if most_bytes >= GIB else (MIB, "MiB")


def format_bytes(num_bytes: int) -> str:
    """Text such as ``"2.32 GiB"``, in the notation of PyTorch's own messages.

    Source: ``format_size`` in c10/core/CachingDeviceAllocator.h (a size equal to a unit's limit
    stays in the smaller unit: 2**30 is "1024.00 MiB"). Negative counts (savings) keep their sign.
    """
    size = abs(num_bytes)
    sign = "-" if num_bytes < 0 else ""
    if size <= KIB:
        return f"{sign}{size} bytes"
    if size <= MIB:
        return f"{sign}{size / KIB:.2f} KiB"
    if size <= GIB:
        return f"{sign}{size / MIB:.2f} MiB"
    return f"{sign}{size / GIB:.2f} GiB"
