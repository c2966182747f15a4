"""Changes to a training run, made to the pretended objects while it is rehearsed: what would this remedy save?

A change never touches the user's code: it acts on the model before its first step, or around each of its calls. The
user's objects are put back after the run like anything else a dry run does to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from oom_magic.predict.following.live_objects import find_live_objects


class InapplicableError(Exception):
    """A change that this model or this machine does not allow, in words."""


class Change:
    """The base of all changes: nothing is changed."""

    def prepare(self, model: torch.nn.Module) -> None:
        """Act on the outermost module before it runs first. Raises InapplicableError."""

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the outermost module is called with instead."""
        return args, kwargs

    def around_call(self) -> AbstractContextManager[Any]:
        """A context for each call of the outermost module."""
        return nullcontext()

    def around_run(self) -> AbstractContextManager[Any]:
        """A context for the whole run."""
        return nullcontext()


class ActivationCheckpointing(Change):
    """Recompute each block's activations in the backward: by Hugging Face's switch, else in the longest list."""

    def prepare(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            enable = getattr(module, "gradient_checkpointing_enable", None)
            if enable is not None and getattr(module, "supports_gradient_checkpointing", False):
                if getattr(module, "is_gradient_checkpointing", False):
                    raise InapplicableError("activation checkpointing is on already")
                enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                return
        for block in repeated_blocks(model):
            vars(block)["forward"] = _recomputed(block.forward)


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that a model repeats: its longest list of modules of one class. Raises InapplicableError."""
    lists = [list(m.children()) for m in model.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential))]
    alike = [blocks for blocks in lists if len(blocks) > 1 and len({type(block) for block in blocks}) == 1]
    if not alike:
        raise InapplicableError("the model has no list of equal blocks to checkpoint")
    return max(alike, key=lambda blocks: (len(blocks), sum(1 for block in blocks for _ in block.modules())))


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MixedPrecision(Change):
    """``torch.autocast("cuda", dtype)`` around the model's forward; ``dtype`` is "bf16" or "fp16"."""

    def __init__(self, dtype: str) -> None:
        self.dtype = _DTYPES[dtype]

    def around_call(self) -> AbstractContextManager[Any]:
        if torch.is_autocast_enabled("cuda"):
            raise InapplicableError("autocast is on already")
        return torch.autocast("cuda", self.dtype)


class HalfWeights(Change):
    """Weights, and so gradients and optimizer state, in a 16-bit type: "bf16" or "fp16"."""

    def __init__(self, dtype: str) -> None:
        self.dtype = _DTYPES[dtype]

    def prepare(self, model: torch.nn.Module) -> None:
        if all(p.element_size() <= 2 for p in model.parameters()):
            raise InapplicableError("the weights have 16 bits or fewer already")
        model.to(self.dtype)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(self._narrow, args)), {name: self._narrow(value) for name, value in kwargs.items()}

    def _narrow(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class AttentionKernel(Change):
    """Another attention implementation of a Hugging Face model (``"sdpa"``)."""

    def __init__(self, name: str) -> None:
        self.name = name

    def prepare(self, model: torch.nn.Module) -> None:
        inner = getattr(model, "base_model", model)
        config = getattr(inner, "config", None) or getattr(model, "config", None)
        if getattr(config, "_attn_implementation", None) is None:
            raise InapplicableError("the model has no choice of attention kernels")
        if config._attn_implementation == self.name:  # type: ignore[union-attr]
            raise InapplicableError(f"the attention is {self.name} already")
        for module in model.modules():
            known = getattr(module, "config", None)
            if getattr(known, "_attn_implementation", None) is not None:
                known._attn_implementation = self.name  # type: ignore[union-attr]


class OptimizerOptions(Change):
    """Options of the optimizers in use, such as ``foreach=False`` or ``fused=True``."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def prepare(self, model: torch.nn.Module) -> None:
        for optimizer in optimizers_of(model):
            unknown = [name for name in self.options if name not in optimizer.defaults]
            if unknown:
                raise InapplicableError(f"{type(optimizer).__name__} has no option {unknown[0]}")
            for group in optimizer.param_groups:
                group.update(self.options)


class OtherOptimizer(Change):
    """Another optimizer over the same parameters. ``make(parameters, lr)`` builds it."""

    def __init__(self, make: Callable[[Any, float], torch.optim.Optimizer]) -> None:
        self.make = make
        self._classes: list[tuple[torch.optim.Optimizer, type]] = []

    def prepare(self, model: torch.nn.Module) -> None:
        for optimizer in optimizers_of(model):
            groups = [{"params": group["params"]} for group in optimizer.param_groups]
            made = self.make(groups, float(optimizer.param_groups[0].get("lr") or 1e-3))
            if type(made) is type(optimizer):
                raise InapplicableError(f"the optimizer is {type(made).__name__} already")
            self._classes.append((optimizer, type(optimizer)))
            optimizer.__class__ = type(made)  # whoever holds the optimizer now has the other one
            vars(optimizer).clear()
            vars(optimizer).update(vars(made))

    @contextmanager
    def around_run(self) -> Iterator[None]:
        try:
            yield
        finally:
            for optimizer, kind in self._classes:
                optimizer.__class__ = kind
            self._classes.clear()


def eight_bit_adamw() -> OtherOptimizer:
    """bitsandbytes' AdamW with 8-bit state. Raises InapplicableError where it is not installed."""
    try:
        adamw: Any = import_module("bitsandbytes.optim").AdamW8bit
    except ImportError:
        raise InapplicableError("bitsandbytes is not installed") from None
    return OtherOptimizer(lambda groups, lr: adamw(groups, lr=lr))


def adafactor() -> OtherOptimizer:
    """PyTorch's Adafactor."""
    return OtherOptimizer(lambda groups, lr: torch.optim.Adafactor(groups, lr=lr))


def sgd() -> OtherOptimizer:
    """Stochastic gradient descent without momentum."""
    return OtherOptimizer(lambda groups, lr: torch.optim.SGD(groups, lr=lr))


def optimizers_of(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """The live optimizers that train parameters of ``model``. Raises InapplicableError when there is none."""
    own = {id(parameter) for parameter in model.parameters()}
    found = [
        obj
        for obj in find_live_objects().tools
        if isinstance(obj, torch.optim.Optimizer)
        and any(id(parameter) in own for group in obj.param_groups for parameter in group["params"])
    ]
    if not found:
        raise InapplicableError("no optimizer of this model is known before its first step")
    return found


class LowRankAdapters(Change):
    """LoRA: the weights frozen, adapters of this rank trained (PEFT, on all linear layers)."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def prepare(self, model: torch.nn.Module) -> None:
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError:
            raise InapplicableError('LoRA needs peft: pip install "oom_magic[hf]"') from None
        if any("lora_" in name for name, _ in model.named_parameters()):
            raise InapplicableError("the model has adapters already")
        optimizers = optimizers_of(model)
        config = LoraConfig(r=self.rank, lora_alpha=2 * self.rank, target_modules="all-linear")
        inject_adapter_in_model(config, model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
            parameter.grad = None
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for optimizer in optimizers:
            optimizer.param_groups[0]["params"] = trained
            del optimizer.param_groups[1:]
            optimizer.state.clear()


class NoGradients(Change):
    """``torch.no_grad()`` around the model, as in an evaluation."""

    def around_call(self) -> AbstractContextManager[Any]:
        if not torch.is_grad_enabled():
            raise InapplicableError("gradients are off already")
        return torch.no_grad()


class ShorterInputs(Change):
    """The model called with less along one dimension (0: fewer samples, 1: shorter sequences)."""

    def __init__(self, dimension: int, before: int, after: int) -> None:
        self.dimension = dimension
        self.before = before
        self.after = after

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(self._cut, args)), {name: self._cut(value) for name, value in kwargs.items()}

    def _cut(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() <= self.dimension:
            return value
        if value.shape[self.dimension] != self.before:
            return value
        return value.narrow(self.dimension, 0, self.after)


class ChunkedLoss(Change):
    """A Hugging Face language model's loss over a thousand tokens at a time: the whole logits are never there."""

    TOKENS = 1024

    def prepare(self, model: torch.nn.Module) -> None:
        owner: Any = next((m for m in model.modules() if hasattr(m, "lm_head") and hasattr(m, "loss_function")), None)
        if owner is None or getattr(getattr(owner, "config", None), "final_logit_softcapping", None):
            raise InapplicableError("the model has no plain language model head")
        head = owner.lm_head
        project = head.forward

        def summed(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(project(hidden).float(), targets, reduction="sum")

        def loss(logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            hidden = logits[:, :-1].flatten(0, 1).split(self.TOKENS)
            targets = labels[:, 1:].flatten().split(self.TOKENS)
            parts = [checkpoint(summed, *part, use_reentrant=False) for part in zip(hidden, targets, strict=True)]
            return torch.stack(parts).sum() / labels.numel()

        vars(head)["forward"] = lambda hidden: hidden
        owner.loss_function = loss
