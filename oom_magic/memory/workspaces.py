"""The workspaces that PyTorch gives to cuBLAS and cublasLt: how large they are, how long they stay; private pools.

Source: aten/src/ATen/cuda/CublasHandlePool.cpp (``parseChosenWorkspaceSize``, ``parseCUDABlasLtWorkspaceSize``,
``getCUDABlasLtWorkspace``), whose history is in the pull requests named below. What version 2.15 does was seen.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from oom_magic.units import KIB, MIB

_SMALL_BYTES = 8320 * KIB  # ":4096:2:16:8"
_LARGE_BYTES = 32 * MIB
_LT_KIB = 1024
# Major compute capabilities with the large one, since versions of PyTorch (#91564: 9.0; #175344; #189312: Thor).
_LARGE_SINCE = {9: (2, 0), 10: (2, 12), 12: (2, 12), 11: (2, 14)}
_UNIFIED_IF_ASKED, _UNIFIED = (2, 8), (2, 12)  # cublasLt works in cuBLAS' own (#151163; by default #168175, #175879)
_LT_STAYS = (2, 9)  # its own stays with the thread and stream (#156495); before, each product takes it again
_NONE_STAYS = (2, 15)  # every product takes and frees


Owner = tuple[str, int, int]  # of a workspace: library, stream, handle


class KeptWorkspace(NamedTuple):
    """A workspace that stays allocated: its card, owner and size."""

    card: int
    owner: Owner
    num_bytes: int


class PrivatePool(NamedTuple):
    """The private pool of a CUDA graph or a ``torch.cuda.MemPool``: its card, PyTorch's name for it, and what it holds
    beside tensors: allocated (workspaces, what C++ keeps), and free, but for its owner alone."""

    card: int
    name: tuple[int, int]
    allocated_bytes: int
    free_bytes: int


def private_pools_in(segments: Iterable[Mapping[str, Any]], taken: Collection[int]) -> list[PrivatePool]:
    """The private pools in ``torch.cuda.memory_snapshot()``; ``taken``: the addresses of tensors."""
    allocated: Counter[tuple[int, tuple[int, int]]] = Counter()
    free: Counter[tuple[int, tuple[int, int]]] = Counter()
    for segment in filter(_is_private, segments):
        pool = segment["device"], tuple(segment["segment_pool_id"])
        free[pool] += segment["total_size"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                free[pool] -= block["size"]
                allocated[pool] += 0 if block["address"] in taken else block["size"]
    return [PrivatePool(*pool, allocated[pool], num_bytes) for pool, num_bytes in free.items()]


def _is_private(segment: Mapping[str, Any]) -> bool:
    return any(segment.get("segment_pool_id", ()))


@dataclass(frozen=True)
class Workspaces:
    """The workspaces of a process, given the version of PyTorch and environment variables."""

    version: tuple[int, ...]
    environment: Mapping[str, str]

    @classmethod
    def here(cls, version: str) -> Workspaces:
        """Those of this process; ``version`` is ``torch.__version__``."""
        return cls(tuple(map(int, version.split(".")[:2])), os.environ)

    @property
    def stays(self) -> bool:
        """Whether cuBLAS' workspace stays allocated for its thread, stream and handle after its first use."""
        return self.version < _NONE_STAYS

    @property
    def lt_stays(self) -> bool:
        """Whether the separate workspace of cublasLt stays, too."""
        return _LT_STAYS <= self.version < _NONE_STAYS

    @property
    def is_unified(self) -> bool:
        """Whether cublasLt works in the workspace of cuBLAS."""
        if not _UNIFIED_IF_ASKED <= self.version < _NONE_STAYS:
            return False
        setting = self.environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
        return setting == "1" or (setting != "0" and self.version >= _UNIFIED)

    @property
    def lt_takes_both(self) -> bool:
        """Whether a product by cublasLt takes cuBLAS' workspace first, with the handle that they share."""
        return self.version < _UNIFIED  # getCurrentCUDABlasLtHandle; seen: no more in 2.13, where they are not unified

    def cublas_bytes(self, capability: tuple[int, int]) -> int:
        """Bytes of cuBLAS' workspace: ``CUBLAS_WORKSPACE_CONFIG`` (":KiB:count" pairs), or the default of the GPU."""
        pairs = re.findall(r":(\d+):(\d+)", self.environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
        if pairs:
            return sum(int(size) * int(count) for size, count in pairs) * KIB
        return _LARGE_BYTES if self.version >= _LARGE_SINCE.get(capability[0], (99,)) else _SMALL_BYTES

    def cublas_lt_bytes(self) -> int:
        """Bytes of cublasLt's separate workspace: ``CUBLASLT_WORKSPACE_SIZE`` (in KiB), or 1 MiB by default."""
        found = re.match(r"\s*\d+", self.environment.get("CUBLASLT_WORKSPACE_SIZE", ""))
        return (int(found[0]) if found else _LT_KIB) * KIB

    def lasting_bytes(self, capability: tuple[int, int]) -> dict[str, int]:
        """The sizes, in bytes, of the workspaces that stay allocated after their first use, by library."""
        own_of_lt = {"cublasLt": self.cublas_lt_bytes()} if self.lt_stays and not self.is_unified else {}
        return {**own_of_lt, **({"cublas": self.cublas_bytes(capability)} if self.stays else {})}

    def lasting_in(
        self,
        segments: Iterable[Mapping[str, Any]],
        taken: Collection[int],
        capability_of: Callable[[int], tuple[int, int]],
    ) -> list[KeptWorkspace]:
        """Those among the blocks of ``torch.cuda.memory_snapshot()``: of such a size, and of no tensor (``taken``: the
        addresses of tensors).

        The snapshot names no handles; they are numbered as threads take them: the first is that of the code itself, the
        next autograd's.
        """
        found: list[KeptWorkspace] = []
        num_handles: Counter[tuple[int, str, int]] = Counter()
        for segment in itertools.filterfalse(_is_private, segments):
            card, stream = segment["device"], segment["stream"]
            libraries = {size: library for library, size in self.lasting_bytes(capability_of(card)).items()}
            for block in segment["blocks"]:
                library = libraries.get(block["requested_size"])
                if library and block["state"] == "active_allocated" and block["address"] not in taken:
                    num_handles[card, library, stream] += 1
                    owner = (library, stream, num_handles[card, library, stream])
                    found.append(KeptWorkspace(card, owner, block["requested_size"]))
        return found
