"""Training on several cards of one process, as users write it: the same code for the truth and for a dry run.

``python card_programs.py record`` on the CUDA build (several cards visible) writes the truth; see ``tests/data/cards.json``.
A program calls ``on_step`` after each optimizer step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.folders import DATA

OnStep = Callable[[], None]
DATA_FILE = DATA / "cards.json"


def _mlp(width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(depth)]
    )


def _llama(**sizes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    usual = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 8000}  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**usual, **sizes}))


def _bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
    )


def gpt2(**sizes: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**{"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 8000, **sizes}))


def train(model: Any, on_step: OnStep, batch: int = 4, seq: int = 256, optimizer: Any = None, amp: Any = None) -> None:
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for _ in range(3):
        x = torch.randint(0, 1000, (batch, seq), device="cuda")
        with torch.autocast("cuda", amp or torch.bfloat16, enabled=amp is not None):
            loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step()


def pipeline(on_step: OnStep) -> None:
    """Three stages by hand, microbatches, one optimizer over all cards, gradients clipped over all."""
    stages = [_mlp(1024, 3).to(f"cuda:{card}") for card in range(3)]
    parameters = [p for stage in stages for p in stage.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for _ in range(3):
        for _ in range(2):
            x = torch.randn(256, 1024).cuda()
            for card, stage in enumerate(stages):
                x = stage(x.to(f"cuda:{card}", non_blocking=True))
            (x**2).mean().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        on_step()


def back_and_forth(on_step: OnStep) -> None:
    """Layers on alternating cards, another type on the way, checkpointed; the loss comes back to the first card."""
    from torch.utils.checkpoint import checkpoint

    layers = [_mlp(768, 1).to(torch.device("cuda", number % 2)) for number in range(4)]
    optimizers = [torch.optim.Adam(layer.parameters(), lr=1e-3) for layer in layers]
    for _ in range(3):
        torch.cuda.set_device(1)
        x = torch.randn(64, 128, 768, device="cuda")
        for number, layer in enumerate(layers):
            x = checkpoint(layer, x.to(torch.device("cuda", number % 2)), use_reentrant=number > 1)
            x = x.half().float()
        torch.cuda.set_device(0)
        x.cuda().transpose(1, 2).contiguous().square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        on_step()


def shared_head(on_step: OnStep) -> None:
    """An embedding on the first card whose weight is copied to the last for the head at each step."""
    embedding, body = nn.Embedding(8000, 512, device="cuda:0"), _mlp(512, 4).cuda(1)
    optimizer = torch.optim.AdamW([*embedding.parameters(), *body.parameters()], lr=1e-3, fused=True)
    for _ in range(3):
        ids = torch.randint(0, 8000, (8, 128), device="cuda:0")
        hidden = body(embedding(ids).to("cuda:1"))
        with torch.cuda.device(1):
            weight = embedding.weight.cuda()
        loss = nn.functional.cross_entropy((hidden @ weight.t()).flatten(0, 1), ids.to(hidden.device).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step()


def data_parallel_cnn(on_step: OnStep) -> None:
    """``nn.DataParallel`` over four cards from batches on the host, buffers, an odd last piece, a loss outside."""
    model = nn.DataParallel(
        nn.Sequential(nn.Linear(512, 2048), nn.BatchNorm1d(2048), nn.ReLU(), nn.Linear(2048, 100)).cuda()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        out = model(torch.randn(1030, 512))
        nn.functional.cross_entropy(out, torch.zeros(1030, dtype=torch.long, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step()


def data_parallel_scaled(on_step: OnStep) -> None:
    """``nn.DataParallel`` of GPT-2 under autocast to float16 with a gradient scaler; dictionaries are gathered."""
    model = nn.DataParallel(gpt2().cuda())
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-4), torch.amp.GradScaler("cuda")
    for _ in range(3):
        x = torch.randint(0, 1000, (8, 256), device="cuda")
        with torch.autocast("cuda", torch.float16):
            loss = model(input_ids=x, labels=x).loss.mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        on_step()


def data_parallel_lora(on_step: OnStep) -> None:
    """``nn.DataParallel`` of a LoRA model in bfloat16, evaluated without gradients between the steps."""
    from peft import LoraConfig, get_peft_model

    model = nn.DataParallel(
        get_peft_model(_llama().to(torch.bfloat16), LoraConfig(r=8, target_modules="all-linear")).cuda()
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for _ in range(3):
        x = torch.randint(0, 1000, (6, 256), device="cuda")
        model(input_ids=x, labels=x).loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(input_ids=x)
        on_step()


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(5000, 128), nn.Linear(512, 50)
        self.rnn = nn.GRU(128, 256, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.rnn.flatten_parameters()
        return self.out(self.rnn(self.words(ids))[0])


def data_parallel_recurrent(on_step: OnStep) -> None:
    """``nn.DataParallel`` of recurrent layers with dropout, whose random state each card has for itself."""
    model = nn.DataParallel(_Tagger().cuda())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.randint(0, 5000, (32, 64))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step()


def _trainer(model: Any, on_step: OnStep, **options: Any) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            on_step()

    rows = [{name: torch.zeros(256, dtype=torch.long) for name in ("input_ids", "labels")} for _ in range(128)]
    usual = {"max_steps": 3, "report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(tempfile.mkdtemp(), **{**usual, **options})
    Trainer(model, arguments, train_dataset=rows, callbacks=[Steps()]).train()


def trainer(on_step: OnStep) -> None:
    """Trainer takes both cards by itself."""
    _trainer(gpt2(), on_step, per_device_train_batch_size=4, bf16=True)


def trainer_accumulating(on_step: OnStep) -> None:
    """Trainer with accumulation and checkpointing in float16 on both cards."""
    more = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "fp16": True, "optim": "adamw_torch"}
    _trainer(_llama(), on_step, per_device_train_batch_size=2, **more)


def trainer_of_dispatched(on_step: OnStep) -> None:
    """A model over two cards is trained where it is: Trainer then does not replicate it."""
    _trainer(_dispatched(_llama(), "LlamaDecoderLayer"), on_step, per_device_train_batch_size=4)


def _dispatched(model: Any, block: str, memory: dict[Any, Any] | None = None, **more: Any) -> Any:
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    memory = memory or get_balanced_memory(model, no_split_module_classes=[block])
    return dispatch_model(
        model, infer_auto_device_map(model, max_memory=memory, no_split_module_classes=[block]), **more
    )


def dispatched_three(on_step: OnStep) -> None:
    """accelerate's balanced device map over three cards, under autocast."""
    train(_dispatched(_llama(), "LlamaDecoderLayer"), on_step, amp=torch.bfloat16)


def dispatched_unevenly(on_step: OnStep) -> None:
    """``max_memory`` for each card, a model with tied weights."""
    train(_dispatched(gpt2(), "GPT2Block", {0: "12MiB", 1: "2GiB"}), on_step)


def dispatched_lora(on_step: OnStep) -> None:
    """LoRA on a model that is spread over two cards."""
    from peft import LoraConfig, get_peft_model

    model = _dispatched(_bert(), "BertLayer", {0: "40MiB", 1: "1GiB"})
    train(get_peft_model(model, LoraConfig(r=4, target_modules=["query", "value"])), on_step)


def _saved(model: Any) -> str:
    folder = tempfile.mkdtemp()
    if torch.version.cuda is None:  # a dry run reads the configuration only
        Path(folder, "config.json").write_text(model.config.to_json_string(use_diff=False))
    else:
        model.save_pretrained(folder)
    return folder


def loaded(on_step: OnStep) -> None:
    """``from_pretrained(device_map="auto")``."""
    from transformers import AutoModelForCausalLM

    folder = _saved(_llama(dtype="bfloat16").to(torch.bfloat16))
    train(AutoModelForCausalLM.from_pretrained(folder, device_map="auto", dtype=torch.bfloat16), on_step)


def loaded_in_sequence(on_step: OnStep) -> None:
    """``device_map="sequential"`` with ``max_memory``: one card is full before the next is used."""
    from transformers import AutoModelForCausalLM

    memory = {0: "20MiB", 1: "1GiB"}
    train(AutoModelForCausalLM.from_pretrained(_saved(gpt2()), device_map="sequential", max_memory=memory), on_step)


def offloaded(on_step: OnStep) -> None:
    """Layers beyond two small cards stay on the host and come for each call; no training."""
    model = _dispatched(_llama(), "LlamaDecoderLayer", {0: "12MiB", 1: "8MiB", "cpu": "1GiB"})
    for _ in range(3):
        x = torch.randint(0, 1000, (4, 256), device="cuda")
        with torch.no_grad():
            model(input_ids=x)
        on_step()


PROGRAMS: dict[Callable[[OnStep], None], int] = {
    pipeline: 3, back_and_forth: 2, shared_head: 2, data_parallel_cnn: 4, data_parallel_scaled: 2, data_parallel_lora: 3,
    data_parallel_recurrent: 2, trainer: 2, trainer_accumulating: 2, trainer_of_dispatched: 2, dispatched_three: 3,
    dispatched_unevenly: 2, dispatched_lora: 2, loaded: 2, loaded_in_sequence: 2, offloaded: 2,
}  # fmt: skip


def peaks(program: Callable[[OnStep], None], num_cards: int) -> list[list[list[int]]]:
    """For each step and card, peak allocated and reserved so far."""
    steps: list[list[list[int]]] = []

    def on_step() -> None:
        steps.append(
            [[torch.cuda.max_memory_allocated(n), torch.cuda.max_memory_reserved(n)] for n in range(num_cards)]
        )

    program(on_step)
    return steps


def _record_one(name: str) -> None:
    from transformers import masking_utils

    find = masking_utils.find_packed_sequence_indices
    # what a real GPU finds: nothing is packed; here nothing is computed, and all reads as zero
    masking_utils.find_packed_sequence_indices = lambda position_ids: (find(position_ids), None)[1]
    program, num_cards = next(item for item in PROGRAMS.items() if item[0].__name__ == name)
    print("@@" + json.dumps(peaks(program, num_cards)), flush=True)
    os._exit(0)


def _record(wanted: list[str]) -> None:
    """Every program in a process of its own."""
    known = json.loads(DATA_FILE.read_text()) if DATA_FILE.exists() else {"torch": torch.__version__, "programs": {}}
    for program, num_cards in PROGRAMS.items():
        name = program.__name__
        if wanted and name not in wanted:
            continue
        environment = {**os.environ, "FAKECUDA_NDEV": str(num_cards), "FAKECUDA_COPY_MAX_KIB": "64"}
        done = subprocess.run([sys.executable, __file__, "one", name], capture_output=True, text=True, env=environment)
        lines = [line for line in done.stdout.splitlines() if line.startswith("@@")]
        if not lines:
            print(name, "FAILED", (done.stdout + done.stderr)[-1500:])
            continue
        known["programs"][name] = json.loads(lines[-1][2:])
        print(name, known["programs"][name][-1], flush=True)
    DATA_FILE.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    _record_one(sys.argv[2]) if sys.argv[1] == "one" else _record(sys.argv[2:])
