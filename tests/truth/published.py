"""Published measurements on real GPUs beside dry runs: ``python tests/truth/published.py [part of an id]``.

The rows are those of ``../shared/truth/public_dev.json``. Library versions matter: run it in an environment
with the versions of the time (printed with each row) for the figures to be comparable.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from oom_magic.memory.report import MemoryReport
from oom_magic.predict.setups.setup import TrainingSetup
from oom_magic.units import GIB, MIB
from tests.support.folders import SHARED

ROWS = SHARED / "truth" / "public_dev.json"
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")

FMS = {"precision": "bf16", "seq_len": 4096, "microbatch_size": 4, "activation_checkpointing": True,
       "max_grad_norm": 1.0, "gpu": "A100 80GB"}  # fmt: skip
FMS_LORA = {"method": "lora", "rank": 16, "alpha": 16, "dropout": 0.1,
            "target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")}  # fmt: skip
# flash-attn takes no mask. Mistral 7B v0.2 has the shapes of v0.1, without the window for which one is made.
MISTRAL = "mistral-7b-v0.2"
# transformers' own AdamW of 2022 worked parameter by parameter.
BERT = {"model": "bert-large-uncased", "seq_len": 512, "attention": "eager", "optimizer": "adamw-loop",
        "gpu": "V100 16GB"}  # fmt: skip
CONTEXT_OF_V100 = 1343 * MIB  # what the authors' first line reads before training


def santacoder() -> Any:
    from transformers import GPTBigCodeConfig

    return GPTBigCodeConfig(n_embd=2048, n_layer=24, n_head=16, n_positions=2048, vocab_size=49280)


def power_lm() -> Any:
    from transformers import GraniteConfig

    return GraniteConfig(
        hidden_size=2304, intermediate_size=9216, num_hidden_layers=40, num_attention_heads=36,
        num_key_value_heads=36, vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip


class SoftmaxOf2021(torch.autograd.Function):
    """Softmax that keeps its input for the backward as well, as PyTorch's did before 1.11 (derivatives.yaml)."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, dim: int) -> torch.Tensor:
        weights = torch.softmax(scores, dim)
        ctx.save_for_backward(scores, weights)
        ctx.dim = dim
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        scores, weights = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, weights, ctx.dim, scores.dtype), None


def softmax_of_2021(scores: torch.Tensor, dim: int) -> torch.Tensor:
    """What stands in for ``torch.nn.functional.softmax`` in the rows of 2022."""
    return SoftmaxOf2021.apply(scores, dim)


# What the published program did otherwise than the code of a setup, by the beginning of the row's id.
EDITS = {
    # torch of 2022 zeroed gradients in place
    "hf-perf-bert-large": ("zero_grad()", "zero_grad(set_to_none=False)"),
    # TRL's peft_module_casting_to_bf16 undoes PEFT's float32 for embeddings and head
    "fms-acceleration-059": (
        "model.train()",
        "for name, module in model.named_modules():\n"
        '    if name.endswith(("embed_tokens", "lm_head")):\n'
        "        module.to(torch.bfloat16)\n"
        "model.train()",
    ),
}


@dataclass(frozen=True)
class PublishedSetup(TrainingSetup):
    """A setup with an edit to its code."""

    edit: tuple[str, str] = ("", "")

    def code(self) -> str:
        code = super().code()
        return code.replace(*self.edit) if self.edit[0] else code


class Attention(nn.Module):
    """The book's attention: written out, or PyTorch's kernel."""

    def __init__(self, width: int, num_heads: int, is_fused: bool) -> None:
        super().__init__()
        self.num_heads, self.is_fused = num_heads, is_fused
        self.qkv = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.num_heads, width // self.num_heads)
        queries, keys, values = (layer(x).view(split).transpose(1, 2) for layer in self.qkv)
        if self.is_fused:
            mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, None, 0.1, True)
        else:
            scores = queries @ keys.transpose(2, 3)
            mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), diagonal=1)
            scores.masked_fill_(mask, -torch.inf)
            mixed = self.dropout(torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)) @ values
        return self.out(mixed.transpose(1, 2).contiguous().view(batch, length, width))


class WrittenNorm(nn.Module):
    """Layer normalisation of single operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, variance = x.mean(dim=-1, keepdim=True), x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class WrittenGELU(nn.Module):
    """GELU of single operators."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = torch.sqrt(torch.tensor(2.0 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(factor * (x + 0.044715 * torch.pow(x, 3))))


class Block(nn.Module):
    """Attention and feed-forward, normalised before."""

    def __init__(self, width: int, num_heads: int, is_fused: bool) -> None:
        super().__init__()
        norm = nn.LayerNorm if is_fused else WrittenNorm
        gelu = nn.GELU(approximate="tanh") if is_fused else WrittenGELU()
        self.attention = Attention(width, num_heads, is_fused)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))
        self.norm1, self.norm2 = norm(width), norm(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.attention(self.norm1(x))) + x
        return self.dropout(self.feed_forward(self.norm2(x))) + x


class SmallGPT(nn.Module):
    """GPT of 163 million parameters: untied head, no bias in queries, keys and values."""

    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50257, 768), nn.Embedding(1024, 768)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(Block(768, 12, is_fused) for _ in range(12)))
        self.norm = nn.LayerNorm(768) if is_fused else WrittenNorm(768)
        self.head = nn.Linear(768, 50257, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.tokens(ids) + self.positions(places))
        return self.head(self.norm(self.blocks(x)))


def small_gpt() -> nn.Module:
    """With attention written out."""
    return SmallGPT(is_fused=False)


def small_gpt_fused() -> nn.Module:
    """With PyTorch's attention."""
    return SmallGPT(is_fused=True)


RASBT = {
    "precision": "bf16",
    "microbatch_size": 8,
    "seq_len": 1024,
    "optimizer": "adamw-fused",
    "gpu": "A100",
}


def peak_allocated(report: MemoryReport) -> int:
    return report.peak_allocated_bytes


def peak_reserved(report: MemoryReport) -> int:
    return report.peak_reserved_bytes


def on_the_v100(report: MemoryReport) -> int:
    return report.peak_reserved_bytes + CONTEXT_OF_V100


# Row: what to train, and which figure of the report was published.
SETUPS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[MemoryReport], int]]] = {
    "fms-acceleration-001": (lambda: {**FMS, "model": santacoder(), "seq_len": 2048}, peak_allocated),
    "fms-acceleration-009": (lambda: {**FMS, "model": MISTRAL}, peak_allocated),
    "fms-acceleration-033": (lambda: {**FMS, **FMS_LORA, "model": MISTRAL}, peak_allocated),
    "fms-acceleration-059": (
        lambda: {**FMS, **FMS_LORA, "model": MISTRAL, "method": "qlora", "precision": "amp-bf16",
                 "microbatch_size": 8},
        peak_allocated,
    ),
    "fms-acceleration-317": (lambda: {**FMS, "model": power_lm()}, peak_allocated),
    "hf-perf-bert-large-003": (lambda: {**BERT, "precision": "fp32", "microbatch_size": 4}, on_the_v100),
    "hf-perf-bert-large-007": (
        lambda: {**BERT, "precision": "amp-fp16", "microbatch_size": 1, "gradient_accumulation_steps": 4,
                 "activation_checkpointing": True},
        on_the_v100,
    ),
    "rasbt-gpt124m-003": (lambda: {**RASBT, "model": small_gpt}, peak_reserved),
    "rasbt-gpt124m-005": (lambda: {**RASBT, "model": small_gpt_fused}, peak_reserved),
}  # fmt: skip
NOT_PRICED = {
    "torchtune-opt-flags-005": "torchtune's own model, compiled",
    "answerai-fsdp-qlora-005": "two GPUs",
    "torchao-optim-001": "compiled",
}


def price(row: dict[str, Any]) -> str:
    """One line of the table."""
    head = f"{row['id']:26}{row['gib']:9.3f}"
    if row["id"] not in SETUPS:
        return f"{head}  not priced: {NOT_PRICED.get(row['id'], 'no setup for it here')}"
    settings, figure = SETUPS[row["id"]]
    softmax = softmax_of_2021 if row["year"] == 2022 else nn.functional.softmax
    started = time.monotonic()
    try:
        edit = next((edit for start, edit in EDITS.items() if row["id"].startswith(start)), ("", ""))
        with patch.object(nn.functional, "softmax", softmax):
            report = PublishedSetup(**settings(), edit=edit).dry_run(stop_after_steps=2)
    except Exception as error:
        return f"{head}  failed: {type(error).__name__}: {str(error).splitlines()[0][:70]}"
    if report.error or report.out_of_memory:
        return f"{head}  failed: {(report.error or 'out of memory').splitlines()[0][:80]}"
    ours = figure(report) / GIB
    software = row["software"] or {}
    named = ", ".join(f"{name} {software[name]}" for name in LIBRARIES if name in software)
    took = f"{time.monotonic() - started:7.1f} s"
    quantity = figure.__name__.replace("_", " ")
    return f"{head}{ours:9.3f}{ours / row['gib'] - 1:+8.2%}{took}  {quantity:15} {named or row['year']}"


def main(part: str = "") -> None:
    """Print the table."""
    print("this environment:", ", ".join(f"{name} {version(name)}" for name in LIBRARIES))
    print(f"{'row':26}{'published':>9}{'ours':>9}{'error':>8}{'':>9}  {'figure':15} versions then")
    for row in json.loads(ROWS.read_text()):
        if part in row["id"]:
            print(price(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2])
