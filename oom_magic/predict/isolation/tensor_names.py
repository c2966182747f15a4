"""What tensors are called: their names in the user's code, and their kinds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from oom_magic.half_built import is_built
from oom_magic.language import _
from oom_magic.predict.isolation.reach import is_users_class

_WRAPPERS: Any = torch._C._functorch


def names_of(tensors: list[torch.Tensor], namespaces: list[dict[str, Any]]) -> dict[int, str]:
    """The names of tensors in the user's code, by identity."""
    wanted = {id(tensor) for tensor in tensors}
    found: dict[int, str] = {}
    for name, value in [item for names in namespaces for item in list(names.items())] if wanted else ():
        if isinstance(value, torch.nn.Module) and is_built(value):
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
    if isinstance(value, torch.nn.Module) and is_built(value):
        named = itertools.chain(value.named_parameters(), value.named_buffers())
        yield from ((f"{path}.{name}", one) for name, one in named)
    elif isinstance(value, torch.optim.Optimizer) and is_built(value):
        states = itertools.chain.from_iterable(map(dict.items, value.state.values()))
        yield from ((f"{path}.state[...][{key!r}]", one) for key, one in states)
    elif isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", one) for key, one in list(value.items()) if isinstance(key, (str, int)))
    elif isinstance(value, (list, tuple)):
        yield from ((f"{path}[{at}]", one) for at, one in enumerate(value))
    elif is_users_class(type(value)) and not isinstance(value, type):
        yield from ((f"{path}.{name}", one) for name, one in list(getattr(value, "__dict__", {}).items()))


def unnamed(tensor: torch.Tensor) -> str:
    """What a tensor without a name is called."""
    return _("a tensor of shape {shape}", shape=tuple(tensor.shape) if is_plain(tensor) else "?")


def kind_of(tensor: torch.Tensor) -> str:
    """The word for a tensor that is not plain, such as "sparse coo"."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.").replace("_", " ")
    return type(tensor).__name__


def has_own_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory, which one with a dispatch of its own leaves to others, as that of a transform of
    ``torch.func`` does, which a failed call keeps alive."""
    has_usual_dispatch = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    is_wrapper = _WRAPPERS.is_functorch_wrapped_tensor(tensor) or _WRAPPERS.is_legacy_batchedtensor(tensor)
    return has_usual_dispatch and not (is_wrapper or torch.nn.parameter.is_lazy(tensor))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a size, strides and no dispatch of its own."""
    return has_own_data(tensor) and not tensor.is_nested and tensor.layout is torch.strided and not tensor.is_quantized


def is_sparse_on_card(tensor: torch.Tensor) -> bool:
    """Whether it is a sparse tensor (COO) with memory on a card, or the fake copy of one."""
    return tensor.layout is torch.sparse_coo and has_own_data(tensor) and (tensor.is_cuda or tensor.is_meta)
