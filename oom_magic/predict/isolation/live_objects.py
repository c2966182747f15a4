"""The tensors, modules and optimizers that are alive in this process, found through the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

_TRAINING_TOOLS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


@dataclass(slots=True)
class LiveObjects:
    """What was found; it keeps all of it alive, so drop it soon."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)  # optimizers, learning rate schedulers, gradient scalers
    num_objects: int = 0  # all that the collector knows


_aside: list[LiveObjects] = []  # what ``heap_set_aside`` found


@contextmanager
def heap_set_aside(collects: bool = True) -> Iterator[None]:
    """For many dry runs in a row: what is alive now is looked at once, and not again by each run.

    Unless ``collects``, what is dead counts as alive; a full collection takes a second for ten million objects.
    Where the user froze objects (``gc.freeze``) nothing is set aside: thawing would thaw theirs too.
    """
    if _aside or gc.get_freeze_count():
        yield
        return
    if collects:
        gc.collect()
    try:
        _aside.append(find_live_objects())  # not a variable: the frame may live on in a traceback
        gc.freeze()
        yield
    finally:
        _aside.clear()
        gc.unfreeze()


def find_live_objects() -> LiveObjects:
    """One pass over all objects; most of the hundreds of thousands are told by their type alone."""
    found = LiveObjects()
    for aside in _aside:
        found = LiveObjects(list(aside.tensors), list(aside.modules), list(aside.tools), aside.num_objects)
    homes: dict[type, list[Any] | None] = {}
    objects = gc.get_objects()
    found.num_objects += len(objects)
    for obj in objects:
        kind = type(obj)
        if kind in homes:
            home = homes[kind]
        else:
            home = homes[kind] = _home(kind, found)
        if home is not None:
            home.append(obj)
    return found


def _home(kind: type, found: LiveObjects) -> list[Any] | None:
    if issubclass(kind, torch.Tensor):
        return found.tensors
    if issubclass(kind, torch.nn.Module):
        return found.modules
    return found.tools if issubclass(kind, _TRAINING_TOOLS) else None


def num_live_objects() -> int:
    """How many objects the collector knows, without counting those that were set aside again."""
    aside = sum(one.num_objects for one in _aside)
    return len(gc.get_objects()) + (aside or gc.get_freeze_count())


def are_set_aside() -> bool:
    """Whether ``heap_set_aside`` lasts: it thaws what is frozen meanwhile."""
    return bool(_aside)
