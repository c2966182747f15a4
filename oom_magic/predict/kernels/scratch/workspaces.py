"""The workspaces of matrix products; ``memory.workspaces`` says how large."""

from __future__ import annotations

from oom_magic.memory.workspaces import Workspaces
from oom_magic.predict.setups.gpus import GPU
from oom_magic.predict.sizing.store import torch_version

HERE = Workspaces.here(torch_version())


def cublas_bytes(card: GPU) -> int:
    """Bytes of cuBLAS' workspace."""
    return HERE.cublas_bytes(card.capability)


def cublas_lt_bytes(_card: GPU) -> int:
    """Bytes of cublasLt's own workspace."""
    return HERE.cublas_lt_bytes()
