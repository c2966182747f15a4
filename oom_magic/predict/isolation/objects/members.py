"""What functions, cells of closures, slots and classes hold: noted to be put back.

Members that are exchanged for the run's copies are set to them meanwhile.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from oom_magic.predict.isolation.objects.copies import FUNCTIONS, Copies
from oom_magic.user_code import is_users_file

PLAIN = frozenset(
    (
        str, int, float, bool, bytes, complex, type(None), range, slice, np.float64, np.float32, np.int64, np.bool_,
        datetime.datetime, datetime.date, datetime.timedelta, torch.dtype, torch.device,
    )
)  # fmt: skip
_OF_FUNCTIONS: tuple[str, ...] = ("__code__", "__defaults__", "__kwdefaults__", "__name__", "__qualname__", "__doc__")
if sys.version_info < (3, 14):  # since then they are computed by code of the user's
    _OF_FUNCTIONS += ("__annotations__",)
_CELL_CONTENTS = vars(types.CellType)["cell_contents"]


class Notes(Protocol):
    """The interface of a snapshot: records what to restore."""

    def add_plain(self, container: Any, depth: int) -> None:
        """A container's contents."""

    def add_all(self, kind: Any, containers: list[Any]) -> None:
        """The contents of many containers of one type."""

    def add_classes(self, objects: Sequence[Any]) -> None:
        """Of what class each object is."""

    def add_class(self, kind: type, before: dict[str, Any]) -> None:
        """What a class holds, which something else puts back."""

    def add_other(self, one: Any, differs: Callable[[], bool]) -> None:
        """An object that something else puts back, and what tells whether there is something to put back."""

    def add_undo(self, undo: Callable[[], object]) -> None:
        """Anything else: what puts it back."""


def noted_function(notes: Notes, copies: Copies, function: types.FunctionType) -> Iterator[Any]:
    """Note a function's code, defaults and closure; what they lead to."""
    if not is_users_file(function.__code__.co_filename):
        if hasattr(function, "__wrapped__"):  # a library's decorator made it
            yield function.__dict__
        if hasattr(function, "_clear_cache"):  # ``functools.singledispatch``
            notes.add_undo(function._clear_cache)
            yield from gc.get_referents(function.registry)  # type: ignore[attr-defined]
        for cell in function.__closure__ or ():  # counts and settings, such as the width that a bar of tqdm has printed
            [held] = gc.get_referents(cell) or [None]
            items = held.values() if type(held) is dict else held
            if type(held) in (list, dict) and PLAIN.issuperset(map(type, items)):
                yield held
        return
    before = {name: getattr(function, name) for name in _OF_FUNCTIONS}
    for name, value in before.items():
        notes.add_undo(functools.partial(restore_attribute, function, name, value))
    notes.add_other(function, functools.partial(_function_differs, function, before))
    yield from before.values()
    yield function.__dict__
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # nothing yet
            notes.add_undo(functools.partial(_empty_member, _CELL_CONTENTS, cell))
            continue
        _note_member(notes, copies, _CELL_CONTENTS, cell, value)
        yield value


def _function_differs(function: types.FunctionType, before: dict[str, Any]) -> bool:
    return any(getattr(function, name) is not value for name, value in before.items())


def noted_slots(notes: Notes, copies: Copies, one: Any) -> Iterator[Any]:
    """Note what slots of an object hold; the same."""
    for base in type(one).__mro__:
        for member in vars(base).values():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    value = member.__get__(one)
                except AttributeError:  # nothing yet
                    notes.add_undo(functools.partial(_empty_member, member, one))
                    continue
                _note_member(notes, copies, member, one, value)
                yield value


def _note_member(notes: Notes, copies: Copies, member: Any, one: Any, value: Any) -> None:
    notes.add_undo(functools.partial(_restore_member, member, one, value))
    made = copies.of(value)
    if made is not None:
        member.__set__(one, made)
    elif type(value) in FUNCTIONS:
        copies.functions.append((value, functools.partial(member.__set__, one)))


def _empty_member(member: Any, one: Any) -> None:
    with contextlib.suppress(AttributeError, ValueError):  # still nothing in it
        member.__delete__(one)


def _restore_member(member: Any, one: Any, value: Any) -> None:
    """Through the slot itself, since a subclass may define a property of the same name."""
    now = one
    with contextlib.suppress(AttributeError, ValueError):  # nothing in it
        now = member.__get__(one)
    if now is not value:
        with contextlib.suppress(AttributeError):  # C code alone may write it
            member.__set__(one, value)


def restore_attribute(one: Any, name: str, value: Any) -> None:
    """Set an attribute to what it was, unless it is."""
    if getattr(one, name) is not value:
        setattr(one, name, value)


def of_class(kind: type) -> dict[str, Any]:
    """What a class has outside its attributes."""
    return {name: getattr(kind, name) for name in ("__bases__", "__name__", "__qualname__")}


def restore_class(kind: type, own: dict[str, Any], before: dict[str, Any]) -> None:
    """Put back what a class has: ``own`` outside its attributes, and these."""
    for name, value in own.items():
        if getattr(kind, name) != value:
            setattr(kind, name, value)
    now = dict(vars(kind))
    for name in now.keys() - before.keys():
        delattr(kind, name)
    for name, value in before.items():
        if now.get(name, before) is not value:
            setattr(kind, name, value)
