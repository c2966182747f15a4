"""What can be varied in a TrainingSetup when its user names nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oom_magic.predict.setups.setup import TrainingSetup

_PRECISIONS = ("bf16", "fp16", "fp32", "amp-bf16", "amp-fp16")
_OPTIMIZERS = ("adamw", "adamw8bit", "paged-adamw8bit", "adafactor", "sgd", "sgd-momentum")
_LONGEST = 4096
_LARGEST_RANK = 128


def setup_ranges(setup: TrainingSetup) -> dict[str, Any]:
    """Batch, sequence length and rank as far as the model allows; a choice for the rest that the model has."""
    source = setup.source
    ranges: dict[str, Any] = {"microbatch_size": (1, max(64, setup.microbatch_size))}
    if source.task != "image-classification":
        longest = min(source.max_seq_len or _LONGEST, max(_LONGEST, setup.seq_len))
        ranges["seq_len"] = (min(128, setup.seq_len, longest), longest)
    is_own = source.task == "own"
    if not is_own:
        narrowest = min(source.linear_layers.values(), default=_LARGEST_RANK)
        ranges["rank"] = (min(4, setup.rank), max(setup.rank, min(_LARGEST_RANK, narrowest)))
        ranges["method"] = _starting_with(setup.method, ("full", "lora", "qlora"))
    ranges["precision"] = _starting_with(setup.precision, _PRECISIONS)
    ranges["optimizer"] = _starting_with(setup.optimizer, _OPTIMIZERS)
    if not is_own:
        ranges["attention"] = _starting_with(setup.attention, ("sdpa", "eager", "flash_attention_2"))
        ranges["activation_checkpointing"] = [setup.activation_checkpointing, not setup.activation_checkpointing]
    if source.task == "causal-lm" and source.model_type != "gemma2":
        ranges["loss"] = _starting_with(setup.loss, ("plain", "chunked"))
    return ranges


def _starting_with(first: str, options: tuple[str, ...]) -> list[str]:
    return [first, *(option for option in options if option != first)]
