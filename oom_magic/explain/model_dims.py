"""The dimensions that tensors are made of, from a TrainingSetup or from the presets that a text names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from oom_magic.predict.setups.models import list_models

if TYPE_CHECKING:
    from oom_magic.predict.setups.setup import TrainingSetup

Dims = Mapping[str, int | str]

_NAMES = {
    "heads": "num_attention_heads",
    "hidden": "hidden_size",
    "vocab": "vocab_size",
    "intermediate": "intermediate_size",
}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def dims_of_setup(setup: Dims | TrainingSetup) -> Dims:
    """The dimensions of a run; a mapping of them is itself."""
    if isinstance(setup, Mapping):
        return setup
    sizes = {"batch": setup.microbatch_size, "seq": setup.seq_len}
    dtype = _DTYPES[setup.precision.removeprefix("amp-")]
    return {**_renamed(setup.source.dims), **sizes, "dtype": dtype}


@cache
def preset_dims() -> Mapping[str, Dims]:
    """The dimensions of every model preset by its names; no library is loaded for it."""
    known: dict[str, Dims] = {}
    for preset in list_models():
        for name in (preset.name, preset.hub_id.split("/")[-1]):
            known.setdefault(name.lower(), _renamed(preset.dims()))
    return known


def _renamed(dims: Mapping[str, Any]) -> dict[str, int | str]:
    return {ours: dims[theirs] for ours, theirs in _NAMES.items() if theirs in dims}
