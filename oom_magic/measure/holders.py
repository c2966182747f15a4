"""Which of the user's names hold GPU memory."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from oom_magic.measure.ownership import inner_tensors, storage_address
from oom_magic.memory.report import Holder

_MAX_DEPTH = 6
_MACHINERY = frozenset({"IPython", "ipykernel", "traitlets", "oom_magic"})
_OPAQUE = (
    str, bytes, int, float, type,
    types.ModuleType, types.FunctionType, types.MethodType, types.FrameType, types.TracebackType,
)  # fmt: skip


def holders_in(
    namespace: Mapping[str, Any], device: int, *, among: Collection[int] | None = None
) -> tuple[Holder, ...]:
    """The names whose values reach memory on ``device``, largest first; what two names share counts for both.

    ``among`` limits it to storages at these addresses. IPython's ``_``, ``__`` and the like are left out, as
    ``Out`` holds the same values; its entries are named ``Out[3]``.
    """
    found = []
    for name, value in _named_values(namespace):
        storages = storages_in(value, device)
        num_bytes = sum(size for address, size in storages.items() if among is None or address in among)
        if num_bytes:
            found.append(Holder(name, num_bytes))
    return tuple(sorted(found, key=lambda holder: -holder.num_bytes))


def storages_in(value: Any, device: int) -> dict[int, int]:
    """Bytes by address of the storages on ``device`` that a value reaches: through modules, optimizers,
    containers and the attributes of objects, six levels deep."""
    storages = {}
    for tensor in _reachable(value, _MAX_DEPTH, set()):
        if tensor.device.index == device and (address := storage_address(tensor)):
            storages[address] = tensor.untyped_storage().nbytes()
    return storages


def _named_values(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in list(namespace.items()):
        if name == "Out" and isinstance(value, dict):
            yield from ((f"Out[{number}]", result) for number, result in list(value.items()))
        elif not name.startswith("_"):
            yield name, value


def _reachable(value: Any, depth: int, seen: set[int]) -> Iterator[torch.Tensor]:
    if depth < 0 or isinstance(value, _OPAQUE) or id(value) in seen or _is_machinery(value):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield from _of_tensor(value)
        return
    for part in _parts(value):
        yield from _reachable(part, depth - 1, seen)


def _is_machinery(value: Any) -> bool:
    """Whether it is the notebook's, such as ``exit``, or ours: those reach all variables."""
    return type(value).__module__.partition(".")[0] in _MACHINERY


def _of_tensor(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    for part in inner_tensors(tensor):
        yield part
        if part.is_leaf and part.grad is not None:
            yield part.grad


def _parts(value: Any) -> list[Any]:
    """What to look at inside a value."""
    if isinstance(value, torch.nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
        attributes = [item for name, item in vars(value).items() if not name.startswith("_")]
        return [*tensors, *attributes]
    if isinstance(value, torch.optim.Optimizer):
        return [value.state, value.param_groups]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())
