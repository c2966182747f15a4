"""Foreach implementations group tensors by device in C++, where pretended ones are "meta"; here they are on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch.utils import _foreach_utils

from oom_magic.predict.following.patches import replaced
from oom_magic.predict.pretend.pretend_gpu import Place, PretendGPU

_NAME = "_group_tensors_by_device_and_dtype"
_USERS = (
    "torch.utils._foreach_utils",
    "torch.nn.utils.clip_grad",
    "torch.optim.optimizer",
    "torch.optim.swa_utils",
)


@contextmanager
def grouped_by_place(gpu: PretendGPU) -> Iterator[None]:
    """Let ``clip_grad_norm_`` and optimizers find groups of pretended tensors on ``cuda:0``."""
    group = getattr(_foreach_utils, _NAME)

    def grouped(lists: list[list[Any]], with_indices: bool = False) -> dict[tuple[torch.device, Any], Any]:
        found = {}
        for (device, dtype), value in group(lists, with_indices).items():
            first = next((tensor for tensor in value[0][0] if tensor is not None), None)
            is_pretended = first is not None and gpu.place(first) is Place.GPU
            found[torch.device("cuda", 0) if is_pretended else device, dtype] = value
        return found

    with ExitStack() as stack:
        for user in _USERS:
            stack.enter_context(replaced(import_module(user), {_NAME: grouped}))
        yield
