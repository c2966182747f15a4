"""Language and speech models, by transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.programs.device_programs.table import BF16, CUDA, FP16, OnStep, program, tokens, train


def language(
    on_step: OnStep,
    family: str = "GPT2",
    head: str = "LMHeadModel",
    batch: int = 4,
    length: int = 1024,
    amp: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    checkpointing: bool = False,
    lora: int = 0,
    optimizer: Callable[[Any], Any] | None = None,
    accumulate: int = 1,
    attention: str | None = None,
    **sizes: Any,
) -> None:
    """A language model of transformers, with labels, as its examples train it."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**sizes)
    if attention:
        config._attn_implementation = attention
    model = getattr(transformers, f"{family}{head}")(config).to(CUDA, dtype)
    if lora:
        import peft

        names = ["q_proj", "v_proj"] if "num_key_value_heads" in sizes else ["c_attn"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=lora, target_modules=names))
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
        if lora:
            model.enable_input_require_grads()

    def loss() -> torch.Tensor:
        x = tokens(config.vocab_size, batch, length)
        labels = torch.zeros(batch, dtype=torch.long, device=CUDA) if head == "ForSequenceClassification" else x
        return model(input_ids=x, labels=labels).loss

    made = optimizer and optimizer([p for p in model.parameters() if p.requires_grad])
    train(model, on_step, loss, amp, optimizer=made, accumulate=accumulate)


LLAMA = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 32,
         "num_key_value_heads": 4, "vocab_size": 32000}  # fmt: skip
WIDE = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000}  # fmt: skip
QWEN = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip


program(language, "gpt2", batch=4)
program(language, "gpt2, bfloat16 autocast", amp=BF16, batch=8)
program(language, "gpt2, float16 with a scaler", amp=FP16, batch=8)
program(language, "gpt2, checkpointing", amp=BF16, batch=16, checkpointing=True)
program(language, "gpt2, eager attention", attention="eager", batch=2)
program(language, "gpt2, flex attention", attention="flex_attention", batch=2, length=512)
program(language, "gpt2, fused AdamW", amp=BF16, optimizer=partial(torch.optim.AdamW, fused=True))
program(language, "gpt2, Adafactor", optimizer=torch.optim.Adafactor)
program(language, "gpt2, SGD one by one", optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False))
program(language, "gpt2, accumulated", amp=BF16, accumulate=4)
program(language, "bert", family="Bert", head="ForMaskedLM", batch=16, length=512)
program(
    language, "roberta classifies", family="Roberta", head="ForSequenceClassification", batch=32, length=256, amp=FP16
)
program(language, "deberta", family="DebertaV2", head="ForSequenceClassification", batch=8, length=512, amp=BF16,
        hidden_size=768, num_hidden_layers=6, num_attention_heads=12, intermediate_size=3072)  # fmt: skip
program(language, "llama 0.4B in bfloat16", family="Llama", head="ForCausalLM", dtype=BF16, length=2048, **LLAMA)
program(
    language,
    "llama 7B, LoRA",
    family="Llama",
    head="ForCausalLM",
    dtype=BF16,
    lora=16,
    batch=2,
    checkpointing=True,
    **WIDE,
)
program(language, "qwen2 0.5B", family="Qwen2", head="ForCausalLM", amp=BF16, **QWEN)
program(language, "qwen2 0.5B, LoRA", family="Qwen2", head="ForCausalLM", dtype=BF16, lora=8, **QWEN)
program(language, "mixtral", family="Mixtral", head="ForCausalLM", dtype=BF16, batch=2, length=512, hidden_size=1024, intermediate_size=2048,
        num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4, vocab_size=32000, num_local_experts=8)  # fmt: skip
program(
    language,
    "mamba",
    family="Mamba",
    head="ForCausalLM",
    batch=2,
    length=128,
    hidden_size=512,
    num_hidden_layers=4,
    vocab_size=8000,
)


@program
def t5(on_step: OnStep) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).to(CUDA).train()
    train(model, on_step, lambda: model(input_ids=tokens(32000, 16, 512), labels=tokens(32000, 16, 128)).loss)


@program
def whisper(on_step: OnStep) -> None:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12,
                           decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072)  # fmt: skip
    model = WhisperForConditionalGeneration(config).to(CUDA).train()
    sounds = torch.randn(8, 80, 3000, device=CUDA)
    train(model, on_step, lambda: model(input_features=sounds, labels=tokens(50000, 8, 128)).loss, FP16)


@program
def wav2vec2(on_step: OnStep) -> None:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    model = Wav2Vec2ForCTC(Wav2Vec2Config(apply_spec_augment=False)).to(CUDA).train()
    sounds = torch.randn(4, 16000 * 5, device=CUDA)
    train(model, on_step, lambda: model(sounds, labels=tokens(32, 4, 40)).loss)


@program
def trainer(on_step: OnStep) -> None:
    """transformers' Trainer with an evaluation."""
    import tempfile

    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class AfterStep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            on_step()

    rows = [{"input_ids": torch.arange(512), "labels": torch.arange(512)} for _ in range(96)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=4, bf16=True,
            report_to="none", disable_tqdm=True, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=16,
            save_strategy="no", logging_strategy="no",
        )  # fmt: skip
        model = GPT2LMHeadModel(GPT2Config(n_layer=6))
        Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:32], callbacks=[AfterStep()]).train()


@program
def quantized(on_step: OnStep) -> None:
    """4-bit layers of bitsandbytes with LoRA's pairs beside them."""
    import bitsandbytes as bnb

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = bnb.nn.Linear4bit(4096, 11008, bias=False, compute_dtype=BF16, quant_type="nf4")
            self.down = bnb.nn.Linear4bit(11008, 4096, bias=False, compute_dtype=BF16, quant_type="nf4")
            self.a, self.b = nn.Linear(4096, 16, bias=False), nn.Linear(16, 11008, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.silu(self.up(x) + self.b(self.a(x))))

    model = nn.Sequential(*[Layer() for _ in range(4)]).to(CUDA)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith(("a.weight", "b.weight"))
    train(model, on_step, lambda: model(torch.randn(4, 1024, 4096, device=CUDA)).float().pow(2).mean(), BF16)


@program
def generated(on_step: OnStep) -> None:
    """A model that generates with a cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).to(CUDA, BF16).eval()
    for _ in range(2):
        model.generate(tokens(32000, 16, 256), min_new_tokens=48, max_new_tokens=48, do_sample=False, pad_token_id=0)
        on_step()
