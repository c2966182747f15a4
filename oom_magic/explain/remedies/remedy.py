"""A remedy: one change, what it saves and whether the run then fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from oom_magic.explain.evidence.causes import Evidence
from oom_magic.memory.categories import TIGHT_SHARE, Verdict, verdict_on

if TYPE_CHECKING:
    from oom_magic.explain.live.growth import Growth
    from oom_magic.predict.setups.gpus import GPU

NOT_YET = Evidence("reason_not_yet")  # of one that is still to be rehearsed
_RELEASES = ("free_held", "drop_copy")  # what nobody needs
# There goes what they save.
_INTO_RAM = ("eval_accumulation", "keep_on_host", "offload_optimizer", "shards_on_host", "offload")


@dataclass(frozen=True)
class Remedy:
    """One change. Sizes in bytes; None where it could not be evaluated, and ``note`` then says why.

    ``key`` names its sentence in the catalogue (``remedy_<key>``), filled with ``values``; ``speed`` that of its
    effect on speed (``speed_<speed>``). ``peak_allocated_bytes`` and ``needed_bytes`` (the least memory for
    PyTorch) are those of the run with the change, ``saving_bytes`` is what ``needed_bytes`` falls by; ``verdict`` is on
    the card with it. ``workspace_bytes``: the most that cuDNN may take for a moment beside them, where there is room.
    ``cost`` orders remedies of equal verdict; ``is_bought``: by other hardware, which comes last.
    ``is_lower_bound``: what the rest of a loop takes is not known, so ``needed_bytes`` is the least; where that fits,
    whether the run does is not known.
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
    verdict: Verdict | None = None
    is_bought: bool = False
    is_lower_bound: bool = False
    workspace_bytes: int = 0

    @property
    def waits(self) -> bool:
        """Whether it is still to be rehearsed."""
        return self.note == NOT_YET

    @property
    def exceeds_ram(self) -> bool:
        """Whether it would move more into RAM than is free there."""
        return self.note is not None and self.note.key == "reason_ram"


@dataclass(frozen=True)
class AsItIs:
    """The unchanged run, with which remedies are compared, and the card. Sizes in bytes.

    ``needed_bytes`` is the least memory for PyTorch with which it ends, ``usable_bytes`` what PyTorch can have,
    ``outside_bytes`` what it cannot. ``is_upper_bound``: compiled code was rehearsed as eager code, which needs more:
    all prices are upper bounds. ``is_lower_bound``: it was left before a part of unknown need.
    """

    needed_bytes: int
    usable_bytes: int
    outside_bytes: int
    is_upper_bound: bool = False
    is_lower_bound: bool = False

    @property
    def total_bytes(self) -> int:
        """The card's."""
        return self.usable_bytes + self.outside_bytes


@dataclass(frozen=True)
class Situation:
    """The situation in which remedies are judged. Sizes in bytes.

    ``usable_bytes`` is what PyTorch can have of the card's ``total_bytes`` now, ``other_bytes`` what other processes
    hold, ``held_bytes`` what only cells that failed before held: in a rehearsal it is free. ``growth`` is what grew in
    the loop that failed, ``style`` how the user trains ("plain", "trainer", "accelerate"), ``backend`` that of the
    device that ran out. ``raised`` is the same without the limit that this process was given for PyTorch's memory.
    ``ram_bytes``: what is free of the host's memory; None where it is another machine's.
    """

    usable_bytes: int
    gpu: GPU
    total_bytes: int = 0
    other_bytes: int = 0
    held_bytes: int = 0
    growth: Growth | None = None
    style: str = "plain"
    phase: str | None = None
    backend: str | None = None
    expandable_segments: bool = False
    is_windows: bool = False
    raised: Situation | None = None
    ram_bytes: int | None = None

    def limited_to(self, limit_bytes: int) -> Situation:
        """The situation under a limit of what PyTorch may reserve, to which nothing outside PyTorch counts."""
        if limit_bytes >= self.usable_bytes:
            return self
        return replace(self, usable_bytes=limit_bytes, total_bytes=limit_bytes, other_bytes=0, raised=self)

    @property
    def is_leaking(self) -> bool:
        """Whether what grew would fill any card in the end: not what one step collects, or a comprehension may."""
        return self.growth is not None and self.growth.num_tensors > 0 and not self.growth.is_of_one_step

    @property
    def has_one_step(self) -> bool:
        """Whether what grew is of one step, which other changes make smaller, too."""
        return self.growth is not None and self.growth.is_of_one_step

    def is_filled_by_held(self, needed_bytes: int) -> bool:
        """Whether a run with this need fits only without what failed cells held."""
        return needed_bytes <= self.usable_bytes < needed_bytes + self.held_bytes

    @property
    def outside_bytes(self) -> int:
        """What PyTorch cannot have of the card: context, libraries, other processes."""
        return max((self.total_bytes or self.usable_bytes) - self.usable_bytes, 0)

    @property
    def safe_bytes(self) -> int:
        """What PyTorch can have while the card is used safely."""
        return int(TIGHT_SHARE * (self.usable_bytes + self.outside_bytes)) - self.outside_bytes - 1

    def judged(self, remedy: Remedy, needed_bytes: int, freed_bytes: int = 0) -> Remedy:
        """The remedy with this need of PyTorch's, ``freed_bytes`` of others released, and its verdict."""
        fits: bool | None = needed_bytes <= self.usable_bytes + freed_bytes
        moved_bytes = (remedy.saving_bytes or 0) if remedy.key in _INTO_RAM else 0
        if self.ram_bytes is not None and moved_bytes > self.ram_bytes:
            note = Evidence("reason_ram", {"moved_bytes": moved_bytes, "ram_bytes": self.ram_bytes})
            remedy, fits = replace(remedy, note=note), None
        if fits and remedy.is_lower_bound:
            fits = None
        used = needed_bytes + self.outside_bytes - freed_bytes
        verdict = verdict_on(used / max(self.usable_bytes + self.outside_bytes, 1)) if fits else None
        return replace(remedy, needed_bytes=needed_bytes, fits=fits, verdict=verdict)


def ranked(remedies: Sequence[Remedy]) -> tuple[Remedy, ...]:
    """Fitting remedies first, by verdict and then by cost; then by saving; then those without a price; hardware last.

    What only releases memory comes before changes, however full the card then is. Hardware comes first only where no
    change fits and all were tried.
    """
    order: tuple[Verdict | None, ...] = ("safe", "tight", "danger", None)

    def rank(remedy: Remedy) -> tuple[Any, ...]:
        """Where a remedy stands among those of its kind."""
        if not remedy.fits:
            return True, remedy.needed_bytes is None, -(remedy.saving_bytes or 0)
        is_release = remedy.key in _RELEASES
        return False, remedy.is_bought, not is_release, order.index(remedy.verdict), remedy.cost

    may_do = any(_may_do(one) for one in remedies)
    return tuple(sorted(remedies, key=lambda remedy: (remedy.is_bought and may_do, *rank(remedy))))


def _may_do(remedy: Remedy) -> bool:
    """Whether a change to the run itself fits, may fit, or was not tried for lack of time."""
    is_untried = remedy.waits or (remedy.note is not None and remedy.note.key == "reason_time")
    may_fit = remedy.fits or (remedy.is_lower_bound and remedy.fits is None)
    return is_untried or bool(may_fit and not remedy.is_bought)


def identity_of(remedy: Remedy) -> Any:
    """What distinguishes a remedy from others of its run, whatever its evaluation."""
    return remedy.key, remedy.values.get("after"), remedy.values.get("keys")
