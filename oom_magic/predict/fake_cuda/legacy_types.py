"""Tensor types from before ``dtype`` and ``device``: ``torch.cuda.FloatTensor(2, 3)``, ``x.type("torch.FloatTensor")``.

Source: torch/csrc/tensor/python_tensor.cpp and torch/csrc/utils/tensor_new.cpp, ``legacy_tensor_ctor``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oom_magic.predict.isolation.patching import Patches

_DTYPES = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Byte": torch.uint8, "Char": torch.int8, "Short": torch.int16, "Int": torch.int32, "Long": torch.int64,
    "Bool": torch.bool,
}  # fmt: skip
_NAMES = {dtype: f"torch.cuda.{name}Tensor" for name, dtype in _DTYPES.items()}


class _CudaType(type):
    """The class of the types: device and dtype decide what is an instance of ``torch.cuda.FloatTensor``."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype is cls.dtype

    def __call__(cls, *args: Any, device: Any = "cuda") -> torch.Tensor:
        """A tensor of this size without values, or of this data."""
        source = args[0] if len(args) == 1 else None
        if source is None or isinstance(source, (int, torch.Size)):
            sizes = args if not isinstance(source, torch.Size) else tuple(source)
            return torch.empty(sizes or (0,), dtype=cls.dtype, device=device)
        if isinstance(source, torch.Tensor):
            return source.to(device, cls.dtype)
        return torch.tensor(source, dtype=cls.dtype, device=device)


TYPES = {
    name: _CudaType(f"{name}Tensor", (), {"dtype": dtype, "is_cuda": True, "__module__": "torch.cuda"})
    for name, dtype in _DTYPES.items()
}


def legacy_types() -> Patches:
    """Adds the types to ``torch.cuda``, and lets one be the default."""
    set_default = torch.set_default_tensor_type

    def set_default_tensor_type(t: Any) -> None:
        kind = cuda_type(t)
        if kind is None:
            torch.set_default_device(None)  # type: ignore[arg-type]
            set_default(t)
        else:
            torch.set_default_dtype(kind.dtype)
            torch.set_default_device("cuda")

    types = {f"{name}Tensor": kind for name, kind in TYPES.items()}
    return [(torch.cuda, types), (torch, {"set_default_tensor_type": set_default_tensor_type})]


def cuda_type(named: Any) -> _CudaType | None:
    """The CUDA type of a class or a name."""
    if isinstance(named, str):
        named = TYPES.get(named.removeprefix("torch.cuda.").removesuffix("Tensor")) if "cuda" in named else None
    return named if isinstance(named, _CudaType) else None


def type_of(view: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Tensor.type``: the name of a tensor's type, or the tensor in another type."""
    tensor, *rest = args
    wanted = rest[0] if rest else kwargs.get("dtype")
    kind = cuda_type(wanted)
    with view:  # queries and moves as the user's code would
        if kind is not None:
            return tensor.to("cuda", kind.dtype)
        if isinstance(wanted, torch.dtype):
            return tensor.to(wanted)
        if wanted is None and tensor.is_cuda:
            return _NAMES.get(tensor.dtype, f"torch.cuda.{tensor.dtype}")
        name = wanted if isinstance(wanted, str) else getattr(wanted, "__name__", "")
        dtype = _DTYPES.get(name.removeprefix("torch.").removesuffix("Tensor"))
        if dtype is not None:
            return tensor.to("cpu", dtype)
    return func(*args, **kwargs)
