"""Where a setup's model comes from: a preset, a folder, a configuration object or the user's own function."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from oom_magic.errors import InvalidSettingError
from oom_magic.predict.setups.models import Task, auto_class, dims_of, find_model

_HEADS = {
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForSequenceClassification": "sequence-classification",
    "ForMaskedLM": "sequence-classification",
    "ForImageClassification": "image-classification",
}  # ForConditionalGeneration is left out: speech and vision models end so too
_TASKS: dict[str, Task] = {
    **dict.fromkeys(
        ("bert", "roberta", "distilbert", "xlm-roberta", "albert", "electra", "deberta-v2"),
        "sequence-classification",
    ),
    **dict.fromkeys(("t5", "mt5", "bart", "mbart", "pegasus"), "seq2seq-lm"),
    **dict.fromkeys(("vit", "deit", "swin"), "image-classification"),
}

# The linear layers of a block, with the sizes of what goes in and out; LoRA takes any of them.
_LLAMA_LAYERS = {
    "q_proj": ("hidden", "heads"), "k_proj": ("hidden", "key_values"),
    "v_proj": ("hidden", "key_values"), "o_proj": ("heads", "hidden"),
    "gate_proj": ("hidden", "intermediate"), "up_proj": ("hidden", "intermediate"),
    "down_proj": ("intermediate", "hidden"),
}  # fmt: skip
_BERT_LAYERS = dict.fromkeys(("query", "key", "value", "dense"), ("hidden", "hidden"))
_LINEAR_LAYERS: dict[str, dict[str, tuple[str, str]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"), _LLAMA_LAYERS),
    **dict.fromkeys(("bert", "roberta"), _BERT_LAYERS),
    "gpt2": dict.fromkeys(("c_attn", "c_proj", "c_fc"), ("hidden", "hidden")),
    "distilbert": dict.fromkeys(("q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"), ("hidden", "hidden")),
    "t5": {
        **dict.fromkeys(("q", "k", "v"), ("hidden", "heads")),
        "o": ("heads", "hidden"), "wi": ("hidden", "intermediate"), "wo": ("intermediate", "hidden"),
    },
    "phi": {
        **{name: _LLAMA_LAYERS[name] for name in ("q_proj", "k_proj", "v_proj")},
        "dense": ("heads", "hidden"), "fc1": ("hidden", "intermediate"), "fc2": ("intermediate", "hidden"),
    },
    "phi3": {
        "qkv_proj": ("hidden", "heads"), "o_proj": ("heads", "hidden"),
        "gate_up_proj": ("hidden", "intermediate"), "down_proj": ("intermediate", "hidden"),
    },
}  # fmt: skip
# PEFT's own choice (peft.utils.constants), written out so that the code says what is trained.
_LORA_TARGETS = {
    "gpt2": ("c_attn",), "bert": ("query", "value"), "roberta": ("query", "value"),
    "distilbert": ("q_lin", "v_lin"), "t5": ("q", "v"), "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "phi3": ("qkv_proj",),
}  # fmt: skip


@dataclass(frozen=True)
class ModelSource:
    """A setup's model, as far as it is known before any library is loaded.

    Exactly one of ``path`` (for ``from_pretrained``), ``config`` and ``factory`` is set.
    """

    label: str
    task: Task | Literal["own"]
    model_type: str = ""
    dims: dict[str, int] = field(default_factory=dict)
    path: str | None = None
    config: Any = None
    factory: Callable[[], Any] | None = None
    num_layers: int | None = None  # number of equal layers, if runs with fewer are enough; None: not known to be equal

    @property
    def auto_class(self) -> str:
        """The transformers class that loads the model ("" for the user's own function)."""
        return "" if self.task == "own" else auto_class(self.task)

    @property
    def lora_targets(self) -> tuple[str, ...] | str:
        """The layers that get an adapter if the user names none."""
        return lora_targets(self.model_type)

    @property
    def attention(self) -> str:
        """The attention implementation that transformers 5 chooses by default; in Gemma 2 "sdpa" would leave out the
        soft cap."""
        return "eager" if self.model_type == "gemma2" else "sdpa"

    @property
    def linear_layers(self) -> dict[str, int]:
        """Linear layers by name, each with its smaller side; empty if the architecture is not known."""
        dims = self.dims
        sizes = {
            "hidden": dims.get("hidden_size", 0),
            "heads": dims.get("num_attention_heads", 0) * dims.get("head_dim", 0),
            "key_values": dims.get("num_key_value_heads", 0) * dims.get("head_dim", 0),
            "intermediate": dims.get("intermediate_size", 0),
        }
        layers = _LINEAR_LAYERS.get(self.model_type, {})
        return {name: min(sizes[side] for side in sides) for name, sides in layers.items()}

    @property
    def max_seq_len(self) -> int | None:
        """The longest sequence that learned positions allow; None if positions are computed."""
        if self.model_type not in ("gpt2", "bert", "roberta", "distilbert"):
            return None
        padding_positions = 2 if self.model_type == "roberta" else 0
        positions = self.dims.get("num_positions")
        return None if positions is None else positions - padding_positions


def lora_targets(model_type: str) -> tuple[str, ...] | str:
    """The layers that LoRA adapts unless told, in setups and in what is advised: names, or ``"all-linear"``."""
    if model_type in _LINEAR_LAYERS:
        return _LORA_TARGETS.get(model_type, ("q_proj", "v_proj"))
    return "all-linear"


def targets_as_code(targets: tuple[str, ...] | str) -> str:
    """The code for PEFT's ``target_modules``."""
    return json.dumps(targets)


def resolve_model(model: Any) -> ModelSource:
    """The source of a setup's ``model``. Raises ValueError if it is of none of the four kinds."""
    if isinstance(model, (str, Path)):
        return _from_name(str(model))
    if hasattr(model, "model_type") and hasattr(model, "to_diff_dict"):
        plain = model.to_dict()
        label = f"{type(model).__name__} model"
        return ModelSource(label, _task_of(plain), model.model_type, dims_of(plain), config=model)
    name = getattr(model, "__name__", "")
    if callable(model) and name.isidentifier():
        return ModelSource(f"{name}()", "own", factory=model)
    raise InvalidSettingError("no_model", model=repr(model))


def _from_name(name: str) -> ModelSource:
    file = Path(name).expanduser() / "config.json"
    if not file.is_file():
        preset = find_model(name)
        layers = preset.num_layers
        dims = preset.dims()
        return ModelSource(preset.name, preset.task, preset.model_type, dims, path=preset.hub_id, num_layers=layers)
    try:
        plain = json.loads(file.read_text())
        model_type = plain["model_type"]
    except (ValueError, KeyError, TypeError):
        raise InvalidSettingError("no_configuration", name=name, file=file) from None
    return ModelSource(file.parent.name, _task_of(plain), model_type, dims_of(plain), path=name)


def _task_of(plain: dict[str, Any]) -> Task:
    for architecture in plain.get("architectures") or ():
        for ending, task in _HEADS.items():
            if architecture.endswith(ending):
                return task  # type: ignore[return-value]
    return _TASKS.get(plain.get("model_type", ""), "causal-lm")


def folder_in_hub_cache(name: str, kind: str) -> Path | None:
    """The folder in Hugging Face's cache of this ``kind`` ("models", "datasets"); None without that library."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return None
    return Path(HF_HUB_CACHE, f"{kind}--{name.replace('/', '--')}")


def name_of_switch(kind: type) -> str:
    """What Hugging Face's switch for checkpointing is called in a class of models, as in ``model.<name>_enable()``: the
    newer name, for the older one warns; "" without one."""
    names = ("activation_checkpointing", "gradient_checkpointing")
    return next((name for name in names if hasattr(kind, f"{name}_enable")), "")
