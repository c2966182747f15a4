"""How a measured block failed, as text and numbers."""

from __future__ import annotations

import re

import torch

from oom_magic.measure.assembly import FailedRequest
from oom_magic.memory.allocator_settings import AllocatorSettings
from oom_magic.memory.report import OutOfMemory
from oom_magic.memory.segments import (
    GRANULE_BYTES,
    MIN_LARGE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    round_up,
)
from oom_magic.memory.timeline import Phase, SourceLine
from oom_magic.units import format_bytes, parse_bytes

_TRIED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_UNKNOWN = FailedRequest(0, SourceLine("", 0), "", Phase.OTHER, 0)


def describe_error(error: BaseException | None) -> str:
    """The type and first line of an exception, such as ``"ValueError: bad shape"``; empty for None."""
    if error is None:
        return ""
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def find_out_of_memory(
    error: BaseException | None, failed: FailedRequest | None, settings: AllocatorSettings
) -> OutOfMemory | None:
    """What is known of torch's out-of-memory error that ended a block; None for any other end.

    Sizes in bytes: exact if the allocator's history holds the failed request, else as rounded in the message.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    message = str(error)
    printed = _TRIED.search(message)
    if failed is None:
        failed = _UNKNOWN._replace(num_bytes=parse_bytes(printed[1]) if printed else 0)
    requested = _segment_bytes(failed.num_bytes, settings)
    if printed and format_bytes(requested) != printed[1]:
        requested = parse_bytes(printed[1])
    return OutOfMemory(
        message=message,
        requested_bytes=requested,
        tensor_bytes=failed.num_bytes,
        step=failed.step,
        phase=failed.phase,
        operator=failed.operator,
        line=failed.line,
        module="",
    )


def _segment_bytes(size: int, settings: AllocatorSettings) -> int:
    """What the driver is asked for, for a block of ``size`` bytes (``get_allocation_size``)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    return settings.large_segment_bytes if size < MIN_LARGE_BYTES else round_up(size, GRANULE_BYTES)
