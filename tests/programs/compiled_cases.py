"""Compiled training as users write it: programs whose peaks the CUDA build counted (data/compiled_truth.json)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128, "intermediate_size": 256}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 2000}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**SIZES, "vocab_size": 2000}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**SIZES, "num_key_value_heads": 2, "vocab_size": 2000}),
    "bert": ("BertConfig", "BertForMaskedLM", {**SIZES, "vocab_size": 2000}),
}


class Block(nn.Module):
    """A transformer block with fused attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and perceptron, each with a residual."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    """Two blocks, tied embeddings and the loss inside, as in nanoGPT."""

    def __init__(self, width: int = 256, vocabulary: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def train(case: dict[str, Any], on_step: Callable[[int], None]) -> None:
    """Three steps, or as many as the case has sizes; ``on_step`` is called after each."""
    if case["model"] == "transformer":
        _train(case, Transformer().cuda(), on_step, lambda run, tokens: run(tokens, tokens))
        return
    import transformers

    config, name, sizes = MODELS[case["model"]]
    attention = {"attn_implementation": case["attention"]} if "attention" in case else {}
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes, **attention))
    if case.get("weights") == "bf16":
        model = model.to(torch.bfloat16)
    if case.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _train(case, model.cuda().train(), on_step, lambda run, tokens: run(input_ids=tokens, labels=tokens).loss)


def _train(
    case: dict[str, Any],
    model: nn.Module,
    on_step: Callable[[int], None],
    loss_of: Callable[[Any, torch.Tensor], torch.Tensor],
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), fused=bool(case.get("fused", True)))
    run: Any = model
    if case.get("how") == "blocks":
        for modules in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
            for block in modules:
                block.compile()
    elif case.get("how") == "forwards":  # the layers of a Hugging Face model
        for block in model.get_submodule(case["layers"]):
            block.forward = torch.compile(block.forward)
    elif case.get("how") == "method":
        model.compile()
    elif case.get("how") != "attention":  # which compiles itself
        run = torch.compile(model)
    for number, (batch, length) in enumerate(case.get("sizes", [(4, 256)] * 3)):
        tokens = torch.randint(0, 1000, (batch, length), device="cuda")
        with (
            torch.set_grad_enabled(not case.get("inference")),
            torch.autocast("cuda", torch.bfloat16, enabled=bool(case.get("amp"))),
        ):
            loss = loss_of(run, tokens)
        if not case.get("inference"):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        on_step(number)
