"""Changes outside the dry run, undone in reverse order; attributes replaced and restored exactly."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType, ModuleType, TracebackType
from typing import Any

import torch

from oom_magic.predict.isolation.run_threads import is_of_run

Patches = Sequence[tuple[Any, Mapping[str, Any]]]  # owners, and their attributes with the replacements
_ABSENT = object()
_active: list[_Replacement] = []
_suspended: list[tuple[list[_Replacement], list[_Replacement]]] = []


class Journal:
    """Undoes the recorded changes at its end. Each ``undo`` can be called twice, or without its change having been
    made.

    So every prefix of a change can be undone, and an interrupted undo is repeated.
    """

    def __init__(self) -> None:
        self._undone: list[Callable[[], object]] = []  # to be called from the end on

    def record(self, undo: Callable[[], object]) -> None:
        """Before a change: how to undo it."""
        self._undone.append(undo)

    def undo(self) -> None:
        """Undo everything; at the end raise the first error there was. An undo that fails twice is given up."""
        first: BaseException | None = None
        has_failed: Callable[[], object] | None = None
        while self._undone:
            undo = self._undone[-1]
            try:
                undo()
            except BaseException as error:
                first = first or error
                if has_failed is not undo:
                    has_failed = undo
                    continue
            self._undone.pop()
        if first is not None:
            raise first

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Undo all that was recorded, the last first."""
        try:
            self.undo()
        finally:
            self.undo()  # for what an exception interrupted in the first attempt


class StandIn(type(torch.Generator)):  # type: ignore[misc]
    """The type of a class that stands for another one, its ``original``, while a dry run lasts.

    What was made of the original before is an instance, too, and other threads make instances of the original.
    """

    original: type

    def __instancecheck__(cls, one: Any) -> bool:
        return type.__instancecheck__(cls, one) or isinstance(one, cls.original)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance of the class, on other threads one of the original."""
        return super().__call__(*args, **kwargs) if is_of_run() else cls.original(*args, **kwargs)


@contextmanager
def patched(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of a module or class; at the end each is what it was, absent ones are removed.

    Functions and switches are replaced for the threads of the dry run; others find them as they were.
    A library that is imported meanwhile may copy a function, a class or a switch (``from safetensors.torch import
    save_file``). Its copy is from then on what the original is, and keeps nothing of the replacement alive.
    """
    made = _Replacement(owner, {name: vars(owner).get(name, _ABSENT) for name in values})
    with Journal() as journal:
        journal.record(functools.partial(_forget, made))
        for name, value in values.items():
            lent, give_back = _reverting(value, getattr(owner, name, None))
            journal.record(give_back)
            journal.record(functools.partial(_put_back, owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, lent)
        _active.append(made)
        yield


@contextmanager
def undone_at_the_end(undos: Iterable[Callable[[], object]]) -> Iterator[None]:
    """Calls noted now; at the end all are made, the last first, whatever is raised."""
    with Journal() as journal:
        for undo in undos:
            journal.record(undo)
        yield


@contextmanager
def all_patched(table: Patches) -> Iterator[None]:
    """``patched`` for every row of a table, from the first to the last."""
    with ExitStack() as stack:
        for owner, values in table:
            stack.enter_context(patched(owner, values))
        yield


def patched_names() -> dict[str, list[str]]:
    """The current replacements: names of owners, and of their attributes. README's list is made from it."""
    found: dict[str, set[str]] = {}
    for one in _active:
        found.setdefault(_name(one.owner), set()).update(one.before)
    return {owner: sorted(names) for owner, names in sorted(found.items())}


def replaced_in_modules() -> dict[int, tuple[Any, Any]]:
    """The functions and classes that are replaced now in the package they come from, each with its replacement, by
    identity."""
    found: dict[int, tuple[Any, Any]] = {}
    for one in _active:
        for name, usual in one.before.items() if isinstance(one.owner, ModuleType) else ():
            home = getattr(usual, "__module__", None) if callable(usual) else None
            if home and home.partition(".")[0] == one.owner.__name__.partition(".")[0]:
                found.setdefault(id(usual), (usual, vars(one.owner)[name]))
    return found


def _name(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"


def _put_back(owner: Any, name: str, value: Any) -> None:
    _put(owner, {name: value})


def _forget(made: _Replacement) -> None:
    if made in _active:
        _active.remove(made)


class _Replacement:
    """The replaced attributes of an owner, with their replacements."""

    def __init__(self, owner: Any, before: Mapping[str, Any]) -> None:
        self.owner = owner
        self.before = before


@contextmanager
def suspended(owners: Collection[Any] | None, names: Collection[str] = ()) -> Iterator[None]:
    """For a while these owners' attributes (None: all), and those of these names, are what they were before anything
    was replaced."""

    def is_meant(one: _Replacement) -> bool:
        return owners is None or any(one.owner is owner for owner in owners) or not one.before.keys().isdisjoint(names)

    found = list(filter(is_meant, _active))
    now = [_Replacement(one.owner, {name: vars(one.owner).get(name, _ABSENT) for name in one.before}) for one in found]
    _put_all(found[::-1])
    _suspended.append((found, now))
    try:
        yield
    finally:
        _suspended.pop()
        _put_all(now)


@contextmanager
def resumed() -> Iterator[None]:
    """Inside ``suspended``: for a while the innermost one does not count."""
    found, now = _suspended[-1] if _suspended else ([], [])
    _put_all(now)
    try:
        yield
    finally:
        _put_all(found[::-1])


def _put_all(replacements: list[_Replacement]) -> None:
    for one in replacements:
        _put(one.owner, one.before)


def _put(owner: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value is not _ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)


def _reverting(replacement: Any, original: Any) -> tuple[Any, Callable[[], None]]:
    """What to set in place of the original, and the function that reverts copies of it to the original."""
    if isinstance(original, type) and isinstance(replacement, type):
        return replacement, functools.partial(_restore_class, replacement, original, _imported_names())
    if isinstance(original, bool):
        flag = _RevertingFlag(replacement, original)
        return flag, functools.partial(setattr, flag, "value", original)
    if original is not None and isinstance(replacement, (FunctionType, MethodType, type)):
        return _reverting_function(replacement, original)
    return replacement, lambda: None


def _reverting_function(
    replacement: Callable[..., Any], original: Any
) -> tuple[Callable[..., Any], Callable[[], None]]:
    """A function that is the replacement until it is reverted, then the original; and the function that reverts it."""
    current = replacement

    @functools.wraps(original)
    def lent(*args: Any, **kwargs: Any) -> Any:
        return (current if is_of_run() else original)(*args, **kwargs)

    def give_back() -> None:
        nonlocal current
        current = original

    return lent, give_back


class _RevertingFlag:
    """Is true as long as its value is: ``datasets`` and transformers before version 5 copy huggingface_hub's switch."""

    def __init__(self, value: bool, original: bool) -> None:
        self.value = value
        self._original = original

    def __bool__(self) -> bool:
        return self.value if is_of_run() else self._original


def _imported_names() -> frozenset[str]:
    """The same set again as long as no module was added: the last one would be another, or their number."""
    last = next(reversed(sys.modules))
    state = len(sys.modules), last, id(sys.modules[last])
    if state not in _names_by_state:
        _names_by_state.clear()
        _names_by_state[state] = frozenset(sys.modules)
    return _names_by_state[state]


_names_by_state: dict[tuple[int, str, int], frozenset[str]] = {}


def _restore_class(replacement: type, original: type, known: frozenset[str]) -> None:
    """Give modules imported since the class itself: what they subclass or give to isinstance can be no function."""
    now = _imported_names()
    for name in now - known if now is not known else ():
        module = sys.modules[name]
        copies = vars(module).items() if isinstance(module, ModuleType) else ()
        for copy in [copy for copy, value in copies if value is replacement]:
            setattr(module, copy, original)
