"""Which kernel attends to nested tensors of ``torch.jagged`` layout, whose rows lie one after the other.

``torch.nested._internal.sdpa`` asks in Python and calls the kernels that take cumulative lengths. Its checks run as
they are; those in C++ (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, ``can_use_flash_attention`` and
``can_use_mem_efficient_attention``) would look for a card.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nested._internal.sdpa as nested_attention
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nn.attention import SDPBackend

from oom_magic.language import _
from oom_magic.predict.isolation.patching import Patches
from oom_magic.predict.operators.attention import (
    HALF_TYPES,
    Capability,
    fits_efficient_kernel,
    fits_shared_memory,
)
from oom_magic.predict.operators.autocast import Autocast

# What autocast computes in lower precision; CUDA casts nested tensors below torch functions, as it does others.
_PRODUCTS = {torch.nn.functional.linear, torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm}
_as_written = NestedTensor.__torch_function__
_dispatched = NestedTensor.__torch_dispatch__


def nested_attention_followed(capability: Capability, autocast: Autocast) -> Patches:
    """The choice of a kernel as this card would make it, and autocast; what is not followed is refused."""

    def __torch_function__(_cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: N807
        if autocast.is_on and func in _PRODUCTS:
            args, kwargs = autocast.lowered(args, kwargs or {})
        return _as_written(func, types, args, kwargs)

    answers = {
        "_autocast": _autocast,
        "_is_computing_meta_flops": lambda _tensor: False,
        "_select_sdp_backend": partial(_choose, capability),
    }
    functions = {"__torch_dispatch__": classmethod(_dispatch), "__torch_function__": classmethod(__torch_function__)}
    return [(nested_attention, answers), (NestedTensor, functions)]


class _Tensors(NamedTuple):
    """What the checks in Python read of ``SDPAParams``, which takes no tensor without data."""

    query: Any
    key: Any
    value: Any


def _choose(
    capability: Capability, query: Any, key: Any, value: Any, mask: Any, dropout: float, _is_causal: bool, gqa: bool
) -> SDPBackend:
    """``_select_sdp_backend``, of the kernels that are followed."""
    tensors = _Tensors(query, key, value)
    if mask is None and not gqa and all(one.values().stride(-1) == 1 for one in tensors):
        if _fits_flash(capability, tensors, dropout):
            return SDPBackend.FLASH_ATTENTION
        if _fits_efficient(capability, tensors):
            return SDPBackend.EFFICIENT_ATTENTION
    raise RuntimeError(  # not a NotImplementedError: NestedTensor.__torch_function__ would catch that
        _(
            "scaled_dot_product_attention of these nested tensors cannot be dry-run: neither flash attention nor"
            " the memory-efficient kernel supports them, and what other kernels take for rows of different"
            " lengths is not modeled. Pad them (torch.nested.to_padded_tensor), or leave it out of the dry run."
        )
    )


def _fits_flash(capability: Capability, tensors: Any, dropout: float) -> bool:
    is_its_type = capability >= (8, 0) and tensors.query.dtype in HALF_TYPES
    is_wanted = is_its_type and torch.backends.cuda.flash_sdp_enabled()
    is_small = is_wanted and fits_shared_memory(capability, tensors, dropout)
    return is_small and nested_attention._can_use_flash_sdpa_jagged(tensors)


def _fits_efficient(capability: Capability, tensors: Any) -> bool:
    is_wanted = torch.backends.cuda.mem_efficient_sdp_enabled() and fits_efficient_kernel(capability, tensors)
    return is_wanted and nested_attention._can_use_efficient_sdpa_jagged(tensors)


def _dispatch(_cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``NestedTensor.__torch_dispatch__``, which makes tensors where its rows are: a backward does not hide the pretend
    card from it, as a forward does."""
    with torch._C.DisableTorchFunction():
        return _dispatched(*args, **kwargs)


def _autocast(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The arguments in autocast's type, as PyTorch's function of this name has them for tensors on CUDA."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    kept = (torch.float64, torch.get_autocast_dtype("cuda"))
    return tuple(one if one is None or one.dtype in kept else one.to(kept[1]) for one in tensors)
