"""The number of layers in a model's configuration, and models with fewer of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_NAMES = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers")
_num_layers: ContextVar[int | None] = ContextVar("num_layers", default=None)


@contextmanager
def only_layers(count: int) -> Iterator[None]:
    """Models loaded by name in dry runs inside have ``count`` layers, in the encoder and in the decoder."""
    token = _num_layers.set(count)
    try:
        yield
    finally:
        _num_layers.reset(token)


def layer_counts(settings: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of layers that ``config.json`` names; of the text's part where there are several."""
    text = settings.get("text_config", settings)
    return {name: text[name] for name in _NAMES if isinstance(text.get(name), int)}


def with_layers_as_asked(settings: dict[str, Any]) -> dict[str, Any]:
    """What ``config.json`` says, but for the number of layers that ``only_layers`` asks for."""
    count = _num_layers.get()
    if count is None:
        return settings
    fewer: dict[str, Any] = dict.fromkeys(layer_counts(settings), count)
    text = settings.get("text_config", settings)
    if text.get("layer_types"):
        fewer["layer_types"] = text["layer_types"][:count]
    return {**settings, "text_config": {**text, **fewer}} if "text_config" in settings else {**settings, **fewer}
