"""How to read a message's numbers: what they look like and are not."""

from __future__ import annotations

from collections.abc import Iterator

from oom_magic.explain.causes import Evidence
from oom_magic.explain.failure import Failure
from oom_magic.explain.traceback_text import Clues


def facts_about(failure: Failure, clues: Clues) -> tuple[Evidence, ...]:
    """Facts that keep a reader of this message, and of the text around it, from a wrong conclusion."""
    accumulation = (Evidence("fact_accumulation"),) if clues.names_accumulation and failure.is_oom else ()
    return (*_facts(failure), *accumulation)


def _facts(failure: Failure) -> Iterator[Evidence]:
    own = failure.self_listed_as_pid
    if own is not None:
        yield Evidence("fact_own_pid", {"pid": own, "own_bytes": failure.own_process_bytes or 0})
    if any(size is None for _, size in failure.other_processes):
        yield Evidence("fact_process_size_unknown")
    if failure.format == "cuda_v2.3_nul_cut":
        yield Evidence("fact_device_zero")
    if failure.private_pool_bytes:
        yield Evidence("fact_private_pools", {"private_pool_bytes": failure.private_pool_bytes})
    if failure.format == "cuda_cached_0.4.1-1.3":
        yield Evidence("fact_cached_excludes_allocated")
    is_misreported = (failure.free_bytes or 0) > (failure.total_bytes or failure.free_bytes or 0)
    if is_misreported and failure.free_bytes is not None:
        yield Evidence("fact_free_above_capacity", {"free_bytes": failure.free_bytes})
