"""Which attention kernel CUDA would run, and that kernel's operators.

Rules: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (``select_sdp_backend`` and its checks) and
attention.cpp (``scaled_dot_product_attention``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from oom_magic.predict.operators.type_checks import check_attention, check_bias

aten = torch.ops.aten
Capability = tuple[int, int]
HALF_TYPES = (torch.float16, torch.bfloat16)
_MAX_FLASH_HEAD_SIZE = 256


def choose_backend(
    capability: Capability,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    enable_gqa: bool,
) -> str:
    """``"cudnn"``, ``"flash"``, ``"efficient"`` or ``"math"``."""
    if query.dim() != 4 or min(query.shape[2], key.shape[2]) == 0:
        return "math"
    backends = torch.backends.cuda
    tensors = (query, key, value)
    prefers_cudnn = capability in ((9, 0), (10, 0)) and backends.cudnn_sdp_enabled()
    if prefers_cudnn and _fits_cudnn(capability, tensors, mask, dropout, is_causal):
        return "cudnn"
    if backends.flash_sdp_enabled() and _fits_flash(capability, tensors, mask, dropout, is_causal, enable_gqa):
        return "flash"
    if backends.mem_efficient_sdp_enabled() and _fits_efficient(capability, tensors, mask):
        return "efficient"
    return "math"


def _fits_flash(
    capability: Capability,
    tensors: tuple[torch.Tensor, ...],
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    query, key, value = tensors
    head_size = query.shape[-1]
    if mask is not None or capability < (8, 0) or query.dtype not in HALF_TYPES:
        return False
    if not head_size == key.shape[-1] == value.shape[-1] or head_size > _MAX_FLASH_HEAD_SIZE:
        return False
    if not (_same_batch_and_heads(tensors, enable_gqa) and _lie_in_rows(tensors, mask)):
        return False
    if is_causal and query.shape[2] != key.shape[2]:
        return False
    return fits_shared_memory(capability, tensors, dropout)


def fits_shared_memory(capability: Capability, tensors: tuple[torch.Tensor, ...], dropout: float) -> bool:
    """``check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120``, of flash attention."""
    head_size = tensors[0].shape[-1]
    small_shared_memory = capability in ((8, 6), (8, 9), (12, 0), (12, 1))
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not (small_shared_memory and trains and (192 < head_size <= 224 or (head_size > 224 and dropout > 0)))


def _fits_efficient(capability: Capability, tensors: tuple[torch.Tensor, ...], mask: torch.Tensor | None) -> bool:
    """Unlike flash attention it takes no groups of heads; as many heads of each may be called groups of one."""
    if not (_same_batch_and_heads(tensors, False) and _lie_in_rows(tensors, mask)):
        return False
    return fits_efficient_kernel(capability, tensors)


def _lie_in_rows(tensors: tuple[torch.Tensor, ...], mask: torch.Tensor | None) -> bool:
    """``check_last_dim_stride_equals_1_dense``: the mask too, which T5's bias, a permuted embedding, does not."""
    return all(tensor.stride(-1) == 1 for tensor in (*tensors, *(() if mask is None else (mask,))))


def fits_efficient_kernel(capability: Capability, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Types, and ``check_head_dim_size_mem_efficient``: heads of as many elements as the kernels load at once."""
    dtype = tensors[0].dtype
    if dtype not in (torch.float32, torch.float16) and not (dtype is torch.bfloat16 and capability >= (8, 0)):
        return False
    alignment = 1 if dtype is torch.float32 and capability < (8, 0) else 4 if dtype is torch.float32 else 8
    return not any(tensor.shape[-1] % alignment for tensor in (tensors[0], tensors[2]))


def _fits_cudnn(
    capability: Capability,
    tensors: tuple[torch.Tensor, ...],
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
) -> bool:
    query, key, value = tensors
    largest = 256 if capability == (9, 0) else 128
    return (
        query.dtype in HALF_TYPES
        and query.shape[-1] == key.shape[-1]
        and all(tensor.shape[-1] % 8 == 0 and tensor.shape[-1] <= largest for tensor in (query, value))
        and _lie_in_rows(tensors, mask)
        and not (mask is not None and (is_causal or mask.requires_grad))
        and dropout * 16 == int(dropout * 16)  # check_cudnn_dropout
        and key.shape[2] > 1
        and not (dropout and query.shape[2] == 1)
    )


def _same_batch_and_heads(tensors: tuple[torch.Tensor, ...], enable_gqa: bool) -> bool:
    query, key, value = tensors
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
        return False
    return query.shape[1] == key.shape[1] or (enable_gqa and query.shape[1] % key.shape[1] == 0)


def attend(
    capability: Capability,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``scaled_dot_product_attention`` by the operators that CUDA would run."""
    check_attention(query, key, value)
    backend = choose_backend(capability, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    mask = _as_bias(attn_mask, query)
    if backend == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, trains, dropout_p, is_causal, False, scale=scale
        )[0]  # type: ignore[no-any-return]
    if backend == "flash":
        return flash_attend(query, key, value, dropout_p, is_causal, scale)
    if backend == "efficient":
        check_bias(mask, query)
        mask = None if mask is None else _aligned(mask, query, key)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, trains, dropout_p, is_causal, scale=scale
        )[0]  # type: ignore[no-any-return]
    return _math(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)


def attention_in_transforms(is_on_gpu: Callable[[torch.Tensor], bool], capability: Capability) -> dict[str, Any]:
    """In place of ``scaled_dot_product_attention``: a transform of ``torch.func`` takes it apart itself, by the kernel
    that would be chosen for tensors without data."""
    usual = torch.nn.functional.scaled_dot_product_attention

    def scaled_dot_product_attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch._C._functorch.is_functorch_wrapped_tensor(query) and is_on_gpu(query):
            return attend(capability, query, *args, **kwargs)
        return usual(query, *args, **kwargs)

    return {"scaled_dot_product_attention": scaled_dot_product_attention}


def flash_attend(
    query: Any, key: Any, value: Any, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """Flash attention on (batch, heads, length, head size)."""
    head_size = query.shape[-1]
    scale = head_size**-0.5 if scale is None else scale
    rest = -head_size % 8  # pad_last_dim: the kernels require head sizes that are multiples of 8
    if rest:
        query, key, value = (pad(tensor, (0, rest)) for tensor in (query, key, value))
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :head_size] if rest else out


def _math(
    query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, scale: Any, enable_gqa: bool
) -> torch.Tensor:
    return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
        query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _as_bias(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A boolean mask as zeros and minus infinities (``convert_boolean_attn_mask``)."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    low = torch.scalar_tensor(-torch.inf, dtype=query.dtype, device=query.device)
    return torch.where(mask, 0.0, low)


def _aligned(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask as the memory-efficient kernel requires it (``preprocess_mask``, ``pad_bias``): rows padded to the next
    multiple of 8, always where a stride is not known while compiling."""
    if mask.stride(-1) != 1 or not all(_is_multiple_of_8(stride) for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        mask = aten.slice.Tensor(pad(mask, (0, 8 - length % 8)), -1, 0, length)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _is_multiple_of_8(stride: int | torch.SymInt) -> bool:
    known = stride.node.maybe_as_int() if isinstance(stride, torch.SymInt) else stride
    return known is not None and known % 8 == 0
