"""Programs whose course real values decide: tokens that end a text, experts, rewards, steps of a solver."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.programs.device_programs.table import BF16, CUDA, OnStep, program, tokens, train

_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}


def _whole(x: torch.Tensor) -> dict[str, Any]:
    return {"attention_mask": torch.ones_like(x)}


@program
def ends_of_texts(on_step: OnStep) -> None:
    """Greedy decoding until each text has ended."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **_HEADS, eos_token_id=2, pad_token_id=0)).to(CUDA, BF16).eval()
    x = tokens(4096, 4, 64)
    with torch.no_grad():
        model.generate(x, max_new_tokens=60, do_sample=False, **_whole(x))
    on_step()


@program
def beams(on_step: OnStep) -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    part = {"layers": 3, "ffn_dim": 1024, "attention_heads": 8}
    both = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in part.items()}
    model = BartForConditionalGeneration(BartConfig(vocab_size=5000, d_model=256, **both)).to(CUDA).eval()
    x = tokens(5000, 8, 80)
    model.generate(x, num_beams=4, max_length=40, **_whole(x))
    on_step()


@program
def experts_of_mixtral(on_step: OnStep) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3}
    config = MixtralConfig(**sizes, **_HEADS, num_local_experts=8, output_router_logits=True)
    model = MixtralForCausalLM(config).to(CUDA, BF16).train()

    def loss() -> torch.Tensor:
        x = tokens(4096, 4, 256)
        return model(input_ids=x, labels=x).loss

    train(model, on_step, loss)


@program
def experts_of_qwen3(on_step: OnStep) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 32}
    experts = {"moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **_HEADS, **experts)).to(CUDA).train()

    def loss() -> torch.Tensor:
        x = tokens(4096, 4, 128)
        return model(input_ids=x, labels=x).loss

    train(model, on_step, loss, optimizer=torch.optim.AdamW(model.parameters(), foreach=True))


def _chances(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, x[..., None]).squeeze(-1)


@program
def rewards(on_step: OnStep) -> None:
    """GRPO by hand: groups of sampled texts, their advantages, two updates for each."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=2000, n_embd=256, n_layer=3, n_head=4)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = 5
    model = GPT2LMHeadModel(config).to(CUDA)
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(2):
        prompts = tokens(2000, 4, 32).repeat_interleave(4, 0)
        with torch.no_grad():
            x = model.generate(prompts, max_new_tokens=40, min_new_tokens=40, do_sample=True, **_whole(prompts))
        reward = torch.rand(16, device=CUDA).view(4, 4)
        gain = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        mask = (x[:, 32:] != 5).float()
        with torch.no_grad():
            before, known = (_chances(one(x).logits[:, 31:-1], x[:, 32:]) for one in (model, reference))
        for _ in range(2):
            now = _chances(model(x).logits[:, 31:-1], x[:, 32:])
            ratio, further = (now - before).exp(), known - now
            kept = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain) - 0.04 * (further.exp() - further - 1)
            optimizer.zero_grad()
            (-((kept * mask).sum(1) / mask.sum(1)).mean()).backward()
            optimizer.step()
        on_step()


@program
def preferences(on_step: OnStep) -> None:
    """DPO by hand: the model without its adapters is the reference."""
    import peft
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(vocab_size=6000, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    adapters = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(Qwen2ForCausalLM(config).to(CUDA, BF16), adapters)

    def chances(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (_chances(model(input_ids=x).logits[:, :-1].float(), x[:, 1:]) * mask[:, 1:]).sum(1)

    def loss() -> torch.Tensor:
        x = tokens(6000, 8, 200)
        mask = (torch.arange(200, device=CUDA) >= 40).float().expand(8, -1)
        with torch.no_grad(), model.disable_adapter():
            known = chances(x, mask)
        chosen, rejected = (chances(x, mask) - known).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    train(model, on_step, loss, optimizer=optimizer)


class _Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 16))

    def forward(self, _time: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layers(y)


@program
def steps_of_a_solver(on_step: OnStep) -> None:
    """An ordinary differential equation, whose solver chooses its steps, and their gradients by its adjoint."""
    from torchdiffeq import odeint_adjoint

    field, times = _Field().to(CUDA), torch.linspace(0, 1, 5, device=CUDA)
    optimizer = torch.optim.Adam(field.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        ends = odeint_adjoint(field, torch.randn(256, 16, device=CUDA), times, rtol=1e-3, atol=1e-4)[-1]
        ends.pow(2).mean().backward()
        optimizer.step()
        on_step()
