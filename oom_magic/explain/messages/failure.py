"""Failure: one out-of-memory message (or look-alike) as plain numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from oom_magic.units import GIB, KIB, MIB

# A process listed by NVML under its host pid holds PyTorch's memory plus the CUDA context and libraries;
# in real messages that surplus stays below this, or both could not be on the device at once.
_MAX_OWN_SURPLUS_BYTES = 3 * GIB


@dataclass(frozen=True)
class Failure:
    """What one message says. Sizes are bytes, rounded from the print; what is not printed is None.

    ``format`` names the template that matched, ``backend`` the library that ran out ("cuda", "hip",
    "xpu", "npu", "mps", "cpu", "jax", "tensorflow"). ``is_oom`` is None where the text alone does not
    decide. ``other_processes`` holds every process the message lists as ``(pid, bytes)``, this very
    process included when it is listed under its host pid (``self_listed_as_pid``). ``text`` is the
    message itself, without prefixes and colour codes, and ``start`` its offset in the cleaned text. ``words``:
    what a text that quotes no message says of it.
    """

    format: str
    backend: str | None = None
    is_oom: bool | None = True
    exception: str | None = None
    device_index: int | None = None
    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    process_bytes: int | None = None
    other_processes: tuple[tuple[int, int | None], ...] = ()
    limit_bytes: int | None = None
    private_pool_bytes: int | None = None
    mps_other_bytes: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    torch_version_guess: str | None = None
    text: str = ""
    start: int = 0
    words: str = ""

    @property
    def stuck_bytes(self) -> int | None:
        """Bytes reserved by PyTorch's cache but not allocated to tensors, in the terms of any version."""
        if self.reserved_unallocated_bytes is not None:
            return self.reserved_unallocated_bytes
        if self.reserved_bytes is not None and self.allocated_bytes is not None:
            return max(0, self.reserved_bytes - self.allocated_bytes)
        return None

    @property
    def pytorch_bytes(self) -> int | None:
        """Bytes that this process's PyTorch holds: allocated and stuck in its cache."""
        if self.allocated_bytes is None:
            return self.reserved_bytes
        return self.allocated_bytes + (self.stuck_bytes or 0)

    @property
    def self_listed_as_pid(self) -> int | None:
        """The pid under which the message lists this process itself, as happens inside containers."""
        allocated = self.pytorch_bytes
        if self.process_bytes is not None or allocated is None:
            return None
        slack = rounding_bytes(allocated) + rounding_bytes(self.stuck_bytes or 0)
        used = (self.total_bytes or 0) - (self.free_bytes or 0)
        most_used = used + slack + 2 * rounding_bytes(used)
        fitting = []
        for pid, size in self.other_processes:
            surplus = (size or 0) - allocated
            is_large_enough = size and surplus >= -slack - rounding_bytes(size)
            if is_large_enough and (surplus < _MAX_OWN_SURPLUS_BYTES or 0 < most_used < allocated + (size or 0)):
                fitting.append(pid)
        return fitting[0] if len(fitting) == 1 else None

    @property
    def own_process_bytes(self) -> int | None:
        """Bytes that this process holds on the device, PyTorch or not, where the message says so."""
        held = self.pytorch_bytes or 0
        if self.process_bytes is not None:  # some drivers print less than PyTorch alone holds, or 0 bytes
            return self.process_bytes if self.process_bytes + 2 * rounding_bytes(held) >= held else None
        own = self.self_listed_as_pid
        return dict(self.other_processes).get(own) if own is not None else None

    @property
    def is_of_unknown_owner(self) -> bool:
        """Whether the one process that the message lists may be this one: what tells them apart is not printed."""
        return len(self.other_processes) == 1 and self.process_bytes is None and self.pytorch_bytes is None

    @property
    def is_of_device(self) -> bool:
        """Whether the message itself is a device's, and not the host's."""
        return self.backend not in (None, "cpu")

    @property
    def listed_other_bytes(self) -> int:
        """Bytes that the message attributes to processes other than this one."""
        own = self.self_listed_as_pid
        return sum(size or 0 for pid, size in self.other_processes if pid != own)

    @property
    def num_sizes(self) -> int:
        """How many sizes the message prints; the fullest message of a text explains it best."""
        sizes = _sizes_of(self)
        return len(sizes) - sizes.count(None) + len(self.other_processes) + (self.dtype is not None)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values, with the derived ones a reader needs."""
        return dataclasses.asdict(self) | {
            "stuck_bytes": self.stuck_bytes,
            "self_listed_as_pid": self.self_listed_as_pid,
        }


_sizes_of = attrgetter(*(one.name for one in dataclasses.fields(Failure) if one.name.endswith("_bytes")))


def rounding_bytes(printed_bytes: int) -> int:
    """Largest error of a size printed with two decimals of its unit (half of 0.01 unit), in bytes."""
    for unit in (GIB, MIB, KIB):
        if printed_bytes >= unit:
            return unit // 200
    return 0
