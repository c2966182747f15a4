"""Attributes replaced for a while, and put back exactly as they were."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

_ABSENT = object()


@contextmanager
def patched(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of a module or class; at the end each is what it was, absent ones are removed.

    A library that is imported meanwhile may copy a function, a class or a switch (``from safetensors.torch import
    save_file``). Its copy is from then on what the original is, and keeps nothing of the replacement alive.
    """
    before = {name: vars(owner).get(name, _ABSENT) for name in values}
    returns = []
    try:
        for name, value in values.items():
            original = getattr(owner, name, None)
            lent, give_back = _reverting(value, original)
            returns.append(give_back)
            setattr(owner, name, lent)
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                if name in vars(owner):
                    delattr(owner, name)
            else:
                setattr(owner, name, value)
        for give_back in returns:
            give_back()


def _reverting(replacement: Any, original: Any) -> tuple[Any, Callable[[], None]]:
    """What to set in place of the original, and what makes the original of its copies."""
    if isinstance(original, type) and isinstance(replacement, type):
        return replacement, functools.partial(_restore_class, replacement, original, frozenset(sys.modules))
    if isinstance(original, bool):
        flag = _RevertingFlag(replacement)
        return flag, functools.partial(setattr, flag, "value", original)
    if original is not None and isinstance(replacement, (FunctionType, type)):
        return _reverting_function(replacement, original)
    return replacement, lambda: None


def _reverting_function(
    replacement: Callable[..., Any], original: Any
) -> tuple[Callable[..., Any], Callable[[], None]]:
    """A function that is the replacement until it is given back, then the original; and what gives it back."""
    current = replacement

    @functools.wraps(original)
    def lent(*args: Any, **kwargs: Any) -> Any:
        return current(*args, **kwargs)

    def give_back() -> None:
        nonlocal current
        current = original

    return lent, give_back


class _RevertingFlag:
    """Is true as long as its value is: ``datasets`` and transformers before version 5 copy huggingface_hub's switch."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def __bool__(self) -> bool:
        return self.value


def _restore_class(replacement: type, original: type, known: frozenset[str]) -> None:
    """Let modules imported since have the class itself: a function in its place could be no base, nor asked of."""
    for name in sys.modules.keys() - known:
        module = sys.modules[name]
        copies = vars(module).items() if isinstance(module, ModuleType) else ()
        for copy in [copy for copy, value in copies if value is replacement]:
            setattr(module, copy, original)
