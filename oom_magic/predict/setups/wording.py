"""What a TrainingSetup says of itself: its settings as phrases."""

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


def in_english(phrases: Sequence[Phrase]) -> str:
    """The phrases in one line."""
    return ", ".join(PHRASES[key].format(**values) for key, values in phrases)
