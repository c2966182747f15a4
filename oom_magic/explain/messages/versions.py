"""Which PyTorch wrote a message: the range of versions that its wording allows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_STATED = re.compile(
    r"(?:py)?torch(?: version)?[ =:_-]{1,3}v?(\d\.\d{1,2}(?:\.\d{1,2}(?:a0|\.dev\d{0,8})?)?)(?!\d)", re.I
)
_CPU_LINES = (
    ("cpuallocator.cpp:56", "1.1"),
    ("cpuallocator.cpp:64", "1.2-1.6"),
    ("cpuallocator.cpp:65", "1.7"),
    ("cpuallocator.cpp:", "1.7-1.10"),
    ("alloc_cpu.cpp", "1.11+"),
)


def stated_version(text: str) -> str | None:
    """The PyTorch version that the text itself names (``torch==2.4.1``, a build path), or None."""
    match = _STATED.search(text)
    return match.group(1) if match else None


def guess_version(values: Mapping[str, Any], window: str) -> str | None:
    """Range of versions such as ``"2.4+"`` from a message's fields and the squeezed text around it."""
    template, exception = values["format"], values["exception"] or ""
    if template in _BY_FORMAT:
        return _BY_FORMAT[template]
    if template == "mps":
        return "2.8+" if "ib" in window.split("maxallowed")[0].split("mpsallocated")[-1] else "1.12-2.7"
    if template == "cpu_allocator":
        return next((version for mark, version in _CPU_LINES if mark in window), None)
    if template == "cuda_malloc_async":
        return None if values.get("total_bytes") is not None else "2.3-2.9"
    if template in ("cuda_v2.2+", "hip", "xpu", "short"):
        return _guess_modern(values, exception, window)
    if template == "cuda_reserved_1.4-2.0":
        return _guess_reserved(values, exception, window)
    if template == "cuda_error_oom":
        if "AcceleratorError" in exception:
            return "2.9+" if "searchforcudaerror" in window else "2.8+"
        return "2.0-2.7" if "torch_use_cuda_dsa" in window else None
    return None


_BY_FORMAT = {
    "cuda_cached_0.4.1-1.3": "0.4.1-1.3",
    "cuda_v2.1": "2.1",
    "cuda_v2.3_nul_cut": "2.3",
    "cuda_thc_pre0.4.1": "0.1-0.4",
    "cuda_preempted": "2.12+",
}


def _guess_modern(values: Mapping[str, Any], exception: str, window: str) -> str | None:
    if values["format"] == "short" or values["backend"] == "xpu":
        return _by_exception(exception) if values["backend"] == "cuda" else None
    if "pytorch_alloc_conf" in window:
        return "2.10"
    if "docs.pytorch.org" in window and values["format"] == "cuda_v2.2+":
        return "2.11+"
    if values["device_index"] is None and values.get("total_bytes") is not None:
        return "2.3"
    if values.get("private_pool_bytes") is not None or exception == "torch.OutOfMemoryError":
        return "2.4+"
    return "2.2-2.3" if exception == "torch.cuda.OutOfMemoryError" else "2.2+"


def _by_exception(exception: str) -> str | None:
    """What the exception's class alone says: its name and module changed with 1.13 and 2.4."""
    return {"torch.OutOfMemoryError": "2.4+", "torch.cuda.OutOfMemoryError": "1.13-2.3"}.get(exception)


def _guess_reserved(values: Mapping[str, Any], exception: str, window: str) -> str:
    if exception.endswith("OutOfMemoryError"):
        return "1.13-2.0"
    if "ifreservedmemoryis" in window:
        return "1.10-1.12" if exception == "RuntimeError" else "1.10-2.0"
    return "1.8-1.9" if values.get("limit_bytes") is not None else "1.4-1.9"
