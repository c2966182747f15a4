"""Process-wide state that a dry run may change: random generators, modes, hooks, the environment.

Settings are in ``settings``, and the contents of Python's own modules in ``standard_library``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from oom_magic.predict.isolation.patching import undone_at_the_end
from oom_magic.predict.isolation.process.library_tables import registrations_noted
from oom_magic.predict.isolation.process.settings import settings_noted
from oom_magic.predict.isolation.snapshot import Snapshot

_ANOTHER_SEED = 104_729  # an arbitrary seed


@contextmanager
def other_random_numbers() -> Iterator[None]:
    """Let the code draw other numbers than it would, which shows whether it depends on them. A dry run restores the
    generators."""
    with process_state_restored():
        for seed in (random.seed, np.random.seed, torch.default_generator.manual_seed):  # of the host alone
            seed(_ANOTHER_SEED)
        yield


def process_state_restored() -> AbstractContextManager[None]:
    """Restore the state at the end, whatever is raised."""
    return undone_at_the_end(_restorations())


def _restorations() -> Iterator[Callable[[], object]]:
    """Calls that put back what is now."""
    yield registrations_noted()
    yield from settings_noted()
    partial = functools.partial
    yield partial(random.setstate, random.getstate())
    yield partial(_restore_numpys, _NUMPYS.get_bit_generator(), np.random.get_state(legacy=False))
    yield partial(torch.set_rng_state, torch.get_rng_state())
    yield partial(torch.set_default_dtype, torch.get_default_dtype())
    yield partial(torch.set_grad_enabled, torch.is_grad_enabled())
    for kind in _KINDS_OF_AUTOCAST:
        with contextlib.suppress(RuntimeError):  # an older PyTorch does not know it
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
    yield partial(restore_environment, dict(os.environ))
    if torch.cuda.is_initialized():  # streams of C++ change them without asking Python
        yield partial(torch.cuda.set_device, torch.cuda.current_device())
        for card in range(torch.cuda.device_count()):
            yield partial(torch.cuda.set_stream, torch.cuda.current_stream(card))


def _restore_numpys(generator: np.random.BitGenerator, state: dict[str, Any]) -> None:
    if _NUMPYS.get_bit_generator() is not generator:
        _NUMPYS.set_bit_generator(generator)
    np.random.set_state(state)


@contextmanager
def environment_kept() -> Iterator[None]:
    """For libraries that set variables when they are loaded."""
    before = dict(os.environ)
    try:
        yield
    finally:
        restore_environment(before)


def restore_environment(before: dict[str, str]) -> None:
    """Sets only what differs, since other threads read it meanwhile."""
    is_elsewhere = hasattr(time, "tzset") and os.environ.get("TZ") != before.get("TZ")
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    if is_elsewhere:
        time.tzset()


_OPTIMIZER = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides the name of the module
_GLOBAL_HOOKS = (
    "_global_buffer_registration_hooks", "_global_module_registration_hooks", "_global_parameter_registration_hooks",
    "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks",
    "_global_forward_hooks_always_called", "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks",
)  # fmt: skip
_NUMPYS: Any = np.random  # some names its stubs lack
_KINDS_OF_AUTOCAST = ("cuda", "cpu", "xpu", "mps", "hpu", "mtia")
_ATTENTION_FLAGS = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
