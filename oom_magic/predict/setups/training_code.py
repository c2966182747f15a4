"""Writes the training code of a setup as a user would, with random batches as data."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from oom_magic.predict.setups.model_source import ModelSource, name_of_switch, targets_as_code

_BLOCKS = "blocks = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)"


class Machine(Protocol):
    """The settings of a TrainingSetup that this code is written from."""

    @property
    def num_gpus(self) -> int: ...
    @property
    def num_processes(self) -> int: ...
    @property
    def parallelism(self) -> str: ...


def imports_for(machine: Machine) -> list[str]:
    """The modules that the other lines need."""
    if machine.num_processes == 1:
        return []
    return ["os", "torch.distributed", *(["torch.distributed.fsdp"] if machine.parallelism == "fsdp2" else [])]


def opening(machine: Machine) -> list[str]:
    """The lines with which a process joins the job that ``torchrun`` started; none for one process."""
    if machine.num_processes == 1:
        return []
    return [
        f"# each of {machine.num_processes} processes: torchrun --nproc-per-node {machine.num_processes} train.py",
        'torch.distributed.init_process_group("nccl")',
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
    ]


def spreading(machine: Machine) -> list[str]:
    """The lines that replicate or shard a model on the GPU, before its optimizer is made."""
    if machine.num_processes == 1:
        return ["model = torch.nn.DataParallel(model)"] if machine.num_gpus > 1 else []
    if machine.parallelism == "fsdp2":
        return [
            _BLOCKS,
            "for block in blocks:",
            "    torch.distributed.fsdp.fully_shard(block)",
            "torch.distributed.fsdp.fully_shard(model)",
        ]
    return ["model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])"]


# Name: library, class, arguments.
OPTIMIZERS = {
    "adamw": ("torch", "AdamW", ""),
    "adamw-fused": ("torch", "AdamW", ", fused=True"),
    "adamw-loop": ("torch", "AdamW", ", foreach=False"),
    "adam": ("torch", "Adam", ""),
    "sgd": ("torch", "SGD", ""),
    "sgd-momentum": ("torch", "SGD", ", momentum=0.9"),
    "adafactor": ("torch", "Adafactor", ""),
    "adamw8bit": ("bitsandbytes", "AdamW8bit", ""),
    "paged-adamw8bit": ("bitsandbytes", "PagedAdamW8bit", ""),
    "paged-adamw32bit": ("bitsandbytes", "PagedAdamW32bit", ""),
}
_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
_PEFT_TASKS = {"causal-lm": "CAUSAL_LM", "sequence-classification": "SEQ_CLS", "seq2seq-lm": "SEQ_2_SEQ_LM"}
_NUM_STEPS = 100
_WIDTH = 100

# PEFT makes its adapters float32, but a classifier stays as it was loaded; GradScaler refuses float16 gradients.
_TRAINED_IN_FLOAT32 = [
    "for parameter in model.parameters():",
    "    if parameter.requires_grad:",
    "        parameter.data = parameter.data.float()",
]

_CHUNKED_LOSS = '''
head = model.get_output_embeddings()

def chunk_loss(hidden, labels):
    return F.cross_entropy(head(hidden).float(), labels, reduction="sum")

def chunked_loss(hidden, labels, tokens=1024):
    """Cross-entropy that never holds the logits of more than a chunk of tokens."""
    hidden, labels = hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    chunks = zip(hidden.split(tokens), labels.split(tokens))
    total = sum(checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks)
    return total / (labels != -100).sum()
'''.strip()


class Settings(Machine, Protocol):
    """The settings of a TrainingSetup that code is written from."""

    @property
    def method(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def lora_alpha(self) -> int: ...
    @property
    def lora_targets(self) -> tuple[str, ...] | str: ...
    @property
    def dropout(self) -> float: ...
    @property
    def microbatch_size(self) -> int: ...
    @property
    def gradient_accumulation_steps(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def target_seq_len(self) -> int | None: ...
    @property
    def precision(self) -> str: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def activation_checkpointing(self) -> bool: ...
    @property
    def attention(self) -> str: ...
    @property
    def loss(self) -> str: ...
    @property
    def frozen(self) -> tuple[str, ...]: ...
    @property
    def data(self) -> str: ...
    @property
    def num_labels(self) -> int: ...
    @property
    def max_grad_norm(self) -> float | None: ...
    @property
    def source(self) -> ModelSource: ...


def write_code(setup: Settings) -> str:
    """The code of ``setup``, ending with a newline."""
    writer = _Writer(setup)
    model = writer.ready_model()
    for module in imports_for(setup):
        writer.use(module)
    parts = [opening(setup), *model, spreading(setup), writer.loss_function()]
    return writer.joined([*parts, writer.optimizer(), writer.data(), writer.loop()])


def write_model_code(setup: Settings) -> str:
    """The part of the code that makes the model and its adapters, ready to be trained."""
    writer = _Writer(setup)
    return writer.joined(writer.ready_model())


class _Writer:
    """Gathers the imports that the parts need."""

    def __init__(self, setup: Settings) -> None:
        self.setup = setup
        self.source: ModelSource = setup.source
        self.is_amp = setup.precision.startswith("amp-")
        self.has_adapter = setup.method != "full"
        self.compute_dtype = _DTYPES[setup.precision.removeprefix("amp-")]
        # Under autocast full training keeps float32 weights; frozen weights under adapters stay 16 bits wide.
        self.weight_dtype = "torch.float32" if self.is_amp and not self.has_adapter else self.compute_dtype
        self.num_labels = getattr(self.source.config, "num_labels", setup.num_labels)
        self.imports: dict[str, set[str]] = {}  # module -> names ("": the module itself)
        self.needs_functional = False

    def ready_model(self) -> list[list[str]]:
        """The parts that make the model."""
        parts = [lines for lines in (self.model(), self.adapter(), self.frozen()) if lines]
        parts[-1].append("model.train()")
        return parts

    def joined(self, parts: list[list[str]]) -> str:
        """The non-empty parts, below the imports that they need."""
        body = "\n\n".join("\n".join(lines) for lines in parts if lines)
        return "\n".join(self.import_lines()) + "\n\n" + body + "\n"

    def import_lines(self) -> list[str]:
        """The imports that the parts written so far need."""
        self.use("torch")
        plain = [f"import {module}" for module, names in self.imports.items() if "" in names]
        plain += ["import torch.nn.functional as F"] if self.needs_functional else []
        whole = [
            f"from {module} import {', '.join(sorted(names))}"
            for module, names in self.imports.items()
            if "" not in names
        ]
        return sorted(plain) + sorted(whole)

    def use(self, module: str, name: str = "") -> str:
        """Note that ``name`` of a module, or the module itself, is needed; the name."""
        self.imports.setdefault(module, set()).add(name)
        return name

    def model(self) -> list[str]:
        """The lines that make the model, on the GPU."""
        source = self.source
        if source.factory is not None:
            return self._own_model()
        lines: list[str] = []
        auto = self.use("transformers", source.auto_class)
        arguments = self._load_arguments()
        if source.config is not None:
            settings = _own_settings(source.config)
            config_class = self.use("transformers", type(source.config).__name__)
            lines += _call(f"config = {config_class}", [f"{key}={value!r}" for key, value in settings.items()])
            lines += _call(f"model = {auto}.from_config", ["config", *arguments], '.to("cuda")')
        elif self.setup.method == "qlora":
            lines += self._quantization()
            card = 0 if self.setup.num_processes == 1 else "torch.cuda.current_device()"
            extra = ["quantization_config=quantization", f'device_map={{"": {card}}}']
            lines += _call(f"model = {auto}.from_pretrained", [_quoted(source.path), *arguments, *extra])
        else:
            lines += _call(f"model = {auto}.from_pretrained", [_quoted(source.path), *arguments], '.to("cuda")')
        if source.task in ("causal-lm", "seq2seq-lm"):
            lines.append("model.config.use_cache = False")
        if self.setup.activation_checkpointing and self.setup.method != "qlora":
            name = checkpointing_name()
            lines += _call(f"model.{name}_enable", [f"{name}_kwargs={_NOT_REENTRANT}"])
        return lines

    def _own_model(self) -> list[str]:
        factory = self.source.factory
        name = factory.__name__  # type: ignore[union-attr]
        module = getattr(factory, "__module__", "")
        comment = ""
        if module and module != "__main__":
            self.use(module, name)
        else:
            comment = "  # your own function"
        dtype = "" if self.weight_dtype == "torch.float32" else f", {self.weight_dtype}"
        return [f'model = {name}().to("cuda"{dtype}){comment}']

    def _load_arguments(self) -> list[str]:
        arguments = [
            f"{_dtype_argument()}={self.weight_dtype}",
            f'attn_implementation="{self.setup.attention}"',
        ]
        if self.source.task == "sequence-classification" and self.source.config is None:
            arguments.append(f"num_labels={self.setup.num_labels}")
        if self.source.task == "image-classification" and self.source.config is None:
            arguments += [f"num_labels={self.setup.num_labels}", "ignore_mismatched_sizes=True"]
        return arguments

    def _quantization(self) -> list[str]:
        self.use("transformers", "BitsAndBytesConfig")
        settings = ["load_in_4bit=True", 'bnb_4bit_quant_type="nf4"', "bnb_4bit_use_double_quant=True",
                    f"bnb_4bit_compute_dtype={self.compute_dtype}"]  # fmt: skip
        if "classification" in self.source.task:  # the head is trained; transformers 5 would quantize it
            settings.append('llm_int8_skip_modules=["classifier", "score"]')
        return _call("quantization = BitsAndBytesConfig", settings)

    def adapter(self) -> list[str]:
        """The lines that put adapters on it; none for full training."""
        setup = self.setup
        if not self.has_adapter:
            return []
        lines: list[str] = []
        if setup.method == "qlora":
            self.use("peft", "prepare_model_for_kbit_training")
            is_on = setup.activation_checkpointing
            arguments = [
                "model",
                f"use_gradient_checkpointing={is_on}",
                *([f"gradient_checkpointing_kwargs={_NOT_REENTRANT}"] if is_on else []),
            ]
            lines += _call("model = prepare_model_for_kbit_training", arguments)
        self.use("peft", "LoraConfig")
        self.use("peft", "get_peft_model")
        settings = [f"r={setup.rank}", f"lora_alpha={setup.lora_alpha}", f"lora_dropout={setup.dropout}",
                    f"target_modules={targets_as_code(setup.lora_targets)}"]  # fmt: skip
        task = _PEFT_TASKS.get(self.source.task)
        settings += [f'task_type="{task}"'] if task else []
        settings += ["fan_in_fan_out=True"] if self.source.model_type == "gpt2" else []  # its Conv1D is transposed
        settings += ['modules_to_save=["classifier"]'] if self.source.task == "image-classification" else []
        lines += _call("lora = LoraConfig", settings)
        lines.append("model = get_peft_model(model, lora)")
        if setup.precision == "amp-fp16" and "classification" in self.source.task:
            lines += _TRAINED_IN_FLOAT32
        return lines

    def frozen(self) -> list[str]:
        """The lines that freeze parameters by their names."""
        if not self.setup.frozen:
            return []
        return [
            f"frozen = [{', '.join(map(_quoted, self.setup.frozen))}]",
            "for name, parameter in model.named_parameters():",
            "    parameter.requires_grad = not any(part in name for part in frozen)",
        ]

    def loss_function(self) -> list[str]:
        """The loss over chunks of tokens; none for the model's own."""
        if self.setup.loss == "plain":
            return []
        self.needs_functional = True
        self.use("torch.utils.checkpoint", "checkpoint")
        base = "model.get_base_model().base_model" if self.has_adapter else "model.base_model"
        return [f"decoder = {base}", *_CHUNKED_LOSS.splitlines()]

    def optimizer(self) -> list[str]:
        """The lines that make the optimizer, and a scaler for float16."""
        library, name, arguments = OPTIMIZERS[self.setup.optimizer]
        if library == "torch":
            optimizer = f"torch.optim.{name}"
        else:
            self.use("bitsandbytes")
            optimizer = f"bitsandbytes.optim.{name}"
        rate = "2e-4" if self.has_adapter else "2e-5"
        lines = []
        if self.has_adapter or self.setup.frozen:
            lines.append("parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]")
        else:
            lines.append("parameters = list(model.parameters())")
        lines.append(f"optimizer = {optimizer}(parameters, lr={rate}{arguments})")
        return lines + (['scaler = torch.amp.GradScaler("cuda")'] if self.setup.precision == "amp-fp16" else [])

    def data(self) -> list[str]:
        """A generator of random batches."""
        count = _NUM_STEPS * self.setup.gradient_accumulation_steps
        head = ["# Random batches stand in for your data: use your own DataLoader here.", "def data_loader():"]
        return [*head, f"    for _ in range({count}):", *(f"        {line}" for line in self._batch())]

    def _batch(self) -> list[str]:
        setup, task, dims = self.setup, self.source.task, self.source.dims
        size = setup.microbatch_size
        if task == "image-classification":
            side, channels = dims.get("image_size", 224), dims.get("num_channels", 3)
            dtype = "" if self.weight_dtype == "torch.float32" else f", dtype={self.weight_dtype}"
            return [
                f"images = torch.randn({size}, {channels}, {side}, {side}{dtype})",
                f'yield {{"pixel_values": images, "labels": torch.randint({self.num_labels}, ({size},))}}',
            ]
        lines = [f"input_ids = torch.randint({dims.get('vocab_size', 100)}, ({size}, {setup.seq_len}))"]
        entries = ['"input_ids": input_ids']
        if setup.data == "padded":
            lines.append("attention_mask = torch.ones_like(input_ids)")
            lines.append(f"attention_mask[0, {max(setup.seq_len // 2, 1)}:] = 0  # the first sequence is shorter")
            entries.append('"attention_mask": attention_mask')
        entries.append(f'"labels": {self._labels(lines)}')
        return [*lines, f"yield {{{', '.join(entries)}}}"]

    def _labels(self, lines: list[str]) -> str:
        setup, task = self.setup, self.source.task
        if task == "sequence-classification":
            return f"torch.randint({self.num_labels}, ({setup.microbatch_size},))"
        if task == "seq2seq-lm":
            length = setup.target_seq_len or setup.seq_len
            return f"torch.randint({self.source.dims['vocab_size']}, ({setup.microbatch_size}, {length}))"
        if setup.data == "padded":
            lines.append("labels = input_ids.masked_fill(attention_mask == 0, -100)")
            return "labels"
        return "input_ids.clone()"

    def loop(self) -> list[str]:
        """The training loop."""
        setup = self.setup
        count = setup.gradient_accumulation_steps
        is_accumulated = count > 1
        forward = self._forward()
        if is_accumulated:
            forward[-1] += f" / {count}"
        if self.is_amp:
            forward = [f'with torch.autocast("cuda", dtype={self.compute_dtype}):', *_indented(forward)]
        is_scaled = setup.precision == "amp-fp16"
        body = ['batch = {name: tensor.to("cuda") for name, tensor in batch.items()}', *forward]
        body.append("scaler.scale(loss).backward()" if is_scaled else "loss.backward()")
        if self.has_adapter and setup.activation_checkpointing:
            # PEFT makes the first hidden state a leaf that collects a gradient; the graph holds both.
            body.append("loss = loss.detach()  # frees the graph before the next forward pass")
        step = self._step(is_scaled)
        body += [f"if step % {count} == 0:", *_indented(step)] if is_accumulated else step
        head = "for step, batch in enumerate(data_loader(), 1):" if is_accumulated else "for batch in data_loader():"
        return [head, *_indented(body)]

    def _forward(self) -> list[str]:
        if self.setup.loss == "chunked":
            return [
                'labels = batch.pop("labels")',
                "loss = chunked_loss(decoder(**batch).last_hidden_state, labels)",
            ]
        if self.source.task == "own":
            self.needs_functional = True
            return [
                'loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, -2), batch["labels"].flatten())',
            ]
        return ["loss = model(**batch).loss" + (".mean()" if self.setup.num_gpus > 1 else "")]  # one of each GPU

    def _step(self, is_scaled: bool) -> list[str]:
        lines = []
        if self.setup.max_grad_norm is not None:
            lines += ["scaler.unscale_(optimizer)"] if is_scaled else []
            lines.append(f"torch.nn.utils.clip_grad_norm_(parameters, {self.setup.max_grad_norm})")
        lines += ["scaler.step(optimizer)", "scaler.update()"] if is_scaled else ["optimizer.step()"]
        return [*lines, "optimizer.zero_grad()"]


_NOT_REENTRANT = '{"use_reentrant": False}'


def _quoted(text: str | None) -> str:
    return json.dumps(text, ensure_ascii=False)


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _call(target: str, arguments: list[str], ending: str = "") -> list[str]:
    line = f"{target}({', '.join(arguments)}){ending}"
    if len(line) <= _WIDTH:
        return [line]
    rows, row = [], ""
    for argument in arguments:
        if row and len(row) + len(argument) > _WIDTH - 8:
            rows.append(row)
            row = ""
        row += ("" if not row else " ") + argument + ","
    return [f"{target}(", *_indented([*rows, row]), f"){ending}"]


def _own_settings(config: Any) -> dict[str, Any]:
    """The settings in which this configuration differs from its class's defaults."""
    default = type(config)().to_dict()
    skipped = {"transformers_version", "torch_dtype", "dtype", "architectures"}
    plain = config.to_dict()
    return {key: value for key, value in plain.items() if key not in skipped and default.get(key) != value}


def checkpointing_name() -> str:
    """What the installed transformers calls activation checkpointing: since 5.23 ``gradient_checkpointing`` warns."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return "gradient_checkpointing"
    return name_of_switch(PreTrainedModel)


def _dtype_argument() -> str:
    """``from_pretrained(torch_dtype=)`` became ``dtype=`` in transformers 4.56."""
    try:
        numbers = version("transformers").split(".")
        return "dtype" if (int(numbers[0]), int(numbers[1])) >= (4, 56) else "torch_dtype"
    except (PackageNotFoundError, ValueError):
        return "dtype"
