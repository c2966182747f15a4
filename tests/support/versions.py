"""For which version of PyTorch a number holds that a test states."""

from __future__ import annotations

import importlib.metadata
import re
from types import ModuleType

import pytest
import torch
import torch.distributed.fsdp

TELLS_WHAT_GRAPHS_SAVED = hasattr(torch._C._autograd.SavedTensor, "data")  # PyTorch 2.6 does not
needs_what_graphs_saved = pytest.mark.skipif(
    not TELLS_WHAT_GRAPHS_SAVED, reason="this PyTorch does not tell what a graph saved"
)

needs_fsdp2 = pytest.mark.skipif(
    not hasattr(getattr(torch.distributed.fsdp, "FSDPModule", None), "set_reshard_after_forward"),
    reason="FSDP2 of this PyTorch is not followed",
)


def recorded_with(version: str) -> pytest.MarkDecorator:
    """Skip a test whose numbers were recorded with another PyTorch than the one here: kernels keep other workspaces."""
    return pytest.mark.skipif(
        not torch.__version__.startswith(version), reason=f"recorded with torch {version}, this is {torch.__version__}"
    )


def as_since_3_11(code: str) -> str:
    """Code from ``ast.unparse``, as later Pythons than 3.10 write it: no parentheses around what a loop assigns."""
    return re.sub(r"\bfor \((.*?)\) in ", r"for \1 in ", code)


def bitsandbytes_or_skip() -> ModuleType:
    """bitsandbytes, or a skipped test: with the Triton of torch 2.6 it cannot be imported where there is no GPU."""
    try:
        import bitsandbytes
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"bitsandbytes cannot be imported: {error}")
    return bitsandbytes


def installed_version(name: str) -> str:
    """The version of a library here, or that there is none."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
