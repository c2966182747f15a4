"""Weights of TorchScript's modules are not exchanged but put back by value.

C++ holds them, and creates Python objects for them on request, so an exchange would have no effect on C++. The run's
code works on the real ones.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from oom_magic.predict.isolation.live_objects import LiveObjects
from oom_magic.predict.isolation.patching import Journal


def keep_scripted(journal: Journal, live: LiveObjects) -> None:
    """Leave them out of what is exchanged, and record what puts each back."""
    scripted = [
        (module, name, tensor)
        for module in live.modules
        if isinstance(module, torch.jit.ScriptModule)
        for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items())
        if tensor is not None
    ]
    grads = [tensor.grad for _module, _name, tensor in scripted]
    known = {id(tensor) for tensor in itertools.chain((one[2] for one in scripted), grads)}
    if scripted:
        live.tensors[:] = [tensor for tensor in live.tensors if id(tensor) not in known]
    for (module, name, tensor), grad in zip(scripted, grads, strict=True):
        journal.record(functools.partial(_restore_scripted, module, name, tensor, tensor.detach().clone(), grad))
        if grad is not None:
            journal.record(functools.partial(_restore_values, grad, grad.clone()))


def _restore_scripted(
    module: Any, name: str, tensor: torch.Tensor, before: torch.Tensor, grad: torch.Tensor | None
) -> None:
    _restore_values(tensor, before)
    if getattr(module, name) is not tensor:
        setattr(module, name, tensor)
    if tensor.grad is not grad:
        tensor.grad = grad


def _restore_values(tensor: torch.Tensor, before: torch.Tensor) -> None:
    if tensor.device == before.device:
        tensor.data = before
    else:  # the run moved it
        torch._C._swap_tensor_impl(tensor, before.requires_grad_(tensor.requires_grad))  # type: ignore[attr-defined]
