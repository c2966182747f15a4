"""Operators that PyTorch composes differently on CUDA, registered while a dry run lasts.

Each names the file of PyTorch that chooses, and its function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.places import Place
from oom_magic.predict.kernels import convolutions, losses, matrix_products, normalization, recurrent
from oom_magic.predict.kernels.normalization import is_by_cudnn
from oom_magic.predict.operators.attention import attend
from oom_magic.predict.operators.autocast import Autocast
from oom_magic.predict.operators.calls import TORCH, Kernel, existing, find_overload, original
from oom_magic.predict.operators.derivatives import cumprod_backward, product
from oom_magic.predict.operators.known_outputs import iterated
from oom_magic.predict.setups.gpus import GPU

aten = torch.ops.aten
_TRAINS = 2  # where the options of a noisy relu say whether it is in training


def _linear(
    gpu: FakeGPU, usual: Kernel, tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """aten/src/ATen/native/Linear.cpp, ``linear``: one product of all rows, or the bias is added to it."""
    if bias is None or tensor.dim() == 2:
        return usual(tensor, weight, bias)
    if tensor.is_contiguous() and bias.dim() == 1:
        rows = tensor.reshape(-1, tensor.shape[-1])
        shape = (*tensor.shape[:-1], weight.shape[0])
        out = aten.addmm(bias, rows, weight.t())
        return aten._unsafe_view(out, shape) if TORCH >= (2, 15) else out.view(shape)
    product = aten.matmul(tensor, weight.t())
    is_written = not (gpu.is_watched or torch._C._functorch.is_functorch_wrapped_tensor(bias))
    return product.add_(bias) if is_written else product + bias


def _batch_norm(usual: Kernel, tensor: torch.Tensor, weight: Any, bias: Any, *args: Any) -> Any:
    """aten/src/ATen/native/Normalization.cpp, ``_batch_norm_impl_index``: cuDNN's input is contiguous, and kept so."""
    if is_by_cudnn(tensor, weight, bias):
        tensor = tensor.contiguous(memory_format=torch._prims_common.suggest_memory_format(tensor))
    return usual(tensor, weight, bias, *args)


def _dropout(usual: Kernel, tensor: torch.Tensor, p: float, train: bool) -> Any:
    """aten/src/ATen/native/Dropout.cpp, ``is_fused_kernel_acceptable``: one kernel, which keeps a mask of booleans."""
    if train and 0 < p < 1 and tensor.numel():
        return aten.native_dropout(tensor, p, train)[0]
    return usual(tensor, p, train)


def _softmax(kernel: Kernel, usual: Kernel, tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """aten/src/ATen/native/SoftMax.cpp: float16, and only that, is widened to float32 inside the kernel."""
    if tensor.dtype is torch.float16 and dtype is torch.float32:
        return kernel(tensor, dim, True)
    return usual(tensor, dim, dtype)


def _rms_norm(
    usual: Kernel, tensor: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    """aten/src/ATen/native/layer_norm.cpp, ``rms_norm_symint``: fused, unless the weight has another type or channels
    lie last."""
    is_last = torch._prims_common.suggest_memory_format(tensor) is not torch.contiguous_format
    if is_last or (weight is not None and weight.dtype is not tensor.dtype):
        return usual(tensor, shape, weight, eps)
    return aten._fused_rms_norm(tensor, shape, weight, eps)[0]


def _grid_sampler(
    usual: Kernel, images: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, align_corners: bool
) -> torch.Tensor:
    """aten/src/ATen/native/GridSampler.cpp, ``cond_cudnn_grid_sampler``: bilinear, from corner to corner."""
    is_its_kind = images.dim() == 4 and images.shape[1] <= 1024 and (mode, padding, align_corners) == (0, 0, True)
    is_its_type = images.dtype in (torch.float16, torch.float32, torch.float64) and torch.backends.cudnn.enabled
    if is_its_kind and is_its_type and images.dtype is grid.dtype and images.numel() < 2**31:
        sampled: torch.Tensor = aten.cudnn_grid_sampler(images, grid)
        return sampled
    return usual(images, grid, mode, padding, align_corners)  # type: ignore[no-any-return]


def _one_hot(usual: Kernel, tensor: torch.Tensor, num_classes: int = -1) -> Any:
    """aten/src/ATen/native/Onehot.cpp: ones are written into zeros, while tensors without data are compared."""
    if num_classes <= 0 or not tensor.numel():
        return usual(tensor, num_classes)
    return tensor.new_zeros((*tensor.shape, num_classes)).scatter_(-1, tensor.unsqueeze(-1), 1)


def _ctc_loss(
    usual: Kernel, scores: torch.Tensor, targets: Any, lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: int = 1, zero_infinity: bool = False,
) -> Any:  # fmt: skip
    """aten/src/ATen/native/LossCTC.cpp, ``ctc_loss``: for the mean, the lengths of the targets go to the GPU."""
    is_mean = reduction == 1
    losses = usual(scores, targets, lengths, target_lengths, blank, 0 if is_mean else reduction, zero_infinity)
    if not is_mean:
        return losses
    there = aten._to_copy.default(target_lengths, dtype=losses.dtype, device=losses.device)
    at_least_one = there.clamp_min(1)
    del there
    return losses.div(at_least_one).mean()


# How CUDA composes an operator; the first argument is what other devices do.
_COMPOSITIONS: dict[str, Kernel] = {
    "batch_norm": _batch_norm,
    "ctc_loss.Tensor": _ctc_loss,
    "cumprod_backward": cumprod_backward,
    "dropout": _dropout,
    "grid_sampler": _grid_sampler,
    "log_softmax.int": partial(_softmax, aten._log_softmax),
    "one_hot": _one_hot,
    "softmax.int": partial(_softmax, aten._softmax),
    **({"rms_norm": _rms_norm} if find_overload("_fused_rms_norm") else {}),
}


def _usual(name: str) -> Kernel:
    """What PyTorch does on other devices."""
    overload = find_overload(name)
    assert overload is not None
    return original(overload)


def _choices(gpu: FakeGPU, card: GPU) -> dict[str, Kernel]:
    """CUDA's own composition of some operators; for others PyTorch's kernel is used."""

    def on_gpu(name: str, kernel: Kernel) -> Kernel:
        usual = _usual(name)

        def choose(*args: Any, **kwargs: Any) -> Any:
            return (kernel if gpu.place(args[0]) is Place.GPU else usual)(*args, **kwargs)

        return choose

    def attention(*args: Any, **kwargs: Any) -> Any:
        # The mask: attention.cpp, _scaled_dot_product_attention_math
        with nullcontext() if gpu.is_watched else gpu.writing_in_place(aten.add.Tensor):
            return attend(card.capability, *args, **kwargs)

    chosen: dict[str, Kernel] = {
        **{name: partial(compose, _usual(name)) for name, compose in _COMPOSITIONS.items()},
        **recurrent.layer_kernels(gpu, card.num_multiprocessors),
        "linear": partial(_linear, gpu, _usual("linear")),
        **{name: partial(product, gpu, _usual(name)) for name in ("prod", "prod.dim_int")},
        "lstm_cell": recurrent.lstm_cell,
        "gru_cell": recurrent.gru_cell,
        "scaled_dot_product_attention": attention,
    }
    return {name: on_gpu(name, kernel) for name, kernel in chosen.items()}


def _activation_backward(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty_strided(tensor.shape, iterated([gradient, tensor], tensor.shape))


def _sampled(images: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return images.new_empty((*images.shape[:2], *grid.shape[1:3]))


def _sampled_backward(images: torch.Tensor, grid: torch.Tensor, _gradient: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return images.new_empty(images.shape), grid.new_empty(grid.shape)


def _fused_rms_norm(
    tensor: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (*tensor.shape[: tensor.dim() - len(shape)], *[1] * len(shape))
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.new_empty(tensor.shape), tensor.new_empty(rows, dtype=wide)


def _norm_backward(
    gradient: torch.Tensor, tensor: torch.Tensor, shape: list[int], *saved_and_weights: Any
) -> tuple[torch.Tensor | None, ...]:
    """aten/src/ATen/native/cuda/layer_norm_kernel.cu: gradients of input and weights are contiguous."""
    mask = saved_and_weights[-1]
    weight = saved_and_weights[len(mask) - 1]  # after as many saved tensors as there are weights
    of_weights = [] if weight is None else [weight.new_empty(shape) if wanted else None for wanted in mask[1:]]
    return tensor.new_empty(tensor.shape) if mask[0] else None, *(of_weights or [None] * (len(mask) - 1))


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """aten/src/ATen/native/GroupedMMUtils.h, ``create_grouped_gemm_output_tensor``: rows padded to 16 bytes."""
    groups: tuple[int, ...] = ()
    if a.dim() == b.dim():
        groups = (a.shape[0],) if a.dim() == 3 or offs is None else tuple(offs.shape)
    shape = (*groups, a.shape[-2], b.shape[-1])
    row = -(-shape[-1] * a.element_size() // 16) * 16 // a.element_size()
    strides = (shape[-2] * row, row, 1)[-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=out_dtype or a.dtype, device=a.device)


# Operators with a kernel of their own on CUDA that are composite elsewhere: the outputs of that kernel.
_FUSED: dict[OpOverload, Kernel] = {
    **recurrent.KERNELS,
    **normalization.KERNELS,
    **convolutions.KERNELS,
    **losses.KERNELS,
    aten.cudnn_grid_sampler.default: _sampled,
    aten.cudnn_grid_sampler_backward.default: _sampled_backward,
    aten.silu_backward.default: _activation_backward,
    aten.mish_backward.default: _activation_backward,
    **existing({"_fused_rms_norm": _fused_rms_norm, "_grouped_mm": _grouped_mm}),
}


def _rows_of_padded(padded: torch.Tensor, _offsets: Any, total: int | None = None) -> torch.Tensor:
    """aten/src/ATen/native/nested/cuda/NestedTensorTransformerFunctions.cpp: as many rows as its caller knows."""
    if total is None:
        raise NotImplementedError
    return padded.new_empty(total, *padded.shape[2:])


def _noisy(tensor: torch.Tensor, noise: torch.Tensor, *options: Any, **others: Any) -> torch.Tensor:
    """aten/src/ATen/native/cuda/RreluWithNoise.cu: in order in training, ``leaky_relu`` in evaluation."""
    out: torch.Tensor = aten.rrelu_with_noise(tensor, noise, *options, **others)
    is_in_training = len(options) > _TRAINS and options[_TRAINS]
    return torch.empty_like(out, memory_format=torch.contiguous_format) if is_in_training else out


def _noisy_gradient(gradient: torch.Tensor, tensor: torch.Tensor, noise: torch.Tensor, *options: Any) -> torch.Tensor:
    """aten/src/ATen/native/Activation.cpp, ``rrelu_with_noise_backward``: in training the noise comes first in their
    product."""
    first = [noise, gradient] if options[_TRAINS] else [tensor, gradient]
    return tensor.new_empty_strided(tensor.shape, iterated(first, tensor.shape))


def _like_input(_gradient: torch.Tensor, tensor: torch.Tensor, *_others: Any) -> torch.Tensor:
    return torch.empty_like(tensor)


def _in_order(op: OpOverload) -> Kernel:
    """The operator, with a contiguous result."""
    return lambda *args: torch.empty_like(op(*args), memory_format=torch.contiguous_format)


# Operators whose outputs have another memory layout on CUDA.
_LAID_OUT: dict[OpOverload, Kernel] = {
    **losses.LAID_OUT,
    **matrix_products.KERNELS,
    **{
        op: _in_order(op)
        for op in (
            aten.glu_backward.default,
            aten.pixel_unshuffle.default,
            aten.masked_fill.Scalar,
            aten.masked_fill.Tensor,
            aten._log_softmax_backward_data.default,
        )
    },
    aten.rrelu_with_noise.default: _noisy,
    aten.rrelu_with_noise_backward.default: _noisy_gradient,
    aten.binary_cross_entropy_backward.default: _like_input,
    aten.native_layer_norm_backward.default: _norm_backward,
    aten._padded_dense_to_jagged_forward.default: _rows_of_padded,
    **existing({"_fused_rms_norm_backward": _norm_backward}),
}


def _differentiable(op: OpOverload) -> Kernel:
    """The kernel that records ``op`` for autograd as one operator."""
    return lambda *args, **kwargs: op._op_dk(DispatchKey.Autograd, *args, **kwargs)


@contextmanager
def cuda_operators(gpu: FakeGPU, card: GPU, autocast: Autocast) -> Iterator[None]:
    """Register CUDA's compositions for fake tensors, and autocast's rules once it is on; take them back at the end."""
    library = torch.library.Library("aten", "IMPL")
    kernels: dict[str, Kernel] = {}

    def register(more: dict[str, Kernel]) -> None:
        for name, kernel in more.items():
            if name not in kernels:
                library.impl(name, partial(_call, kernels, name), "AutogradMeta")
            kernels[name] = kernel
            overload = find_overload(name)
            assert overload is not None
            if overload not in _FUSED:
                gpu.kernels[overload] = kernel

    def register_rules() -> None:
        rules = {op.name().removeprefix("aten::"): (op, rule) for op, rule in autocast.rules().items()}
        register({name: rule(kernels.get(name) or original(op)) for name, (op, rule) in rules.items()})

    try:
        gpu.operators.fuse(_FUSED | _LAID_OUT)
        register({op.name().removeprefix("aten::"): _differentiable(op) for op in _FUSED} | _choices(gpu, card))
        autocast.prepare_by(register_rules)
        yield
    finally:
        library._destroy()
        kernels.clear()
        gpu.kernels.clear()


def _call(kernels: dict[str, Kernel], name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a kernel by its name, because PyTorch keeps registered functions forever, and a kernel refers to the whole
    dry run.

    Source: ``python_registrations_`` in torch/csrc/utils/python_dispatch.cpp.
    """
    return kernels[name](*args, **kwargs)
