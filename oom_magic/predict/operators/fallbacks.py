"""Operators without a meta kernel: decomposed, estimated, or refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._library.fake_impl import set_ctx_getter
from torch._library.simple_registry import singleton
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from oom_magic.language import _
from oom_magic.predict.fake_cuda.places import FakeDevice, Place

aten = torch.ops.aten

# Which arguments the results are like. Samplers of torch.distributions and their gradients
# (aten/src/ATen/native/Distributions.cpp); WeightNorm.cpp's backward, whose shapes PyTorch 2.6 lacks.
_LIKE_ARGUMENTS = {
    aten._sample_dirichlet.default: (0,),
    aten._standard_gamma.default: (0,),
    aten._standard_gamma_grad.default: (0,),
    aten._dirichlet_grad.default: (0,),
    aten.binomial.default: (0,),
    aten._weight_norm_interface_backward.default: (1, 2),
}


def _least_squares(
    gpu: FakeDevice, a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[torch.Tensor, ...]:
    """aten/src/ATen/native/BatchLinearAlgebra.cpp, ``linalg_lstsq``: solution, residuals, rank and singular values;
    those that a driver does not compute are empty. CUDA has one driver."""
    driver = driver or ("gels" if gpu.place(a) is Place.GPU else "gelsy")
    *batch, num_rows, num_columns = a.shape
    sides = b.shape[a.dim() - 1 :]  # none where there is one right-hand side
    has_residuals = num_rows > num_columns and driver != "gelsy"
    return (
        a.new_empty((*batch, num_columns, *sides)),
        a.new_empty((*batch, *(sides or (1,))) if has_residuals else 0),
        a.new_empty(0 if driver == "gels" else batch, dtype=torch.long),
        a.new_empty((*batch, min(num_rows, num_columns)) if driver in ("gelsd", "gelss") else 0),
    )


_SHAPED: dict[OpOverload, Callable[..., Any]] = {aten.linalg_lstsq.default: _least_squares}
_Fallback = Callable[[FakeDevice, OpOverload, tuple[Any, ...], dict[str, Any]], Any]


def find_fallback(error: Exception) -> _Fallback | None:
    """The fallback for an operator that failed because its tensors have no data; None if it failed for another reason.

    The words are those of ``torch/_library/custom_ops.py`` and ``fake_impl.py``, for operators that libraries define.
    """
    if "output Tensor with data-dependent shape" in str(error):
        return _run_sized_by_values
    if isinstance(error, NotImplementedError) or "no fake impl" in str(error):
        return _run_without_kernel
    return None


def _run_sized_by_values(gpu: FakeDevice, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The outputs of an operator such as ``torchvision::nms``, as long as its first tensor."""
    gpu.values.assume_as_long(func)
    with set_ctx_getter(lambda: _AsLongAs(_first_tensor(args, kwargs))):
        return singleton.find(func.name()).fake_impl.kernel(*args, **kwargs)


def _run_without_kernel(gpu: FakeDevice, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator without a meta kernel. Raises NotImplementedError for PyTorch's own operators."""
    decomposition = decomposition_table.get(func)
    if decomposition is not None:
        with gpu:
            return decomposition(*args, **kwargs)
    if func in _SHAPED:
        if gpu.place(args[0]) is Place.GPU:
            gpu.values.assume_uncounted(func)
        return _SHAPED[func](gpu, *args, **kwargs)
    if func in _LIKE_ARGUMENTS:
        like = [torch.empty_like(args[k], memory_format=torch.contiguous_format) for k in _LIKE_ARGUMENTS[func]]
        return tuple(like) if len(like) > 1 else like[0]
    name = func.name()
    if not func._schema.returns:
        return None  # it writes into its arguments only, such as a fused optimizer
    if func.namespace in ("aten", "prims", "quantized"):
        raise NotImplementedError(
            _(
                "{name} cannot be dry-run: PyTorch cannot infer the shape of its result without data. Specify it"
                ' with @torch.library.register_fake("{name}"), or leave the operator out of the dry run.',
                name=name,
            )
        )
    first = _first_tensor(args, kwargs)
    gpu.values.assume(
        _(
            "{name} has no fake kernel; its results were assumed to be like its first tensor"
            ' (@torch.library.register_fake("{name}") specifies their true shape)',
            name=name,
        )
    )
    made = [
        torch.empty_like(first) if isinstance(result.type, torch.TensorType) and first is not None else None
        for result in func._schema.returns
    ]
    return None if not made else made[0] if len(made) == 1 else tuple(made)


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    return next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)


class _AsLongAs:
    """What ``torch.library.get_ctx()`` returns to a fake kernel here: numbers for sizes that depend on values."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self._length = tensor.shape[0] if tensor is not None and tensor.dim() else 1

    def new_dynamic_size(self, **limits: int) -> int:
        """The tensor's length, or the greatest that the kernel allows."""
        return min(self._length, limits.get("max", self._length))

    create_unbacked_symint = new_dynamic_size


def storage_under(tensor: torch.Tensor) -> torch.UntypedStorage:
    """A tensor's storage, also for wrappers of another tensor. Raises NotImplementedError for sparse tensors."""
    kind = type(tensor)
    if kind is not torch.Tensor and is_wrapper(kind):
        return storage_under(wrapped_in(tensor)[0])
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return storage_under(torch._C._functorch.get_unwrapped(tensor))
        if torch._C._functorch.is_legacy_batchedtensor(tensor):  # of ``is_grads_batched``, which does not nest
            with torch._C._DisableTorchDispatch():
                return storage_under(torch._remove_batch_dim(tensor, 1, 1, 0))
        if tensor.layout is torch.sparse_coo:
            with torch._C._DisableTorchDispatch():
                return tensor._values().untyped_storage()
        raise NotImplementedError(
            _(
                "{layout} tensors are not supported in a dry run; use dense ones, or torch.sparse_coo.",
                layout=tensor.layout,
            )
        ) from None


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this type, such as DTensor, hold their memory in others (torch/utils/_python_dispatch.py)."""
    return kind is not torch.Tensor and kind is not torch.nn.Parameter and hasattr(kind, "__tensor_flatten__")


def wrapped_in(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a wrapper holds."""
    names, _unused = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [getattr(tensor, name) for name in names]
