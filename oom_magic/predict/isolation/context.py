"""Settings that apply while a dry run lasts, each undone at its end."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.utils import parametrize

from oom_magic.language import _
from oom_magic.predict.isolation.patching import Patches, all_patched, patched

_running = threading.Lock()
_OPTIMIZER = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides the name of the module


def is_dry_run() -> bool:
    """Whether a dry run is under way in this process."""
    return _running.locked()


@contextmanager
def only_one() -> Iterator[None]:
    """One dry run at a time. Raises RuntimeError for a second one."""
    if not _running.acquire(blocking=False):
        raise RuntimeError(
            _(
                "A dry run is already running in this process; dry runs cannot be nested or run in parallel"
                " threads. Call the function itself instead."
            )
        )
    try:
        yield
    finally:
        _running.release()


@contextmanager
def checkpoints_ended() -> Iterator[None]:
    """A checkpointed forward that an error broke off ends with the run.

    Otherwise its hooks on saved tensors stay registered in PyTorch 2.11 for as long as the error's traceback lives.
    They take themselves off, so this ends before ``pytorch_state_restored``.
    """
    make = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    made: list[Any] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    try:
        with patched(torch.utils.checkpoint, {"_checkpoint_without_reentrant_generator": noted}):
            yield
    finally:
        for generator in reversed(made):
            generator.close()


@contextmanager
def parametrizations_cached_apart() -> Iterator[None]:
    """``parametrize.cached()`` fills a table of its module and puts another in its place: the run begins with one that
    nothing else holds, such as what is noted to be put back, so that all that is in it is freed then."""
    before = parametrize._cache
    parametrize._cache = dict(before)
    try:
        yield
    finally:
        parametrize._cache = before


@contextmanager
def checkpoints_compared_alike() -> Iterator[None]:
    """Activation checkpointing compares devices of saved and recomputed tensors; show it the same view of both."""
    checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    extract = checks[torch.utils.checkpoint._DEFAULT_DETERMINISM_MODE]

    def extract_metadata(tensor: torch.Tensor) -> dict[str, Any]:
        with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
            return extract(tensor)

    checks[torch.utils.checkpoint._DEFAULT_DETERMINISM_MODE] = extract_metadata
    try:
        yield
    finally:
        checks[torch.utils.checkpoint._DEFAULT_DETERMINISM_MODE] = extract


def python_functions_followed() -> Patches:
    """Torch-function modes see the operators inside PyTorch's own Python functions, not those functions."""

    def is_overridden(*_unused: Any) -> bool:
        return False

    return [
        (module, {name: is_overridden for name in vars(module) if name.startswith("has_torch_function")})
        for module in (torch._tensor, torch.functional, torch.nn.functional, torch.nn.init, torch.autograd)
    ]


@contextmanager
def steps_hooked(before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None) -> Iterator[None]:
    """Every optimizer's step calls them as the hooks that ``register_optimizer_step_pre_hook`` and ``_post_hook`` add.

    The tables of hooks are replaced, not changed: a step on another thread may be going through them.
    """
    hooks = {"_global_optimizer_pre_hooks": before, "_global_optimizer_post_hooks": after}
    tables = {
        name: OrderedDict({**getattr(_OPTIMIZER, name), hook: hook}) for name, hook in hooks.items() if hook is not None
    }
    with all_patched([(_OPTIMIZER, tables)]):
        yield
