"""What a dry run may change in the user's objects besides tensors: attributes, class attributes, arrays, defaults.

Looked for from the user's names, a few levels deep. What a function keeps in its closure is not: code that is rehearsed
may tell its caller something that way.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from oom_magic.predict.isolation.reach import NOT_WALKED, is_users_class
from oom_magic.user_code import is_users_file

_MOST_OBJECTS, _MOST_ITEMS, _DEPTH = 5_000, 1_000, 5
_COPIED_BYTES, _MOST_COPIED_BYTES = 1 << 24, 1 << 27  # of one array, of all
_NO_OBJECTS = (torch.Tensor, torch.nn.Module, types.ModuleType, types.CodeType, types.FrameType)


class Notes(Protocol):
    """Where it is noted what to put back."""

    def add_plain(self, container: Any, depth: int) -> None:
        """A container's contents."""

    def add_undo(self, undo: Callable[[], object]) -> None:
        """Anything else: what puts it back."""


def note_users_objects(notes: Notes, roots: Iterable[Any], not_ours: set[int]) -> None:
    """Note what ``roots`` lead to, but nothing with an identity in ``not_ours``."""
    level, seen, room = list(roots), set(not_ours), _MOST_COPIED_BYTES
    for _ in range(_DEPTH):
        below: list[Any] = []
        for one in level:
            if id(one) in seen:
                continue
            seen.add(id(one))
            if isinstance(one, np.ndarray):
                room -= _note_array(notes, one, room)
            else:
                below += _noted(notes, one)
            if len(seen) - len(not_ours) > _MOST_OBJECTS:
                return
        level = below


def _noted(notes: Notes, one: Any) -> Iterator[Any]:
    """Note an object that is no array; what it leads to."""
    kind = type(one)
    if kind in (list, dict, set, deque, tuple):
        if kind is not tuple:
            notes.add_plain(one, 1)
        if len(one) <= _MOST_ITEMS:
            yield from list(one.values()) if kind is dict else list(one)
    elif isinstance(one, types.FunctionType):
        if is_users_file(one.__code__.co_filename):
            notes.add_plain(one.__dict__, 1)
            yield from (*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values(), *one.__dict__.values())
    elif isinstance(one, type):
        if is_users_class(one):
            before = dict(vars(one))
            notes.add_undo(functools.partial(_restore_class, one, before))
            yield from before.values()
    elif not isinstance(one, _NO_OBJECTS) and str(kind.__module__).partition(".")[0] not in NOT_WALKED:
        own = getattr(one, "__dict__", None)
        if type(own) is dict:
            notes.add_plain(own, 1)
            yield from list(own.values())


def _note_array(notes: Notes, array: Any, room: int) -> int:
    """The bytes that were copied. A large array can be read only meanwhile."""
    if not array.flags.writeable or isinstance(array, np.memmap) or array.dtype.hasobject:
        return 0
    if array.nbytes <= min(_COPIED_BYTES, room):
        notes.add_undo(functools.partial(_restore_array, array, array.copy(order="K")))
        return int(array.nbytes)
    notes.add_undo(functools.partial(array.setflags, write=True))
    array.setflags(write=False)
    return 0


def _restore_array(array: Any, before: Any) -> None:
    if array.shape == before.shape and array.tobytes() != before.tobytes():  # a NaN is not equal to itself
        array[...] = before


def _restore_class(kind: type, before: dict[str, Any]) -> None:
    now = dict(vars(kind))
    for name in now.keys() - before.keys():
        delattr(kind, name)
    for name, value in before.items():
        if now.get(name, before) is not value:
            setattr(kind, name, value)
