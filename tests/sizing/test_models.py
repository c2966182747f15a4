"""The model presets: shapes against published parameter counts and the shared table of configurations."""

import json

import pytest

from oom_magic.predict.setups.models import config_for_hub_id, dims_of, find_model, list_models
from tests.support.folders import SHARED

CONFIGURATIONS = SHARED / "truth" / "model_configs.json"
PRESETS = list_models()


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_parameter_count(preset):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    is_bare = preset.task == "sequence-classification"
    model_class = transformers.AutoModel if is_bare else getattr(transformers, preset.auto_class)
    with torch.device("meta"):
        model = model_class.from_config(preset.config())
    assert sum(parameter.numel() for parameter in model.parameters()) == preset.num_parameters


def shared_configurations():
    return json.loads(CONFIGURATIONS.read_text()) if CONFIGURATIONS.exists() else []


@pytest.mark.skipif(not CONFIGURATIONS.exists(), reason="the shared table of configurations is not here")
def test_shapes_agree_with_the_shared_table():
    checked = 0
    for row in shared_configurations():
        settings = config_for_hub_id(row["model"])
        if settings is None:
            continue
        dims = dims_of(settings)
        layers = row["layers"] // 2 if row["arch"] == "t5" else row["layers"]
        expected = {
            "hidden_size": row["hidden"],
            "num_hidden_layers": layers,
            "num_attention_heads": row["heads"],
            "num_key_value_heads": row["kv_heads"],
            "head_dim": row["head_dim"],
            "intermediate_size": row["intermediate"],
        }
        if row["arch"] != "vit":
            expected["vocab_size"] = row["vocab"]
        assert {name: dims[name] for name in expected} == expected, row["model"]
        assert find_model(row["model"]).num_parameters == row["params_arithmetic"], row["model"]
        checked += 1
    assert checked >= 35


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("gpt2", "gpt2"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen1.5-7B-Chat", "qwen1.5-7b"),
        ("Llama 3.2 1B", "llama-3.2-1b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("unsloth/Llama-3.2-3B-Instruct", "llama-3.2-3b"),
        ("mistral-7b", "mistral-7b-v0.1"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("bert-base-chinese", "bert-base-chinese"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("BERT large", "bert-large-uncased"),
        ("google/vit-base-patch16-224", "vit-base"),
        ("Qwen3-8B-Base", "qwen3-8b"),
    ],
)
def test_spellings(spelling, name):
    assert find_model(spelling).name == name


def test_unknown_name_offers_the_closest():
    with pytest.raises(ValueError, match=r"'qwen2\.5-8b' is not a model preset.*qwen2\.5-7b"):
        find_model("qwen2.5-8b")


def test_hub_id_that_is_no_preset():
    assert config_for_hub_id("someone/something-else") is None


def test_names_are_unique():
    assert len({preset.name for preset in PRESETS}) == len(PRESETS)


def test_dims_fill_in_what_a_configuration_leaves_out():
    dims = find_model("gpt2").dims()
    assert (dims["intermediate_size"], dims["head_dim"], dims["num_key_value_heads"]) == (3072, 64, 12)


def test_configuration_of_the_installed_transformers():
    pytest.importorskip("transformers")
    config = find_model("llama-3.2-1b").config(num_hidden_layers=2)
    assert (config.model_type, config.num_hidden_layers, config.tie_word_embeddings) == ("llama", 2, True)
    assert dims_of(config)["num_key_value_heads"] == 8


def test_architecture_unknown_to_transformers(monkeypatch):
    transformers = pytest.importorskip("transformers")

    def refuse(*_args, **_kwargs):
        raise ValueError("Unrecognized model identifier")

    monkeypatch.setattr(transformers.AutoConfig, "for_model", refuse)
    with pytest.raises(ValueError, match="does not know the architecture 'qwen3'"):
        find_model("qwen3-8b").config()


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "oom_magic\[hf\]"'):
        find_model("gpt2").config()
