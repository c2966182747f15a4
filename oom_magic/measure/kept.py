"""What one of the user's objects keeps: how many tensors, on what device memory, with or without their graphs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from oom_magic.collection import without_collection
from oom_magic.measure.ownership import tensors_in
from oom_magic.measure.reach import Locate, reach, without


@dataclass(frozen=True, slots=True)
class Kept:
    """``num_bytes`` are those that no model in sight owns; ``are_numbers``: each tensor has one element."""

    num_tensors: int
    num_bytes: int
    has_graph: bool
    are_numbers: bool


def kept_by(value: Any, locate: Locate, around: Iterable[Any] = ()) -> Kept:
    """What a value keeps. Weights of the models among ``around`` do not count, though graphs lead to them."""
    with without_collection():
        tensors = list(tensors_in(value))
        models = reach([one for one in around if issubclass(type(one), torch.nn.Module)], locate)
        storages = without(reach([value], locate).everything(), models.everything())
        return Kept(
            len(tensors),
            sum(storages.values()),
            any(tensor.grad_fn is not None for tensor in tensors),
            bool(tensors) and all(tensor.numel() == 1 for tensor in tensors),
        )
