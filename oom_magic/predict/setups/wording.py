"""What a TrainingSetup says of itself: its settings as phrases, and why some do not go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Phrase = tuple[str, dict[str, Any]]  # a key of PHRASES and the values that it names

PHRASES: dict[str, str] = {
    "setting": "{value}",
    "full": "full fine-tuning",
    "lora": "LoRA of rank {rank}",
    "qlora": "QLoRA of rank {rank}",
    "batch": "batch {batch}",
    "batch_of_tokens": "batch {batch} x {seq} tokens",
    "accumulation": "accumulated {times} times",
    "checkpointing": "activation checkpointing",
    "attention": "{name} attention",
    "chunked_loss": "chunked loss",
    "card": "on {gpu} ({total})",
}
REFUSALS: dict[str, str] = {
    "qlora_of_no_file": (
        "method 'qlora' needs weights to quantize: a preset or a folder, not a configuration or a function."
    ),
    "qlora_in_32_bits": ("method 'qlora' computes in 16 bits: precision must be bf16, fp16, amp-bf16 or amp-fp16."),
    "frozen_and_adapters": (
        "frozen {frozen} goes with method 'full'; adapters freeze all the rest anyway: leave it out."
    ),
    "chunked_loss_without_logits": (
        "loss 'chunked' is for decoders such as GPT-2 and Llama, not for {model}: use 'plain'."
    ),
    "chunked_loss_and_soft_cap": "loss 'chunked' would leave out this model's soft cap on the logits: use 'plain'.",
    "checkpointing_of_own_model": (
        "activation_checkpointing needs a transformers model; a function's model must do it itself."
    ),
    "padded_without_mask": "data 'padded' needs a transformers language model, not images or a function.",
    "no_target_modules": "target_modules must be given for the model of a function.",
    "flash_in_32_bits": ("attention 'flash_attention_2' works in 16 bits only: with precision 'fp32' use 'sdpa'."),
    "flash_on_old_card": (
        "attention 'flash_attention_2' needs compute capability 8.0, which {gpu} does not have: use 'sdpa'."
    ),
    "flash_of_t5": "attention 'flash_attention_2': transformers has none for {model}; use 'sdpa' or 'eager'.",
    "longer_than_positions": "seq_len {seq} is more than the {positions} positions of {model}: give at most that.",
    "no_such_layer": "target_modules '{name}' is no layer of {model}: {known}",
    "rank_above_layer": (
        "rank {rank} is larger than the layer it adapts: {layer} of {model} has {width}; give at most that."
    ),
}


class SettingsError(ValueError):
    """Settings that do not go together: a key of REFUSALS and the values that its sentence names.

    ``offer`` is said behind it: what may have been meant.
    """

    def __init__(self, key: str, offer: str = "", **values: Any) -> None:
        super().__init__(REFUSALS[key].format(**values) + offer)
        self.key = key
        self.values = values


def in_english(phrases: Sequence[Phrase]) -> str:
    """The phrases in one line."""
    return ", ".join(PHRASES[key].format(**values) for key, values in phrases)
