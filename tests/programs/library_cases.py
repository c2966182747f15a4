"""Training code for "cuda" as users of libraries write it.

test_libraries_agreement.py rehearses it, data/record_libraries.py measures it. Each case gets the folder in which
``write_models`` has put small models.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

LLAMA = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    "qwen": ("Qwen2Config", "Qwen2ForCausalLM", {**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": 2048, "n_embd": 256, "n_layer": 2, "n_head": 4,
                                               "bos_token_id": 0, "eos_token_id": 0}),
    "bert": ("BertConfig", "BertForSequenceClassification", {
        "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2,
        "num_attention_heads": 4}),
}  # fmt: skip


def write_models(folder: Path, weights: bool) -> None:
    """A folder for each model: its config.json and, if ``weights``, a file of bfloat16 weights."""
    import transformers

    for name, (config_class, model_class, settings) in MODELS.items():
        config = getattr(transformers, config_class)(**settings, architectures=[model_class])
        config.dtype = torch.bfloat16
        config.save_pretrained(folder / name)
        if weights:
            getattr(transformers, model_class)(config).to(torch.bfloat16).save_pretrained(folder / name)


def load(folder: Path, name: str, **options: Any) -> Any:
    """The causal language model ``name``, in training mode."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / name, **options).train()


def loop(model: Any, optimizers: list[Any], autocast: torch.dtype | None = None, clip: float | None = None) -> None:
    """Four steps of a plain loop."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for _ in range(4):
        tokens = torch.randint(5, 2048, (2, 128)).to("cuda")
        with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()


def plain(folder: Path) -> None:
    model = load(folder, "llama", dtype=torch.bfloat16).to("cuda")
    loop(model, [torch.optim.AdamW(model.parameters())])


def device_map(folder: Path) -> None:
    model = load(folder, "qwen", dtype=torch.float32, device_map="auto", attn_implementation="eager")
    loop(model, [torch.optim.AdamW(model.parameters())], torch.bfloat16)


def qlora(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                      bnb_4bit_compute_dtype=torch.bfloat16)  # fmt: skip
    model = load(folder, "llama", quantization_config=quantization, device_map={"": 0})
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    model = get_peft_model(model, LoraConfig(r=16, lora_dropout=0.05, target_modules="all-linear"))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loop(model, [torch.optim.AdamW(parameters, lr=1e-4)], clip=1.0)


def lora_on_8_bits(folder: Path) -> None:
    import bitsandbytes
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    model = load(folder, "qwen", quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map="auto")
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], use_rslora=True))
    loop(model, [bitsandbytes.optim.PagedAdamW8bit(model.parameters())], torch.bfloat16)


def dora(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = load(folder, "gpt2", dtype=torch.float32).to("cuda")
    config = LoraConfig(target_modules=["c_attn"], use_dora=True, modules_to_save=["ln_f"], fan_in_fan_out=True)
    model = get_peft_model(model, config)
    loop(model, [torch.optim.AdamW(model.parameters())])


def adapters_everywhere(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = load(folder, "qwen", dtype=torch.bfloat16).to("cuda")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    config = LoraConfig(r=8, target_modules="all-linear", use_rslora=True, lora_dropout=0.1, bias="lora_only")
    model = get_peft_model(model, config)
    loop(model, [torch.optim.AdamW(model.parameters(), lr=1e-4)], clip=1.0)


def selective_checkpointing(folder: Path) -> None:
    """Products are kept, all else is computed again."""
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    layers = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
    ).cuda()
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(4):
        hidden = torch.rand(16, 128, 256, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            for layer in layers:
                hidden = hidden + checkpoint(layer, hidden, use_reentrant=False, context_fn=contexts)
        hidden.float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def prompt_tuning(folder: Path) -> None:
    from peft import PromptTuningConfig, get_peft_model

    model = load(folder, "gpt2", dtype=torch.bfloat16).to("cuda")
    model = get_peft_model(model, PromptTuningConfig(num_virtual_tokens=8, task_type="CAUSAL_LM")).to("cuda")
    loop(model, [torch.optim.AdamW(model.parameters())])


def optimizers_of_8_bits(folder: Path) -> None:
    from bitsandbytes import optim

    model = load(folder, "gpt2", dtype=torch.float32).to("cuda")
    parts = [list(model.parameters())[start::4] for start in range(4)]
    loop(model, [optim.AdamW8bit(parts[0]), optim.PagedAdamW32bit(parts[1]), optim.Lion8bit(parts[2]),
                 optim.SGD8bit(parts[3], lr=1e-3, momentum=0.9)])  # fmt: skip


def linear_layers(folder: Path) -> None:
    from bitsandbytes import nn as quantized
    from bitsandbytes.optim import Adam8bit

    four = {"quant_type": "fp4", "compress_statistics": False, "compute_dtype": torch.bfloat16}
    model = nn.Sequential(
        quantized.Linear4bit(512, 2048, **four), nn.ReLU(), quantized.LinearNF4(2048, 512), nn.ReLU(),
        quantized.Linear8bitLt(512, 2048, has_fp16_weights=False, threshold=6.0), nn.LayerNorm(2048),
    ).cuda()  # fmt: skip
    embedding = nn.Embedding(1000, 512).to(0).half()
    optimizer = Adam8bit([*model.parameters(), *embedding.parameters()], lr=1e-3)
    for _ in range(4):
        tokens = torch.randint(0, 1000, (64, 40), device="cuda")
        with torch.autocast("cuda", torch.float16):
            loss = model(embedding(tokens)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Texts(Dataset[Any]):
    """Full sequences with masks."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(5 + index, 101 + index)
        return {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": torch.ones_like(tokens)}


def train_with_trainer(folder: Path, model: Any, trainer_class: Any = None, **options: Any) -> None:
    """Four steps of Hugging Face's Trainer."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=4, logging_steps=1, report_to="none", disable_tqdm=True,
        per_device_train_batch_size=4, per_device_eval_batch_size=8, **options,
    )  # fmt: skip
    kind = trainer_class or Trainer
    kind(model=model, args=arguments, train_dataset=Texts(), eval_dataset=Texts()).train()


def trainer_bf16(folder: Path) -> None:
    model = load(folder, "qwen", dtype=torch.float32)
    train_with_trainer(folder, model, bf16=True, gradient_accumulation_steps=2, save_steps=2)


def trainer_fp16(folder: Path) -> None:
    model = load(folder, "gpt2", dtype=torch.float32)
    train_with_trainer(folder, model, fp16=True, gradient_checkpointing=True, label_smoothing_factor=0.1,
                       optim="adamw_bnb_8bit", eval_strategy="steps", eval_steps=1, max_grad_norm=0.5,
                       dataloader_num_workers=2, save_strategy="no")  # fmt: skip


def preference_trainer(folder: Path) -> None:
    """A trainer with a loss of its own and a frozen reference model, as TRL's are."""
    import torch.nn.functional as F
    from transformers import Trainer

    reference = load(folder, "llama", dtype=torch.bfloat16).to("cuda").eval()

    def log_probabilities(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
        chosen = inputs["labels"][:, 1:].unsqueeze(-1)
        return logits.float().log_softmax(-1).gather(-1, chosen).squeeze(-1).sum(-1)

    class PreferenceTrainer(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            with torch.no_grad():
                expected = log_probabilities(reference, inputs)
            margins = (log_probabilities(model, inputs) - expected).view(2, -1)
            loss = -F.logsigmoid(0.1 * (margins[0] - margins[1])).mean()
            return (loss, None) if return_outputs else loss

    model = load(folder, "llama", dtype=torch.bfloat16)
    train_with_trainer(folder, model, PreferenceTrainer, bf16=True, optim="adamw_torch_fused", save_strategy="no")


def accelerate_loop(folder: Path) -> None:
    from accelerate import Accelerator
    from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "bert", dtype=torch.float32).train()
    tokens = torch.randint(5, 2048, (64, 96))
    data = TensorDataset(tokens, torch.ones_like(tokens), torch.randint(0, 2, (64,)))
    loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2, pin_memory=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 10)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for input_ids, mask, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=input_ids, attention_mask=mask, labels=labels).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


CASES: dict[str, Callable[[Path], None]] = {
    case.__name__: case
    for case in (plain, device_map, qlora, lora_on_8_bits, dora, adapters_everywhere,
                 selective_checkpointing, prompt_tuning, optimizers_of_8_bits, linear_layers,
                 trainer_bf16, trainer_fp16, preference_trainer, accelerate_loop)
}  # fmt: skip
