"""``doctor``: the system check and, for given models, the training setup to use on this card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oom_magic.description import Block, Description, Sentence
from oom_magic.explain.recommendation import Recommendation, recommend
from oom_magic.measure.system.check import SystemCheck, check_system
from oom_magic.predict.setups.gpus import DEFAULT_GPU, GPU, closest_gpu, find_gpu

_MORE = "For a training setup that fits: %oom_doctor --model NAME (--model alone: three typical models)."


@dataclass(frozen=True, repr=False)
class Checkup(SystemCheck):
    """A system check with recommended setups for ``card``; none were asked for where there are none."""

    recommended: tuple[Recommendation, ...] = ()
    card: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, ready for JSON."""
        recommended = [one.to_dict() for one in self.recommended]
        return {**SystemCheck(**_fields(self)).to_dict(), "recommended": recommended, "card": self.card}

    def describe(self) -> Description:
        """Findings, facts, and setups to paste."""
        blocks: list[Block] = self._blocks()
        if self.recommended:
            blocks.append(Sentence(f"Recommended for {self.card}:", "strong"))
        for one in self.recommended:
            blocks += one.blocks()
        return Description("System check", (*blocks, *([] if self.recommended else [Sentence(_MORE, "quiet")])))


def doctor(model: str | Sequence[str] = (), *, gpu: str | None = None, memory: int | str | None = None) -> Checkup:
    """Check the machine, the GPUs, the driver, torch and its settings; works without a GPU, too.

    For each ``model`` (a preset's name or several) the largest comfortable training setup on ``gpu`` (default: the card
    here) is found by dry runs, which takes some seconds each. ``memory`` overrides the card's capacity.
    """
    check = check_system()
    models = (model,) if isinstance(model, str) else tuple(model)
    if not models:
        return Checkup(**_fields(check))
    name, card, capacity = _card(check, gpu, memory)
    found = tuple(recommend(one, card.name, capacity) for one in models)
    return Checkup(**_fields(check), recommended=found, card=name)


def _card(check: SystemCheck, gpu: str | None, memory: int | str | None) -> tuple[str, GPU, int | str | None]:
    """The card asked for, the one here or the default: its name, what stands for it in dry runs, and its memory."""
    if gpu is None and check.cards:
        device = check.cards[0].device
        return device.name, closest_gpu(device.name, device.capability or (0, 0)), memory or device.total_bytes
    card = find_gpu(gpu or DEFAULT_GPU)
    return card.name, card, memory


def _fields(check: SystemCheck) -> dict[str, Any]:
    return {name: getattr(check, name) for name in SystemCheck.__dataclass_fields__}
