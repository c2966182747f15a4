"""Shape inference: the tensors that a call would make.

The call runs on the meta device; no code of the user's runs, and none of their objects is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_MODULES = ("torch", "torch.functional", "torch.nn.functional", "torch._C._nn", "torch._VF")
_TENSOR_METHODS_LEFT_OUT = frozenset({"backward", "item", "tolist", "numpy", "share_memory_", "register_hook"})
_OF_COMPILED_CODE = "_empty_strided_cuda"  # how what Inductor writes takes memory: size, stride, dtype
_FUNCTIONS_LEFT_OUT = frozenset({"save", "load", "compile", "manual_seed", "seed", "from_file"})


@dataclass(frozen=True)
class TensorShape:
    """A tensor as plain data: shape, element type and bytes."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorShape:
        """Shape, type and size of a tensor, real or fake; its values are not read."""
        with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
            num_bytes = int(tensor.numel()) * int(tensor.element_size())
            return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), num_bytes)


@dataclass(frozen=True)
class Output:
    """A tensor that a call makes, and the operator inside it that makes it (``"_log_softmax"``)."""

    operator: str
    tensor: TensorShape


def shape_of(value: Any) -> TensorShape | None:
    """The shape of a tensor, None for anything else."""
    return TensorShape.of(value) if isinstance(value, torch.Tensor) else None


def to_meta(value: Any) -> Any:
    """``value`` with tensors, also in lists and dictionaries, replaced by ones of equal shape and no memory."""
    return tree_map(_to_meta, value)


def is_computable(value: Any) -> bool:
    """Whether arithmetic on a value runs no code of the user's: numbers and tensors."""
    return isinstance(value, (int, float, torch.Tensor))


def is_followed(function: Any) -> bool:
    """Whether a function is torch's and free of side effects."""
    name = getattr(function, "__name__", "")
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.Tensor):
        return name not in _TENSOR_METHODS_LEFT_OUT
    if not callable(function) or isinstance(function, type) or name.startswith("set_"):
        return False
    if name == _OF_COMPILED_CODE or isinstance(function, torch._ops.OpOverload):
        return True
    known = getattr(function, "__module__", None) or getattr(owner, "__name__", "")
    return known in _MODULES and name not in _FUNCTIONS_LEFT_OUT


def infer(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, tuple[Output, ...]]:
    """The result of a call of torch's on the meta device, and the tensors it makes. Raises what the call raises."""
    watch = _Watch()
    keywords = dict(kwargs)
    if keywords.get("device") is not None:
        keywords["device"] = "meta"
    if getattr(function, "__name__", "") == _OF_COMPILED_CODE:
        function, (*args, keywords["dtype"]) = torch.empty_strided, args
    if getattr(function, "__name__", "") in ("to", "cuda") and isinstance(function.__self__, torch.Tensor):
        args = tuple(value for value in args if isinstance(value, torch.dtype)) or (function.__self__.dtype,)
        keywords = {"copy": True, **{name: value for name, value in keywords.items() if name == "dtype"}}
        args = () if "dtype" in keywords else args
        function = function.__self__.to
    with torch.no_grad(), torch.device("meta"), watch:
        result = function(*args, **keywords)
    if isinstance(result, torch.Tensor):
        watch.reshape(result)
    return result, tuple(watch.made.values())


def named_parameters(values: Mapping[str, Any]) -> Iterator[tuple[int, str, TensorShape]]:
    """(identity, name, shape) of the parameters of modules among ``values``: ``model.lm_head.weight``."""
    for name, value in values.items():
        if isinstance(value, torch.nn.Module):
            with suppress(Exception):  # a module that is partly built or partly moved
                for path, parameter in value.named_parameters():
                    yield id(parameter), f"{name}.{path}", TensorShape.of(parameter)


def module_member(value: Any, name: str, default: Any) -> Any:
    """A parameter, buffer, part or plain attribute of a module, else ``default``: no property is run."""
    if not isinstance(value, torch.nn.Module):
        return default
    own = vars(value)
    tables = (own.get("_parameters"), own.get("_buffers"), own.get("_modules"), own)
    return next((table[name] for table in tables if table and name in table), default)


def _to_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the results of operators that are not views, by their storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, Output] = {}
        self._alive: list[Any] = []  # so that no storage reuses the identity of another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = set(map(_storage, tree_leaves((args, kwargs))))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and _storage(value) not in known:
                operator = func._schema.name.rpartition("::")[2]
                self.made.setdefault(_storage(value), Output(operator, TensorShape.of(value)))
                self._alive.append(value)
        return result

    def reshape(self, result: torch.Tensor) -> None:
        """Record the call's result in its final shape, not in that of an inner operator's output."""
        made = self.made.get(_storage(result))
        shape = TensorShape.of(result)
        if made is not None and made.tensor.num_bytes == shape.num_bytes:
            self.made[_storage(result)] = replace(made, tensor=shape)


def _storage(value: Any) -> int:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else 0
