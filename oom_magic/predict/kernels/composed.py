"""Operators whose CUDA kernel is made of other operators: these run in its place, each taking its own memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.places import Handler, Place, tensors_in
from oom_magic.predict.operators.attention import Capability, choose_backend
from oom_magic.predict.operators.calls import existing
from oom_magic.predict.operators.drawn_numbers import draw_on_host

aten = torch.ops.aten


def _multinomial(
    weights: torch.Tensor, num_samples: int, replacement: bool = False, out: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """aten/src/ATen/native/Distributions.cpp, ``multinomial_out``, and cuda/MultinomialKernel.cu."""
    shape = (*weights.shape[:-1], num_samples)
    result = weights.new_empty(shape, dtype=torch.int64) if out is None else out.resize_(shape)
    if replacement and num_samples > 1:
        scratch = [torch.empty_like(weights) for _ in ("distribution", "normalized", "running sums")]
        while scratch:
            scratch.pop()
        return result
    least, most = torch.aminmax(weights)
    not_negative = least >= 0
    is_finite = most < torch.inf
    _is_valid = not_negative & is_finite
    del is_finite, not_negative
    sums = weights.sum(-1)
    are_zero = sums == 0
    is_any_zero = are_zero.any() if weights.dim() > 1 else are_zero
    del are_zero, sums
    torch.logical_not(is_any_zero)
    chances = torch.empty_like(weights).exponential_(1)
    torch.div(weights, chances, out=chances)
    if num_samples == 1:
        return torch.argmax(chances, dim=-1, keepdim=True, out=result)
    torch.topk(chances, num_samples, out=(weights.new_empty(result.shape), result))
    return result


def _is_infinite(values: torch.Tensor) -> torch.Tensor:
    """aten/src/ATen/native/TensorCompare.cpp, ``isinf``."""
    if not values.is_floating_point():
        return torch.zeros_like(values, dtype=torch.bool)
    return values.abs() == torch.inf


def _count_nonzero(tensor: torch.Tensor, dim: Any = None) -> torch.Tensor:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, ``count_nonzero_cuda``."""
    is_counted = tensor if tensor.dtype is torch.bool else tensor != 0
    return is_counted.sum() if dim is None else is_counted.sum(dim)


def _median(tensor: torch.Tensor) -> torch.Tensor:
    """aten/src/ATen/native/cuda/Sorting.cpp, ``median_impl``: of all elements, sorted."""
    ordered = tensor.flatten().sort()[0]
    return torch.where(ordered[-1].isnan(), ordered[-1], ordered[(len(ordered) - 1) // 2])


def _median_of_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Likewise, ``nanmedian``: how many are numbers says where it is."""
    ordered = tensor.flatten().sort()[0]
    place = ((len(ordered) - 1 - ordered.isnan().sum()) / 2).to(torch.int64)
    return ordered.index_select(0, place.view(1)).squeeze(0)


def _distance(first: torch.Tensor, second: torch.Tensor, power: float = 2.0) -> torch.Tensor:
    """aten/src/ATen/native/Distance.cpp, ``dist``."""
    return (first - second).norm(power)


def _multivariate_log_gamma(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """aten/src/ATen/native/UnaryOps.cpp, ``mvlgamma``."""
    steps = torch.arange(number, dtype=tensor.dtype, device=tensor.device)
    each = tensor.unsqueeze(-1) + steps
    del steps
    return each.sum(-1)


def _euclidean_distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """aten/src/ATen/native/Distance.cpp, ``_euclidean_dist``: one product of rows with their norms beside them."""
    first_norm = first.pow(2).sum(-1, keepdim=True)
    first_ones = torch.ones_like(first_norm)
    second_norm = second.pow(2).sum(-1, keepdim=True)
    second_ones = torch.ones_like(second_norm)
    left = torch.cat([first.mul(-2), first_norm, first_ones], -1)
    del first_ones, first_norm
    right = torch.cat([second, second_ones, second_norm], -1)
    del second_norm, second_ones
    return left.matmul(right.mT).clamp_min_(0).sqrt_()


def _masked_scatter_backward(gradient: torch.Tensor, mask: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp: what the mask left out is filled up with zeros."""
    selected = gradient.masked_select(mask)
    rest = torch.Size(sizes).numel() - selected.numel()
    if rest > 0:
        selected = torch.cat([selected, gradient.new_zeros(rest)])
    return selected.view(sizes)


def _trilinear(
    first: torch.Tensor, second: torch.Tensor, third: torch.Tensor, expand1: list[int], expand2: list[int],
    expand3: list[int], summed: list[int], unrolled: int = 1,
) -> torch.Tensor:  # fmt: skip
    """aten/src/ATen/native/Linear.cpp, ``_trilinear``: one slice of the unrolled dimension after the other."""
    expanded = expand1, expand2, expand3
    num_dims = first.dim() + len(expand1)
    factors = list(zip((first, second, third), expanded, strict=True))
    whole = [_unsqueezed(tensor, dims) for tensor, dims in factors]
    sizes = [max(tensor.shape[dim] for tensor in whole) for dim in range(num_dims)]
    in_first_two = [dim for dim in summed if dim in expand3]
    with_third = [dim for dim in summed if dim not in expand3]
    out = first.new_zeros([1 if dim in summed else size for dim, size in enumerate(sizes)])
    if out.numel() and all(tensor.numel() for tensor in whole):
        for k in range(sizes[unrolled]):
            one, two, three = (
                tensor.narrow(unrolled, 0 if unrolled in dims else k, 1)
                for tensor, dims in zip(whole, expanded, strict=True)
            )
            part = _summed_product(one, two, in_first_two)
            part = _summed_product(part, three, with_third)
            (out if unrolled in summed else out.narrow(unrolled, k, 1)).add_(part)
            del part
    return out.squeeze(summed)


def _unsqueezed(tensor: torch.Tensor, dims: list[int]) -> torch.Tensor:
    for dim in sorted(dims):
        tensor = tensor.unsqueeze(dim)
    return tensor


def _summed_product(left: torch.Tensor, right: torch.Tensor, summed: list[int]) -> torch.Tensor:
    """The same file, ``sumproduct_pair``, with the summed dimensions kept."""
    if not summed:
        return left * right
    shared: list[int] = []
    of_left: list[int] = []
    of_right: list[int] = []
    for dim in range(left.dim()):
        is_left, is_right = left.shape[dim] != 1, right.shape[dim] != 1
        if dim not in summed:
            (shared if is_left and is_right else of_left if is_left else of_right).append(dim)
        elif is_left and not is_right:
            left = left.sum(dim, keepdim=True)
        elif is_right and not is_left:
            right = right.sum(dim, keepdim=True)
    sizes = [left.shape[dim] for dim in (*shared, *of_left)] + [1] * len(summed)
    order = [*shared, *of_left, *summed, *of_right]
    num_shared, num_left, num_right = (
        prod(tensor.shape[dim] for dim in dims) for tensor, dims in ((left, shared), (left, of_left), (right, of_right))
    )
    num_summed = prod(left.shape[dim] for dim in summed)
    rows = left.permute(order).reshape(num_shared, num_left, num_summed)
    columns = right.permute([*shared, *summed, *of_right, *of_left]).reshape(num_shared, num_summed, num_right)
    made = torch.bmm(rows, columns).view([*sizes, *(right.shape[dim] for dim in of_right)])
    return made.permute(sorted(range(len(order)), key=order.__getitem__))


def _attention(
    capability: Capability, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, width: int, heads: int,
    weight: torch.Tensor, bias: torch.Tensor, out_weight: torch.Tensor, out_bias: torch.Tensor,
    mask: torch.Tensor | None = None, need_weights: bool = True, average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """aten/src/ATen/native/transformers/cuda/attention.cu, ``native_multi_head_attention_cuda``."""
    batch, length = query.shape[:2]
    size = width // heads
    unprojected = query.view(batch, -1, heads, size).transpose(1, 2)  # of which the kernel is asked
    backend = choose_backend(capability, unprojected, unprojected, unprojected, None, 0.0, False, False)
    if query is key is value and backend != "math" and not need_weights and mask is None:
        packed = torch.nn.functional.linear(query, weight, bias)
        q, k, v = (part.view(batch, -1, heads, size).transpose(1, 2) for part in packed.chunk(3, -1))
        rows = aten.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, -1, width)
        out = torch.nn.functional.linear(rows, out_weight, out_bias)
        del rows
        return out, None
    if query is key is value:
        packed = aten.mm(query.reshape(-1, width), weight.t()).view(batch, length, 3 * width)
    else:
        packed = _projected((query, key, value), weight.chunk(3))
    parts = list(packed.new_empty(3, batch, heads, length, size).unbind())  # ``transform_bias_rescale_qkv``
    del packed
    scores = torch.bmm(parts[0].flatten(0, 1), parts[1].flatten(0, 1).mT).view(batch, heads, length, -1)
    weights = scores if mask is None else _masked_softmax(scores, mask, mask_type)
    del scores
    torch.bmm(weights.flatten(0, 1), parts[2].flatten(0, 1), out=parts[0].flatten(0, 1))  # over the query
    if not need_weights:
        del weights
    rows = parts[0].transpose(1, 2).reshape(batch * length, width)
    out = torch.addmm(out_bias, rows, out_weight.t()).view(batch, length, width)
    del rows
    if not need_weights:
        return out, None
    return out, weights.sum(1).div_(heads) if average_attn_weights else weights


def _masked_softmax(scores: torch.Tensor, mask: torch.Tensor, mask_type: int | None) -> torch.Tensor:
    """aten/src/ATen/native/transformers/attention.cpp, ``masked_softmax``, and native/cuda/SoftMax.cu.

    One kernel takes rows of up to 1024 scores (4096 bytes) whose mask lies in order; the others are filled and copied.
    """
    where = mask.to(torch.bool)
    found = torch.empty_like(scores)
    length = scores.shape[-1]
    is_in_order = where.is_contiguous() and mask_type != 0  # a mask for all rows is expanded
    if length <= 1024 and length * scores.element_size() <= 4096 and is_in_order:
        return found
    padding_of_rows = 1
    if mask_type == padding_of_rows:
        where = where[:, None, None, :]
    return scores.masked_fill(where, -torch.inf).softmax(-1)


def _projected(inputs: tuple[torch.Tensor, ...], weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """``qkv_projection`` of several inputs, one after the other, joined."""
    parts = [torch.mm(tensor.flatten(0, 1), part.t()) for tensor, part in zip(inputs, weights, strict=True)]
    return torch.cat([part.view(*inputs[0].shape[:2], -1) for part in parts], -1)


def _encoder_layer(
    capability: Capability, src: torch.Tensor, width: int, heads: int, weight: torch.Tensor, bias: torch.Tensor,
    out_weight: torch.Tensor, out_bias: torch.Tensor, use_gelu: bool, norm_first: bool, eps: float,
    norm_weight_1: torch.Tensor, norm_bias_1: torch.Tensor, norm_weight_2: torch.Tensor, norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor, ffn_bias_1: torch.Tensor, ffn_weight_2: torch.Tensor, ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None, mask_type: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """aten/src/ATen/native/transformers/transformer.cpp, ``transformer_encoder_layer_forward``."""

    def normed(tensor: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor) -> torch.Tensor:
        return torch.layer_norm(tensor, (width,), norm_weight, norm_bias, eps)

    hidden = normed(src, norm_weight_1, norm_bias_1) if norm_first else src
    projections = weight, bias, out_weight, out_bias
    hidden = _attention(
        capability, hidden, hidden, hidden, width, heads, *projections, mask, False, mask_type=mask_type
    )[0]
    hidden = hidden.add_(src)
    if not norm_first:
        hidden = normed(hidden, norm_weight_1, norm_bias_1)
    before = hidden
    if norm_first:
        hidden = normed(hidden, norm_weight_2, norm_bias_2)
    wide = aten._addmm_activation(ffn_bias_1, hidden.flatten(0, 1), ffn_weight_1.t(), use_gelu=use_gelu)
    hidden = torch.addmm(ffn_bias_2, wide, ffn_weight_2.t()).view(src.shape)
    del wide
    hidden = hidden.add_(before)
    return hidden if norm_first else normed(hidden, norm_weight_2, norm_bias_2)


# -- grids: native/AffineGridGenerator.cpp -------------------------------------------------------------------------


def _base_grid(like: torch.Tensor, sizes: list[int], align_corners: bool) -> torch.Tensor:
    """``make_base_grid_4D``, ``_5D``: the coordinates of each pixel, and a one."""
    lengths = sizes[:1] + sizes[2:]
    grid = like.new_empty((*lengths, len(lengths)))
    for column, length in enumerate(reversed(lengths[1:])):
        steps = torch.linspace(-1, 1, length, dtype=like.dtype, device=like.device)
        if length > 1 and not align_corners:
            steps = steps * (length - 1) / length
        grid.select(-1, column).copy_(steps.view(-1, *[1] * column))
        del steps
    grid.select(-1, -1).fill_(1)
    return grid.view(sizes[0], -1, len(lengths))


def _affine_grid(theta: torch.Tensor, sizes: list[int], align_corners: bool) -> torch.Tensor:
    grid = _base_grid(theta, sizes, align_corners).bmm(theta.transpose(1, 2))
    return grid.view(sizes[0], *sizes[2:], len(sizes) - 2)


def _affine_grid_backward(gradient: torch.Tensor, sizes: list[int], align_corners: bool) -> torch.Tensor:
    grid = _base_grid(gradient, sizes, align_corners).transpose(1, 2)
    return grid.bmm(gradient.reshape(sizes[0], -1, len(sizes) - 2)).transpose(1, 2)


# -- fake quantization: native/quantized/FakeQuantPerTensorAffine.cpp and FakeQuantPerChannelAffine.cpp -----------

_Pair = tuple[torch.Tensor, torch.Tensor]


def _per_tensor(tensor: torch.Tensor, *_unused: Any) -> _Pair:
    """The values, and a mask of those within the range."""
    return torch.empty_like(tensor), torch.empty_like(tensor, dtype=torch.bool)


def _per_channel(tensor: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, *_unused: Any) -> _Pair:
    """Likewise; whole zero points are compared with the range."""
    if not zero_point.is_floating_point():
        torch.aminmax(zero_point)
    return _per_tensor(tensor)


def _learned_per_tensor(tensor: torch.Tensor, *_unused: Any) -> torch.Tensor:
    return _per_tensor(tensor)[0]


def _learned_per_channel(
    tensor: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, *_unused: Any
) -> torch.Tensor:
    whole = torch.empty_like(zero_point).to(torch.int32)
    return _per_channel(tensor, scale, whole)[0]


def _gradients_per_tensor(gradient: torch.Tensor, tensor: torch.Tensor, *_unused: Any) -> tuple[torch.Tensor, ...]:
    """Of the tensor, and of scale and zero point, summed up."""
    found, of_scale, of_zero_point = (torch.empty_like(tensor) for _ in range(3))
    return found, of_scale.sum().unsqueeze(0), of_zero_point.sum().unsqueeze(0)


def _gradients_per_channel(
    gradient: torch.Tensor, tensor: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, axis: int,
    *_unused: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Likewise, for each channel."""
    rounded = torch.empty_like(zero_point)
    torch.aminmax(rounded)
    found, of_scale, of_zero_point = (torch.empty_like(tensor) for _ in range(3))
    dims = [dim for dim in range(tensor.dim()) if dim != axis]
    made = found, of_scale.sum(dims), of_zero_point.sum(dims)
    del rounded
    return made


def _observed(
    tensor: torch.Tensor, observer_on: torch.Tensor, fake_quant_on: torch.Tensor, running_min: torch.Tensor,
    running_max: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, averaging: float, least: int, most: int,
    axis: int, per_row: bool = False, symmetric: bool = False,
) -> _Pair:  # fmt: skip
    """cuda/FusedObsFakeQuant.cu: the range is observed, by channel with a number for each from the first call on; then
    the tensor is quantized."""
    in_order = tensor.contiguous()
    if not per_row:
        torch.aminmax(in_order)
        return _per_tensor(tensor)
    if not running_min.numel():
        for state in (running_min, running_max, scale, zero_point):
            state.resize_(tensor.shape[axis])
    rows = tensor if tensor.dim() == 2 else tensor.transpose(0, axis).flatten(1)
    torch.aminmax(rows, dim=1)
    return _per_channel(tensor, scale, zero_point)


# -- the table -----------------------------------------------------------------------------------------------------


def _handler(compose: Callable[..., Any]) -> Handler:
    def handle(gpu: FakeGPU, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        if not any(gpu.place(tensor) is Place.GPU for tensor in tensors_in(args, kwargs)):
            return gpu.run(func, args, kwargs)
        with gpu:
            return compose(*args, **kwargs)

    return handle


def _handler_for_card(compose: Callable[..., Any]) -> Handler:
    def handle(gpu: FakeGPU, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        return _handler(partial(compose, gpu.card.capability))(gpu, func, args, kwargs)

    return handle


def _draw_uniformly(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].is_meta:
        return gpu.run(func, args, kwargs)
    return draw_on_host(gpu, func, args, kwargs)


def _draw_in_place(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Numbers of a normal distribution take what those of a uniform one do (cuda/DistributionTemplates.h): nothing. The
    shape of the one is inferred in Python (torch/_refs, ``normal_``), in ten times as long."""
    if not args[0].is_meta:
        return draw_on_host(gpu, func, args, kwargs)
    return gpu.run(aten.uniform_.default, args[:1], {})


HANDLERS: dict[OpOverload, Handler] = existing({
    "uniform_": _draw_uniformly,
    "normal_": _draw_in_place,
    "multinomial": _handler(_multinomial),
    "multinomial.out": _handler(_multinomial),
    "masked_scatter_backward": _handler(_masked_scatter_backward),
    "affine_grid_generator": _handler(_affine_grid),
    "affine_grid_generator_backward": _handler(_affine_grid_backward),
    "isinf": _handler(_is_infinite),
    "count_nonzero": _handler(_count_nonzero),
    "median": _handler(_median),
    "nanmedian": _handler(_median_of_numbers),
    "dist": _handler(_distance),
    "mvlgamma": _handler(_multivariate_log_gamma),
    "_trilinear": _handler(_trilinear),
    "_euclidean_dist": _handler(_euclidean_distance),
    "fake_quantize_per_tensor_affine_cachemask": _handler(_per_tensor),
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _handler(_per_tensor),
    "fake_quantize_per_channel_affine_cachemask": _handler(_per_channel),
    "_fake_quantize_learnable_per_tensor_affine": _handler(_learned_per_tensor),
    "_fake_quantize_learnable_per_tensor_affine_backward": _handler(_gradients_per_tensor),
    "_fake_quantize_learnable_per_channel_affine": _handler(_learned_per_channel),
    "_fake_quantize_learnable_per_channel_affine_backward": _handler(_gradients_per_channel),
    "_fused_moving_avg_obs_fq_helper": _handler(_observed),
    "_native_multi_head_attention": _handler_for_card(_attention),
    "_transformer_encoder_layer_fwd": _handler_for_card(_encoder_layer),
})  # fmt: skip
