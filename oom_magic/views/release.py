"""How a release looks: before and after, what went, and who holds the rest."""

from __future__ import annotations

from collections.abc import Sequence

from oom_magic.measure.holders.inventory import Holding
from oom_magic.measure.holders.release import DeviceChange, Released
from oom_magic.views.blocks import Block, Cell, Description, Sentence, Table
from oom_magic.views.registry import register

_UNUSED = "torch has taken no GPU memory in this process."
_NO_GPU = "torch finds no GPU here, so there is nothing to give back (%oom_doctor says why)."


@register
def describe_released(released: Released) -> Description:
    """Before and after by device, what went, and who holds the rest, largest first."""
    blocks: list[Block] = [] if released.has_gpu else [Sentence(_NO_GPU)]
    if not released.devices:
        return Description("Nothing to free", tuple(blocks or [Sentence(_UNUSED)]))
    used = [one for one in released.devices if one.before.reserved_bytes or one.after.reserved_bytes]
    blocks += [_before_and_after(one) for one in used or released.devices[:1]]
    rows: list[tuple[Cell, ...]] = [(one.what, one.num_bytes) for one in released.gone]
    rest = released.freed_allocated_bytes - sum(one.num_bytes for one in released.gone)
    if rest > 0:
        rows.append(("what nothing used any more, workspaces, rounding", rest))
    if rows:
        blocks.append(Table(("would go" if released.is_dry_run else "what went", "memory"), tuple(rows)))
    else:
        blocks.append(Sentence("No error held memory."))
    blocks += _remaining(released)
    title = "A release would free" if released.is_dry_run else "Released"
    return Description(title, tuple(blocks))


def _remaining(released: Released) -> list[Block]:
    rows: list[tuple[Cell, ...]] = [
        (one.name or "(no name)", _what(one), one.num_bytes, ", ".join(one.also)) for one in released.holders
    ]
    if released.unnamed_bytes:
        rows.append(("(no tensor)", "rounding, workspaces, libraries", released.unnamed_bytes, ""))
    if not rows:
        return [Sentence("Nothing is left.", "good")]
    total = ("still allocated", "", released.allocated_bytes, "")
    table = Table(("who holds the rest", "what", "memory", "also held by"), tuple(rows), total=total)
    return [table, *map(Sentence, _ways(released.holders))]


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
