"""The view of a Released: memory before and after, what was freed, and who holds the rest."""

from __future__ import annotations

from collections.abc import Sequence

from oom_magic.explain.live.holders import in_words
from oom_magic.explain.sentences.catalogue import render_evidence
from oom_magic.language import _, choose_language
from oom_magic.measure.holders.inventory import MemoryHolder
from oom_magic.measure.holders.release import DeviceChange, Released
from oom_magic.views.blocks import Block, Cell, Description, Sentence, Table, register


@register
def describe_released(released: Released) -> Description:
    """Before and after by device, what went, and who holds the rest, largest first."""
    no_gpu = Sentence(_("torch finds no GPU here, so there is nothing to release (%oom_doctor says why)."))
    pretend = Sentence(_("There is no GPU here: this is the memory of the pretend one."), "quiet")
    blocks: list[Block] = [] if released.has_gpu else [pretend if released.devices else no_gpu]
    if not released.devices:
        unused = Sentence(_("torch has allocated no GPU memory in this process."))
        return Description(_("Nothing to free"), tuple(blocks or [unused]))
    used = [one for one in released.devices if one.before.reserved_bytes or one.after.reserved_bytes]
    blocks += [_before_and_after(one) for one in used or released.devices[:1]]
    rows: list[tuple[Cell, ...]] = [(_kind(one.what), one.num_bytes) for one in released.freed]
    rest = released.freed_allocated_bytes - sum(one.num_bytes for one in released.freed)
    if rest > 0:
        rows.append((_("unreferenced memory, workspaces, rounding"), rest))
    if rows:
        blocks.append(Table((_("would be freed") if released.is_dry_run else _("freed"), _("memory")), tuple(rows)))
    else:
        blocks.append(Sentence(_("No error was holding memory.")))
    blocks += _remaining(released)
    title = _("What would be released") if released.is_dry_run else _("Released")
    return Description(title, tuple(blocks))


def _remaining(released: Released) -> list[Block]:
    rows: list[tuple[Cell, ...]] = [
        (one.name or _("(no name)"), _what(one), one.num_bytes, ", ".join(one.also)) for one in released.holders
    ]
    if released.unnamed_bytes:
        rows.append((_("(no tensor)"), _("rounding, workspaces, libraries"), released.unnamed_bytes, ""))
    if not rows:
        return [Sentence(_("Nothing is still allocated."), "good")]
    total = (_("still allocated"), "", released.allocated_bytes, "")
    table = Table((_("holder of the rest"), _("what"), _("memory"), _("also held by")), tuple(rows), total=total)
    return [table, *map(Sentence, _advice(released.holders))]


def _before_and_after(change: DeviceChange) -> Table:
    before, after = change.before, change.after
    rows: list[tuple[Cell, ...]] = [
        (_("allocated"), before.allocated_bytes, after.allocated_bytes),
        (_("reserved"), before.reserved_bytes, after.reserved_bytes),
    ]
    if before.used_bytes is not None and after.used_bytes is not None:
        rows.append((_("in use by all processes (NVML)"), before.used_bytes, after.used_bytes))
    return Table((change.device, _("before"), _("after")), tuple(rows))


def _what(holder: MemoryHolder) -> str:
    return _kind(holder.what) if holder.name else _("held by {what}", what=_kind(holder.what))


def _kind(what: str) -> str:
    """What ``release`` calls a holder, in the language spoken."""
    return render_evidence(in_words(what), choose_language())


def _advice(holders: Sequence[MemoryHolder]) -> list[str]:
    """How to free what is left: for each kind of holder one sentence."""
    ways = []
    graphs = [one.name for one in holders if one.what == "autograd graph" and one.name]
    gradients = [one.name for one in holders if one.what == "gradients" and one.name]
    names = dict.fromkeys(one.name for one in holders if one.name and not one.name.startswith("Out["))
    if graphs:
        ways.append(
            _("{name} keeps its autograd graph alive: keep {name}.detach() or .item() instead.", name=graphs[0])
        )
    if gradients:
        ways.append(_("{name}.zero_grad() frees gradients.", name=gradients[0]))
    if names:
        ways.append(_("%oom_free --names {names} also deletes variables.", names=" ".join(list(names)[:3])))
    if any(one.name.startswith("Out[") for one in holders):
        ways.append(
            _("IPython keeps each result it shows: %oom_free --out forgets them; end a line with ; to keep none.")
        )
    return ways
