"""Operators that PyTorch composes differently on CUDA, registered while a dry run lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.places import Place
from oom_magic.predict.kernels import convolutions, losses, normalization, recurrent
from oom_magic.predict.operators import compositions
from oom_magic.predict.operators.attention import attend
from oom_magic.predict.operators.autocast import Autocast
from oom_magic.predict.operators.calls import Kernel, existing, find_overload, original
from oom_magic.predict.setups.gpus import GPU

aten = torch.ops.aten


def _choices(gpu: FakeGPU, card: GPU) -> dict[str, Kernel]:
    """CUDA's own composition of some operators; for others PyTorch's kernel is used."""

    def on_gpu(name: str, kernel: Kernel) -> Kernel:
        overload = find_overload(name)
        assert overload is not None
        usual = original(overload)

        def choose(*args: Any, **kwargs: Any) -> Any:
            return (kernel if gpu.place(args[0]) is Place.GPU else usual)(*args, **kwargs)

        return choose

    def attention(*args: Any, **kwargs: Any) -> Any:
        with gpu.writing_in_place(aten.add.Tensor):  # the mask: attention.cpp, _scaled_dot_product_attention_math
            return attend(card.capability, *args, **kwargs)

    chosen: dict[str, Kernel] = {
        **recurrent.layer_kernels(gpu, card.num_multiprocessors),
        "lstm_cell": recurrent.lstm_cell,
        "gru_cell": recurrent.gru_cell,
        "linear": compositions.linear(original(aten.linear.default)),
        "batch_norm": compositions.batch_norm(original(aten.batch_norm.default)),
        "ctc_loss.Tensor": compositions.ctc_loss(original(aten.ctc_loss.Tensor)),
        "cumprod_backward": compositions.cumprod_backward(original(aten.cumprod_backward.default)),
        "dropout": compositions.dropout(original(aten.dropout.default)),
        "one_hot": compositions.one_hot(original(aten.one_hot.default)),
        "softmax.int": compositions.softmax(aten._softmax, original(aten.softmax.int)),
        "log_softmax.int": compositions.softmax(aten._log_softmax, original(aten.log_softmax.int)),
        "scaled_dot_product_attention": attention,
    }
    if find_overload("_fused_rms_norm"):
        chosen["rms_norm"] = compositions.rms_norm(original(aten.rms_norm.default))
    return {name: on_gpu(name, kernel) for name, kernel in chosen.items()}


def _activation_backward(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor)


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
    aten.silu_backward.default: _activation_backward,
    aten.mish_backward.default: _activation_backward,
    **existing({"_fused_rms_norm": _fused_rms_norm, "_grouped_mm": _grouped_mm}),
}


# Operators whose outputs lie otherwise in memory on CUDA.
_LAID_OUT: dict[OpOverload, Kernel] = {
    **losses.LAID_OUT,
    aten.native_layer_norm_backward.default: _norm_backward,
    **existing({"_fused_rms_norm_backward": _norm_backward}),
}


def _differentiable(op: OpOverload) -> Kernel:
    """The kernel that records ``op`` for autograd as one operator."""
    return lambda *args, **kwargs: op._op_dk(DispatchKey.Autograd, *args, **kwargs)


@contextmanager
def cuda_operators(gpu: FakeGPU, card: GPU, autocast: Autocast) -> Iterator[None]:
    """Register CUDA's compositions and autocast rules for pretended tensors; take them back at the end."""
    library = torch.library.Library("aten", "IMPL")
    kernels: dict[str, Kernel] = {}
    try:
        gpu.fused.update(_FUSED | _LAID_OUT)
        kernels |= {op.name().removeprefix("aten::"): _differentiable(op) for op in _FUSED}
        kernels.update(_choices(gpu, card))
        for op, rule in autocast.rules().items():
            name = op.name().removeprefix("aten::")
            kernels[name] = rule(kernels.get(name) or original(op))
        for name, kernel in kernels.items():
            library.impl(name, partial(_call, kernels, name), "AutogradMeta")
            overload = find_overload(name)
            assert overload is not None
            if overload not in _FUSED:
                gpu.kernels[overload] = kernel
        yield
    finally:
        library._destroy()
        kernels.clear()


def _call(kernels: dict[str, Kernel], name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a kernel by its name: what was registered PyTorch keeps for good, and a kernel leads to the whole dry run.

    Source: ``python_registrations_`` in torch/csrc/utils/python_dispatch.cpp.
    """
    return kernels[name](*args, **kwargs)
