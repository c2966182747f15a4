"""PyTorch's own tip judged: would max_split_size_mb or expandable_segments help here?"""

from __future__ import annotations

from collections.abc import Iterator

from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.evidence.clues.traceback import Clues
from oom_magic.explain.evidence.number_rules import MIN_STUCK_SHARE
from oom_magic.explain.messages.failure import Failure


def facts_about(failure: Failure, clues: Clues) -> tuple[Evidence, ...]:
    """Facts that keep a reader of this message, and of the text around it, from a wrong conclusion."""
    accumulation = (Evidence("fact_accumulation"),) if clues.names_accumulation and failure.is_oom else ()
    return (*_facts(failure), *_facts_around(clues), *accumulation)


def _facts_around(clues: Clues) -> Iterator[Evidence]:
    """What the text around a message believes of the machine, put right."""
    if clues.expandable_segments and "Windows" in clues.systems:
        yield Evidence("fact_expandable_windows")
    if "shuts_down" in clues.run.told:
        yield Evidence("fact_no_shutdown")


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


# expandable_segments needs driver support that these lack; there it fails or is ignored.
_UNSUPPORTED_SYSTEMS = ("Windows", "WSL", "Jetson")


def judge_tip(failure: Failure, clues: Clues) -> Evidence | None:
    """What of a tip against fragmentation is right for this failure; None where none is given or it cannot be told."""
    stuck, requested, free = failure.stuck_bytes, failure.requested_bytes, failure.free_bytes or 0
    if stuck is None or requested is None or not clues.has_tip:
        return None
    values = {"stuck_bytes": stuck, "requested_bytes": requested}
    with_free = {"free_bytes": free} if stuck < requested else {}
    if stuck + free < requested:
        return Evidence("tip_does_not_apply", values)
    held = failure.pytorch_bytes or 0
    if stuck < held * MIN_STUCK_SHARE:
        values |= {"held_bytes": held}
        return Evidence("tip_delays_with_free", values | with_free) if with_free else Evidence("tip_delays", values)
    if clues.expandable_segments:
        return Evidence("tip_already_followed", values)
    unsupported = [system for system in clues.systems if system in _UNSUPPORTED_SYSTEMS]
    if unsupported:
        return Evidence("tip_unsupported", values | {"system": unsupported[0]})
    if with_free:
        return Evidence("tip_applies_with_free", values | with_free)
    return Evidence("tip_applies", values)
