"""Code to paste for each remedy, in the style the user trains in."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from oom_magic.explain.evidence.checks import device_name
from oom_magic.explain.remedies.own_code.checkpointing import checkpointing
from oom_magic.predict.setups.model_source import targets_as_code

RELEASE = "%oom_free"
_ACCUMULATING = """\
for number, batch in enumerate(loader, 1):
    loss = {model}(**batch).loss / accumulation
    loss.backward()
    if number % accumulation == 0:
        optimizer.step()
        optimizer.zero_grad()"""
_PLAIN = {
    "sdpa": '{inner}.set_attn_implementation("sdpa")\n# or from_pretrained(..., attn_implementation="sdpa")',
    "released_gradients": "optimizer.zero_grad()           # set_to_none=True is the default",
    "dropped_outputs": """\
# instead of outputs = {model}(**batch), which keeps the logits
loss = {model}(**batch).loss
loss.backward()""",
    "mixed_precision": """\
with torch.autocast("cuda", dtype=torch.{torch_dtype}):
    loss = {model}(**batch).loss
# outside the block{scaler}
loss.backward()""",
    "chunked_loss": """\
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss
language_model = {language_model}
head = language_model.lm_head

def make_logits(hidden):
    return type(head).forward(head, hidden)

def chunk_loss(hidden, targets):
    logits = make_logits(hidden).float()
    cross_entropy = torch.nn.functional.cross_entropy
    return cross_entropy(logits, targets, reduction="sum")

def loss_in_chunks(logits, labels, **options):
    if not torch.is_grad_enabled():
        return ForCausalLMLoss(logits, labels, **options)
    hidden = logits[:, :-1].flatten(0, 1)
    targets = labels[:, 1:].flatten()
    parts = zip(hidden.split({tokens}), targets.split({tokens}))
    losses = [checkpoint(chunk_loss, *part, use_reentrant=False)
        for part in parts]
    return sum(losses) / (targets != -100).sum()

def forward(hidden):
    trains = torch.is_grad_enabled()
    return hidden if trains else make_logits(hidden)

head.forward = forward
language_model.loss_function = loss_in_chunks""",
    "checkpointing": """\
{switched}.{switch}_enable(
    {switch}_kwargs={{"use_reentrant": False}})""",
    "checkpointing_blocks": """\
from functools import partial
from torch.utils.checkpoint import {checkpoints}
{recomputed}""",
    "compile": "{model}.compile()   # before the first step",
    "compile_blocks": """\
for block in {layers}:
    block.compile()   # before the first step; not the whole model""",
    "activation_budget": """\
import torch._functorch.config
# before the first step
torch._functorch.config.activation_memory_budget = 0.5""",
    "no_cuda_graphs": """\
# without mode="reduce-overhead" or "max-autotune"
{model} = torch.compile({model})""",
    "foreach": "optimizer = torch.optim.AdamW({model}.parameters(), lr=lr,\n    foreach=False)   # or fused=True",
    "optimizer_8bit": """\
import bitsandbytes as bnb
optimizer = bnb.optim.AdamW8bit({model}.parameters(), lr=lr)""",
    "offload_optimizer": """\
from torchao.optim import CPUOffloadOptimizer   # pip install torchao
optimizer = CPUOffloadOptimizer(
    {model}.parameters(), torch.optim.AdamW, lr=lr)""",
    "adafactor": "optimizer = torch.optim.Adafactor({model}.parameters(), lr=lr)",
    "gradients_in_buckets": "{model} = DistributedDataParallel({model},\n    gradient_as_bucket_view=True)",
    "resharded": """\
for block in {layers}:
    fully_shard(block, reshard_after_forward=True)""",
    "fully_sharded": """\
from torch.distributed.fsdp import fully_shard
for block in {bare_layers}:
    fully_shard(block)
# before the optimizer is created, not DistributedDataParallel({model})
fully_shard({model})""",
    "fully_sharded_accelerate": """\
from accelerate import FullyShardedDataParallelPlugin
plugin = FullyShardedDataParallelPlugin(
    {plugin})
accelerator = Accelerator(fsdp_plugin=plugin)""",
    "fully_sharded_trainer": """\
TrainingArguments(..., fsdp="full_shard auto_wrap",
    fsdp_config={config})""",
    "balanced_layers": """\
device_map = {map}
{model} = {loader}.from_pretrained({source},
    device_map=device_map)""",
    "shards_on_host": """\
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
for block in {layers}:
    fully_shard(block, offload_policy=CPUOffloadPolicy())
# before the optimizer is created
fully_shard({model}, offload_policy=CPUOffloadPolicy())""",
    "sgd": "optimizer = torch.optim.SGD({model}.parameters(), lr=lr, momentum=0.0)",
    "single_weights": "{model} = {model}.float()   # before the optimizer is created",
    "single_weights_inputs": """\
{model} = {model}.float()   # before the optimizer is created
# and its inputs: {model}(x.float())""",
    "half_weights": "{model} = {model}.to(torch.{torch_dtype})   # before the optimizer is created",
    "half_weights_inputs": """\
{model} = {model}.to(torch.{torch_dtype})   # before the optimizer is created

def with_narrow_inputs(module, args, kwargs):
    def narrow(one):
        is_wide = torch.is_tensor(one) and one.is_floating_point()
        return one.to(torch.{torch_dtype}) if is_wide else one
    named = {{name: narrow(one) for name, one in kwargs.items()}}
    return tuple(map(narrow, args)), named

{called}.register_forward_pre_hook(with_narrow_inputs, with_kwargs=True)""",
    "lora": """\
from peft import LoraConfig, get_peft_model
{model} = get_peft_model({inner},
    LoraConfig(r={rank}, lora_alpha={alpha}{targets}))""",
    "qlora": """\
from peft import LoraConfig, get_peft_model
from peft import prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig
quantization = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16)
{model} = {loader}.from_pretrained({source},
    quantization_config=quantization)
{model} = prepare_model_for_kbit_training({model},
    use_gradient_checkpointing=False)
{model} = get_peft_model({model},
    LoraConfig(r={rank}, lora_alpha={alpha}{targets}))""",
    "loaded_half": """\
{model} = {loader}.from_pretrained({source}, dtype=torch.{torch_dtype},
    device_map="cuda")          # torch_dtype= before transformers 4.56""",
    "loaded_half_own": '{model} = {model}.to(torch.{torch_dtype}).to("cuda")   # cast, then move',
    "loaded_8bit": """\
from transformers import BitsAndBytesConfig
quantization = BitsAndBytesConfig(load_in_8bit=True)
{model} = {loader}.from_pretrained({source},
    quantization_config=quantization,
    device_map="cuda")          # and no .to("cuda") after it""",
    "loaded_4bit": """\
from transformers import BitsAndBytesConfig
quantization = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16)
{model} = {loader}.from_pretrained({source},
    quantization_config=quantization,
    device_map="cuda")          # and no .to("cuda") after it""",
    "no_grad": "with torch.no_grad():\n    outputs = {model}(**batch)",
    "smaller_batch": "{name} = {after}\naccumulation = {accumulation}\n" + _ACCUMULATING,
    "smaller_evaluation": "{name} = {after}",
    "later_evaluation": "{name} = {after}",
    "shorter_sequences": "{name} = {after}",
    "fsdp": """\
from torch.distributed.fsdp import fully_shard
for layer in {layers}:
    fully_shard(layer)
# run with: torchrun --nproc-per-node {gpus} train.py
fully_shard({model})""",
    "drop_copy": f"del {{names}}\n{RELEASE}",
    "free_held": RELEASE,
    "free_held_any": RELEASE,
    "smaller_batch_any": "accumulation = 4    # with a quarter of the batch size\n" + _ACCUMULATING,
    "offload": """\
{model} = {loader}.from_pretrained({source}{options},
    device_map="auto"{limits})   # and no .to("cuda") after it""",
    "detach": "{pairs}",
    "backward_each": "{pairs}",
    "keep_on_host": "{pairs}",
    "keep_newest": "{pairs}",
    "raise_limit": "torch.cuda.set_per_process_memory_fraction(1.0)",
    "fewer_waiting": "loader = DataLoader(dataset, batch_size=batch_size, num_workers=0)",
}
# For texts without any sign of transformers: their batches and methods would not be those of the user's model.
_GENERIC = {
    "smaller_batch_any": """\
accumulation = 4    # with a quarter of the batch size
for number, (inputs, targets) in enumerate(loader, 1):
    loss = loss_function({model}(inputs), targets) / accumulation
    loss.backward()
    if number % accumulation == 0:
        optimizer.step()
        optimizer.zero_grad()""",
    "mixed_precision": """\
with torch.autocast("cuda", dtype=torch.{torch_dtype}):
    loss = loss_function({model}(inputs), targets)
# outside the block{scaler}
loss.backward()""",
    "checkpointing": """\
from torch.utils.checkpoint import checkpoint
# in the model's forward, for each large block, not x = block(x)
x = checkpoint(block, x, use_reentrant=False)""",
    "sdpa": """\
from torch.nn.functional import scaled_dot_product_attention
out = scaled_dot_product_attention(query, key, value)""",
    "no_grad": "with torch.no_grad():\n    outputs = {model}(inputs)",
    "chunked_loss": "",
    "lora": "",
    "qlora": "",
    "offload": "",
}
_TRAINER = {
    "sdpa": _PLAIN["sdpa"],
    "mixed_precision": "TrainingArguments(..., {dtype}=True)",
    "checkpointing": """\
TrainingArguments(..., {switch}=True,
    {switch}_kwargs={{"use_reentrant": False}})""",
    "chunked_loss": "# pip install liger-kernel\nTrainingArguments(..., use_liger_kernel=True)",
    "foreach": 'TrainingArguments(..., optim="adamw_torch_fused")',
    "optimizer_8bit": 'TrainingArguments(..., optim="adamw_bnb_8bit")',
    "offload_optimizer": """\
# pip install deepspeed
# ds.json:
# {{"zero_optimization": {{"stage": 2,
#     "offload_optimizer": {{"device": "cpu"}}}},
#  "train_micro_batch_size_per_gpu": "auto",
#  "gradient_accumulation_steps": "auto"}}
TrainingArguments(..., deepspeed="ds.json")""",
    "adafactor": 'TrainingArguments(..., optim="adafactor")',
    "sgd": 'TrainingArguments(..., optim="sgd")',
    "smaller_batch_any": """\
# {sizes}
TrainingArguments(..., per_device_train_batch_size={half},
    gradient_accumulation_steps={twice})""",
    "smaller_evaluation": "TrainingArguments(..., per_device_eval_batch_size={after})",
    "later_evaluation": "TrainingArguments(..., per_device_eval_batch_size={after})",
    "smaller_batch": """\
TrainingArguments(..., per_device_train_batch_size={after},
    gradient_accumulation_steps={accumulation})""",
    "shorter_sequences": "# tokenizer(..., truncation=True, max_length={after})",  # wherever the data is made
    "gradients_in_buckets": "",
    "fully_sharded": "",
    "fsdp": """\
TrainingArguments(..., fsdp="full_shard auto_wrap")
# torchrun --nproc-per-node {gpus} train.py""",
    "eval_accumulation": "TrainingArguments(..., eval_accumulation_steps=1)",
    "kept_classes": "",  # the user's own metrics are changed
    "no_grad": "TrainingArguments(..., eval_accumulation_steps=1,\n    prediction_loss_only=True)",
}
_ACCELERATE = {
    "fully_sharded": "",
    "gradients_in_buckets": """\
from accelerate import DistributedDataParallelKwargs
ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
accelerator = Accelerator(kwargs_handlers=[ddp])""",
    "mixed_precision": 'accelerator = Accelerator(mixed_precision="{dtype}")',
    "smaller_batch": """\
accelerator = Accelerator(gradient_accumulation_steps={accumulation})
{name} = {after}
for batch in loader:
    with accelerator.accumulate({model}):
        loss = {model}(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()""",
    "fsdp": "accelerate launch --use_fsdp --num_processes {gpus} train.py",
}
_SHELL = {
    "expandable_segments": """\
# Linux, before Python starts
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# in a notebook, before torch uses the GPU:
#   import os
#   os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
# PowerShell (takes effect on Linux only):
#   $env:PYTORCH_CUDA_ALLOC_CONF = "expandable_segments:True\"""",
    "shared_memory": "docker run --shm-size=MORE ...   # MORE: a larger number than now (64m unless set)",
    "close_processes_any": "{tool}\n# then close the notebooks and programs it lists: kill <PID>",
    "check_processes": "{tool}",
    "close_processes": "nvidia-smi\n# then close the notebooks and programs it lists: kill <PID>",
}
# Their templates contain a generic loop or model: shown as code only where written into the user's own.
IN_A_LOOP = frozenset({"no_grad", "dropped_outputs", "mixed_precision", "drawn_edges"})
ACCELERATOR_SETTINGS = frozenset({"mixed_precision", "fsdp"})  # which leave the loop as it is
STYLES = {"plain": _PLAIN, "generic": _GENERIC, "trainer": _TRAINER, "accelerate": _ACCELERATE}
_TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16"}
# Default names, where the user's are not known.
_NAMES = {
    "model": "model", "loader": "AutoModelForCausalLM", "source": "name", "layers": "model.model.layers",
    "recomputed": checkpointing(["*model.model.layers"], []), "switch": "gradient_checkpointing",
    "options": "", "half": "HALF", "twice": "TWICE", "tokens": "256",
    "sizes": "HALF, TWICE: half and twice the current values",
}  # fmt: skip
_PARTS = ("layers", "language_model", "recomputed")  # of a model
_PLACE = "after the line that makes"
RUN_ONCE = "run this, then the failed cell again"
_IN_CELL = "in the cell that failed"
_CHECKPOINTS = ("checkpoint", "checkpoint_sequential")
_SCALER = "; scale it with torch.amp.GradScaler"

# The variable that sets up the allocator, where it is not CUDA's.
_ALLOCATOR_VARIABLES = {
    "hip": "PYTORCH_HIP_ALLOC_CONF", "npu": "PYTORCH_NPU_ALLOC_CONF", "xpu": "PYTORCH_ALLOC_CONF",
}  # fmt: skip


def for_backend(code: str, backend: str | None) -> str:
    """Code that was written for CUDA as it is for another backend's device."""
    device = device_name(backend)
    code = code.replace('"cuda"', f'"{device}"').replace("torch.cuda.", f"torch.{device}.")
    return code.replace("PYTORCH_CUDA_ALLOC_CONF", _ALLOCATOR_VARIABLES.get(backend or "", "PYTORCH_CUDA_ALLOC_CONF"))


def lacks_names(key: str, names: Mapping[str, str]) -> bool:
    """Whether the code for a remedy refers to a model, or to a part of a known one, that ``names`` do not have."""
    template = _PLAIN.get(key, "")
    parts = [name for name in _PARTS if f"{{{name}}}" in template]
    if (parts and all(name in names for name in parts)) or ("switched" in names and "{switched}" in template):
        return False
    return _is_of_model(template) and ("model" not in names or ("inner" in names and bool(parts)))


def _is_of_model(template: str) -> bool:
    return any(f"{{{name}}}" in template for name in (*_PARTS, "model", "inner", "switched"))


def code_for(key: str, style: str, values: Mapping[str, Any]) -> tuple[str, str]:
    """(code, its language) for a remedy; ("", "python") where there is nothing to paste.

    Code for a model that a function or script makes is told where it belongs.
    """
    if key in _SHELL:
        return _SHELL[key].replace("{tool}", str(values.get("tool", "nvidia-smi"))), "shell"
    template = STYLES[style].get(key, _PLAIN.get(key, ""))
    dtype = str(values.get("dtype", ""))
    names = {**_NAMES, **values}
    inner = names.get("inner", names["model"])
    targets = values.get("targets")  # None: no model is available; PEFT uses its defaults
    filled = template.format(
        **{
            "called": names["model"],
            "inner": inner,
            "switched": inner,
            "language_model": inner,
            "bare_layers": names["layers"],
            **names,
        }
        | {"targets": f", target_modules={targets_as_code(targets)}" if targets else ""}
        | {"limits": f',\n    max_memory={{0: "{values["limit"]}", "cpu": "999GiB"}}' if "limit" in values else ""},
        torch_dtype=_TORCH_NAMES.get(dtype, dtype),
        alpha=2 * int(values.get("rank", 0)),
        scaler=_SCALER if dtype == "fp16" else "",
        checkpoints=", ".join(one for one in _CHECKPOINTS if f"{one}," in names["recomputed"]),
    )
    if "made" in names and _is_of_model(template):
        filled = placed_after(names["made"], filled, names["function"])
    return filled, "python"


def placed_after(made: str, code: str, function: str = "") -> str:
    """Code that belongs behind the line, of a function or the cell, that makes something, as it is told."""
    return f"# {f'in {function}, ' if function else ''}{_PLACE} {made}:\n{code}"


def in_the_cell(code: str) -> str:
    """Code that belongs into the cell that failed, as it is told."""
    return f"# {_IN_CELL}:\n{code}"


def is_placed(code: str) -> bool:
    """Whether some of the code is told to belong behind another line."""
    return any(line.startswith("# ") and _PLACE in line for line in code.splitlines())


def rebinds_model(key: str) -> bool:
    """Whether the code for a remedy makes another model of the one that there is."""
    return "\n{model} = " in f"\n{_PLAIN.get(key, '')}"


def in_a_notebook(code: str) -> str:
    """The lines of a shell's code that are commented out as those of a notebook, as Python with their heading."""
    lines = [line.removeprefix("#   ") for line in code.splitlines()]
    at = next((at for at, line in enumerate(lines) if "notebook" in line), len(lines))
    return "\n".join([*lines[at : at + 1], *(one for one in lines[at + 1 :] if one.startswith(("import ", "os.")))])


def is_python(code: str) -> bool:
    """Whether a cell can contain it: Python, except for lines that call a magic."""
    try:
        ast.parse("\n".join(line for line in code.splitlines() if not line.startswith("%")))
    except SyntaxError:
        return False
    return True
