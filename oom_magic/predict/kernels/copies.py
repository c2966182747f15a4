"""Copies that CUDA's kernels make of arguments whose layout or place they cannot read.

The gradient of a sum is one number expanded, so a backward often begins with such a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.operator_table import Rule
from oom_magic.predict.operators.calls import Call

aten = torch.ops.aten
_MOST_DIMS = 3  # of one Fourier transform (``cufft_max_ndim``)


def is_readable(tensor: torch.Tensor) -> bool:
    """Contiguous in the memory format that it suggests."""
    if tensor.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    memory_format = formats.get(tensor.dim())
    return memory_format is not None and tensor.is_contiguous(memory_format=memory_format)


def copied(*after: int, before: tuple[int, ...] = (), is_read: Callable[[torch.Tensor], bool] = is_readable) -> Rule:
    """A kernel that copies the arguments at these positions, before and after its outputs are made, unless ``is_read``
    says that it reads their layout (``.contiguous()`` in the kernel)."""

    def rule(call: Call) -> None:
        copy_unread(before, call)
        make_outputs(call)
        copy_unread(after, call)

    def copy_unread(positions: tuple[int, ...], call: Call) -> None:
        for position in positions:
            tensor = call.argument(position)
            if isinstance(tensor, torch.Tensor) and not is_read(tensor):
                call.take_like(tensor)

    return rule


contiguous = partial(copied, is_read=torch.Tensor.is_contiguous)  # for kernels that read no other memory format


def make_outputs(call: Call) -> None:
    """Make all outputs, in order."""
    for position in range(len(call.outputs)):
        call.output(position)


def then_copied(rule: Rule) -> Rule:
    """A variant that copies a result of its own into the given one."""

    def rule_of_variant(call: Call) -> None:
        call.take_like(call.outputs[0])
        rule(call)

    return rule_of_variant


def _complex_to_real(call: Call) -> None:
    """aten/src/ATen/native/UnaryOps.cpp, ``unary_op_impl_with_complex_to_float_out``: complex numbers first."""
    make_outputs(call)
    if call.args[0].is_complex():
        call.take_like(call.args[0])


def _angle(call: Call) -> None:
    """The same file, ``angle``: complex numbers before the result."""
    if call.args[0].is_complex():
        call.take_like(call.args[0])
    make_outputs(call)


def _images_to_columns(call: Call) -> None:
    """aten/src/ATen/native/cuda/Im2Col.cu: the output is first made like the input, then resized."""
    images, made = call.args[0], call.outputs[0]
    grows = made.numel() > images.numel()
    first = call.take_like(images) if grows else -1
    if not grows:
        call.output(0, images.numel() * made.element_size())
    if not images.is_contiguous():
        call.take_like(images)
    call.output(0)
    call.give_back(first)


def _columns_to_images(call: Call) -> None:
    """aten/src/ATen/native/cuda/Col2Im.cu: likewise; the larger memory stays."""
    columns, made = call.args[0], call.outputs[0]
    call.output(0, max(columns.numel(), made.numel()) * made.element_size())
    if not columns.is_contiguous():
        call.take_like(columns)


def _noisy_relu(call: Call) -> None:
    """aten/src/ATen/native/cuda/RreluWithNoise.cu: in evaluation it is ``leaky_relu``."""
    (contiguous(0) if call.argument(4, False) else make_outputs)(call)


def _pairwise_gradient(call: Call) -> None:
    """aten/src/ATen/native/cuda/DistanceKernel.cu, ``pdist_backward_kernel_impl``: each row's part from each other."""
    points = call.args[1]
    call.output(0)
    call.take((len(points) - 1) * points.numel() * points.element_size())


def _distance_gradient(call: Call) -> None:
    """The same file, ``cdist_backward_kernel_impl``: each row's part from each of the other rows."""
    _gradient, points, others, power = call.args[:4]
    call.output(0)
    if power:
        call.take(others.shape[-2] * points.numel() * points.element_size())


def _fourier_to_real(call: Call) -> None:
    """aten/src/ATen/native/cuda/SpectralOps.cpp, ``_fft_c2r_cufft``: the transform may overwrite what it reads."""
    tensor, dims = call.args[:2]
    call.output(0)
    if _is_at_once(dims):
        call.take_like(tensor)
        _transform(call, tensor.new_empty(tensor.shape), dims)
    else:
        _complex_dims(call, tensor, dims[:-1])


def _fourier_of_real(call: Call) -> None:
    """The same file, ``_fft_r2c_cufft``: the input is aligned as complex numbers are."""
    tensor, dims = call.args[:2]
    call.output(0)
    if tensor.storage_offset() % 2:
        call.take_like(tensor)
    if _is_at_once(dims):
        _transform(call, tensor, dims)
    else:
        _transform(call, tensor, dims[-1:])
        call.take_like(call.outputs[0])


def _fourier(call: Call) -> None:
    """The same file, ``_fft_c2c_cufft``."""
    call.output(0)
    tensor, dims = call.args[:2]
    _complex_dims(call, tensor, dims, is_made=True)


def _complex_dims(call: Call, tensor: torch.Tensor, dims: Sequence[int], *, is_made: bool = False) -> None:
    """Three dimensions at a time, from one tensor into another; ``is_made``: the first is there."""
    if not is_made:
        call.take_like(tensor)
    order = sorted(dims, key=lambda dim: -tensor.stride()[dim])
    _transform(call, tensor, order[-_MOST_DIMS:])
    if len(order) > _MOST_DIMS:
        call.take_like(tensor)


def _is_at_once(dims: Sequence[int]) -> bool:
    """``use_optimized_cufft_path``."""
    return len(dims) <= _MOST_DIMS and list(dims[:2]) != [0, 1]


def _transform(call: Call, tensor: torch.Tensor, dims: Sequence[int]) -> None:
    """``_exec_fft``: the other dimensions become one, and cuFFT has to be able to step through the rest."""
    others = sorted(set(range(tensor.dim())) - set(dims), key=lambda dim: -tensor.stride()[dim])
    lengths = [tensor.shape[dim] for dim in dims]
    rows = tensor.permute(*others, *dims).reshape(tensor.numel() // max(prod(lengths), 1), *lengths)
    copies = [call.take_like(tensor)] if rows.untyped_storage()._cdata != tensor.untyped_storage()._cdata else []
    if not _can_step(rows):
        copies.append(call.take_like(tensor))
    call.give_back(*reversed(copies))


def _can_step(rows: torch.Tensor) -> bool:
    """CuFFTPlanCache.h, ``as_cufft_embed``: whether the layout need not be copied."""
    count, *lengths = rows.shape
    between, *strides = rows.stride()
    step = strides[-1]
    if step <= 0 or (count != 1 and between == 0):
        return False
    for length, stride in zip(lengths[:0:-1], strides[-2::-1], strict=True):
        if length == 1:
            continue
        if stride <= 0 or stride % step:
            return False
        step = stride
    return True


def _unfolded_gradient(call: Call) -> None:
    """aten/src/ATen/native/UnfoldBackward.h: the positions along the dimension."""
    _gradient, sizes, dim = call.args[:3]
    call.output(0)
    call.take(sizes[dim] * torch.int64.itemsize)


def _where(call: Call) -> None:
    """aten/src/ATen/native/TensorCompare.cpp, ``where_self_out``: numbers on the host go to the GPU."""
    for number in call.args[1:]:
        if not number.is_meta:
            call.take(number.element_size())


def _scalar_power(call: Call) -> None:
    """aten/src/ATen/native/Pow.cpp, ``pow.Scalar_out``: the base goes to the GPU."""
    call.output(0)
    call.take(call.outputs[0].element_size())


def _roll(call: Call) -> None:
    """aten/src/ATen/native/TensorTransformations.h, ``roll_common``: one dimension after the other."""
    tensor, shifts = call.args[:2]
    copy = -1 if tensor.is_contiguous() else call.take_like(tensor)
    for _ in shifts[1:]:
        call.take_like(tensor)
        call.give_back(copy)
        copy = -1
    call.output(0)


def _in_order(call: Call) -> None:
    """Kernels that read and write contiguous tensors, and copy what they wrote to the outputs.

    Under aten/src/ATen/native/cuda: AdaptiveMaxPooling2d.cu, UpSampleBilinear2d.cu
    (``upsample_gen2d_aa_out_cuda_template``), UpSampleNearest3d.cu.
    """
    make_outputs(call)
    for tensor in (*call.outputs, call.args[0]):
        if not tensor.is_contiguous():
            call.take_like(tensor)


def _gradient_in_order(call: Call) -> None:
    """The backward of such kernels: AdaptiveMaxPooling2d.cu, UpSampleTrilinear3d.cu."""
    call.output(0)
    for tensor in (*(one for one in call.args if isinstance(one, torch.Tensor)), call.outputs[0]):
        if tensor is not call.args[1] and not tensor.is_contiguous():
            call.take_like(tensor)


def _resampled(call: Call) -> None:
    """UpSampleNearest2d.cu, UpSampleBilinear2d.cu: what keeps its size is copied to the output, however it lies."""
    make_outputs(call)
    if call.outputs[0].shape != call.args[0].shape and not is_readable(call.args[0]):
        call.take_like(call.args[0])


def _pooled_gradient(call: Call) -> None:
    """aten/src/ATen/native/cuda/AdaptiveAveragePooling.cu: of channels last, any gradient is read."""
    call.output(0)
    gradient, images = call.args[:2]
    is_last = torch._prims_common.suggest_memory_format(images) is torch.channels_last
    if not is_last and not gradient.is_contiguous():
        call.take_like(gradient)


def _gradient_of_windows(call: Call) -> None:
    """AveragePool2d.cu, DilatedMaxPool2d.cu: gradient and images are read in the memory format that images suggest."""
    make_outputs(call)
    memory_format = torch._prims_common.suggest_memory_format(call.args[1])
    for tensor in call.args[:2]:
        if not tensor.is_contiguous(memory_format=memory_format):
            call.take_like(tensor)


def _by_cudnns_sampler(call: Call) -> None:
    """aten/src/ATen/native/cudnn/GridSampler.cpp: expanded tensors, and a grid that is not in order, are copied."""
    for tensor in call.args:
        if 0 in tensor.stride() or (tensor is call.args[1] and not tensor.is_contiguous()):
            call.take_like(tensor)


_IN_ORDER = (
    "adaptive_max_pool2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "upsample_nearest3d",
    "_upsample_nearest_exact3d",
)  # fmt: skip
_GRADIENT_IN_ORDER = ("adaptive_max_pool2d_backward", "upsample_trilinear3d_backward")
_FIRST_AFTER_OUTPUT = (
    "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d",
    "upsample_nearest1d", "_upsample_nearest_exact1d", "nll_loss_backward", "nll_loss2d_backward",
    "max_pool3d_with_indices_backward", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool3d_backward", "fractional_max_pool3d_backward", "upsample_nearest1d_backward",
    "_upsample_nearest_exact1d_backward", "upsample_linear1d_backward", "reflection_pad1d_backward",
)  # fmt: skip
_RESAMPLED = (
    "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest2d_backward",
    "_upsample_nearest_exact2d_backward", "upsample_bilinear2d_backward",
)  # fmt: skip
_WINDOWS_BACKWARD = ("max_pool2d_with_indices_backward", "avg_pool2d_backward")
_FIRST_CONTIGUOUS = (
    "avg_pool3d", "avg_pool3d_backward",
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "kthvalue", "mode", "cummax",
    "cummin", "adaptive_max_pool3d", "upsample_bicubic2d_backward", "_upsample_bilinear2d_aa_backward",
    "_upsample_bicubic2d_aa_backward", "upsample_nearest3d_backward", "_upsample_nearest_exact3d_backward",
    "reflection_pad2d_backward",
)  # fmt: skip
_FIRST_BEFORE_OUTPUT = ("_adaptive_avg_pool3d", "fractional_max_pool2d_backward")


def _rules(names: tuple[str, ...], make: Callable[[], Rule]) -> dict[OpOverload, Rule]:
    return {getattr(aten, name).default: make() for name in names if hasattr(aten, name)}


RULES: dict[OpOverload, Rule] = {
    **_rules(_FIRST_AFTER_OUTPUT, lambda: copied(0)),
    **_rules(_RESAMPLED, lambda: _resampled),
    **_rules(_WINDOWS_BACKWARD, lambda: _gradient_of_windows),
    **_rules(_FIRST_BEFORE_OUTPUT, lambda: contiguous(before=(0,))),
    **_rules(_IN_ORDER, lambda: _in_order),
    **_rules(_GRADIENT_IN_ORDER, lambda: _gradient_in_order),
    aten._adaptive_avg_pool2d_backward.default: _pooled_gradient,
    aten._pdist_backward.default: _pairwise_gradient,
    aten._cdist_backward.default: _distance_gradient,
    **_rules(_FIRST_CONTIGUOUS, lambda: contiguous(0)),
    aten.rrelu_with_noise.default: _noisy_relu,
    aten.median.dim: contiguous(0),
    aten.nanmedian.dim: contiguous(0),
    aten.bucketize.Tensor: contiguous(0),
    aten.searchsorted.Tensor: contiguous(0, 1),
    aten.abs.default: _complex_to_real,
    aten.angle.default: _angle,
    aten._fft_c2r.default: _fourier_to_real,
    aten._fft_r2c.default: _fourier_of_real,
    aten._fft_c2c.default: _fourier,
    aten.cudnn_grid_sampler.default: _by_cudnns_sampler,
    aten.cudnn_grid_sampler_backward.default: _by_cudnns_sampler,
    aten.where.self: _where,
    aten.pow.Scalar: _scalar_power,
    aten.roll.default: _roll,
    aten.unfold_backward.default: _unfolded_gradient,
    aten.im2col.default: _images_to_columns,
    aten.col2im.default: _columns_to_images,
}
