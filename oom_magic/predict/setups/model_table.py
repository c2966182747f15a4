"""The shapes behind the model presets: what the ``config.json`` files on the Hugging Face hub say.

Only what decides memory is here: sizes, ties, dropout, soft caps, windows; no RoPE constants, no special
tokens. Parameter counts are the published ones; ``tests/test_models.py`` builds every preset and counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Task = Literal["causal-lm", "sequence-classification", "seq2seq-lm", "image-classification"]


@dataclass(frozen=True)
class Family:
    """Models of one architecture. Each row: name, hub id, number of parameters, then a value per column."""

    model_type: str
    task: Task
    columns: str
    rows: tuple[tuple[Any, ...], ...]
    common: dict[str, Any] = field(default_factory=dict)


_BLOCKS = "hidden_size intermediate_size num_hidden_layers num_attention_heads"
_ENCODER = _BLOCKS + " vocab_size"
_DECODER = _BLOCKS + " num_key_value_heads vocab_size"
_UNTIED = {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}
_TIED = {"tie_word_embeddings": True, "torch_dtype": "bfloat16"}


def _gemma3_text(*sizes: int) -> dict[str, Any]:
    columns = (_BLOCKS + " num_key_value_heads head_dim query_pre_attn_scalar").split()
    rest = {"vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window": 1024,
            "tie_word_embeddings": True, "model_type": "gemma3_text"}  # fmt: skip
    return {**dict(zip(columns, sizes, strict=True)), **rest}


FAMILIES = (
    Family(
        "gpt2", "causal-lm", "n_embd n_layer n_head",
        (
            ("distilgpt2", "distilbert/distilgpt2", 81_912_576, 768, 6, 12),
            ("gpt2", "openai-community/gpt2", 124_439_808, 768, 12, 12),
            ("gpt2-medium", "openai-community/gpt2-medium", 354_823_168, 1024, 24, 16),
            ("gpt2-large", "openai-community/gpt2-large", 774_030_080, 1280, 36, 20),
            ("gpt2-xl", "openai-community/gpt2-xl", 1_557_611_200, 1600, 48, 25),
        ),
        {"n_positions": 1024, "vocab_size": 50257},
    ),
    Family(
        "bert", "sequence-classification", _ENCODER,
        (
            ("bert-base-uncased", "google-bert/bert-base-uncased", 109_482_240, 768, 3072, 12, 12, 30522),
            ("bert-base-cased", "google-bert/bert-base-cased", 108_310_272, 768, 3072, 12, 12, 28996),
            ("bert-large-uncased", "google-bert/bert-large-uncased", 335_141_888, 1024, 4096, 24, 16, 30522),
            ("bert-base-chinese", "google-bert/bert-base-chinese", 102_267_648, 768, 3072, 12, 12, 21128),
        ),
        {"max_position_embeddings": 512, "type_vocab_size": 2},
    ),
    Family(
        "roberta", "sequence-classification", _ENCODER,
        (
            ("roberta-base", "FacebookAI/roberta-base", 124_645_632, 768, 3072, 12, 12, 50265),
            ("roberta-large", "FacebookAI/roberta-large", 355_359_744, 1024, 4096, 24, 16, 50265),
        ),
        {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    ),
    Family(
        "distilbert", "sequence-classification", "dim hidden_dim n_layers n_heads vocab_size",
        (
            ("distilbert-base-uncased", "distilbert/distilbert-base-uncased", 66_362_880,
             768, 3072, 6, 12, 30522),
            ("distilbert-base-multilingual-cased", "distilbert/distilbert-base-multilingual-cased",
             134_734_080,
             768, 3072, 6, 12, 119547),
        ),
        {"max_position_embeddings": 512},
    ),
    Family(
        "t5", "seq2seq-lm", "d_model d_kv d_ff num_layers num_decoder_layers num_heads",
        (
            ("t5-small", "google-t5/t5-small", 60_506_624, 512, 64, 2048, 6, 6, 8),
            ("t5-base", "google-t5/t5-base", 222_903_552, 768, 64, 3072, 12, 12, 12),
            ("t5-large", "google-t5/t5-large", 737_668_096, 1024, 64, 4096, 24, 24, 16),
            ("t5-3b", "google-t5/t5-3b", 2_851_598_336, 1024, 128, 16384, 24, 24, 32),
        ),
        {"vocab_size": 32128, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
    ),
    Family(
        "llama", "causal-lm", _DECODER + " max_position_embeddings",
        (
            ("llama-2-7b", "meta-llama/Llama-2-7b-hf", 6_738_415_616, 4096, 11008, 32, 32, 32, 32000, 4096),
            ("llama-2-13b", "meta-llama/Llama-2-13b-hf", 13_015_864_320,
             5120, 13824, 40, 40, 40, 32000, 4096),
            ("llama-2-70b", "meta-llama/Llama-2-70b-hf", 68_976_648_192, 8192, 28672, 80, 64, 8, 32000, 4096),
        ),
        {"tie_word_embeddings": False, "torch_dtype": "float16"},
    ),
    Family(
        "llama", "causal-lm", _DECODER + " max_position_embeddings",
        (
            ("tinyllama-1.1b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1_100_048_384,
             2048, 5632, 22, 32, 4, 32000, 2048),
            ("llama-3-8b", "meta-llama/Meta-Llama-3-8B", 8_030_261_248, 4096, 14336, 32, 32, 8, 128256, 8192),
            ("llama-3-70b", "meta-llama/Meta-Llama-3-70B", 70_553_706_496,
             8192, 28672, 80, 64, 8, 128256, 8192),
            ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 8_030_261_248,
             4096, 14336, 32, 32, 8, 128256, 131072),
            ("llama-3.1-70b", "meta-llama/Llama-3.1-70B", 70_553_706_496,
             8192, 28672, 80, 64, 8, 128256, 131072),
            ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496,
             8192, 28672, 80, 64, 8, 128256, 131072),
        ),
        _UNTIED,
    ),
    Family(
        "llama", "causal-lm", _DECODER + " head_dim",
        (
            ("llama-3.2-1b", "meta-llama/Llama-3.2-1B", 1_235_814_400, 2048, 8192, 16, 32, 8, 128256, 64),
            ("llama-3.2-3b", "meta-llama/Llama-3.2-3B", 3_212_749_824, 3072, 8192, 28, 24, 8, 128256, 128),
        ),
        {**_TIED, "max_position_embeddings": 131072},
    ),
    Family(
        "mistral", "causal-lm", _DECODER + " sliding_window",
        (
            ("mistral-7b-v0.1", "mistralai/Mistral-7B-v0.1", 7_241_732_096,
             4096, 14336, 32, 32, 8, 32000, 4096),
            ("mistral-7b-v0.2", "mistralai/Mistral-7B-Instruct-v0.2", 7_241_732_096,
             4096, 14336, 32, 32, 8, 32000, None),
            ("mistral-7b-v0.3", "mistralai/Mistral-7B-v0.3", 7_248_023_552,
             4096, 14336, 32, 32, 8, 32768, None),
        ),
        {**_UNTIED, "max_position_embeddings": 32768},
    ),
    Family(
        "qwen2", "causal-lm", _DECODER,
        (
            ("qwen1.5-1.8b", "Qwen/Qwen1.5-1.8B", 1_836_828_672, 2048, 5504, 24, 16, 16, 151936),
            ("qwen1.5-4b", "Qwen/Qwen1.5-4B", 3_950_369_280, 2560, 6912, 40, 20, 20, 151936),
            ("qwen1.5-7b", "Qwen/Qwen1.5-7B", 7_721_324_544, 4096, 11008, 32, 32, 32, 151936),
            ("qwen1.5-14b", "Qwen/Qwen1.5-14B", 14_167_290_880, 5120, 13696, 40, 40, 40, 152064),
            ("qwen1.5-32b", "Qwen/Qwen1.5-32B", 32_512_218_112, 5120, 27392, 64, 40, 8, 152064),
            ("qwen2-7b", "Qwen/Qwen2-7B", 7_615_616_512, 3584, 18944, 28, 28, 4, 152064),
            ("qwen2.5-7b", "Qwen/Qwen2.5-7B", 7_615_616_512, 3584, 18944, 28, 28, 4, 152064),
            ("qwen2.5-14b", "Qwen/Qwen2.5-14B", 14_770_033_664, 5120, 13824, 48, 40, 8, 152064),
            ("qwen2.5-32b", "Qwen/Qwen2.5-32B", 32_763_876_352, 5120, 27648, 64, 40, 8, 152064),
        ),
        {**_UNTIED, "max_position_embeddings": 32768},
    ),
    Family(
        "qwen2", "causal-lm", _DECODER,
        (
            ("qwen1.5-0.5b", "Qwen/Qwen1.5-0.5B", 463_987_712, 1024, 2816, 24, 16, 16, 151936),
            ("qwen2-0.5b", "Qwen/Qwen2-0.5B", 494_032_768, 896, 4864, 24, 14, 2, 151936),
            ("qwen2-1.5b", "Qwen/Qwen2-1.5B", 1_543_714_304, 1536, 8960, 28, 12, 2, 151936),
            ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", 494_032_768, 896, 4864, 24, 14, 2, 151936),
            ("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B", 1_543_714_304, 1536, 8960, 28, 12, 2, 151936),
            ("qwen2.5-3b", "Qwen/Qwen2.5-3B", 3_085_938_688, 2048, 11008, 36, 16, 2, 151936),
        ),
        {**_TIED, "max_position_embeddings": 32768},
    ),
    Family(
        "qwen3", "causal-lm", _DECODER + " tie_word_embeddings",
        (
            ("qwen3-0.6b", "Qwen/Qwen3-0.6B", 596_049_920, 1024, 3072, 28, 16, 8, 151936, True),
            ("qwen3-1.7b", "Qwen/Qwen3-1.7B", 1_720_574_976, 2048, 6144, 28, 16, 8, 151936, True),
            ("qwen3-4b", "Qwen/Qwen3-4B", 4_022_468_096, 2560, 9728, 36, 32, 8, 151936, True),
            ("qwen3-8b", "Qwen/Qwen3-8B", 8_190_735_360, 4096, 12288, 36, 32, 8, 151936, False),
            ("qwen3-14b", "Qwen/Qwen3-14B", 14_768_307_200, 5120, 17408, 40, 40, 8, 151936, False),
            ("qwen3-32b", "Qwen/Qwen3-32B", 32_762_123_264, 5120, 25600, 64, 64, 8, 151936, False),
        ),
        {"head_dim": 128, "max_position_embeddings": 40960, "torch_dtype": "bfloat16"},
    ),
    Family(
        "gemma2", "causal-lm", _DECODER + " head_dim query_pre_attn_scalar",
        (
            ("gemma-2-2b", "google/gemma-2-2b", 2_614_341_888, 2304, 9216, 26, 8, 4, 256000, 256, 256),
            ("gemma-2-9b", "google/gemma-2-9b", 9_241_705_984, 3584, 14336, 42, 16, 8, 256000, 256, 256),
            ("gemma-2-27b", "google/gemma-2-27b", 27_227_128_320, 4608, 36864, 46, 32, 16, 256000, 128, 144),
        ),
        {
            "max_position_embeddings": 8192, "sliding_window": 4096, "tie_word_embeddings": True,
            "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "torch_dtype": "float32",
        },
    ),
    Family(
        "gemma3_text", "causal-lm", _DECODER + " sliding_window",
        (
            ("gemma-3-270m", "google/gemma-3-270m", 268_098_176, 640, 2048, 18, 4, 1, 262144, 512),
            ("gemma-3-1b", "google/gemma-3-1b-pt", 999_885_952, 1152, 6912, 26, 4, 1, 262144, 512),
        ),
        {**_TIED, "head_dim": 256, "query_pre_attn_scalar": 256, "max_position_embeddings": 32768},
    ),
    Family(  # with the vision tower that comes with them
        "gemma3", "causal-lm", "text_config",
        (
            ("gemma-3-4b", "google/gemma-3-4b-pt", 4_300_079_472, _gemma3_text(2560, 10240, 34, 8, 4, 256, 256)),
            ("gemma-3-12b", "google/gemma-3-12b-pt", 12_187_325_040, _gemma3_text(3840, 15360, 48, 16, 8, 256, 256)),
            ("gemma-3-27b", "google/gemma-3-27b-pt", 27_432_406_640, _gemma3_text(5376, 21504, 62, 32, 16, 128, 168)),
        ),
        {
            "mm_tokens_per_image": 256, "torch_dtype": "bfloat16",
            "vision_config": {
                "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
                "image_size": 896, "patch_size": 14, "vision_use_head": False, "model_type": "siglip_vision_model",
            },
        },
    ),
    Family(
        "phi", "causal-lm", _BLOCKS + " partial_rotary_factor resid_pdrop",
        (
            ("phi-1.5", "microsoft/phi-1_5", 1_418_270_720, 2048, 8192, 24, 32, 0.5, 0.0),
            ("phi-2", "microsoft/phi-2", 2_779_683_840, 2560, 10240, 32, 32, 0.4, 0.1),
        ),
        {
            "vocab_size": 51200, "max_position_embeddings": 2048, "tie_word_embeddings": False,
            "torch_dtype": "float16",
        },
    ),
    Family(
        "phi3", "causal-lm", _DECODER + " max_position_embeddings sliding_window tie_word_embeddings",
        (
            ("phi-3-mini", "microsoft/Phi-3-mini-4k-instruct", 3_821_079_552,
             3072, 8192, 32, 32, 32, 32064, 4096, 2047, False),
            ("phi-3-medium", "microsoft/Phi-3-medium-4k-instruct", 13_960_238_080,
             5120, 17920, 40, 40, 10, 32064, 4096, 2047, False),
            ("phi-3.5-mini", "microsoft/Phi-3.5-mini-instruct", 3_821_079_552,
             3072, 8192, 32, 32, 32, 32064, 131072, 262144, False),
            ("phi-4", "microsoft/phi-4", 14_659_507_200, 5120, 17920, 40, 40, 10, 100352, 16384, None, False),
            ("phi-4-mini", "microsoft/Phi-4-mini-instruct", 3_836_021_760,
             3072, 8192, 32, 24, 8, 200064, 131072, 262144, True),
        ),
        {"torch_dtype": "bfloat16", "pad_token_id": 0, "eos_token_id": 0},
    ),
    Family(
        "vit", "image-classification", _BLOCKS,
        (
            ("vit-base", "google/vit-base-patch16-224", 86_567_656, 768, 3072, 12, 12),
            ("vit-large", "google/vit-large-patch16-224", 304_326_632, 1024, 4096, 24, 16),
        ),
        {"image_size": 224, "patch_size": 16, "num_labels": 1000},
    ),
)  # fmt: skip
