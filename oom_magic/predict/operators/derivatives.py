"""Derivatives that PyTorch computes another way where tensors have no data, or off CUDA.

torch/csrc/autograd/FunctionsManual.cpp asks whether an element is zero; without data it goes the way that is right
either way. Here none is zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.places import Handler
from oom_magic.predict.operators.calls import Kernel

aten = torch.ops.aten


def cumprod_backward(
    _usual: Kernel, gradient: torch.Tensor, tensor: torch.Tensor, dim: int, output: torch.Tensor
) -> torch.Tensor:
    """``cumprod_backward``."""
    if tensor.numel() <= 1 or tensor.size(dim) == 1:
        return gradient
    product = output * gradient
    zeros = tensor == 0
    zeros.any()
    backwards = product.flip(dim)
    sums = backwards.cumsum(dim)
    forwards = sums.flip(dim)
    del sums, backwards
    return forwards.div(tensor)


class _Product(torch.autograd.Function):
    """``prod`` with ``prod_backward``."""

    @staticmethod
    def forward(ctx: Any, usual: Kernel, tensor: torch.Tensor, dim: int | None, keepdim: bool, dtype: Any) -> Any:
        """The product along ``dim``, or of all elements."""
        where = () if dim is None else (dim, keepdim)
        made = usual(tensor, *where, dtype=dtype)
        ctx.save_for_backward(tensor, made)
        ctx.where = where
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        """The gradient of the tensor."""
        tensor, made = ctx.saved_tensors
        tensor = tensor.to(gradient.dtype)
        if not ctx.where:
            _unused = tensor == 0  # and where: nowhere
            del _unused
            return None, gradient * (made / tensor).conj(), None, None, None
        dim, keepdim = ctx.where
        if not keepdim:
            gradient, made = gradient.unsqueeze(dim), made.unsqueeze(dim)
        is_zero = tensor == 0
        num_zeros = is_zero.sum(dim, keepdim=True)
        num_zeros.sum()
        found = gradient * (made / tensor).conj()
        del num_zeros, is_zero
        return None, found, None, None, None


def product(
    gpu: FakeGPU, usual: Kernel, tensor: torch.Tensor, dim: int | None = None, keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """``prod``, unless transforms or modes take it apart: then the derivative goes PyTorch's safe way on CUDA too."""
    is_plain = not (gpu.traces or gpu.is_watched or torch._C._are_functorch_transforms_active())
    if tensor.dim() and tensor.requires_grad and is_plain and torch.autograd.forward_ad._current_level < 0:
        return _Product.apply(usual, tensor, dim, keepdim, dtype)
    return usual(tensor, *(() if dim is None else (dim, keepdim)), dtype=dtype)


def _accumulated(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In ``renorm_backward`` norms and sums have the type in which the device accumulates numbers: on CUDA that of the
    input, of halves single precision, elsewhere double precision (aten/src/ATen/AccumulateType.h)."""
    is_wide = kwargs.get("dtype") is torch.float64 and torch.promote_types(args[0].dtype, torch.float32).itemsize == 4
    if is_wide and torch._C._current_graph_task_id() != -1:
        node = torch._C._current_autograd_node()
        if node is not None and node.name() == "RenormBackward0":
            kwargs = {**kwargs, "dtype": torch.float32}
    return gpu.run(func, args, kwargs)


HANDLERS: dict[OpOverload, Handler] = dict.fromkeys(
    (aten.linalg_vector_norm.default, aten.sum.dim_IntList), _accumulated
)
