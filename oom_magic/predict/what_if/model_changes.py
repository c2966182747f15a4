"""Changes to the model: how it computes and which parts are trained."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from oom_magic.predict.isolation.patching import all_patched
from oom_magic.predict.setups.model_source import lora_targets, name_of_switch
from oom_magic.predict.what_if.change import Change, InapplicableError, library
from oom_magic.predict.what_if.optimizer_changes import optimizers_of
from oom_magic.predict.what_if.recomputed_parts import parts_of, recomputed_parts
from oom_magic.user_code import Lines, running_lines

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ActivationCheckpointing(Change):
    """Recompute activations in the backward: by Hugging Face's switch, else of ``recomputed_parts``."""

    def check(self, model: torch.nn.Module) -> None:
        """Needs Hugging Face's switch, turned off, or parts of several layers."""
        switch = _checkpointing_switch(model)
        if switch is None and not recomputed_parts(model):
            raise InapplicableError("no_blocks")
        if switch is not None and any(getattr(module, "gradient_checkpointing", False) for module in switch.modules()):
            raise InapplicableError("checkpointing_already")

    def prepare(self, model: torch.nn.Module) -> None:
        """Turn on the switch, or recompute each part."""
        switch = _checkpointing_switch(model)
        self.variant = "" if switch is not None else "blocks"
        if switch is not None:
            name = name_of_switch(type(switch))
            getattr(switch, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": False}})
            return
        parts = recomputed_parts(model)
        for block in parts.blocks_of(model):
            vars(block)["forward"] = _recomputed(block.forward)
        for path, bounds in parts.bounds:
            sequence: Any = model.get_submodule(path)
            vars(sequence)["forward"] = _recomputed_in_parts(parts_of(sequence, bounds))


def path_of_switch(model: torch.nn.Module) -> str | None:
    """The path of the (sub)module with Hugging Face's switch for checkpointing; None without one."""
    for path, module in model.named_modules():
        if name_of_switch(type(module)) and getattr(module, "supports_gradient_checkpointing", False):
            return path
    return None


def _checkpointing_switch(model: torch.nn.Module) -> Any:
    path = path_of_switch(model)
    return None if path is None else model.get_submodule(path)


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that a model repeats: its longest list of modules of one class. Raises InapplicableError."""
    path = path_of_blocks(model)
    if path is None:
        raise InapplicableError("no_equal_blocks")
    return list(model.get_submodule(path).children())


def path_of_blocks(model: torch.nn.Module) -> str | None:
    """Where a model has the blocks that it repeats: the path of its longest list of modules of one class; or None."""
    sizes: dict[str, tuple[int, int]] = {}
    for path, module in model.named_modules():
        blocks = list(module.children()) if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) else []
        if len(blocks) > 1 and len({type(block) for block in blocks}) == 1:
            sizes[path] = len(blocks), sum(1 for block in blocks for _ in block.modules())
    return max(sizes, key=lambda path: sizes[path], default=None)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def _recomputed_in_parts(parts: list[torch.nn.Module]) -> Callable[..., Any]:
    return partial(checkpoint_sequential, parts, len(parts), use_reentrant=False)


class MixedPrecision(Change):
    """``torch.autocast("cuda", dtype)`` around the model's forward; ``dtype`` is "bf16" or "fp16".

    ``with_loss``: what follows with gradients, up to the backward, is under it as well; where a run ``trains``, which a
    survey tells, calls without gradients then stay as they are, for they stand elsewhere.
    """

    trains = False

    def __init__(self, dtype: str, with_loss: bool = False) -> None:
        self.dtype = DTYPES[dtype]
        self._with_loss = with_loss
        self._open = ExitStack()
        self._is_on = False

    def check(self, model: torch.nn.Module) -> None:
        """Autocast must not be on yet."""
        if torch.is_autocast_enabled("cuda") and not self._is_on:
            raise InapplicableError("autocast_already")

    def around_call(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """``torch.autocast``, which may last until the backward."""
        if not (self._with_loss and torch.is_grad_enabled()):
            return nullcontext() if self._with_loss and self.trains else torch.autocast("cuda", self.dtype)
        if not self._is_on:
            self._open.enter_context(torch.autocast("cuda", self.dtype))
            self._is_on = True
        return nullcontext()

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """A backward ends it."""
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            self._end()
            original(*args, **kwargs)

        with all_patched([(torch.autograd, {"backward": backward})]):
            try:
                yield
            finally:
                self._end()

    def _end(self) -> None:
        self._open.close()
        self._is_on = False


class HalfWeights(Change):
    """Weights, and so gradients and optimizer state, in a 16-bit type: "bf16" or "fp16"; inputs are cast, too."""

    def __init__(self, dtype: str) -> None:
        self.dtype = DTYPES[dtype]

    def check(self, model: torch.nn.Module) -> None:
        """Some weights must be wider than 16 bits."""
        if all(p.element_size() <= 2 for p in model.parameters()):
            raise InapplicableError("weights_16_bits_already")

    def prepare(self, model: torch.nn.Module) -> None:
        """Cast the weights."""
        model.to(self.dtype)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with floating-point tensors cast to the type of the weights."""
        return tuple(map(self._narrow, args)), {name: self._narrow(value) for name, value in kwargs.items()}

    def _narrow(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == self.dtype:
            return value
        self.variant = "inputs"
        return value.to(self.dtype)


class SingleWeights(HalfWeights):
    """Weights, and so all that comes from them, in float32 instead of float64; inputs are cast, too."""

    written_as = "single_weights"

    def __init__(self) -> None:
        self.dtype = torch.float32

    def check(self, model: torch.nn.Module) -> None:
        """Some weights must be in float64."""
        if all(p.dtype != torch.float64 for p in model.parameters()):
            raise InapplicableError("no_weights_in_float64")


class AttentionKernel(Change):
    """Another attention implementation of a Hugging Face model (``"sdpa"``)."""

    def __init__(self, name: str) -> None:
        self.name = name

    def check(self, model: torch.nn.Module) -> None:
        """Needs a Hugging Face model with another implementation."""
        names = {config._attn_implementation for config in _attention_configs(model)}
        if not names:
            raise InapplicableError("no_attention_choice")
        if any(getattr(config, "output_attentions", False) for config in _attention_configs(model)):
            raise InapplicableError("attention_maps_wanted")
        if names == {self.name}:
            raise InapplicableError("attention_already", name=self.name)

    def prepare(self, model: torch.nn.Module) -> None:
        """Set the implementation in all its configurations."""
        for config in _attention_configs(model):
            config._attn_implementation = self.name

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, without requests for attention maps, which fused kernels do not return."""
        if kwargs.get("output_attentions"):
            raise InapplicableError("attention_maps_wanted")
        return args, kwargs


def _attention_configs(model: torch.nn.Module) -> list[Any]:
    configs = (getattr(module, "config", None) for module in model.modules())
    return [config for config in configs if getattr(config, "_attn_implementation", None) is not None]


class LowRankAdapters(Change):
    """LoRA: the weights frozen, adapters of this rank trained (PEFT), on the layers that a setup would choose.

    ``values`` say the ``rank`` and, once a model was checked, the ``targets``.
    """

    def __init__(self, rank: int) -> None:
        self.values: dict[str, Any] = {"rank": rank}
        self._peft = library("peft")

    def check(self, model: torch.nn.Module) -> None:
        """Needs a Hugging Face model without adapters, and an optimizer."""
        if any("lora_" in name for name, _ in model.named_parameters()):
            raise InapplicableError("adapters_already")
        if not hasattr(model, "config"):
            raise InapplicableError("no_adapters_for_it")
        optimizers_of(model)
        self.values["targets"] = _targets(model)

    def prepare(self, model: torch.nn.Module) -> None:
        """Add adapters; the optimizers train them and nothing else."""
        optimizers = optimizers_of(model)
        rank, targets = self.values["rank"], self.values["targets"]
        modules = targets if isinstance(targets, str) else list(targets)
        config = self._peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=modules)
        self._peft.inject_adapter_in_model(config, model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
            parameter.grad = None
            if parameter.requires_grad:  # as peft.get_peft_model does
                parameter.data = parameter.data.float()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for optimizer in optimizers:
            for group in optimizer.param_groups:  # a scheduler expects their number
                group["params"] = []
            optimizer.param_groups[0]["params"] = trained
            optimizer.state.clear()


def _targets(model: torch.nn.Module) -> tuple[str, ...] | str:
    """A setup's targets for models of this type; all linear layers if the names do not match."""
    targets = lora_targets(str(getattr(model.config, "model_type", "")))
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return targets if isinstance(targets, str) or names.issuperset(targets) else "all-linear"


class QuantizedAdapters(LowRankAdapters):
    """QLoRA: linear layers in 4 bits as bitsandbytes loads them, adapters trained; existing adapters stay."""

    applies_at_load = True

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._layers = library("bitsandbytes").nn

    def check(self, model: torch.nn.Module) -> None:
        """Needs linear layers that are not quantized; adapters may be there."""
        if any(isinstance(module, self._layers.Linear4bit) for module in model.modules()):
            raise InapplicableError("quantized_already")
        if not plain_linears(model):
            raise InapplicableError("no_linear_layers")
        if not _has_adapters(model):
            super().check(model)

    def prepare(self, model: torch.nn.Module) -> None:
        """Quantize the linear layers, then add adapters where there are none."""
        for owner, name, layer in plain_linears(model):
            setattr(owner, name, quantized(layer, 4).to("cuda"))
        for name, parameter in model.named_parameters():  # as peft.prepare_model_for_kbit_training does
            if parameter.dtype in DTYPES.values() and "lora_" not in name:
                parameter.data = parameter.data.float()
        if not _has_adapters(model):
            vars(model)["is_loaded_in_4bit"] = True
            super().prepare(model)


def quantized(layer: torch.nn.Linear, bits: int) -> torch.nn.Module:
    """A linear layer that bitsandbytes quantizes to 8 or 4 bits when it is moved to the GPU."""
    nn = library("bitsandbytes").nn
    size = (layer.in_features, layer.out_features, layer.bias is not None)
    made: torch.nn.Module
    if bits == 4:
        made = nn.Linear4bit(
            *size, compute_dtype=torch.bfloat16, compress_statistics=True, quant_type="nf4", device="meta"
        )
        made.weight = nn.Params4bit(
            layer.weight.detach().to(torch.bfloat16), requires_grad=False, compress_statistics=True, quant_type="nf4",
            module=made,
        )  # fmt: skip
    else:
        made = nn.Linear8bitLt(*size, has_fp16_weights=False, threshold=6.0, device="meta")
        weight = layer.weight.detach().to(torch.float16)
        made.weight = nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    made.bias = layer.bias
    return made


def _has_adapters(model: torch.nn.Module) -> bool:
    return any("lora_" in name for name, _ in model.named_parameters())


def plain_linears(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Linear]]:
    """The linear layers to quantize, with their parent modules: all but adapters and the output layer."""
    found = []
    for path, owner in model.named_modules():
        for name, layer in owner.named_children():
            is_output = name in ("lm_head", "score", "classifier", "qa_outputs")
            if type(layer) is torch.nn.Linear and not is_output and "lora_" not in f"{path}.{name}":
                found.append((owner, name, layer))
    return found


class NoGradients(Change):
    """``torch.no_grad()`` around models that evaluate: in evaluation mode, called when all training was done, or in
    lines whose graphs no backward walked.

    Not where gradients go through one to its inputs, as through the network of a perceptual loss, nor around one whose
    weights are trained though it never was in training mode.
    ``num_training_calls`` models were called until the last optimizer step of the run as it is, and ``unwalked`` are
    those lines, each with those that lead to it; a survey tells.
    """

    num_training_calls = 0
    unwalked: frozenset[Lines] = frozenset()

    def __init__(self) -> None:
        self._num_calls = 0
        self._goes_through = False
        self._trained: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def check(self, model: torch.nn.Module) -> None:
        """Gradients must be on."""
        if not torch.is_grad_enabled():
            raise InapplicableError("gradients_off_already")

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """Count calls from the start of the run."""
        self._num_calls = 0
        self._trained.clear()
        yield

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unchanged; notes whether gradients flow to the inputs."""
        given = (*args, *kwargs.values())
        self._goes_through = any(isinstance(one, torch.Tensor) and one.requires_grad for one in given)
        return args, kwargs

    def around_call(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """``torch.no_grad()`` for a call that evaluates."""
        self._num_calls += 1
        if self._num_calls > self.num_training_calls or is_within(self.unwalked):
            return torch.no_grad()
        if model.training:
            self._trained.add(model)
        evaluates = not model.training and not self._goes_through and (model in self._trained or not _is_trained(model))
        return torch.no_grad() if evaluates else nullcontext()


def is_within(places: Collection[Lines]) -> bool:
    """Whether the user's code runs one of the lines."""
    lines = running_lines() if places else ()
    return any(lines[: len(one)] == one for one in places)


def _is_trained(model: torch.nn.Module) -> bool:
    """Whether an optimizer trains weights of the model."""
    with suppress(InapplicableError):
        return bool(optimizers_of(model))
    return False


_MOST_LOGITS_BYTES = 128 * 2**20  # of a chunk, in float32; its loss and gradients take about as much four times
_TOKENS_OF_CHUNK = range(6, 11)  # powers of two: smaller chunks leave the GPU idle, larger ones are no faster


def chunk_tokens(owner: Any) -> int:
    """How many tokens' logits a Hugging Face model computes at a time: the larger its vocabulary, the fewer."""
    vocab_size = owner.config.get_text_config().vocab_size
    sizes = [2**power for power in _TOKENS_OF_CHUNK]
    return max([size for size in sizes if size * vocab_size * 4 <= _MOST_LOGITS_BYTES], default=sizes[0])


class ChunkedLoss(Change):
    """A Hugging Face language model's loss over some hundred tokens at a time: the whole logits are never
    materialized.

    An evaluation, without gradients, is as before: it goes by another line, and Liger's kernel then makes all logits.
    """

    def check(self, model: torch.nn.Module) -> None:
        """Needs a language model's head with a loss that can be replaced."""
        _language_model(model)

    def prepare(self, model: torch.nn.Module) -> None:
        """The head returns hidden states; the loss computes logits for one chunk at a time."""
        owner = _language_model(model)
        head = owner.lm_head
        project, original, size = head.forward, owner.loss_function, chunk_tokens(owner)

        def summed(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(project(hidden).float(), targets, reduction="sum")

        def loss(logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not torch.is_grad_enabled():
                return original(logits, labels, *args, **kwargs)
            hidden, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            chunks = zip(hidden.split(size), targets.split(size), strict=True)
            losses = [checkpoint(summed, *chunk, use_reentrant=False) for chunk in chunks]
            return torch.stack(losses).sum() / (targets != -100).sum()

        vars(head)["forward"] = lambda hidden: hidden if torch.is_grad_enabled() else project(hidden)
        owner.loss_function = loss


def path_of_head(model: torch.nn.Module) -> str | None:
    """Where ``model`` has the module that owns the language model's head and computes its loss; None without one."""
    for path, module in model.named_modules():
        has_head = "lm_head" in module._modules and hasattr(type(module), "loss_function")
        if has_head and not getattr(module.config, "final_logit_softcapping", None):
            return path
    return None


def _language_model(model: torch.nn.Module) -> Any:
    path = path_of_head(model)
    if path is None:
        raise InapplicableError("no_language_head")
    return model.get_submodule(path)
