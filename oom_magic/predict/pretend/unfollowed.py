"""Operators that say nothing of their outputs without data: decomposed, guessed, or refused with a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload

if TYPE_CHECKING:
    from oom_magic.predict.pretend.pretend_gpu import PretendGPU

aten = torch.ops.aten

# Samplers of torch.distributions and their gradients (aten/src/ATen/native/Distributions.cpp).
_LIKE_THEIR_FIRST = {
    aten._sample_dirichlet.default,
    aten._standard_gamma_grad.default,
    aten._dirichlet_grad.default,
    aten.binomial.default,
}


def run_without_kernel(gpu: PretendGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator without a kernel for pretended tensors returns. Raises NotImplementedError for PyTorch's own."""
    decomposition = decomposition_table.get(func)
    if decomposition is not None:
        with gpu:
            return decomposition(*args, **kwargs)
    if func in _LIKE_THEIR_FIRST:
        return torch.empty_like(args[0], memory_format=torch.contiguous_format)
    name = func.name()
    if not func._schema.returns:
        return None  # it writes into its arguments only, such as a fused optimizer
    if func.namespace in ("aten", "prims", "quantized"):
        raise NotImplementedError(
            f"{name} cannot be dry-run: PyTorch does not tell the shape of its result without data. "
            f'Tell it with @torch.library.register_fake("{name}"), or leave the operator out of the dry run.'
        )
    first = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)), None)
    gpu.values.assume(
        f"{name} has no fake kernel; its results were taken to be like its first tensor "
        f'(@torch.library.register_fake("{name}") tells their true shape)'
    )
    made = [
        torch.empty_like(first) if isinstance(result.type, torch.TensorType) and first is not None else None
        for result in func._schema.returns
    ]
    return None if not made else made[0] if len(made) == 1 else tuple(made)


def storage_under(tensor: torch.Tensor) -> torch.UntypedStorage:
    """A tensor's storage, that of what ``torch.func`` wraps included. Raises NotImplementedError for sparse tensors."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return storage_under(torch._C._functorch.get_unwrapped(tensor))
        raise NotImplementedError(
            f"{tensor.layout} tensors are not followed in a dry run; use dense ones (for an embedding: sparse=False)."
        ) from None
