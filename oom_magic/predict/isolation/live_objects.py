"""The tensors, modules and optimizers that are alive in this process, found through the garbage collector.

A list of all objects holds what other threads are making as well: a tuple that they fill may then not grow
(``_PyTuple_Resize``). So such a list begins and ends within one call of C, in which no other thread runs Python code.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import io
import itertools
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from oom_magic.interrupts import collect_garbage

FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
TRAINING_TOOLS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


@dataclass(slots=True)
class LiveObjects:
    """What was found; it keeps all of it alive, so drop it soon."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)  # optimizers, learning rate schedulers, gradient scalers
    files: list[Any] = field(default_factory=list)  # open files, maps of arrays and databases
    functions: list[Any] = field(default_factory=list)  # of C, by ctypes
    loops: list[asyncio.AbstractEventLoop] = field(default_factory=list)
    num_objects: int = 0  # all that the collector knows


_FROZEN_BY_PYTHON = 1000  # at most: CPython 3.12 begins with some hundred frozen objects
_aside: list[LiveObjects] = []  # what ``heap_set_aside`` found


@contextmanager
def heap_set_aside(collects: bool = True) -> Iterator[None]:
    """For many dry runs in a row: objects that are alive now are examined once, not in each run.

    Unless ``collects``, garbage counts as alive; a full collection takes a second for ten million objects.
    """
    if _aside:
        yield
        return
    if collects:
        collect_garbage()
    with users_thawed():
        try:
            _aside.append(find_live_objects())  # not a variable: the frame may live on in a traceback
            gc.freeze()
            yield
        finally:
            _aside.clear()
            gc.unfreeze()


@contextmanager
def users_thawed() -> Iterator[None]:
    """What the user froze (``gc.freeze``), which no list of objects shows, counts as all others for a while.

    It is frozen again at the end, after a collection, since frozen garbage would never be collected.
    """
    if _aside:
        yield
        return
    was_frozen = gc.get_freeze_count() > _FROZEN_BY_PYTHON
    gc.unfreeze()
    try:
        yield
    finally:
        gc.unfreeze()  # the run's own doing
        if was_frozen:
            collect_garbage()
            gc.freeze()


def find_live_objects() -> LiveObjects:
    """One pass over all objects, most of which are classified by their type alone."""
    found = LiveObjects()
    for aside in _aside:
        found = LiveObjects(
            [*aside.tensors],
            [*aside.modules],
            [*aside.tools],
            [*aside.files],
            [*aside.functions],
            [*aside.loops],
            aside.num_objects,
        )
    homes = {kind: home for root, home in _homes(found) for kind in _subclasses(root)}
    [(number, objects)] = list(_counted_and_chosen(homes))
    found.num_objects += number
    with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
        for obj in objects:
            home = homes[type(obj)]
            if home is not found.tensors or _is_there(obj):
                home.append(obj)
    return found


def _is_there(tensor: torch.Tensor) -> bool:
    """Whether it is no tensor that C++ has let go, whose Python object lives on, empty: PyTorch 2.6 has such."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return True  # it answers by itself
    try:
        tensor.device  # noqa: B018 - there is nothing to ask but this
    except RuntimeError:
        return False
    return True


def _homes(found: LiveObjects) -> list[tuple[type, list[Any]]]:
    tools = ((kind, found.tools) for kind in TRAINING_TOOLS)
    files = ((kind, found.files) for kind in (*FILES, np.memmap, sqlite3.Connection))
    functions = (ctypes._CFuncPtr, found.functions)  # type: ignore[attr-defined]
    loops = (asyncio.AbstractEventLoop, found.loops)
    return [(torch.Tensor, found.tensors), (torch.nn.Module, found.modules), *tools, *files, functions, loops]


def _subclasses(root: type) -> set[type]:
    """A class and all of its subclasses."""
    found, waiting = {root}, [root]
    while waiting:
        new: set[type] = set(type.__subclasses__(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def _counted_and_chosen(wanted: Collection[type]) -> Iterator[tuple[int, list[Any]]]:
    """How many objects there are, and those of the types ``wanted``: to be asked for in one call."""
    thrice = itertools.chain.from_iterable(map(itertools.repeat, map(gc.get_objects, (None,)), (3,)))  # the same list
    are_wanted = map(map, itertools.repeat(wanted.__contains__), map(map, itertools.repeat(type), thrice))
    return zip(map(len, thrice), map(list, map(itertools.compress, thrice, are_wanted)), strict=True)


def find_kinds() -> set[type]:
    """The types of all objects. What other threads make is not held meanwhile: a tuple that is held cannot grow."""
    return set(map(type, itertools.chain.from_iterable(map(gc.get_objects, (None,)))))


def find_objects(kinds: Collection[type]) -> list[Any]:
    """All objects of these types; no others are held meanwhile."""
    [(_number, objects)] = _counted_and_chosen(kinds)
    return objects


def count_objects(generation: int | None = None) -> int:
    """How many objects the collector knows, of one generation or (None) of all, frozen ones apart."""
    return next(map(len, map(gc.get_objects, (generation,))))


def num_live_objects() -> int:
    """How many objects the collector knows, without counting those that were set aside again."""
    aside = sum(one.num_objects for one in _aside)
    return count_objects() + (aside or gc.get_freeze_count())


def lists_aside() -> list[list[Any]]:
    """The lists of what was set aside, which refer to it."""
    return [some for one in _aside for some in (one.tensors, one.modules, one.tools)]


def are_set_aside() -> bool:
    """Whether ``heap_set_aside`` lasts: it thaws what is frozen meanwhile."""
    return bool(_aside)
