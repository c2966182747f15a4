"""Data loaders in one process: worker processes know no pretend GPU, and only the batches matter."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, dataloader

from oom_magic.predict.isolation.patching import Patches, patched
from oom_magic.predict.libraries.adapters import Adapter, Run


def _one_process(module: ModuleType, run: Run) -> Patches:
    """Batches are made where they are asked for; pinned memory is host memory like any other."""

    def _get_iterator(loader: DataLoader[Any]) -> Any:
        with patched(loader, {"num_workers": 0, "timeout": 0, "prefetch_factor": None}):
            return dataloader._SingleProcessDataLoaderIter(loader)

    def pin_memory(data: Any, device: Any = None) -> Any:
        return data

    return [
        (DataLoader, {"_get_iterator": _get_iterator}),
        (torch.utils.data._utils.pin_memory, {"pin_memory": pin_memory}),
    ]


ADAPTERS: dict[str, Adapter] = {"torch.utils.data.dataloader": _one_process}
