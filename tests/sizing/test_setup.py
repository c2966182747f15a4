"""TrainingSetup: the code it writes, what it refuses, and that the code runs in a dry run."""

import ast
import itertools
import json
import logging
from typing import Any

import pytest

import oom_magic as om
from oom_magic.errors import InvalidSettingError
from oom_magic.one_line_errors import Interrupted
from oom_magic.predict.setups.gpus import DEFAULT_GPU
from oom_magic.predict.setups.model_source import resolve_model
from oom_magic.predict.setups.models import find_model
from oom_magic.predict.setups.setup import TrainingSetup
from oom_magic.predict.setups.training_code import OPTIMIZERS
from oom_magic.predict.sizing.runs import Runs
from tests.support.versions import bitsandbytes_or_skip

MODELS = ("gpt2", "bert-base-chinese", "t5-small", "qwen2.5-0.5b", "vit-base")
FAMILIES = (
    "gpt2", "bert-base-uncased", "roberta-base", "distilbert-base-uncased", "t5-small", "llama-3.2-1b", "mistral-7b",
    "qwen2.5-0.5b", "qwen3-0.6b", "gemma-2-2b", "gemma-3-270m", "gemma-3-4b", "phi-1.5", "phi-3-mini", "vit-base",
)  # fmt: skip
_QUICK = ("gpt2", "t5-small", "qwen2.5-0.5b", "vit-base")  # one of each kind; CI trains all of them
TRAINED = [family if family in _QUICK else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
PRECISIONS = ("fp32", "bf16", "fp16", "amp-bf16", "amp-fp16")


def build_perceptron():
    """A language model without layers, of the user's own."""
    import torch

    return torch.nn.Sequential(torch.nn.Embedding(100, 32), torch.nn.Linear(32, 100))


def problems(code):
    """Names that ``code`` imports and does not use, or uses and does not define (a small pyflakes)."""
    tree = ast.parse(code)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    loaded = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    defined = {node.id for node in names if isinstance(node.ctx, ast.Store)} | imported
    defined |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    defined |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    known = set(dir(__builtins__)) | set(__builtins__ if isinstance(__builtins__, dict) else ())
    return (imported - loaded) | (loaded - defined - known)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_code_of_every_combination(model, method, precision):
    if method == "qlora" and precision == "fp32":
        pytest.skip("refused; see below")
    choices = itertools.product(OPTIMIZERS, (False, True), (1, 4), (None, 1.0))
    for optimizer, is_checkpointed, count, norm in choices:
        setup = TrainingSetup(
            model, method=method, precision=precision, optimizer=optimizer, max_grad_norm=norm,
            activation_checkpointing=is_checkpointed, gradient_accumulation_steps=count,
        )  # fmt: skip
        code = setup.code()
        assert not problems(code), code
        assert len(code.splitlines()) < 55
        assert max(map(len, code.splitlines())) <= 105


@pytest.mark.parametrize("loss", ["plain", "chunked"])
@pytest.mark.parametrize("data", ["packed", "padded"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_code_of_language_model_options(loss, data, method):
    setup = TrainingSetup("llama-3.2-1b", method=method, loss=loss, data=data, attention="eager")
    assert not problems(setup.code())


def test_plain_code_is_short():
    assert len(TrainingSetup("gpt2").code().splitlines()) < 30


def test_code_of_frozen_parts():
    code = TrainingSetup("bert-base-uncased", frozen=["embeddings", "layer.0."]).code()
    assert 'frozen = ["embeddings", "layer.0."]' in code
    assert "if parameter.requires_grad" in code
    assert not problems(code)


def test_code_of_a_configuration_names_what_differs():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=256, num_hidden_layers=2, num_attention_heads=4)
    setup = TrainingSetup(config)
    assert "hidden_size=256" in setup.code()
    assert "vocab_size" not in setup.code().split("from_config")[0]
    assert setup.to_dict()["model"] == "LlamaConfig model"


def test_code_of_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 64})
    )
    code = TrainingSetup(str(tmp_path)).code()
    assert f'AutoModelForSequenceClassification.from_pretrained(\n    "{tmp_path}"' in code


def test_folder_that_holds_no_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a configuration of a transformers model"):
        TrainingSetup(str(tmp_path))


def test_code_of_a_function():
    code = TrainingSetup(build_perceptron, precision="fp32").code()
    assert "import build_perceptron" in code
    assert "transformers" not in code
    assert not problems(code)


def test_qlora_code_is_what_users_write():
    code = TrainingSetup("qwen1.5-7b", method="qlora", rank=32, activation_checkpointing=True).code()
    for piece in (
        'bnb_4bit_quant_type="nf4"', "bnb_4bit_use_double_quant=True",
        "bnb_4bit_compute_dtype=torch.bfloat16",
        "prepare_model_for_kbit_training", "r=32, lora_alpha=64", "get_peft_model(model, lora)",
    ):  # fmt: skip
        assert piece in code


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "qwen2.5-8b"}, r"'qwen2\.5-8b' is not a model preset\..* Did you mean .*qwen2\.5-7b"),
        ({"model": 7}, "model 7 is neither the name of a preset, a folder"),
        ({"method": "lorra"}, r"method 'lorra' is not one of full, lora, qlora\. Did you mean lora\?"),
        ({"precision": "bfloat16"}, r"precision 'bfloat16' is not one of fp32, bf16.*Did you mean"),
        ({"optimizer": "adamw_8bit"}, r"optimizer 'adamw_8bit' .*Did you mean adamw8bit\?"),
        ({"attention": "flash"}, r"attention 'flash' .*Did you mean flash_attention_2\?"),
        ({"microbatch_size": 0}, "microbatch_size 0 is not a positive whole number"),
        ({"seq_len": -1}, "seq_len -1 is not"),
        ({"rank": 1.5}, "rank 1.5 is not"),
        ({"alpha": 0}, "alpha 0 is not"),
        ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps True is not"),
        ({"dropout": 1.0}, "dropout 1.0 is not between 0 and 1"),
        ({"max_grad_norm": 0}, "max_grad_norm 0 is not positive"),
        ({"gpu": "RTX 3065"}, "'RTX 3065' is not in the catalogue"),
        ({"memory": "12"}, "did you mean '12GiB'"),
        ({"seq_len": 2048}, "seq_len 2048 exceeds the 1024 positions of gpt2"),
        ({"model": "roberta-base", "seq_len": 513}, "exceeds the 512 positions"),
        ({"method": "lora", "rank": 1000}, "rank 1000 is larger than .*: c_attn of gpt2 has width 768"),
        ({"model": "llama-3.2-1b", "method": "lora", "rank": 600}, "v_proj of llama-3.2-1b has width 512"),
        ({"method": "lora", "target_modules": ["c_atn"]}, r"'c_atn' is not a layer of gpt2: .*mean c_attn\?"),
        ({"method": "lora", "frozen": ["wte"]}, "requires method 'full'"),
        ({"method": "qlora", "precision": "fp32"}, "computes in 16 bits"),
        ({"model": build_perceptron, "method": "qlora"}, "needs weights to quantize"),
        ({"model": build_perceptron, "method": "lora"}, "target_modules must be given"),
        ({"model": build_perceptron, "activation_checkpointing": True}, "needs a transformers model"),
        (
            {"model": "bert-base-uncased", "loss": "chunked"},
            "supports decoders .* not bert-base-uncased: use 'plain'",
        ),
        ({"model": "gemma-2-2b", "loss": "chunked"}, "soft cap"),
        ({"model": "vit-base", "data": "padded"}, "not images"),
        ({"attention": "flash_attention_2", "precision": "fp32"}, "16-bit precision only"),
        ({"attention": "flash_attention_2", "model": "t5-small"}, "is not available in transformers for t5-small"),
        ({"attention": "flash_attention_2", "gpu": "T4"}, "compute capability 8.0, which T4 does not have"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainingSetup(**{"model": "gpt2", **changes})


def test_replace():
    setup = TrainingSetup("gpt2", rank=8).replace(microbatch_size=4, gradient_accumulation_steps=2)
    assert (setup.rank, setup.global_batch_size) == (8, 8)
    with pytest.raises(ValueError, match=r"no field 'modle'\. Did you mean model\?"):
        TrainingSetup(modle="gpt2")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"no field 'batch_size'\. Did you mean microbatch_size\?"):
        setup.replace(batch_size=4)


def test_description():
    setup = TrainingSetup("qwen1.5-7b", method="qlora", rank=32, seq_len=1024, gradient_accumulation_steps=16)
    assert str(setup) == (
        "qwen1.5-7b, QLoRA of rank 32, bf16, adamw, batch 1 x 1024 tokens, accumulated 16 times, on NVIDIA"
        " GeForce RTX 3060 (11.76 GiB)"
    )
    assert setup.to_dict()["gpu"] == DEFAULT_GPU


def tiny(**changes):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=500)
    return TrainingSetup(config, **{"seq_len": 64, "microbatch_size": 2, **changes})


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "amp-bf16", "optimizer": "adamw-fused"},
        {"precision": "amp-fp16", "max_grad_norm": 1.0},
        {"gradient_accumulation_steps": 3, "data": "padded"},
        {"activation_checkpointing": True},
        {"method": "lora", "rank": 4},
        {"method": "lora", "rank": 4, "loss": "chunked", "activation_checkpointing": True},
        {"loss": "chunked"},
        {"frozen": ("embed_tokens",), "optimizer": "sgd-momentum"},
        {"optimizer": "adafactor", "attention": "eager"},
    ],
    ids=str,
)
def test_code_runs_in_a_dry_run(changes):
    report = tiny(**changes).dry_run()
    assert report.error == "" and report.out_of_memory is None
    assert len(report.steps) == 3
    assert report.breakdown["parameter"] > 0
    assert {line.line.file for line in report.lines if line.line.line} == {"TrainingSetup code"}
    assert any(line.line.text.startswith("loss") for line in report.lines)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["full", "qlora"])
@pytest.mark.parametrize("family", TRAINED)
def test_every_family_trains_with_every_method(family, method, tmp_path, recwarn):
    """Two layers of it, from a folder. The code says nothing when it runs."""
    bitsandbytes_or_skip()
    config = find_model(family).config()
    for part in (config, getattr(config, "text_config", config), getattr(config, "vision_config", config)):
        for name in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "n_layers"):
            if hasattr(part, name):
                setattr(part, name, 2)
        if getattr(part, "layer_types", None):
            part.layer_types = part.layer_types[:2]
    config.save_pretrained(tmp_path)
    setup = TrainingSetup(str(tmp_path), method=method, rank=2, seq_len=33, activation_checkpointing=True, gpu="A100")
    report = setup.dry_run()
    assert report.out_of_memory is None and len(report.steps) == 3
    assert (report.breakdown["optimizer_state"] < report.breakdown["parameter"]) == (method != "full")
    assert not [str(warning.message) for warning in recwarn if "peft" in warning.filename]


def test_an_option_that_no_dry_run_has_is_named():
    with pytest.raises(TypeError, match=r"dry_run.. of a TrainingSetup has no option 'seq_len', only gpu, memory"):
        TrainingSetup("gpt2").dry_run(seq_len=64)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_go_where_peft_puts_them(family):
    constants = pytest.importorskip("peft.utils.constants")
    source = resolve_model(family)
    usual = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(source.model_type)
    assert usual is None or list(source.lora_targets) == list(usual)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["paged-adamw8bit", "adamw"])
def test_qlora_runs_in_a_dry_run(optimizer, recwarn):
    bitsandbytes_or_skip()
    setup = TrainingSetup(
        "qwen2.5-0.5b",
        method="qlora",
        precision="amp-bf16",
        optimizer=optimizer,
        activation_checkpointing=True,
    )
    report = setup.dry_run()
    assert not [warning for warning in recwarn if issubclass(warning.category, FutureWarning)]
    assert report.error == "" and len(report.steps) == 3
    # 358 million weights of linear layers in half a byte, 136 million of the embedding in four bytes
    assert 0.68e9 < report.breakdown["parameter"] < 0.80e9


@pytest.mark.slow
def test_logits_of_a_failed_qlora_run():
    """The case of Qwen1.5-7B on 16 GB: batch 2 x seq 2048 x vocabulary 151936 x 4 bytes are asked for."""
    bitsandbytes_or_skip()
    setup = TrainingSetup(
        "qwen1.5-7b", method="qlora", rank=64, precision="amp-bf16", microbatch_size=2, seq_len=2048,
        activation_checkpointing=True, gpu="RTX 4080",
    )  # fmt: skip
    failure = setup.dry_run().out_of_memory
    assert failure is not None
    assert failure.tensor_bytes == 2 * 2048 * 151936 * 4
    assert failure.line.text.startswith("loss = model")


def test_function_runs_in_a_dry_run():
    report = TrainingSetup(build_perceptron, precision="fp32", seq_len=32).dry_run()
    assert len(report.steps) == 3 and report.error == ""


@pytest.mark.slow
def test_an_interrupt_of_its_sizes_is_one_line(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Runs, "trace", interrupted)
    with pytest.raises(Interrupted, match="none of your variables or files changed"):
        om.TrainingSetup("distilgpt2", gpu="T4").sizes(seq_len=(64, 256))


@pytest.mark.slow
def test_sizes_agree_with_the_dry_run():
    setup = tiny()
    sizes = setup.sizes(microbatch_size=(1, 8), seq_len=(32, 128))
    report = setup.replace(microbatch_size=5, seq_len=96).dry_run()
    predicted = sizes.peak_allocated_bytes(microbatch_size=5, seq_len=96)
    assert predicted == pytest.approx(report.peak_allocated_bytes, rel=0.001)
    with pytest.raises(ValueError, match=r"use setup\.replace\(gpu="):
        setup.sizes(gpu=["T4", "L4"])


def test_dry_run_on_a_small_card():
    report = tiny(memory="500MiB", seq_len=2048, microbatch_size=64).dry_run()
    assert report.out_of_memory is not None
    assert report.out_of_memory.line.file == "TrainingSetup code"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gpt2", "bert-base-uncased", "t5-small", "vit-base", "distilbert"])
def test_presets_run_in_a_dry_run(name):
    pytest.importorskip("transformers")
    setup = TrainingSetup(name, seq_len=64, precision="fp32", gpu="A100 80GB")
    report = setup.dry_run()
    assert report.error == "" and len(report.steps) == 3
    weights = 4 * find_model(name).num_parameters
    assert weights * 0.98 < report.breakdown["parameter"] < weights * 1.02 + 8 * 2**20


def test_without_transformers_the_code_is_written_all_the_same(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert "from_pretrained" in TrainingSetup("gpt2").code()


def test_a_classifier_under_adapters_is_trained_in_float32_where_gradients_are_scaled() -> None:
    setup = TrainingSetup("distilbert-base-uncased", method="lora", precision="amp-fp16", seq_len=64)
    assert "parameter.data.float()" in setup.code()
    assert setup.dry_run(stop_after_steps=2).error == ""
    assert "parameter.data.float()" not in setup.replace(precision="amp-bf16").code()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_gpus": 2, "num_processes": 2}, "num_gpus is for a single process"),
        ({"parallelism": "fsdp2"}, "needs several processes"),
        ({"parallelism": "fsdp2", "num_processes": 2, "method": "lora"}, "requires method 'full'"),
        (
            {"parallelism": "fsdp2", "num_processes": 2, "optimizer": "adamw8bit"},
            "needs one of PyTorch's own optimizers",
        ),
        ({"num_gpus": 2, "method": "qlora"}, "use num_processes=2"),
        ({"num_processes": 2, "loss": "chunked"}, "use 'plain'"),
    ],
)
def test_what_several_gpus_do_not_go_with(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainingSetup("gpt2", **changes)


@pytest.mark.slow
def test_several_gpus() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=128, n_head=2, vocab_size=1000)
    alone = TrainingSetup(config, microbatch_size=8, seq_len=64, precision="fp32")
    replicas, ddp = alone.replace(num_gpus=2), alone.replace(num_processes=4)
    if not hasattr(pytest.importorskip("torch.distributed.fsdp").FSDPModule, "set_reshard_after_forward"):
        with pytest.raises(InvalidSettingError, match="this PyTorch"):
            ddp.replace(parallelism="fsdp2")
        pytest.skip("FSDP2 of this PyTorch is not followed")
    sharded = ddp.replace(parallelism="fsdp2")
    assert (replicas.global_batch_size, ddp.global_batch_size) == (8, 32)
    reports = [setup.dry_run() for setup in (alone, replicas, ddp, sharded)]
    assert [len(report.cards) for report in reports] == [1, 2, 1, 1]
    states = [report.breakdown["optimizer_state"] for report in reports]
    assert states[0] == states[1] == states[2] > 3 * states[3]
    sizes = ddp.sizes(microbatch_size=(2, 16))
    assert sizes.report(microbatch_size=8).peak_allocated_bytes == reports[2].peak_allocated_bytes


def test_a_dry_run_on_another_card():
    report = TrainingSetup("gpt-2", gpu="RTX 3060", seq_len=16).dry_run(gpu="T4", memory="15GiB", stop_after_steps=1)
    assert report.device.name == "Tesla T4"
    assert report.device.total_bytes == 15 * 2**30


def build_noisy():
    logging.getLogger("transformers").warning("loss_type is unrecognized")
    return build_perceptron()


def test_libraries_say_nothing_about_code_that_the_user_did_not_write(caplog):
    TrainingSetup(build_noisy, seq_len=16, gpu="T4").dry_run(stop_after_steps=1)
    assert caplog.text == "" and logging.root.manager.disable == 0
