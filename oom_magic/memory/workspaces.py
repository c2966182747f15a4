"""The workspaces that PyTorch gives to cuBLAS and cublasLt: how large they are, and how long they stay.

Source: aten/src/ATen/cuda/CublasHandlePool.cpp (``parseChosenWorkspaceSize``, ``parseCUDABlasLtWorkspaceSize``,
``getCUDABlasLtWorkspace``), whose history is in the pull requests named below. What version 2.15 does was seen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from oom_magic.units import KIB, MIB

_SMALL_BYTES = 8320 * KIB  # ":4096:2:16:8"
_LARGE_BYTES = 32 * MIB
_LT_KIB = 1024
# Major compute capabilities with the large one, since versions of PyTorch (#91564: 9.0; #175344; #189312: Thor).
_LARGE_SINCE = {9: (2, 0), 10: (2, 12), 12: (2, 12), 11: (2, 14)}
_UNIFIED_AT_WISH, _UNIFIED = (2, 8), (2, 12)  # cublasLt works in cuBLAS' own (#151163; by default #168175, #175879)
_LT_STAYS = (2, 9)  # its own stays with the thread and stream (#156495); before, each product takes it again
_NONE_STAYS = (2, 15)  # every product takes and frees


@dataclass(frozen=True)
class Workspaces:
    """The workspaces of a process with this version of PyTorch, as its environment variables say."""

    version: tuple[int, ...]
    environment: Mapping[str, str]

    @classmethod
    def here(cls, version: str) -> Workspaces:
        """Those of this process; ``version`` is ``torch.__version__``."""
        return cls(tuple(map(int, version.split(".")[:2])), os.environ)

    @property
    def stays(self) -> bool:
        """Whether cuBLAS' workspace stays with thread, stream and handle once it was needed."""
        return self.version < _NONE_STAYS

    @property
    def lt_stays(self) -> bool:
        """Whether cublasLt's own does."""
        return _LT_STAYS <= self.version < _NONE_STAYS

    @property
    def is_unified(self) -> bool:
        """Whether cublasLt works in the workspace of cuBLAS."""
        if not _UNIFIED_AT_WISH <= self.version < _NONE_STAYS:
            return False
        wish = self.environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
        return wish == "1" or (wish != "0" and self.version >= _UNIFIED)

    @property
    def lt_takes_both(self) -> bool:
        """Whether a product by cublasLt takes cuBLAS' workspace first, with the handle that they share."""
        return self.version < _UNIFIED  # getCurrentCUDABlasLtHandle; seen: no more in 2.13, where they are not unified

    def cublas_bytes(self, capability: tuple[int, int]) -> int:
        """The workspace of cuBLAS: as ``CUBLAS_WORKSPACE_CONFIG`` says (":KiB:count" pairs), else by generation."""
        pairs = re.findall(r":(\d+):(\d+)", self.environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
        if pairs:
            return sum(int(size) * int(count) for size, count in pairs) * KIB
        return _LARGE_BYTES if self.version >= _LARGE_SINCE.get(capability[0], (99,)) else _SMALL_BYTES

    def cublas_lt_bytes(self) -> int:
        """That of cublasLt where it has its own: as ``CUBLASLT_WORKSPACE_SIZE`` says in KiB, else 1 MiB."""
        found = re.match(r"\s*\d+", self.environment.get("CUBLASLT_WORKSPACE_SIZE", ""))
        return (int(found[0]) if found else _LT_KIB) * KIB

    def kept_bytes(self, capability: tuple[int, int]) -> frozenset[int]:
        """The sizes of those that stay allocated."""
        own_of_lt = {self.cublas_lt_bytes()} if self.lt_stays and not self.is_unified else set()
        return frozenset(own_of_lt | ({self.cublas_bytes(capability)} if self.stays else set()))
