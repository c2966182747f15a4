"""Training runs described by plain values, as in shared/fakecuda/truth.py; run on CUDA, or in a dry run.

A case names a Hugging Face configuration and model class, sizes, precision, optimizer and so on; ``run`` trains it and
returns what ``torch.cuda`` counted. The code is ordinary code for "cuda": the dry run sees just this.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers

Case = dict[str, Any]
_WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_AUTOCAST = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adamw-fused": ("AdamW", {"fused": True}),
    "adamw-loop": ("AdamW", {"foreach": False}),
    "adam": ("Adam", {}),
    "sgd": ("SGD", {"lr": 0.01}),
    "sgd-momentum": ("SGD", {"lr": 0.01, "momentum": 0.9}),
    "adafactor": ("Adafactor", {}),
    "rmsprop": ("RMSprop", {}),
    "adagrad": ("Adagrad", {}),
}


def make_model(case: Case) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model, on the device that torch creates on, and a batch on the host."""
    spec = case["model"]
    config = getattr(transformers, spec["config_class"])(**spec.get("config", {}))
    options = {"attn_implementation": case["attn"]} if case.get("attn") else {}
    model = getattr(transformers, spec["model_class"])._from_config(config, **options)
    if "inputs" in case:
        return model, {name: make_input(case, *how) for name, how in case["inputs"].items()}
    rows: int = case.get("batch", 1)
    columns: int = case.get("seq", 128)
    vocabulary = getattr(config.get_text_config(), "vocab_size", 1000)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(min(5, vocabulary - 1), vocabulary, shape, device="cpu")

    batch = {"input_ids": ids(rows, columns)}
    if case.get("attention_mask") == "ones":
        batch["attention_mask"] = torch.ones(rows, columns, dtype=torch.long, device="cpu")
    zeros = torch.zeros(rows, dtype=torch.long, device="cpu")
    if "SequenceClassification" in spec["model_class"]:
        batch["labels"] = zeros
    elif "QuestionAnswering" in spec["model_class"]:
        batch["start_positions"] = batch["end_positions"] = zeros
    else:
        batch["labels"] = ids(rows, case.get("target_seq", columns))
    return model, batch


def make_input(case: Case, kind: str, *shape: int) -> torch.Tensor:
    """``["float", 4, 3, 224, 224]``: numbers in the weights' type; ``["int100", 4, 64]``: integers from 5 to 99."""
    if kind == "float":
        return torch.rand(shape, dtype=_WEIGHTS.get(case.get("precision", "fp32")), device="cpu")
    if kind == "ones":
        return torch.ones(shape, dtype=torch.long, device="cpu")
    return torch.randint(5, int(kind.removeprefix("int")), shape, device="cpu")


def move(module: torch.nn.Module, device: str, moved: dict[int, Any] | None = None) -> None:
    """What ``module.to(device)`` allocates, in its order, from parameters on the meta device."""
    moved = {} if moved is None else moved
    for child in module.children():
        move(child, device, moved)
    for store in (module._parameters, module._buffers):
        for name, tensor in store.items():
            if tensor is None or tensor.device.type == device:
                continue
            if id(tensor) not in moved:
                made = torch.empty_like(tensor, device=device)
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                new = torch.nn.Parameter(made, tensor.requires_grad) if is_parameter else made
                moved[id(tensor)] = new, tensor
            store[name] = moved[id(tensor)][0]


def build(case: Case, device: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model of a case on the device, with adapters, frozen parts and checkpointing."""
    where = case.get("build", "meta")
    with torch.device(where):
        torch.set_default_dtype(_WEIGHTS.get(case.get("precision", "fp32"), torch.float32))
        try:
            model, batch = make_model(case)
        finally:
            torch.set_default_dtype(torch.float32)
    for pattern in case.get("freeze", []):
        for name, parameter in model.named_parameters():
            if re.search(pattern, name):
                parameter.requires_grad_(False)
    if case.get("lora"):
        model = with_adapters(model, case["lora"], where)
    if case.get("checkpointing"):
        kwargs = {"use_reentrant": case["checkpointing"] == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        if case.get("lora"):
            model.enable_input_require_grads()
    if where == "meta":
        move(model, device)
    elif where == "cpu":
        model = model.to(device)
    return model.train(not case.get("eval", False)), batch


def with_adapters(model: Any, lora: dict[str, Any], where: str) -> Any:
    """The model with PEFT's LoRA adapters."""
    import peft

    config = peft.LoraConfig(
        r=lora.get("r", 8),
        lora_alpha=lora.get("alpha", 16),
        lora_dropout=lora.get("dropout", 0.0),
        target_modules=lora.get("targets"),
        task_type=lora.get("task", "CAUSAL_LM"),
    )
    with torch.device(where):
        return peft.get_peft_model(model, config)


class Trainer:
    """The training loop of a case; what it counts on CUDA is in ``steps`` (one dict a step) and ``stage``."""

    def __init__(self, case: Case, device: str = "cuda") -> None:
        self.case = case
        self.device = device
        self.stage = "build"
        self.steps: list[dict[str, int]] = []

    def run(self) -> None:
        """Build, then train."""
        self.prepare()
        self.train()

    def prepare(self) -> None:
        """Make the model, the batch and the optimizer."""
        case = self.case
        self.model, self.batch = build(case, self.device)
        name, options = _OPTIMIZERS.get(case.get("optimizer", "adamw"), ("", {}))
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        make = getattr(torch.optim, name, None) if name else None
        self.optimizer = make(self.parameters, **options) if make else None
        self.scaler = torch.amp.GradScaler(self.device) if case.get("precision") == "amp-fp16" else None

    def train(self) -> None:
        """All steps."""
        kept = None
        for number in range(self.case.get("steps", 3)):
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.steps.append({"step": number + 1})
            kept = self._step()
            if self.device == "cuda":
                self._count()
        del kept

    def _count(self) -> None:
        self.steps[-1]["peak_allocated"] = torch.cuda.max_memory_allocated()
        self.steps[-1]["peak_reserved"] = torch.cuda.max_memory_reserved()

    def _step(self) -> Any:
        kept = None
        for _ in range(self.case.get("accumulate", 1)):
            kept = self._forward_and_backward()
        if self.optimizer is not None and not self.case.get("no_grad"):
            self._update(self.optimizer)
        return kept

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        dtype = _AUTOCAST.get(self.case.get("precision", "fp32"))
        with (
            torch.no_grad() if self.case.get("no_grad") else contextlib.nullcontext(),
            torch.autocast(self.device, dtype) if dtype else contextlib.nullcontext(),
        ):
            yield

    def _forward_and_backward(self) -> Any:
        self.stage = "forward"
        batch = {name: tensor.to(self.device) for name, tensor in self.batch.items()}
        with self._context():
            outputs = self.model(**batch)
        loss = outputs.loss
        if self.case.get("outputs") == "loss":
            outputs = None
        if not self.case.get("no_grad"):
            self.stage = "backward"
            (self.scaler.scale(loss) if self.scaler else loss).backward()
        return outputs if self.case.get("outputs") == "kept" else None

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        self.stage = "optimizer"
        if self.case.get("clip"):
            if self.scaler:
                self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, self.case["clip"])
        if self.scaler:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=self.case.get("set_to_none", True))
