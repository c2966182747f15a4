"""A remedy: one change, what it saves and whether the run then fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oom_magic.explain.evidence.causes import Evidence

if TYPE_CHECKING:
    from oom_magic.explain.evidence.growth import Growth
    from oom_magic.predict.setups.gpus import GPU


@dataclass(frozen=True)
class Remedy:
    """One change. Sizes in bytes; None where it could not be priced, and ``note`` then says why.

    ``key`` names its sentence in the catalogue (``remedy_<key>``), filled with ``values``; ``speed`` that of its
    effect on speed (``speed_<speed>``). ``peak_allocated_bytes`` and ``needed_bytes`` (the least memory for
    PyTorch) are those of the run with the change, ``saving_bytes`` is what ``needed_bytes`` falls by. ``cost``
    orders remedies of equal effect.
    """

    key: str
    cost: int
    speed: str
    values: Mapping[str, Any] = field(default_factory=dict)
    peak_allocated_bytes: int | None = None
    needed_bytes: int | None = None
    saving_bytes: int | None = None
    fits: bool | None = None
    global_batch_before: int | None = None
    global_batch_after: int | None = None
    note: Evidence | None = None
    code: str = ""
    language: str = "python"


@dataclass(frozen=True)
class Situation:
    """What the remedies are judged against. Sizes in bytes.

    ``usable_bytes`` is what PyTorch can have on the card now, ``other_bytes`` what other processes hold,
    ``held_bytes`` what only failed cells still hold, ``growth`` what grew in the loop that failed, ``copy`` what
    was loaded twice. ``style`` is how
    the user trains ("plain", "trainer", "accelerate").
    """

    usable_bytes: int
    gpu: GPU
    other_bytes: int = 0
    held_bytes: int = 0
    growth: Growth | None = None
    copy: Evidence | None = None
    style: str = "plain"
    phase: str | None = None
    expandable_segments: bool = False
    is_windows: bool = False


def ranked(remedies: Sequence[Remedy]) -> tuple[Remedy, ...]:
    """What fits first, the least cost first; then what saves most; at the end what is not priced."""
    return tuple(
        sorted(
            remedies,
            key=lambda remedy: (
                remedy.fits is not True,
                remedy.fits is None,
                remedy.cost if remedy.fits else -(remedy.saving_bytes or 0),
            ),
        )
    )
