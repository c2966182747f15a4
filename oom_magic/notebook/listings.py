"""What ``--list-gpus`` and ``--list-models`` print: the catalogues, one line each, to be searched with the eye."""

from __future__ import annotations

from oom_magic.predict.setups.gpus import list_gpus
from oom_magic.predict.setups.models import list_models
from oom_magic.units import format_bytes


def cards_listed() -> str:
    """Every card with its memory, by generation."""
    cards = sorted(list_gpus(), key=lambda card: (card.capability, card.total_bytes, card.name))
    width = max(len(card.name) for card in cards)
    return "\n".join(f"{card.name:<{width}}  {format_bytes(card.total_bytes):>10}" for card in cards)


def models_listed() -> str:
    """Every preset with its number of parameters and its name on the hub."""
    models = list_models()
    width = max(len(model.name) for model in models)
    return "\n".join(f"{model.name:<{width}}  {model.num_parameters / 1e9:7.2f} B  {model.hub_id}" for model in models)
