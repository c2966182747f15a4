"""Model presets: configurations known without a network, made with the transformers that is installed.

For sizing they are also made with fewer layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal

from oom_magic.errors import InvalidSettingError
from oom_magic.language import _
from oom_magic.predict.setups.gpus import read_table

Task = Literal["causal-lm", "sequence-classification", "seq2seq-lm", "image-classification"]

# The names of a size in different architectures; the first one that a configuration has is taken.
_DIMENSIONS = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim", "d_kv"),
    "intermediate_size": ("intermediate_size", "n_inner", "d_ff", "hidden_dim"),
    "vocab_size": ("vocab_size",),
    "num_positions": ("max_position_embeddings", "n_positions"),
    "num_labels": ("num_labels",),
    "image_size": ("image_size",),
    "patch_size": ("patch_size",),
    "num_channels": ("num_channels",),
}

_ALIASES = {
    "gpt2-small": "gpt2", "bert-base": "bert-base-uncased", "bert-large": "bert-large-uncased",
    "distilbert": "distilbert-base-uncased", "roberta": "roberta-base", "llama-7b": "llama-2-7b",
    "mistral-7b": "mistral-7b-v0.1", "tinyllama": "tinyllama-1.1b", "phi-3": "phi-3-mini",
    "phi-3.5": "phi-3.5-mini", "vit": "vit-base",
}  # fmt: skip
# Fine-tuned siblings have the shapes of their base model.
_SIBLING = re.compile(r"[-_ ](?:instruct|chat|hf|it|pt)(?=[-_ ]|$)|(?<=\db)[-_ ]base$")

_AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
}


@dataclass(frozen=True)
class ModelPreset:
    """A model that can be evaluated by name.

    ``num_parameters`` is the published count: with the language-model head or classifier for models that are
    published with one, of the bare encoder for the BERT family. ``settings`` come from ``config.json``.
    """

    name: str
    hub_id: str
    model_type: str
    task: Task
    num_parameters: int
    settings: dict[str, Any] = field(repr=False, hash=False)

    def config(self, **changes: Any) -> Any:
        """The configuration object of the installed transformers."""
        return make_config(self.model_type, {**self.settings, **changes})

    def build(self, **changes: Any) -> Any:
        """The model with random weights on the default device. ``changes`` go to the configuration."""
        import transformers

        return getattr(transformers, self.auto_class).from_config(self.config(**changes))

    @property
    def auto_class(self) -> str:
        """The transformers class to load the model with, such as ``"AutoModelForCausalLM"``."""
        return auto_class(self.task)

    @property
    def num_layers(self) -> int | None:
        """The number of layers in the encoder and in the decoder (if it has both, the same); None: they differ."""
        counts = set(layer_counts(self.settings).values())
        return counts.pop() if len(counts) == 1 else None

    def dims(self) -> dict[str, int]:
        """The model's dimensions, by transformers' most common names."""
        return dims_of(self.settings)


def find_model(name: str) -> ModelPreset:
    """The preset meant by ``name``: "qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", "Llama 3.2 1B".

    Raises ValueError with the closest names of the catalogue.
    """
    known = _presets_by_key()
    preset = _look_up(name)
    if preset is not None:
        return preset
    close = get_close_matches(_key(name), known, n=6, cutoff=0.5)
    offered = list(dict.fromkeys(known[match].name for match in close))[:3]
    raise InvalidSettingError("unknown_model", name=name, offer=offered)


@cache
def list_models() -> tuple[ModelPreset, ...]:
    """Every preset, in the order of models.toml."""
    return tuple(
        ModelPreset(name, hub_id, family["model_type"], family["task"], count, {**family["common"], **columns})
        for family in read_table("models.toml")["family"]
        for name, hub_id, count, *values in family["models"]
        for columns in [
            dict(zip(family["columns"], (None if value == "null" else value for value in values), strict=True))
        ]
    )


def config_for_hub_id(hub_id: str) -> dict[str, Any] | None:
    """The memory-relevant part of ``config.json`` of ``hub_id``, or None if that model is no preset."""
    preset = _look_up(hub_id)
    return None if preset is None else {"model_type": preset.model_type, **preset.settings}


def make_config(model_type: str, settings: dict[str, Any]) -> Any:
    """A transformers configuration of this type; ValueError if the installed one is too old for it."""
    try:
        import transformers
    except ImportError:
        raise ImportError(_('Model presets need transformers: pip install "oom_magic[hf]".')) from None
    try:
        return transformers.AutoConfig.for_model(model_type, **settings)
    except ValueError:
        raise ValueError(
            _(
                "transformers {version} does not know the architecture {model_type!r}; a newer version does: pip"
                " install -U transformers.",
                version=transformers.__version__,
                model_type=model_type,
            )
        ) from None


def auto_class(task: Task) -> str:
    """The name of the transformers class that loads a model for ``task``."""
    return _AUTO_CLASSES[task]


def dims_of(config: Any) -> dict[str, int]:
    """The sizes in a configuration (an object or its ``dict``), by transformers' most common names.

    Sizes that it leaves to the usual rule are filled in: key-value heads as many as heads, the head size from
    hidden size and heads, GPT-2's inner size four times the hidden size.
    """
    plain = config if isinstance(config, dict) else config.to_dict()
    plain = {**plain, **plain.get("text_config", {})}
    dims = {name: plain[spelling] for name, spellings in _DIMENSIONS.items() for spelling in _first(plain, spellings)}
    if "hidden_size" in dims and "num_attention_heads" in dims:
        dims.setdefault("num_key_value_heads", dims["num_attention_heads"])
        dims.setdefault("head_dim", dims["hidden_size"] // dims["num_attention_heads"])
        dims.setdefault("intermediate_size", 4 * dims["hidden_size"])
    return dims


def _first(plain: dict[str, Any], spellings: Iterable[str]) -> list[str]:
    return [spelling for spelling in spellings if isinstance(plain.get(spelling), int)][:1]


@cache
def _presets_by_key() -> dict[str, ModelPreset]:
    known: dict[str, ModelPreset] = {}
    for preset in list_models():
        base_name = preset.hub_id.split("/")[-1]
        for name in (preset.name, base_name, _SIBLING.sub("", base_name.lower())):
            known.setdefault(_key(name), preset)
    for alias, name in _ALIASES.items():
        known.setdefault(_key(alias), known[_key(name)])
    return known


def _look_up(name: str) -> ModelPreset | None:
    known = _presets_by_key()
    base_name = name.strip().lower().split("/")[-1]
    return known.get(_key(base_name)) or known.get(_key(_SIBLING.sub("", base_name)))


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


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
    """The content of ``config.json`` with the number of layers that ``only_layers`` asks for."""
    count = _num_layers.get()
    if count is None:
        return settings
    fewer: dict[str, Any] = dict.fromkeys(layer_counts(settings), count)
    text = settings.get("text_config", settings)
    if text.get("layer_types"):
        fewer["layer_types"] = text["layer_types"][:count]
    return {**settings, "text_config": {**text, **fewer}} if "text_config" in settings else {**settings, **fewer}
