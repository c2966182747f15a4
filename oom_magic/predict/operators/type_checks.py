"""What CUDA's kernels refuse because of its arguments' types, in their words.

Tensors without data are computed whatever their types are, and a real run ends there. Each function names the source,
under aten/src/ATen; ``ScalarType.h`` names the types.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.language import _
from oom_magic.predict.fake_cuda.places import FakeDevice, Handler, tensors_in
from oom_magic.predict.operators.calls import existing

_NAMES = {
    torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float", torch.float64: "Double",
    torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble", torch.bool: "Bool", torch.uint8: "Byte",
    torch.int8: "Char", torch.int16: "Short", torch.int32: "Int", torch.int64: "Long",
}  # fmt: skip
QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
_REDUCED = frozenset({torch.float16, torch.bfloat16})
_WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_NOT_REAL = _WHOLE | _COMPLEX
_BOOL = frozenset({torch.bool})
_FLOATING = _REDUCED | _COMPLEX | {torch.float32, torch.float64}
Check = Callable[[tuple[Any, ...]], None]


def name(dtype: torch.dtype) -> str:
    """The type as C++ calls it: ``Half``."""
    return _NAMES.get(dtype, str(dtype))


def check_of(func: OpOverload) -> Check | None:
    """A function that raises what CUDA's kernel raises for arguments of these types."""
    return _CHECKS.get(func)


def check_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """native/transformers/attention.cpp, ``validate_sdpa_input``."""
    if not query.dtype is key.dtype is value.dtype:
        kinds = [_C_TYPES.get(tensor.dtype, str(tensor.dtype)) for tensor in (query, key, value)]
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got query.dtype:"
            f" {kinds[0]} key.dtype: {kinds[1]} and value.dtype: {kinds[2]} instead."
        )


def check_bias(mask: torch.Tensor | None, query: torch.Tensor) -> None:
    """native/transformers/cuda/attention.cu, ``_efficient_attention_forward``."""
    if mask is not None and mask.dtype is not query.dtype:
        raise RuntimeError("invalid dtype for bias - should match query's dtype")


_C_TYPES = {
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.float32: "float",
    torch.float64: "double",
}


def _others(args: tuple[Any, ...], positions: tuple[int, ...]) -> list[torch.Tensor]:
    """The tensors there whose type is not the first argument's."""
    given = [args[position] for position in positions if position < len(args)]
    return [one for one in given if isinstance(one, torch.Tensor) and one.dtype is not args[0].dtype]


def _same(*positions: int) -> Check:
    """``Tensor::data_ptr<T>`` and accessors: native/cuda/layer_norm_kernel.cu, GridSampler.cu."""

    def check(args: tuple[Any, ...]) -> None:
        for other in _others(args, positions):
            raise RuntimeError(f"expected scalar type {name(args[0].dtype)} but found {name(other.dtype)}")

    return check


def _grid(num_dims: int, args: tuple[Any, ...]) -> None:
    """native/cuda/GridSampler.cu, ``launch_grid_sampler_2d_forward_kernel`` and its like for volumes."""
    _refused(f"grid_sampler_{num_dims}d_cuda", _NOT_REAL, args)
    _same(1)(args)


def _group_norm(args: tuple[Any, ...]) -> None:
    """native/mixed_data_type.h, ``check_mixed_data_type``; native/cuda/group_norm_kernel.cu."""
    for other in _others(args, (1, 2)):
        if other.dtype is not torch.float32:
            raise RuntimeError("mixed dtype (CPU): expect parameter to have scalar type of Float")
    _same(1, 2)(args)


def _convolution(args: tuple[Any, ...]) -> None:
    """native/Convolution.cpp, ``check_input_same_type_as_parameters``."""
    for other, what in ((args[1], "weight"), (args[2], "bias")):
        if other is not None and other.dtype is not args[0].dtype:
            kinds = [f"torch.cuda.{name(tensor.dtype)}Tensor" for tensor in (args[0], other)]
            raise RuntimeError(f"Input type ({kinds[0]}) and {what} type ({kinds[1]}) should be the same")
    _said("getCudnnDataTypeFromScalarType() not supported for {name}", _BOOL)(args)  # native/cudnn/Conv_v8.cpp


def _cross_entropy(args: tuple[Any, ...]) -> None:
    """native/TensorIterator.cpp, ``compute_types``."""
    for other in _others(args, (1, 2)):
        raise RuntimeError(f"Found dtype {name(other.dtype)} but expected {name(args[0].dtype)}")


def _targets(args: tuple[Any, ...]) -> None:
    """native/cuda/Loss.cu, ``nll_loss_forward_out_cuda_template``."""
    if args[1].dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(f"expected target dtype to be Long or Byte, but got {name(args[1].dtype)}")


def _targets_of_images(args: tuple[Any, ...]) -> None:
    """native/cuda/NLLLoss2d.cu."""
    if args[1].dtype is not torch.int64:
        raise RuntimeError(f"expected scalar type Long but found {name(args[1].dtype)}")


def _selected(args: tuple[Any, ...]) -> None:
    """native/cuda/Indexing.cu, ``index_select_out_cuda_impl``."""
    if args[2].dtype not in (torch.int32, torch.int64):
        raise NotImplementedError(f"\"index_select_out_cuda_impl\" not implemented for '{name(args[2].dtype)}'")


def _probabilities(args: tuple[Any, ...]) -> None:
    """native/Distributions.cpp, ``bernoulli_out_impl``."""
    if args[0].dtype in _NOT_REAL:
        raise RuntimeError(f"expected probabilities tensor to have floating type, got {name(args[0].dtype)}")


def _index_add(args: tuple[Any, ...]) -> None:
    """native/TensorAdvancedIndexing.cpp, ``index_func_meta_impl``."""
    for other in _others(args, (3,)):
        raise RuntimeError(
            f"index_add_(): self ({name(args[0].dtype)}) and source ({name(other.dtype)}) must have the same scalar"
            " type"
        )


def _index_put(args: tuple[Any, ...]) -> None:
    """native/TensorAdvancedIndexing.cpp, ``make_info``."""
    for other in _others(args, (2,)):
        raise RuntimeError(
            f"Index put requires the source and destination dtypes match, got {name(args[0].dtype)} for the destination"
            f" and {name(other.dtype)} for the source."
        )


def _bias(args: tuple[Any, ...]) -> None:
    """native/cuda/Blas.cpp, ``addmm_out_cuda_impl``; that the factors differ is said first."""
    if args[1].dtype is args[2].dtype is not args[0].dtype:
        raise RuntimeError(
            f"self and mat2 must have the same dtype, but got {name(args[0].dtype)} and {name(args[2].dtype)}"
        )
    _refused("addmm_cuda", _WHOLE, args)


def _refused(kernel: str, dtypes: frozenset[torch.dtype], args: tuple[Any, ...]) -> None:
    """``AT_DISPATCH``: the kernel is not compiled for the type."""
    if args[0].dtype in dtypes:
        raise NotImplementedError(f"\"{kernel}\" not implemented for '{name(args[0].dtype)}'")


def _said(words: str, dtypes: frozenset[torch.dtype]) -> Check:
    """A check of the type before the kernel, in its own ``words``; ``{name}`` is the type's."""

    def check(args: tuple[Any, ...]) -> None:
        if args[0].dtype in dtypes:
            raise RuntimeError(words.format(name=name(args[0].dtype)))

    return check


def _bins(args: tuple[Any, ...]) -> None:
    """native/cuda/SummaryOps.cu, ``_histc_cuda_template``."""
    _said("HalfTensor is not supported", frozenset({torch.float16}))(args)
    _refused("histc", _BOOL | _COMPLEX | _REDUCED, args)


def _fourier(args: tuple[Any, ...], last: int | None = None) -> None:
    """native/cuda/CuFFTPlanCache.h, ``CuFFTConfig``; native/cuda/SpectralOps.cpp. The last size is that of the real
    numbers."""
    tensor, dims = args[:2]
    _said("cuFFT doesn't support tensor of type: BFloat16", frozenset({torch.bfloat16}))(args)
    sizes = [tensor.shape[dim] for dim in dims]
    sizes[-1:] = [last or sizes[-1]]
    if tensor.dtype in (torch.float16, torch.complex32) and any(size & (size - 1) for size in sizes):
        raise RuntimeError(
            "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, but got a"
            f" signal size of{sizes}"
        )


# Kernels that are not compiled for some types, and the operators that call them.
_NOT_COMPILED: tuple[tuple[str, frozenset[torch.dtype], str], ...] = (
    ("addmm_cuda", _WHOLE, "mm addbmm"),
    ("addmv_impl_cuda", _WHOLE, "addmv mv"),
    ("baddbmm_cuda", _WHOLE, "bmm baddbmm"),
    ("dot", _WHOLE, "dot vdot"),
    ("lerp_cuda", _WHOLE, "lerp.Scalar lerp.Tensor"),
    ("cdist_cuda", _REDUCED, "_cdist_forward"),
    ("ctc_loss_cuda", _REDUCED, "_ctc_loss _ctc_loss.Tensor"),
    ("cholesky_cusolver", _REDUCED, "cholesky"),
    ("angle_cuda", _REDUCED, "angle"),
    ("polar_cuda", _REDUCED, "polar"),
    ("igamma_cuda", _REDUCED | _NOT_REAL, "igamma"),
    ("igammac_cuda", _REDUCED | _NOT_REAL, "igammac"),
    ("hypot_cuda", _NOT_REAL, "hypot"),
    ("nextafter_cuda", _NOT_REAL, "nextafter"),
    ("bitwise_and_cuda", _FLOATING, "bitwise_and.Tensor bitwise_and.Scalar"),
    ("bitwise_or_cuda", _FLOATING, "bitwise_or.Tensor bitwise_or.Scalar"),
    ("bitwise_xor_cuda", _FLOATING, "bitwise_xor.Tensor bitwise_xor.Scalar"),
    ("bitwise_not_cuda", _FLOATING, "bitwise_not"),
    ("lshift_cuda", _FLOATING | _BOOL, "bitwise_left_shift.Tensor"),
    ("rshift_cuda", _FLOATING | _BOOL, "bitwise_right_shift.Tensor"),
    ("gcd_cuda", _FLOATING | _BOOL, "gcd"),
    ("lcm_cuda", _FLOATING, "lcm"),
    ("kthvalue_cuda", _BOOL | _COMPLEX, "kthvalue"),
    ("ceil_cuda", _BOOL, "ceil"),
    ("floor_cuda", _BOOL, "floor"),
    ("trunc_cuda", _BOOL, "trunc"),
    ("clamp_cuda", _BOOL, "clamp"),
    ("round_cuda", _BOOL | _COMPLEX, "round"),
    ("threshold_cuda", _BOOL | _COMPLEX, "threshold"),
    ("im2col_out_cuda", _WHOLE - _BOOL, "im2col"),
    ("max_pool2d_with_indices_out_cuda_frame", _NOT_REAL, "max_pool2d_with_indices"),
    ("max_pool3d_with_indices_out_frame", _NOT_REAL, "max_pool3d_with_indices"),
    ("avg_pool2d_out_cuda_frame", _NOT_REAL, "avg_pool2d"),
    ("avg_pool3d_out_cuda", _NOT_REAL - {torch.uint8}, "avg_pool3d"),
    ("adaptive_avg_pool2d_cuda", _NOT_REAL, "_adaptive_avg_pool2d"),
    ("adaptive_avg_pool3d_cuda", _NOT_REAL, "_adaptive_avg_pool3d"),
    ("adaptive_max_pool2d_cuda", _NOT_REAL, "adaptive_max_pool2d"),
    ("adaptive_max_pool3d_cuda", _NOT_REAL, "adaptive_max_pool3d"),
    ("upsample_linear1d_out_frame", _NOT_REAL, "upsample_linear1d"),
    ("upsample_bilinear2d_out_frame", _NOT_REAL, "upsample_bilinear2d _upsample_bilinear2d_aa"),
    ("upsample_bicubic2d_out_frame", _NOT_REAL, "upsample_bicubic2d"),
    ("upsample_trilinear3d_out_frame", _NOT_REAL, "upsample_trilinear3d"),
    ("upsample_nearest1d_out_frame", _NOT_REAL - {torch.uint8}, "upsample_nearest1d _upsample_nearest_exact1d"),
    ("upsample_nearest2d_out_frame", _NOT_REAL - {torch.uint8}, "upsample_nearest2d"),
    ("host_softmax", _NOT_REAL, "_softmax _log_softmax"),
    ("GeluCUDAKernelImpl", _NOT_REAL, "gelu"),
    ("silu_cuda", _WHOLE, "silu silu_"),
    ("mish_cuda", _NOT_REAL, "mish mish_"),
    ("elu_cuda", _NOT_REAL, "elu elu_ celu celu_"),
    ("glu_cuda", _NOT_REAL, "glu"),
    ("softplus_cuda", _NOT_REAL - _BOOL, "softplus"),
    ("hardshrink_cuda", _NOT_REAL, "hardshrink"),
    ("hardswish_cuda", _NOT_REAL, "hardswish hardswish_"),
    ("hardsigmoid_cuda", _NOT_REAL, "hardsigmoid hardsigmoid_"),
    ("leaky_relu_cuda", _COMPLEX, "leaky_relu leaky_relu_"),
    ("log_sigmoid_forward_cuda", _NOT_REAL - _BOOL, "log_sigmoid_forward"),
    ("rrelu_with_noise_out_cuda", _NOT_REAL, "rrelu_with_noise"),
    ("masked_scale", _NOT_REAL, "native_dropout_backward"),
    ("multi_margin_loss_cuda", _NOT_REAL, "multi_margin_loss"),
    ("multilabel_margin_loss_forward_kernel", _NOT_REAL, "multilabel_margin_loss_forward"),
    ("batch_norm_stats_cuda", _NOT_REAL, "native_batch_norm"),
)

_CHECKS: dict[OpOverload, Check] = existing({
    **{op: partial(_refused, kernel, dtypes) for kernel, dtypes, ops in _NOT_COMPILED for op in ops.split()},
    "native_group_norm": _group_norm,
    "native_layer_norm": _same(2, 3),
    "grid_sampler_2d": partial(_grid, 2),
    "grid_sampler_3d": partial(_grid, 3),
    "convolution": _convolution,
    "binary_cross_entropy": _cross_entropy,
    "nll_loss_forward": _targets,
    "nll_loss2d_forward": _targets_of_images,
    "index_add": _index_add,
    "index_add_": _index_add,
    "index_put": _index_put,
    "index_put_": _index_put,
    "addmm": _bias,
    "index_select": _selected,
    "bernoulli": _probabilities,
    "histc": _bins,
    "_fft_r2c": _fourier,
    "_fft_c2c": _fourier,
    "_fft_c2r": lambda args: _fourier(args, args[3]),
    **dict.fromkeys(("std.correction", "var.correction", "std_mean.correction", "var_mean.correction"), _said(
        "std and var only support floating point and complex dtypes", _WHOLE
    )),
    "relu": _said("Boolean inputs not supported for relu", _BOOL),
    "argmax": _said("argmax(): does not support bool input", _BOOL),
    "argmin": _said("argmin(): does not support bool input", _BOOL),
})  # fmt: skip


def refuse_quantized(operator: str, tensor: torch.Tensor | None = None) -> None:
    """Raise NotImplementedError, unless ``tensor`` is not quantized: meta kernels give tensors of ordinary types."""
    if tensor is not None and not tensor.is_quantized:
        return
    raise NotImplementedError(
        _(
            "{name} cannot be dry-run: tensors of quantized types, such as torch.qint8, cannot be faked. Leave it out"
            " of the dry run.",
            name=operator,
        )
    )


def quantized_on_host(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator on quantized tensors, which are real. Raises NotImplementedError for others."""
    device = kwargs.get("device")
    if any(tensor.is_meta for tensor in tensors_in(args, kwargs)) or (device is not None and device.type != "cpu"):
        refuse_quantized(f"torch.{func._schema.name.removeprefix('aten::')}")
    return func(*args, **kwargs)


def _quantize(gpu: FakeDevice, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return quantized_on_host(func, args, kwargs)


HANDLERS: dict[OpOverload, Handler] = existing(
    dict.fromkeys(
        (
            "quantize_per_tensor", "quantize_per_tensor.tensor_qparams", "quantize_per_tensor.tensors",
            "quantize_per_tensor_dynamic", "quantize_per_channel", "dequantize.self", "dequantize.tensors", "int_repr",
        ),
        _quantize,
    )
)  # fmt: skip
