"""Process-wide state that a dry run may change: random generators, modes, hooks, the environment.

Settings are in ``settings``, and what stands in Python's own modules in ``standard_library``.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch

from oom_magic.predict.isolation.patching import Journal
from oom_magic.predict.isolation.process.settings import settings_noted
from oom_magic.predict.isolation.snapshot import Snapshot

_ANOTHER_SEED = 104_729  # an arbitrary seed


@contextmanager
def other_random_numbers() -> Iterator[None]:
    """Draw other numbers than the code would: shows whether it depends on them. A dry run puts generators back."""
    with process_state_restored():
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(_ANOTHER_SEED)
        yield


@contextmanager
def process_state_restored() -> Iterator[None]:
    """Restore the state at the end, whatever is raised."""
    with Journal() as journal:
        for restore in _restorations():
            journal.record(restore)
        yield


def _restorations() -> Iterator[Callable[[], object]]:
    """Calls that put back what is now."""
    yield from settings_noted()
    partial = functools.partial
    yield partial(random.setstate, random.getstate())
    yield partial(np.random.set_state, np.random.get_state())
    yield partial(torch.set_rng_state, torch.get_rng_state())
    yield partial(torch.set_default_dtype, torch.get_default_dtype())
    yield partial(torch.set_grad_enabled, torch.is_grad_enabled())
    for kind in ("cuda", "cpu"):
        yield partial(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
        yield partial(torch.set_autocast_dtype, kind, torch.get_autocast_dtype(kind))
    yield partial(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    yield partial(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warns)
    yield partial(torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
    for name in _ATTENTION_FLAGS:
        is_on = getattr(torch.backends.cuda, f"{name}_enabled")()
        yield partial(getattr(torch.backends.cuda, f"enable_{name.removesuffix('_sdp')}_sdp"), is_on)
    hooks = Snapshot()
    for owner, name in itertools.product((torch.nn.modules.module, _OPTIMIZER), _GLOBAL_HOOKS):
        hooks.add(getattr(owner, name, None), 1)
    yield hooks.restore
    yield partial(_restore_pytorchs_own, _pytorchs_own())
    yield partial(_restore_default_device, _default_device())
    yield partial(restore_environment, dict(os.environ))


def _pytorchs_own() -> list[tuple[Any, dict[str, Any]]]:
    """The attributes of PyTorch's modules, and of classes that libraries change."""
    modules = [
        module for name, module in list(sys.modules.items()) if _is_pytorchs(name) and isinstance(module, ModuleType)
    ]
    return [(owner, dict(vars(owner))) for owner in (*modules, torch.Tensor, torch.nn.Module, torch.optim.Optimizer)]


def _restore_pytorchs_own(before: list[tuple[Any, dict[str, Any]]]) -> None:
    """Take out what others put in place of PyTorch's functions and classes, as DeepSpeed does with ``F.linear``.

    Replacements by PyTorch itself, made on first use, stay.
    """
    for owner, contents in before:
        now = vars(owner)
        if len(now) == len(contents) and all(map(operator.is_, contents.values(), list(now.values()))):
            continue
        for name, value in contents.items():
            new = now.get(name, value)
            if new is not value and callable(value) and not _is_pytorchs(getattr(new, "__module__", None) or "torch"):
                setattr(owner, name, value)


def _is_pytorchs(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def restore_environment(before: dict[str, str]) -> None:
    """Only what differs: other threads read it meanwhile."""
    is_elsewhere = hasattr(time, "tzset") and os.environ.get("TZ") != before.get("TZ")
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    if is_elsewhere:
        time.tzset()


def _restore_default_device(device: torch.device | None) -> None:
    if _default_device() == device:
        return
    torch.set_default_device(device)
    if device is None:  # as if none had ever been named: PyTorch 2.6 asks None for its device
        del torch._GLOBAL_DEVICE_CONTEXT.device_context  # type: ignore[attr-defined]


def _default_device() -> torch.device | None:
    """What ``torch.set_default_device`` named; None: nothing."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # type: ignore[attr-defined]
    return None if context is None else context.device


_OPTIMIZER = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides the name of the module
_GLOBAL_HOOKS = (
    "_global_buffer_registration_hooks", "_global_module_registration_hooks", "_global_parameter_registration_hooks",
    "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks",
    "_global_forward_hooks_always_called", "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks",
)  # fmt: skip
_ATTENTION_FLAGS = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
