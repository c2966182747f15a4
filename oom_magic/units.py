"""Bytes: the one parser and the one formatter.

Every count of bytes in oom_magic is an ``int``; text is made of it only here, at the last moment.
"""

from __future__ import annotations

import re

from oom_magic.errors import InvalidSettingError

KIB, MIB, GIB = 2**10, 2**20, 2**30

_FACTORS = {
    "B": 1, "BYTE": 1, "BYTES": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 2**40,
}  # fmt: skip
_AMOUNT = re.compile(r"\s*([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)\s*([A-Za-z]*)\s*")


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


def parse_bytes(text: str | int) -> int:
    """Number of bytes meant by ``"12GiB"`` (binary) or ``"12GB"`` (decimal); an ``int`` is itself.

    Raises ValueError, naming the value and the fix, for a missing or unknown unit and for sizes
    that are not positive.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        amount = text
    else:
        match = _AMOUNT.fullmatch(str(text))
        if match is None:
            raise InvalidSettingError("no_size", text=text)
        number, unit = match.groups()
        if not unit:
            raise InvalidSettingError("size_without_unit", text=text, number=number)
        factor = _FACTORS.get(unit.upper())
        if factor is None:
            raise InvalidSettingError("unknown_unit", text=text, unit=unit)
        amount = round(float(number) * factor)
    if amount <= 0:
        raise InvalidSettingError("size_not_positive", text=text)
    return amount
