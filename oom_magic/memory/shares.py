"""How much of a card may be used: the shares at which it gets tight, and dangerous."""

from __future__ import annotations

from typing import Literal

Verdict = Literal["safe", "tight", "danger"]
# Below the first a run is safe, up to the second tight, above it in danger.
TIGHT_SHARE, DANGER_SHARE = 0.85, 0.90


def verdict_on(used_fraction: float) -> Verdict:
    """Whether it is safe to use that share of a card."""
    if used_fraction < TIGHT_SHARE:
        return "safe"
    return "tight" if used_fraction <= DANGER_SHARE else "danger"
