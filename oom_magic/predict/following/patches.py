"""Attributes replaced for a while, and put back exactly as they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of a module or class; at the end each is what it was, absent ones are removed."""
    before = {name: vars(owner).get(name, _ABSENT) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                if name in vars(owner):
                    delattr(owner, name)
            else:
                setattr(owner, name, value)
