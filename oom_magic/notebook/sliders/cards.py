"""The GPUs offered by the sliders: the user's own first, then the catalogue."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from oom_magic.inputs import parse_bytes
from oom_magic.language import _
from oom_magic.memory.report import Device
from oom_magic.predict.setups.gpus import DEFAULT_GPU, closest_gpu, find_gpu, list_gpus
from oom_magic.units import format_bytes


@dataclass(frozen=True, slots=True)
class SliderCard:
    """A card to try: one of the catalogue, with another capacity if ``memory_bytes`` is given."""

    gpu: str
    memory_bytes: int | None = None
    is_own: bool = False

    @property
    def device(self) -> Device:
        """The card as a report shows it."""
        card = find_gpu(self.gpu)
        return Device(card.name, self.memory_bytes or card.total_bytes, card.context_bytes, capability=card.capability)

    @property
    def kind(self) -> tuple[tuple[int, int], int]:
        """Compute capability and multiprocessors, which decide the kernels that run on it."""
        card = find_gpu(self.gpu)
        return card.capability, card.num_multiprocessors

    def __str__(self) -> str:
        yours = _(" (yours)") if self.is_own else ""
        name = self.device.name.removeprefix("NVIDIA ").removeprefix("GeForce ")
        return f"{name}, {format_bytes(self.device.total_bytes)}{yours}"


@dataclass(frozen=True, slots=True)
class SliderMachine:
    """How many such cards there are, and whose memory is asked for: that of one ``card``, or of a job's process."""

    num_gpus: int = 1
    num_processes: int | None = None
    card: int | None = None

    def named(self, label: str) -> str:
        """A label: the function or setup, and the cards."""
        if self.num_processes is not None:
            return _("{name}, process {rank} of {number}", name=label, rank=0, number=self.num_processes)
        if self.num_gpus > 1:
            return _("{name}, cuda:{card} of {number}", name=label, card=self.card or 0, number=self.num_gpus)
        return label


def offered_cards(gpu: str | Iterable[str] | None, memory: str | int | None) -> tuple[SliderCard, ...]:
    """The cards to choose from, the one to start with first. A list of names limits the choice to them.

    Raises ValueError, with the closest names, for a card that is not known, and for a ``memory`` that is no size.
    """
    names = [gpu] if isinstance(gpu, str) else list(gpu or ())
    for name in names:
        find_gpu(name)
    if gpu is not None and not isinstance(gpu, str):
        return tuple(map(SliderCard, names))
    own = _own_card() if gpu is None and memory is None else None
    memory_bytes = None if memory is None else parse_bytes(memory)
    first = own or SliderCard(gpu or DEFAULT_GPU, memory_bytes)
    rest = sorted(list_gpus(), key=lambda card: (card.total_bytes, card.capability, card.name))
    return (first, *(SliderCard(card.name) for card in rest if SliderCard(card.name).device != first.device))


def _own_card() -> SliderCard | None:
    from oom_magic.measure.device.cards import current_device, is_available

    if not is_available():
        return None
    device = current_device()
    card = closest_gpu(device.name, device.capability or (0, 0))
    return SliderCard(card.name, device.total_bytes, is_own=True)
