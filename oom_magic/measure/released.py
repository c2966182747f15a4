"""What ``release`` did, as numbers and words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oom_magic.description import Block, Cell, Describable, Description, Sentence, Table
from oom_magic.measure.accelerator import Levels
from oom_magic.measure.holders import Holding

_UNUSED = "torch has taken no GPU memory in this process."
_NO_GPU = "torch finds no GPU here, so there is nothing to give back (%oom_doctor says why)."


@dataclass(frozen=True, slots=True)
class DeviceChange:
    """One device before and after. Sizes in bytes."""

    device: str
    before: Levels
    after: Levels


@dataclass(frozen=True, slots=True)
class Gone:
    """Something that was let go, and the bytes that nothing else held; ``is_own``: the error that was asked about."""

    what: str
    num_bytes: int
    is_own: bool = False


@dataclass(frozen=True, repr=False)
class Released(Describable):
    """What ``release`` freed, or in a dry run would free, and who holds the rest. Sizes in bytes.

    ``devices`` is empty where there is none, or none was used yet. ``holders`` count each byte once. Without
    ``has_gpu`` torch finds no accelerator: what is told is the pretend GPU's memory, if any.
    """

    devices: tuple[DeviceChange, ...] = ()
    gone: tuple[Gone, ...] = ()
    holders: tuple[Holding, ...] = ()
    is_dry_run: bool = False
    has_gpu: bool = True

    @property
    def freed_allocated_bytes(self) -> int:
        """What was in tensors, on all devices."""
        return sum(one.before.allocated_bytes - one.after.allocated_bytes for one in self.devices)

    @property
    def freed_reserved_bytes(self) -> int:
        """What went back to the driver, cache included."""
        return sum(one.before.reserved_bytes - one.after.reserved_bytes for one in self.devices)

    @property
    def allocated_bytes(self) -> int:
        """What is still in tensors."""
        return sum(one.after.allocated_bytes for one in self.devices)

    @property
    def reserved_bytes(self) -> int:
        """What torch still holds from the driver."""
        return sum(one.after.reserved_bytes for one in self.devices)

    @property
    def unnamed_bytes(self) -> int:
        """What is allocated but in no tensor that Python sees: rounding, workspaces, the inside of libraries."""
        return max(self.allocated_bytes - sum(holder.num_bytes for holder in self.holders), 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, ready for JSON."""
        return asdict(self)

    def describe(self) -> Description:
        """Before and after by device, what went, and who holds the rest, largest first."""
        blocks: list[Block] = [] if self.has_gpu else [Sentence(_NO_GPU)]
        if not self.devices:
            return Description("Nothing to free", tuple(blocks or [Sentence(_UNUSED)]))
        used = [one for one in self.devices if one.before.reserved_bytes or one.after.reserved_bytes]
        blocks += [_before_and_after(one) for one in used or self.devices[:1]]
        rows: list[tuple[Cell, ...]] = [(one.what, one.num_bytes) for one in self.gone]
        rest = self.freed_allocated_bytes - sum(one.num_bytes for one in self.gone)
        if rest > 0:
            rows.append(("what nothing used any more, workspaces, rounding", rest))
        if rows:
            blocks.append(Table(("would go" if self.is_dry_run else "what went", "memory"), tuple(rows)))
        else:
            blocks.append(Sentence("No error held memory."))
        blocks += self._remaining()
        title = "A release would free" if self.is_dry_run else "Released"
        return Description(title, tuple(blocks))

    def _remaining(self) -> list[Block]:
        rows: list[tuple[Cell, ...]] = [
            (one.name or "(no name)", _what(one), one.num_bytes, ", ".join(one.also)) for one in self.holders
        ]
        if self.unnamed_bytes:
            rows.append(("(no tensor)", "rounding, workspaces, libraries", self.unnamed_bytes, ""))
        if not rows:
            return [Sentence("Nothing is left.", "good")]
        total = ("still allocated", "", self.allocated_bytes, "")
        table = Table(("who holds the rest", "what", "memory", "also held by"), tuple(rows), total=total)
        return [table, *map(Sentence, _ways(self.holders))]


def _before_and_after(change: DeviceChange) -> Table:
    before, after = change.before, change.after
    rows: list[tuple[Cell, ...]] = [
        ("allocated", before.allocated_bytes, after.allocated_bytes),
        ("reserved", before.reserved_bytes, after.reserved_bytes),
    ]
    if before.used_bytes is not None and after.used_bytes is not None:
        rows.append(("in use by all (NVML)", before.used_bytes, after.used_bytes))
    return Table((change.device, "before", "after"), tuple(rows))


def _what(holding: Holding) -> str:
    return holding.what if holding.name else f"held by {holding.what}"


def _ways(holders: Sequence[Holding]) -> list[str]:
    """How to free what is left: for each kind of holder one sentence."""
    ways = []
    graphs = [one.name for one in holders if one.what == "autograd graph" and one.name]
    gradients = [one.name for one in holders if one.what == "gradients" and one.name]
    names = dict.fromkeys(one.name for one in holders if one.name and not one.name.startswith("Out["))
    if graphs:
        ways.append(f"{graphs[0]} keeps the graph that made it: keep {graphs[0]}.detach() or .item() instead.")
    if gradients:
        ways.append(f"{gradients[0]}.zero_grad() frees gradients.")
    if names:
        ways.append(f"%oom_free --names {' '.join(list(names)[:3])} deletes variables, too.")
    if any(one.name.startswith("Out[") for one in holders):
        ways.append("IPython keeps each result it shows: %oom_free --out forgets them; a ; after it shows none.")
    return ways
