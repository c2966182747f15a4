"""The view of a SystemCheck, with recommended setups."""

from __future__ import annotations

import os

from oom_magic.explain.doctor import Checkup, Recommendation, training_arguments
from oom_magic.language import _, choose_language
from oom_magic.measure.device.nvml import DeviceProcess
from oom_magic.measure.system_check import SystemCheck
from oom_magic.units import format_bytes
from oom_magic.views.blocks import Block, Code, Description, Sentence, Table, register
from oom_magic.views.words import code_in


@register
def describe_system_check(check: SystemCheck) -> Description:
    """Findings with what to do; then the facts, and the processes on the cards."""
    return Description(_("System check"), tuple(_blocks(check)))


def _blocks(check: SystemCheck) -> list[Block]:
    blocks: list[Block] = []
    for one in check.findings:
        blocks += [Sentence(one.what, one.tone), Sentence(f"{one.why} {one.fix}")]
    if not check.findings:
        blocks.append(Sentence(_("Nothing to change."), "good"))
    blocks.append(Table((_("what"), _("value")), check.facts))
    for card in check.cards:
        rows = tuple((str(one.pid), _name(one), _size(one.num_bytes)) for one in card.processes)
        title = _("Processes on GPU {index}", index=card.index)
        blocks += [Table((_("pid"), _("process"), _("memory")), rows, title=title)] if rows else []
    blocks += [Sentence(_("Not checked: {name} ({why}).", name=name, why=why), "quiet") for name, why in check.failed]
    return blocks


@register
def describe_checkup(checkup: Checkup) -> Description:
    """Findings, facts, and setups to paste."""
    blocks: list[Block] = _blocks(checkup)
    if checkup.recommended:
        blocks.append(Sentence(_("Recommended for {card}:", card=checkup.card), "strong"))
        for one in checkup.recommended:
            blocks += _recommendation(one)
    else:
        more = _("To find a training setup that fits: %oom_doctor --model NAME (--model alone: three typical models).")
        blocks.append(Sentence(more, "quiet"))
    return Description(_("System check"), tuple(blocks))


def _recommendation(recommendation: Recommendation) -> list[Block]:
    """The setup in words, and the options to paste."""
    if recommendation.setup is None:
        name = recommendation.model
        return [
            Sentence(
                _("{name}: even QLoRA with short sequences does not fit; choose a smaller model.", name=name), "bad"
            )
        ]
    words = _(
        "{setup}: peak {peak_bytes} (dry run)",
        setup=recommendation.setup.summary,
        peak_bytes=recommendation.peak_reserved_bytes,
    )
    return [Sentence(words, "good"), Code(code_in(choose_language(), training_arguments(recommendation.setup)))]


def _name(process: DeviceProcess) -> str:
    own = _("this kernel") if process.pid == os.getpid() else ""
    return ", ".join(filter(None, (process.name, own))) or _("unknown")


def _size(num_bytes: int | None) -> str:
    return _("unknown") if num_bytes is None else format_bytes(num_bytes)
