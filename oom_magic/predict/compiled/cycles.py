"""Cycles of objects that compiling leaves: what they refer to stays until Python's collector frees them.

Dynamo collects young objects only (``run_gc_after_compile``), while the frames that it read are still there. CPython
begins a full collection once the new objects are a quarter of the old ones: while something else is compiled, or not
before training ends. A dry run collects before anything else is allocated, and notes which memory
would stay: tensors that such cycles refer to, and those that lie in other objects of the user's (a model's output, a
cache of keys) when these end. The error with which Dynamo ends a graph refers to the frames in which it was raised, and
these to their callers: what is in the variables of those when they return would stay, too.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from oom_magic.interrupts import Interrupts
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.user_code import is_own_file

_HOLD_NO_RESULTS = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, CodeType)
_COMPILERS = ("torch._", "torch.fx.", "torch.utils.", "sympy.")  # modules whose objects are the compiler's own
_MOST_VISITED = 10_000  # objects, in search of tensors


class Cycles:
    """What compiling leaves in cycles during one dry run."""

    def __init__(self, gpu: FakeGPU, has_held: Callable[[], None]) -> None:
        self._gpu = gpu
        self._has_held = has_held  # called when something is noted
        self._watched: dict[int, Any] = {0: object()}  # by identity; the first shows how many references are ours
        self._is_due = False

    def collect_later(self) -> None:
        """Something was compiled: ``release`` collects what it left, since many frames may be compiled in between."""
        self._is_due = True

    def grow_old(self) -> None:
        """What is there now survives Dynamo's collection of young objects, as it does where Inductor's part of
        compiling makes many."""
        with Interrupts().waiting():
            gc.collect(1)

    def _collect(self) -> None:
        """Free what only cycles hold."""
        with Interrupts().waiting():  # an interrupt that is raised in a finalizer would be lost
            flags, num_before = gc.get_debug(), len(gc.garbage)
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                gc.collect()
            finally:
                gc.set_debug(flags)
            garbage = gc.garbage[num_before:]
            del gc.garbage[num_before:]
            inside = set(map(id, garbage))
            referred = [one for one in chain.from_iterable(map(gc.get_referents, garbage)) if id(one) not in inside]
            self._note(one for one in chain(garbage, referred) if issubclass(type(one), torch.Tensor))
            callers = chain.from_iterable(_running(one) for one in referred if isinstance(one, FrameType))
            self._watched.update({id(one): one for one in filter(_may_hold_results, chain(referred, callers))})
            del referred
            garbage.clear()
            gc.collect()

    def release(self) -> None:
        """Free what only cycles hold and let go of watched objects that nothing else refers to; called before each
        allocation."""
        if self._is_due:
            self._is_due = False
            self._collect()
        while True:
            counts = list(map(sys.getrefcount, self._watched.values()))
            if counts.count(counts[0]) == 1:
                return
            for key, count in list(zip(self._watched, counts, strict=True))[1:]:
                if count == counts[0]:
                    self._note(_tensors_in(self._watched[key]))
                    del self._watched[key]

    def clear(self) -> None:
        """The dry run ends."""
        self._watched.clear()

    def _note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that the tensors' memory may stay; of weights nothing is said, since a model holds them anyway."""
        found = [tensor for tensor in tensors if self._gpu.note_freed_late(tensor)]
        if not all(isinstance(tensor, torch.nn.Parameter) for tensor in found):
            self._has_held()


def _may_hold_results(one: Any) -> bool:
    kind = type(one)
    if isinstance(one, FrameType):
        return one.f_code.co_name != "<module>"  # whose variables stay anyway
    return gc.is_tracked(one) and not issubclass(kind, (*_HOLD_NO_RESULTS, torch.Tensor)) and not _is_compilers(kind)


def _running(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames that wait for this one to return, up to the dry run's own."""
    while frame is not None and not is_own_file(frame.f_code.co_filename):
        yield frame
        frame = frame.f_back


def _is_compilers(kind: type) -> bool:
    return str(kind.__module__).startswith(_COMPILERS)


def _tensors_in(one: Any) -> list[torch.Tensor]:
    """The tensors that an object leads to; modules and code lead to no results."""
    found, seen, left = [], {id(one)}, [one]
    while left and len(seen) < _MOST_VISITED:
        for inner in gc.get_referents(left.pop()):
            if id(inner) in seen or issubclass(type(inner), (*_HOLD_NO_RESULTS, FrameType, torch.nn.Module)):
                continue
            seen.add(id(inner))
            if issubclass(type(inner), torch.Tensor):
                found.append(inner)
            elif not _is_compilers(type(inner)):
                left.append(inner)
    return found
