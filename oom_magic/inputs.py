"""Reads sizes as users write them: ``"12GiB"``. (``units`` writes them.)"""

from __future__ import annotations

import re

from oom_magic.errors import InvalidSettingError
from oom_magic.units import GIB, KIB, MIB

_FACTORS = {
    "B": 1, "BYTE": 1, "BYTES": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 2**40,
}  # fmt: skip
_AMOUNT = re.compile(r"\s*([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Number of bytes in ``"12GiB"`` (binary) or ``"12GB"`` (decimal); an ``int`` is a number of bytes already.

    Raises InvalidSettingError for a missing or unknown unit and for sizes that are not positive.
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
