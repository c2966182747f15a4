"""The state that an iteration of a loop finds: the shapes of its batch, and how much the code around it keeps."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from inspect import CO_GENERATOR, CO_OPTIMIZED
from itertools import count
from types import FrameType
from typing import Any

import numpy as np
import torch

_UNIQUE = count(1)
_SMALL = (bool, int, float, complex, str, bytes, np.generic, type(None))
_FEW = 100  # entries of a dictionary that are looked into


def shapes_of(item: Any) -> tuple[Any, ...]:
    """The shapes of the tensors in a batch; empty if it has none."""
    if isinstance(item, torch.Tensor):
        return (tuple(item.shape),)
    parts = item.values() if isinstance(item, Mapping) else item if isinstance(item, (list, tuple)) else ()
    return tuple(shape for part in parts for shape in shapes_of(part))


def count_kept(frame: FrameType) -> int:
    """The number of entries in containers and tensors that the running code's variables refer to.

    Numbers and strings do not count. For a generator, which yields what others may keep, the result is unique.
    """
    if frame.f_code.co_flags & CO_GENERATOR:
        return next(_UNIQUE)
    names = frame.f_locals
    values = [*names.values(), *(frame.f_globals.get(name) for name in frame.f_code.co_names)]
    owners = [names.get("self"), *(one for one in values if type(one).__module__ == "__main__")]
    values += [value for owner in owners for value in list(getattr(owner, "__dict__", {}).values())]
    kept = sum(map(_count_in, values))
    if frame.f_code.co_flags & CO_OPTIMIZED and sys.version_info < (3, 13):
        names.clear()  # a copy of a function's variables, which would keep tensors alive
    return kept


def _count_in(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(_count(one) for one in value.values()) if len(value) < _FEW else len(value)
    return _count(value)


def _count(value: Any) -> int:
    """The number of entries of a tensor or a container, without their own entries."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.numel() if isinstance(value, torch.Tensor) else value.size
    if isinstance(value, (list, tuple, deque)):
        return 0 if not value or isinstance(value[-1], _SMALL) or _count(value[-1]) == 1 else len(value)
    return len(value) if isinstance(value, (set, frozenset)) else 0
