"""PyTorch's own tip judged: would max_split_size_mb or expandable_segments help here?"""

from __future__ import annotations

from oom_magic.explain.causes import MIN_STUCK_SHARE, Evidence
from oom_magic.explain.failure import Failure
from oom_magic.explain.traceback_text import Clues

# expandable_segments needs driver support that these lack; there it fails or is ignored.
_UNSUPPORTED_SYSTEMS = ("Windows", "WSL", "Jetson")


def judge_tip(failure: Failure, clues: Clues) -> Evidence | None:
    """What of the tip against fragmentation is right for this failure, or None where it cannot be told."""
    stuck, requested = failure.stuck_bytes, failure.requested_bytes
    if stuck is None or requested is None:
        return None
    values = {"stuck_bytes": stuck, "requested_bytes": requested}
    if stuck < requested:
        return Evidence("tip_does_not_apply", values)
    held = failure.pytorch_bytes or 0
    if stuck < held * MIN_STUCK_SHARE:
        return Evidence("tip_delays", {**values, "held_bytes": held})
    if clues.expandable_segments:
        return Evidence("tip_already_followed", values)
    unsupported = [system for system in clues.systems if system in _UNSUPPORTED_SYSTEMS]
    if unsupported:
        return Evidence("tip_unsupported", values | {"system": unsupported[0]})
    return Evidence("tip_applies", values)
