"""What one process takes of a card outside PyTorch, as contexts.toml has it read: never one number, always a range."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache

from oom_magic.predict.setups.tables import read_table
from oom_magic.units import MIB

_FEWEST = 2  # readings of a generation that make a range


def context_range(
    capability: tuple[int, int], typical_bytes: int, environment: Mapping[str, str] = os.environ
) -> tuple[int, int]:
    """The least and the most bytes that were read on cards of this generation, or on any where few were read.

    ``typical_bytes`` is among them. With ``CUDA_MODULE_LOADING=EAGER`` they are those of all kernels at once.
    """
    is_eager = environment.get("CUDA_MODULE_LOADING", "").upper() == "EAGER"
    least, most = _range(capability, "eager" if is_eager else "lazy")
    return (least, most) if is_eager else (min(least, typical_bytes), max(most, typical_bytes))


@cache
def _range(capability: tuple[int, int], loading: str) -> tuple[int, int]:
    readings = [reading for reading in read_table("contexts.toml")["reading"] if reading["loading"] == loading]
    own = [mib for reading in readings if reading.get("capability") == [*capability] for mib in reading["mib"]]
    found = own if len(own) >= _FEWEST else [mib for reading in readings for mib in reading["mib"]]
    return min(found) * MIB, max(found) * MIB
