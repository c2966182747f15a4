"""The error for invalid settings, with the sentence for each case, and exceptions as one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oom_magic.language import Language, Sentences, choose_language, render

REFUSALS: Sentences = {
    "qlora_of_no_file": (
        "method 'qlora' needs weights to quantize: give a preset or a folder, not a configuration or a function."
    ),
    "qlora_in_32_bits": ("method 'qlora' computes in 16 bits: precision must be bf16, fp16, amp-bf16 or amp-fp16."),
    "frozen_and_adapters": (
        "frozen={frozen} requires method 'full'; adapters freeze all other weights anyway: leave it out."
    ),
    "chunked_loss_without_logits": (
        "loss 'chunked' supports decoders such as GPT-2 and Llama, not {model}: use 'plain'."
    ),
    "chunked_loss_and_soft_cap": "loss 'chunked' would drop this model's soft cap on the logits: use 'plain'.",
    "checkpointing_of_own_model": (
        "activation_checkpointing needs a transformers model; a model from a function must do it itself."
    ),
    "padded_without_mask": "data 'padded' needs a transformers language model, not images or a function.",
    "no_target_modules": "target_modules must be given for a model from a function.",
    "gpus_and_processes": (
        "num_gpus is for a single process; each of {processes} processes has one GPU: give only one of the two."
    ),
    "chunked_loss_of_several": (
        "loss 'chunked' bypasses the model's own forward, which several GPUs need: use 'plain'."
    ),
    "replicas_in_4_bits": "method 'qlora': 4-bit layers cannot be replicated; use num_processes={gpus}, not num_gpus.",
    "shards_of_one": "parallelism 'fsdp2' needs several processes: give num_processes.",
    "shards_of_adapters": (
        "parallelism 'fsdp2' requires method 'full': adapters have another dtype than the weights they adapt."
    ),
    "shards_stepped_by_others": "parallelism 'fsdp2' needs one of PyTorch's own optimizers, not {optimizer}.",
    "shards_scaled": "parallelism 'fsdp2' is not supported with precision 'amp-fp16': use 'amp-bf16'.",
    "shards_of_old_torch": "parallelism 'fsdp2' is not supported with this PyTorch: use 2.13 or newer.",
    "flash_in_32_bits": ("attention 'flash_attention_2' supports 16-bit precision only: with 'fp32' use 'sdpa'."),
    "flash_on_old_card": (
        "attention 'flash_attention_2' needs compute capability 8.0, which {gpu} does not have: use 'sdpa'."
    ),
    "flash_of_t5": "attention 'flash_attention_2' is not available in transformers for {model}; use 'sdpa' or 'eager'.",
    "longer_than_positions": "seq_len {seq} exceeds the {positions} positions of {model}: give at most that.",
    "no_such_layer": "target_modules '{name}' is not a layer of {model}: {known}.",
    "rank_above_layer": (
        "rank {rank} is larger than the layer it adapts: {layer} of {model} has width {width}; give at most that."
    ),
    "no_field": "TrainingSetup has no field '{name}'.",
    "not_one_of": "{name} '{value}' is not one of {allowed}.",
    "not_a_count": "{name} {value} is not a positive whole number.",
    "no_such_rank": "rank {rank} is not one of the job's processes: give 0 to {last}.",
    "not_a_fraction": "{name} {value} is not between 0 and 1.",
    "not_positive": "{name} {value} is not positive; use None to turn clipping off.",
    "unknown_card": "'{name}' is not in the catalogue of GPUs. For another card give its memory: '12GiB'.",
    "unknown_model": (
        "'{name}' is not a model preset. A folder with config.json or a transformers configuration works too."
    ),
    "no_model": (
        "model {model} is neither the name of a preset, a folder with config.json, a transformers configuration"
        " nor a named function that returns an nn.Module."
    ),
    "no_configuration": "model '{name}': {file} is not a configuration of a transformers model.",
    "no_size": "'{text}' is not a size; write it like '12GiB' or '500MB'.",
    "size_without_unit": "'{text}' has no unit; did you mean '{number}GiB'?",
    "unknown_unit": "'{unit}' in '{text}' is not a unit; use GiB, MiB, KiB, GB, MB, KB or B.",
    "size_not_positive": "'{text}' is not a positive size; write it like '12GiB'.",
    "did_you_mean": "Did you mean {names}?",
}


class InvalidSettingError(ValueError):
    """A setting with an invalid value. ``key`` selects the sentence of REFUSALS, ``values`` fill in its fields.

    ``offer``: valid values that may have been meant, the likeliest first.
    """

    def __init__(self, key: str, *, offer: Sequence[str] = (), **values: Any) -> None:
        self.key = key
        self.values = {name: str(value) for name, value in values.items()}
        self.offer = ", ".join(offer)
        super().__init__(self.in_language(choose_language()))

    def in_language(self, lang: Language) -> str:
        """The sentence, followed by the values that may have been meant."""
        sentence = render(REFUSALS[self.key], lang, self.values)
        offer = render(REFUSALS["did_you_mean"], lang, {"names": self.offer}) if self.offer else ""
        return f"{sentence} {offer}".rstrip()


def describe_error(error: BaseException | None) -> str:
    """The type and first line of an exception, such as ``"ValueError: bad shape"``; empty for None."""
    if error is None:
        return ""
    line = first_line(error)
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or an empty string."""
    return str(error).strip().partition("\n")[0]
