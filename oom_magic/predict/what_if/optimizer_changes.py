"""Changes to the optimizer: another one, other options, its state elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch

from oom_magic.half_built import is_built
from oom_magic.predict.isolation.context import steps_hooked
from oom_magic.predict.isolation.live_objects import find_live_objects
from oom_magic.predict.libraries.bitsandbytes_ops import complaints_muted
from oom_magic.predict.what_if.change import Change, InapplicableError, library


def optimizers_of(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """The live optimizers that train parameters of ``model``, without wrappers such as accelerate's and Lightning's.

    Raises InapplicableError when there is none.
    """
    own = {id(parameter) for parameter in model.parameters()}
    found = [
        obj
        for obj in find_live_objects().tools
        if isinstance(obj, torch.optim.Optimizer)
        and is_built(obj)
        and not any(isinstance(one, torch.optim.Optimizer) for one in vars(obj).values())
        and any(id(parameter) in own for group in obj.param_groups for parameter in group["params"])
    ]
    if not found:
        raise InapplicableError("no_optimizer")
    return found


class OptimizerOptions(Change):
    """Options of the optimizers in use, such as ``foreach=False`` or ``fused=True``."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def check(self, model: torch.nn.Module) -> None:
        """Every optimizer must have the options."""
        for optimizer in optimizers_of(model):
            for name in self.options:
                if name not in optimizer.defaults:
                    raise InapplicableError("no_such_option", optimizer=type(optimizer).__name__, option=name)

    def prepare(self, model: torch.nn.Module) -> None:
        """Set them in all parameter groups."""
        for optimizer in optimizers_of(model):
            for group in optimizer.param_groups:
                group.update(self.options)


class OtherOptimizer(Change):
    """Another optimizer, ``kind(parameters, lr=...)``, over the same parameters."""

    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        self.kind = kind
        self._classes: list[tuple[ReferenceType[torch.optim.Optimizer], type]] = []  # what the run drops goes

    def check(self, model: torch.nn.Module) -> None:
        """Some optimizer must be of another class, none a method of its own that evaluates the loss repeatedly."""
        found = optimizers_of(model)
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in found):
            raise InapplicableError("optimizer_evaluates")
        if all(type(optimizer) is self.kind for optimizer in found):
            raise InapplicableError("optimizer_already", name=self.kind.__name__)

    def prepare(self, model: torch.nn.Module) -> None:
        """Change the class of the optimizers in use, keeping parameters and learning rate."""
        for optimizer in optimizers_of(model):
            if type(optimizer) is self.kind:
                continue
            groups = [{"params": group["params"]} for group in optimizer.param_groups]
            made = self.kind(groups, lr=float(optimizer.param_groups[0].get("lr") or 1e-3))  # type: ignore[call-arg]
            self._classes.append((ref(optimizer), type(optimizer)))
            optimizer.__class__ = type(made)  # every reference to the optimizer now leads to the other one
            vars(optimizer).clear()
            vars(optimizer).update(vars(made))

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A step that calls the model itself, by its closure, has begun as that of the optimizer to be replaced: it
        calls the closure here, and goes on with nothing to do where the other optimizer then has stepped."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or type(optimizer) is self.kind:
            return None
        idle = copy.copy(optimizer)
        idle.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
        with torch.enable_grad():
            loss = closure()
        has_changed = type(optimizer) is self.kind
        if has_changed:
            getattr(self.kind.step, "__wrapped__", self.kind.step)(optimizer)  # without hooks: this is the same step
        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (idle if has_changed else optimizer, lambda: loss, *args[2:]), rest

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """Restore the classes of the user's optimizers at the end."""
        try:
            with steps_hooked(self._before_step):
                yield
        finally:
            for reference, kind in self._classes:
                if (optimizer := reference()) is not None:
                    optimizer.__class__ = kind
            self._classes.clear()


def eight_bit_adamw() -> OtherOptimizer:
    """bitsandbytes' AdamW with 8-bit state, as large as its Adam. Raises MissingError where it is not installed."""
    with complaints_muted():
        adamw: Any = library("bitsandbytes.optim").AdamW8bit
    return OtherOptimizer(adamw)


def adafactor() -> OtherOptimizer:
    """PyTorch's Adafactor."""
    return OtherOptimizer(torch.optim.Adafactor)


def sgd() -> OtherOptimizer:
    """Stochastic gradient descent without momentum."""
    return OtherOptimizer(torch.optim.SGD)


class _HostOptimizer(torch.optim.Optimizer):
    """State and arithmetic in host memory, results copied into the weights: a step allocates nothing on the GPU."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Does nothing on the GPU; returns the closure's result. Raises TypeError for sparse gradients, as the copy
        to dense ones on the host fails."""
        result = None if closure is None else closure()
        parameters = (one for group in self.param_groups for one in group["params"])
        if any(one.grad is not None and one.grad.is_sparse for one in parameters):
            raise TypeError
        return result


def offloaded_optimizer() -> OtherOptimizer:
    """An optimizer in host memory, like torchao's CPUOffloadOptimizer and DeepSpeed's ZeRO-Offload."""
    return OtherOptimizer(_HostOptimizer)
