"""PyTorch's words for memory that it could not have."""

from __future__ import annotations

from oom_magic.memory.allocator.replay import AllocatorOutOfMemory, ReplayFailure
from oom_magic.units import format_bytes


def failure_message(
    error: AllocatorOutOfMemory | ReplayFailure,
    total_bytes: int,
    context_bytes: int,
    limit_bytes: int | None = None,
    device_index: int = 0,
) -> str:
    """PyTorch's own wording (c10/cuda/CUDACachingAllocator.cpp, ``malloc``); ``limit_bytes`` is that of a fraction."""
    cached = error.reserved_bytes - error.allocated_bytes
    allowed = "" if limit_bytes is None else f"{format_bytes(limit_bytes)} allowed; "
    return (
        f"CUDA out of memory. Tried to allocate {format_bytes(error.segment_bytes)}. GPU {device_index} has a total "
        f"capacity of {format_bytes(total_bytes)} of which {format_bytes(error.free_bytes)} is free. "
        "Including non-PyTorch memory, "
        f"this process has {format_bytes(error.reserved_bytes + context_bytes)} memory in use. "
        f"{allowed}Of the allocated memory {format_bytes(error.allocated_bytes)} is allocated by PyTorch, "
        f"and {format_bytes(cached)} is reserved by PyTorch but unallocated. "
        "If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )
