"""The weights of a model that a few lines name, beside the card that they name."""

from __future__ import annotations

import pytest

from oom_magic.explain.evidence.causes import Cause
from oom_magic.explain.evidence.clues.magnitudes import card_bytes, weights_in
from oom_magic.explain.explainer import explain
from oom_magic.units import GIB
from tests.support.told import as_shown


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("vicuna 13B on 16 GB fp16: OOM", Cause.WEIGHTS_TOO_BIG),
        ("Getting OOM on T4 with falcon-7b-instruct", Cause.WEIGHTS_TOO_BIG),  # 14 GB beside a context
        ("Running CogVLM on a 3090, out of memory", Cause.WEIGHTS_TOO_BIG),  # whose name does not say its size
        ("OOM at model.to(device) for huggyllama/llama-7b on a single 3090 (24G)", Cause.WEIGHTS_TOO_BIG),
        ("SFT of Qwen2.5-1.5B on RTX 3090 24GB: CUDA out of memory", Cause.OPTIMIZER_STATE),
        ("How can I fine-tune whisper-large on a 16GB T4? out of memory", Cause.OPTIMIZER_STATE),
        ("7b model training on 4*40G A100, OOM after some iterations", Cause.ACTIVATIONS),  # the first made the state
        ("llama-7b embeddings on a 3090 in fp16 with long documents, OOM", Cause.ACTIVATIONS),
        (
            "显存不足：微调后的模型 baichuan-7b 在24G3090显卡上推理",
            Cause.WEIGHTS_TOO_BIG,
        ),  # a tuned model trains nothing
    ],
)
def test_a_model_and_a_card_tell_the_cause(text, cause):
    assert explain(text, fast=True).cause is cause


def test_weights_in_32_bits_are_told_with_what_they_take():
    assert "26.08 GiB with 32 bits each" in as_shown("OOM when I load llama-7b on a single 3090 (24G)")


@pytest.mark.parametrize(
    ("text", "num_gib"),
    [
        ("a single Tesla T4 with 15.36 GB VRAM", 15),
        ("32G V100推理，显存勉强够，31G+", 32),
        ("using device Vulkan0 (Mali-G720) (unknown id) - 11264 MiB free", 11),
    ],
)
def test_a_card_is_as_large_as_the_text_says(text, num_gib):
    assert card_bytes(text) == num_gib * GIB


def test_no_number_of_an_address_is_a_model():
    assert weights_in("assets/26202915/371c0c1f-8437-46b5-b983") is None


def test_fewer_layers_that_fit_show_that_it_is_the_weights():
    text = "Vulkan can't allocate memory unless nGpuLayers=20 or less.\nggml_vulkan: Device memory allocation failed"
    assert explain(text, fast=True).cause is Cause.WEIGHTS_TOO_BIG


def test_vulkan_refuses_a_buffer_though_the_card_has_room():
    text = "Vulkan fails to allocate memory buffer, even though there is enough VRAM. Ollama, qwen3-vl:8b"
    assert "maxMemoryAllocationSize" in as_shown(text)


def test_a_small_model_is_not_what_fills_the_card():
    text = (
        "onnxruntime with tensorrt: when I load a model of about 1 MB it consumes about 5 GB memory, the system crashes"
    )
    diagnosis = explain(text, fast=True)
    assert diagnosis.cause is Cause.MEMORY_FRACTION_LIMIT
    assert "A model of 1 MB takes little itself" in as_shown(text)
