"""Models that were loaded twice: several modules of equal parameter shapes among the user's names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_LEAST_BYTES = 2**20  # small modules may well look alike


def twin_models(names: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Names of models of equal class and shapes, each with weights on the GPU; the bytes of all but one."""
    alike: dict[Any, dict[int, str]] = defaultdict(dict)
    sizes: dict[Any, int] = {}
    for name, value in list(names.items()):
        if name.startswith("_") or not isinstance(value, torch.nn.Module):
            continue
        parameters = list(value.parameters())
        key = (type(value), tuple((tuple(one.shape), one.dtype, one.device) for one in parameters))
        sizes[key] = sum(one.numel() * one.element_size() for one in parameters)
        if sizes[key] >= _LEAST_BYTES and parameters[0].device.type == "cuda":
            alike[key].setdefault(id(parameters[0]), name)
    for key, twins in alike.items():
        if len(twins) > 1:
            yield tuple(twins.values()), sizes[key] * (len(twins) - 1)
