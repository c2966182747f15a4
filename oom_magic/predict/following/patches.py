"""Attributes replaced for a while, and put back exactly as they were."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

_ABSENT = object()


@contextmanager
def replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of a module or class; at the end each is what it was, absent ones are removed.

    A library that is imported meanwhile may copy a function (``from safetensors.torch import save_file``). Its copy
    does from then on what the original does, and keeps nothing of the replacement alive.
    """
    before = {name: vars(owner).get(name, _ABSENT) for name in values}
    returns = []
    try:
        for name, value in values.items():
            original = getattr(owner, name, None)
            if type(value) is FunctionType and original is not None:
                value, give_back = _lent(value, original)
                returns.append(give_back)
            setattr(owner, name, value)
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


def _lent(replacement: Callable[..., Any], original: Any) -> tuple[Callable[..., Any], Callable[[], None]]:
    """A function that is the replacement until it is given back, then the original; and what gives it back."""
    current = replacement

    @functools.wraps(original)
    def lent(*args: Any, **kwargs: Any) -> Any:
        return current(*args, **kwargs)

    def give_back() -> None:
        nonlocal current
        current = original

    return lent, give_back
