"""Memory on torch's accelerator (CUDA, XPU or MPS): how much of it is in use, and the address of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from oom_magic.measure.device.cards import driver_reading
from oom_magic.measure.history.attribution import Storage, storage_of


@dataclass(frozen=True, slots=True)
class Levels:
    """Bytes of one device: in tensors, reserved by torch, and in use by all processes (None: not known)."""

    allocated_bytes: int
    reserved_bytes: int
    used_bytes: int | None = None


class Memory(Protocol):
    """Devices whose memory can be released: real ones, or (``is_fake``) the pretend GPU."""

    is_fake: bool

    def allocated(self) -> dict[str, int]:
        """Bytes in tensors now, by device."""

    def levels(self) -> dict[str, Levels]:
        """The levels now, by device."""

    def storage(self, tensor: torch.Tensor) -> Storage | None:
        """Address and bytes of a plain tensor's storage; None if it is not on these devices."""

    def return_cached(self, allocated_before: Mapping[str, int]) -> None:
        """Return cached memory to the driver, and workspaces if more than ``allocated_before`` is allocated."""


class AcceleratorMemory:
    """The devices of torch's accelerator. Reading them never initializes one: a context takes memory itself."""

    is_fake = False

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._backend: Any = getattr(torch, kind)

    def allocated(self) -> dict[str, int]:
        """Bytes in tensors now, by device; empty if this process has not used the devices."""
        if not self._is_initialized():
            return {}
        if self._kind == "mps":
            return {"mps:0": self._backend.current_allocated_memory()}
        return {f"{self._kind}:{at}": self._backend.memory_allocated(at) for at in range(self._backend.device_count())}

    def levels(self) -> dict[str, Levels]:
        """The levels now, by device."""
        return {device: self._level(at, num_bytes) for at, (device, num_bytes) in enumerate(self.allocated().items())}

    def storage(self, tensor: torch.Tensor) -> Storage | None:
        """Address and bytes of a plain tensor's storage; None if it is on another device."""
        with torch._C.DisableTorchFunction():
            return storage_of(tensor) if tensor.device.type == self._kind else None

    def return_cached(self, allocated_before: Mapping[str, int]) -> None:
        """Return cached memory to the driver, and cuBLAS' workspaces if more than ``allocated_before`` is allocated.

        A workspace is allocated again when it is needed.
        """
        if not self._is_initialized():
            return
        if self._kind == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            if any(num_bytes > allocated_before.get(device, 0) for device, num_bytes in self.allocated().items()):
                torch._C._cuda_clearCublasWorkspaces()
        self._backend.empty_cache()

    def _is_initialized(self) -> bool:
        return bool(getattr(self._backend, "is_initialized", lambda: True)())

    def _level(self, index: int, allocated_bytes: int) -> Levels:
        if self._kind == "mps":
            return Levels(allocated_bytes, self._backend.driver_allocated_memory())
        used = driver_reading(index).used_bytes if self._kind == "cuda" else None
        return Levels(allocated_bytes, self._backend.memory_reserved(index), used)


def find_accelerators() -> list[Memory]:
    """The accelerator that torch was built for and finds here, or an empty list."""
    if not torch.accelerator.is_available():  # first: without one, PyTorch 2.6 raises when asked for its kind
        return []
    kind = torch.accelerator.current_accelerator()
    return [AcceleratorMemory(kind.type)] if kind is not None and hasattr(torch, kind.type) else []
