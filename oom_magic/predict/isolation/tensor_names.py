"""Names of tensors in the user's code."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from oom_magic.predict.isolation.reach import is_users_class


def names_of(tensors: list[torch.Tensor], namespaces: list[dict[str, Any]]) -> dict[int, str]:
    """The names of tensors in the user's code, by identity."""
    wanted = {id(tensor) for tensor in tensors}
    found: dict[int, str] = {}
    for name, value in [item for names in namespaces for item in list(names.items())] if wanted else ():
        if isinstance(value, torch.nn.Module):
            named = itertools.chain(value.named_parameters(), value.named_buffers())
            found |= {id(tensor): f"{name}.{path}" for path, tensor in named if id(tensor) in wanted}
        elif isinstance(value, (list, tuple)):
            found |= {id(item): f"{name}[{at}]" for at, item in enumerate(value) if id(item) in wanted}
        elif id(value) in wanted:
            found[id(value)] = name
    return found


def find_name(tensors: Iterable[torch.Tensor], namespaces: Iterable[Mapping[str, Any]]) -> str:
    """How the user's code names one of ``tensors``, such as ``ema['0.weight']``; an empty text if it does not."""
    wanted = {id(tensor) for tensor in tensors}
    level = [(name, value) for names in namespaces for name, value in list(names.items())] if wanted else []
    for _level in range(_DEEPEST):
        for path, value in level:
            if id(value) in wanted:
                return path
        level = [item for path, value in level for item in _items(path, value)]
    return ""


_DEEPEST = 5  # names, attributes and items within each other


def _items(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The items and attributes of a value, each with its path."""
    if isinstance(value, torch.nn.Module):
        named = itertools.chain(value.named_parameters(), value.named_buffers())
        yield from ((f"{path}.{name}", one) for name, one in named)
    elif isinstance(value, torch.optim.Optimizer):
        states = itertools.chain.from_iterable(map(dict.items, value.state.values()))
        yield from ((f"{path}.state[...][{key!r}]", one) for key, one in states)
    elif isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", one) for key, one in list(value.items()) if isinstance(key, (str, int)))
    elif isinstance(value, (list, tuple)):
        yield from ((f"{path}[{at}]", one) for at, one in enumerate(value))
    elif is_users_class(type(value)) and not isinstance(value, type):
        yield from ((f"{path}.{name}", one) for name, one in list(getattr(value, "__dict__", {}).items()))
