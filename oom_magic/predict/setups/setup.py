"""TrainingSetup: a training run described by its settings, its code and its memory."""

from __future__ import annotations

import inspect
import linecache
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from oom_magic.errors import InvalidSettingError
from oom_magic.inputs import parse_bytes
from oom_magic.language import Language, Plural, Sentences, _, choose_language, render
from oom_magic.one_line_errors import OneLineErrors
from oom_magic.predict.setups.gpus import DEFAULT_GPU, find_gpu
from oom_magic.predict.setups.hardware import Hardware
from oom_magic.predict.setups.model_source import ModelSource, folder_in_hub_cache, resolve_model
from oom_magic.predict.setups.training_code import OPTIMIZERS, write_code
from oom_magic.results import Result
from oom_magic.units import format_bytes

if TYPE_CHECKING:
    from oom_magic.memory.report import MemoryReport
    from oom_magic.predict.sizing.sizes import Sizes

Phrase = tuple[str, dict[str, Any]]  # a key of PHRASES and the values that it names

PHRASES: Sentences = {
    "setting": "{value}",
    "full": "full fine-tuning",
    "lora": "LoRA of rank {rank}",
    "qlora": "QLoRA of rank {rank}",
    "batch": "batch {batch}",
    "batch_of_tokens": "batch {batch} x {seq} tokens",
    "accumulation": Plural("accumulated {times} time", "accumulated {times} times", "times"),
    "checkpointing": "activation checkpointing",
    "attention": "{name} attention",
    "chunked_loss": "chunked loss",
    "replicas": "{number} GPUs (DataParallel)",
    "ddp": "{number} processes (DDP)",
    "fsdp2": "{number} processes (FSDP2)",
    "card": "on {gpu} ({total})",
}


def in_words(phrases: Sequence[Phrase], lang: Language) -> str:
    """The phrases in one line."""
    return ", ".join(render(PHRASES[key], lang, values) for key, values in phrases)


_T = TypeVar("_T")
CODE_FILE = "TrainingSetup code"  # how its lines are named in a report

_CHOICES: dict[str, tuple[str, ...]] = {
    "method": ("full", "lora", "qlora"),
    "precision": ("fp32", "bf16", "fp16", "amp-bf16", "amp-fp16"),
    "optimizer": tuple(OPTIMIZERS),
    "attention": ("sdpa", "eager", "flash_attention_2"),
    "loss": ("plain", "chunked"),
    "data": ("packed", "padded"),
    "parallelism": ("ddp", "fsdp2"),
}
_COUNTS = (
    "rank",
    "microbatch_size",
    "gradient_accumulation_steps",
    "seq_len",
    "num_labels",
    "num_gpus",
    "num_processes",
)


def _naming_the_closest(cls: type[_T]) -> type[_T]:
    """Decorator: ``__init__`` suggests the closest field for an unknown name."""
    init: Any = cls.__init__

    @wraps(init)
    def checked(self: _T, *args: Any, **given: Any) -> None:
        _check_names(given)
        init(self, *args, **given)

    cls.__init__ = checked  # type: ignore[method-assign, assignment]
    return cls


@_naming_the_closest
@dataclass(frozen=True)
class TrainingSetup(Result):
    """A training run: the model, how it is trained, with what batches, on which card.

    ``model`` is a preset's name ("qwen2.5-7b"), a folder with ``config.json``, a transformers configuration, or a named
    function that returns an ``nn.Module`` from token ids to logits.
    ``precision`` is the type of the weights ("fp32", "bf16", "fp16"), or autocast with float32 weights ("amp-bf16",
    "amp-fp16"); weights that LoRA and QLoRA freeze have 16 bits in both cases.
    ``num_gpus`` cards are used by one process (DataParallel, which splits each microbatch), or one card by each of
    ``num_processes``, which hold replicas ("ddp") or shards ("fsdp2") of the model and a microbatch each.
    Raises ValueError with field, value and what is allowed, if settings are wrong, alone or together.
    """

    model: Any
    method: str = "full"  # "lora", "qlora"
    rank: int = 16
    alpha: int | None = None  # default: twice the rank
    target_modules: tuple[str, ...] | str | None = None  # default: PEFT's choice for the model
    dropout: float = 0.0
    microbatch_size: int = 1
    gradient_accumulation_steps: int = 1
    seq_len: int = 512
    target_seq_len: int | None = None  # of encoder-decoder models
    precision: str = "bf16"
    optimizer: str = "adamw"
    activation_checkpointing: bool = False
    attention: str = ""  # default: transformers' choice for the model
    loss: str = "plain"  # "chunked"
    frozen: tuple[str, ...] = ()  # parts of names of parameters that are not trained
    data: str = "packed"  # all sequences are full; "padded": with an attention mask
    num_labels: int = 2
    max_grad_norm: float | None = None  # None: gradients are not clipped
    gpu: str = DEFAULT_GPU
    memory: str | int | None = None  # the card's capacity, if another
    num_gpus: int = 1
    num_processes: int = 1
    parallelism: str = "ddp"

    def __post_init__(self) -> None:
        """Raises InvalidSettingError for values that are wrong, alone or together."""
        for name in ("target_modules", "frozen"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        if not self.attention:
            object.__setattr__(self, "attention", self.source.attention)
        _check_fields(self)
        _check_combination(self)

    @cached_property
    def source(self) -> ModelSource:
        """Where the model comes from and the sizes known of it."""
        return resolve_model(self.model)

    @property
    def lora_alpha(self) -> int:
        """LoRA's scaling numerator: twice the rank unless given."""
        return 2 * self.rank if self.alpha is None else self.alpha

    @property
    def lora_targets(self) -> tuple[str, ...] | str:
        """The layers that get an adapter."""
        return self.source.lora_targets if self.target_modules is None else self.target_modules

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step, of all processes."""
        return self.microbatch_size * self.gradient_accumulation_steps * self.num_processes

    @property
    def machine(self) -> dict[str, int]:
        """The settings of ``dry_run`` for these GPUs."""
        return {"num_gpus": self.num_gpus} if self.num_processes == 1 else {"num_processes": self.num_processes}

    def code(self) -> str:
        """The training code, ready to paste: it is what ``dry_run`` runs."""
        return write_code(self)

    def train(self) -> None:
        """Run the code."""
        text = self.code()
        linecache.cache[CODE_FILE] = (len(text), None, text.splitlines(keepends=True), CODE_FILE)
        namespace: dict[str, Any] = {"__name__": "__main__"}
        if self.source.factory is not None:
            namespace[self.source.factory.__name__] = self.source.factory
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of libraries, about names that the user did not write
            exec(compile(text, CODE_FILE, "exec"), namespace)

    def _rehearse(self) -> None:
        """Run the code in a dry run, without warnings of libraries about code that the user did not write."""
        before = logging.root.manager.disable
        logging.disable(max(before, logging.WARNING))
        try:
            self.train()
        finally:
            logging.disable(before)

    def dry_run(self, **options: Any) -> MemoryReport:
        """A dry run of the code on ``gpu``; ``options`` go to ``oom_magic.dry_run``."""
        from oom_magic.predict.dry_run import dry_run

        known = [*inspect.signature(dry_run).parameters][2:-1]
        for name in options:
            if name not in known:
                offer = ", ".join(known)
                raise TypeError(
                    _(
                        "dry_run() of a TrainingSetup has no option {name!r}, only {offer}; change fields with"
                        " replace().",
                        name=name,
                        offer=offer,
                    )
                )
        return dry_run(self._rehearse, **{"gpu": self.gpu, "memory": self.memory, **self.machine, **options})

    def sizes(self, **ranges: Any) -> Sizes:
        """The memory as a function of fields: ``setup.sizes(microbatch_size=(1, 32), seq_len=(128, 4096))``."""
        with OneLineErrors("function"):
            sizes = self.untraced_sizes(**ranges)
            sizes.trace()
        return sizes

    @property
    def identity(self) -> Any:
        """The key of its stored sizes, without the environment; None if names do not determine the model."""
        is_alone = self.num_gpus == self.num_processes == 1  # else buckets go across layers
        if self.source.num_layers is None or not is_alone:
            return None
        return self.to_dict(), self.code(), local_configurations(self.source.path)

    def untraced_sizes(self, *, stop_after_steps: int = 3, **ranges: Any) -> Sizes:
        """The memory as a function of fields, not traced yet."""
        from oom_magic.predict.setups.models import only_layers
        from oom_magic.predict.sizing.layered import Layers
        from oom_magic.predict.sizing.ranges import Ranges
        from oom_magic.predict.sizing.sizes import Sizes

        for name in ("gpu", "memory", "num_gpus", "num_processes"):
            if name in ranges:
                raise ValueError(
                    _("{name} is not a size of the run: use setup.replace({name}=...).sizes(...).", name=name)
                )
        _check_names(ranges)

        def train(**values: Any) -> None:
            self.replace(**values)._rehearse()

        train.__name__ = self.source.label
        known, count = self.identity, self.source.num_layers
        layers = None if known is None or count is None else Layers(count, only_layers)
        hardware = Hardware.of(self.gpu, self.memory, **self.machine)
        options: dict[str, Any] = {"layers": layers, "identity": lambda: known, "stop_after_steps": stop_after_steps}
        options["card"] = 0  # nn.DataParallel fills the first
        return Sizes(train, Ranges.parse(train, ranges), hardware, **options)

    def replace(self, **changes: Any) -> TrainingSetup:
        """The setup with some fields changed."""
        _check_names(changes)
        return replace(self, **changes)

    def phrases(self) -> list[Phrase]:
        """The setup in one line, as keys of ``PHRASES`` with their values."""
        batch = {"batch": self.microbatch_size, "seq": self.seq_len}
        has_tokens = self.source.task != "image-classification"
        card = find_gpu(self.gpu)
        total_bytes = card.total_bytes if self.memory is None else parse_bytes(self.memory)
        said: list[tuple[bool, str, dict[str, Any]]] = [
            (True, "setting", {"value": self.source.label}),
            (True, self.method, {"rank": self.rank}),
            (True, "setting", {"value": self.precision}),
            (True, "setting", {"value": self.optimizer}),
            (True, "batch_of_tokens" if has_tokens else "batch", batch),
            (self.gradient_accumulation_steps > 1, "accumulation", {"times": self.gradient_accumulation_steps}),
            (self.activation_checkpointing, "checkpointing", {}),
            (self.attention != "sdpa", "attention", {"name": self.attention}),
            (self.loss == "chunked", "chunked_loss", {}),
            (self.num_gpus > 1, "replicas", {"number": self.num_gpus}),
            (self.num_processes > 1, self.parallelism, {"number": self.num_processes}),
            (True, "card", {"gpu": card.name, "total": format_bytes(total_bytes)}),
        ]
        return [(key, values) for is_said, key, values in said if is_said]

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data; a configuration or function by its name."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        if not isinstance(self.model, str):
            plain["model"] = self.source.label
        return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}

    @property
    def summary(self) -> str:
        """The setup in one line."""
        return in_words(self.phrases(), choose_language())

    def __str__(self) -> str:
        return self.summary


def _check_names(names: Any) -> None:
    known = [field.name for field in fields(TrainingSetup)]
    for name in names:
        if name not in known:
            raise InvalidSettingError("no_field", name=name, offer=_closest(name, known))


def _closest(value: Any, allowed: Any) -> list[str]:
    return get_close_matches(str(value), allowed, n=1, cutoff=0.4)


def _check_fields(setup: TrainingSetup) -> None:
    for name, allowed in _CHOICES.items():
        value = getattr(setup, name)
        if value not in allowed:
            offer = _closest(value, allowed)
            raise InvalidSettingError("not_one_of", name=name, value=value, allowed=", ".join(allowed), offer=offer)
    for name in (*_COUNTS, *(n for n in ("alpha", "target_seq_len") if getattr(setup, n) is not None)):
        value = getattr(setup, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidSettingError("not_a_count", name=name, value=repr(value))
    if not isinstance(setup.dropout, (int, float)) or not 0 <= setup.dropout < 1:
        raise InvalidSettingError("not_a_fraction", name="dropout", value=repr(setup.dropout))
    if setup.max_grad_norm is not None and not setup.max_grad_norm > 0:
        raise InvalidSettingError("not_positive", name="max_grad_norm", value=repr(setup.max_grad_norm))
    find_gpu(setup.gpu)
    if setup.memory is not None:
        parse_bytes(setup.memory)


def _check_combination(setup: TrainingSetup) -> None:
    source = setup.source
    values: dict[str, Any] = {
        "frozen": setup.frozen,
        "gpu": setup.gpu,
        "seq": setup.seq_len,
        "positions": source.max_seq_len,
        "model": source.label,
        "gpus": setup.num_gpus,
        "processes": setup.num_processes,
        "optimizer": setup.optimizer,
    }
    for key, is_wrong in wrong_combinations(setup).items():
        if is_wrong:
            raise InvalidSettingError(key, **values)
    if setup.method != "full":
        _check_adapter(setup)


def wrong_combinations(setup: TrainingSetup) -> dict[str, bool]:
    """Settings that do not go together, by the key of the error: whether the setup has them."""
    return {**_wrong_on_one_card(setup), **_wrong_on_several(setup)}


def _wrong_on_one_card(setup: TrainingSetup) -> dict[str, bool]:
    source = setup.source
    is_own = source.task == "own"
    is_flash = setup.attention == "flash_attention_2"
    return {
        "qlora_of_no_file": setup.method == "qlora" and source.path is None,
        "qlora_in_32_bits": setup.method == "qlora" and setup.precision == "fp32",
        "frozen_and_adapters": bool(setup.frozen) and setup.method != "full",
        "chunked_loss_without_logits": setup.loss == "chunked" and source.task != "causal-lm",
        "chunked_loss_and_soft_cap": setup.loss == "chunked" and source.model_type == "gemma2",
        "checkpointing_of_own_model": setup.activation_checkpointing and is_own,
        "padded_without_mask": setup.data == "padded" and source.task in ("own", "image-classification"),
        "no_target_modules": is_own and setup.method == "lora" and setup.target_modules is None,
        "flash_in_32_bits": is_flash and setup.precision == "fp32",
        "flash_on_old_card": is_flash and find_gpu(setup.gpu).capability < (8, 0),
        "flash_of_t5": is_flash and source.model_type == "t5",
        "longer_than_positions": source.max_seq_len is not None and setup.seq_len > source.max_seq_len,
    }


def _wrong_on_several(setup: TrainingSetup) -> dict[str, bool]:
    return {
        "gpus_and_processes": setup.num_gpus > 1 and setup.num_processes > 1,
        "chunked_loss_of_several": setup.loss == "chunked" and max(setup.num_gpus, setup.num_processes) > 1,
        "replicas_in_4_bits": setup.method == "qlora" and setup.num_gpus > 1,
        "shards_of_one": setup.parallelism == "fsdp2" and setup.num_processes == 1,
        "shards_of_adapters": setup.parallelism == "fsdp2" and setup.method != "full",
        "shards_stepped_by_others": setup.parallelism == "fsdp2" and OPTIMIZERS[setup.optimizer][0] != "torch",
        "shards_scaled": setup.parallelism == "fsdp2" and setup.precision == "amp-fp16",
        "shards_of_old_torch": setup.parallelism == "fsdp2" and not _follows_shards(),
    }


def _follows_shards() -> bool:
    """Whether FSDP2 can be followed: not that of PyTorch 2.6, whose shards reject the gradients of a dry run, and which
    does not have this method yet."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_reshard_after_forward")


def _check_adapter(setup: TrainingSetup) -> None:
    layers = setup.source.linear_layers
    targets = setup.lora_targets
    model = setup.source.label
    if targets == "all-linear":
        targets = tuple(layers)
    for name in (targets,) if isinstance(targets, str) else targets:
        last = name.split(".")[-1]
        if layers and last not in layers:
            known = ", ".join(layers)
            raise InvalidSettingError(
                "no_such_layer", name=name, model=model, known=known, offer=_closest(last, layers)
            )
        if layers and setup.rank > layers[last]:
            raise InvalidSettingError("rank_above_layer", rank=setup.rank, layer=last, model=model, width=layers[last])


def local_configurations(hub_id: str | None) -> list[tuple[str, int, int]]:
    """Path, size and time of each file that decides which configuration a dry run finds.

    That is a folder of the same name, else what the Hugging Face cache holds, of the revision that it names.
    """
    if hub_id is None:
        return []
    files = [Path(hub_id, "config.json").absolute()]
    own = folder_in_hub_cache(hub_id, "models")
    if own is not None:
        files += [*own.glob("snapshots/*/config.json"), *own.glob("refs/*")]
    stats = [(str(file), file.stat()) for file in sorted(files) if file.is_file()]
    return [(name, about.st_size, about.st_mtime_ns) for name, about in stats]
