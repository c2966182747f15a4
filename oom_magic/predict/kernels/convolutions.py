"""How CUDA's convolutions take their memory: cuDNN's memory format, and the copies that bring arguments into it.

Sources: aten/src/ATen/native/Convolution.cpp (``convolution_backward``), aten/src/ATen/native/cudnn/ConvShared.cpp.
What cuDNN's engines take inside depends on the engine that it picks: the most of it is in ``cudnn_workspaces``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.language import _
from oom_magic.predict.fake_cuda.fake_gpu import Rule
from oom_magic.predict.kernels.copies import make_outputs
from oom_magic.predict.kernels.cudnn_workspaces import Convolution, compute, is_by_cudnn
from oom_magic.predict.kernels.reductions import take_buffers
from oom_magic.predict.operators.calls import Call

aten = torch.ops.aten
_FORMATS = {3: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}


def _is_in(tensor: torch.Tensor, memory_format: torch.memory_format) -> bool:
    return tensor.is_contiguous(memory_format=memory_format)


def memory_format_of(tensor: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """The format that cuDNN computes in (``cudnn_conv_suggest_memory_format``): channels last if either is."""
    last = _FORMATS.get(tensor.dim(), torch.contiguous_format)
    for argument in (tensor, weight):
        if _is_in(argument, last) and not argument.is_contiguous():
            return last
    return torch.contiguous_format


def _take_copies(call: Call, memory_format: torch.memory_format, *tensors: torch.Tensor) -> list[int]:
    return [call.take_like(tensor) for tensor in tensors if not _is_in(tensor, memory_format)]


def _forward(call: Call) -> None:
    """``_convolution`` lays out the input, ``cudnn_convolution_forward_out`` the weight."""
    tensor, weight = call.args[:2]
    memory_format = memory_format_of(tensor, weight)
    copies = _take_copies(call, memory_format, tensor)
    make_outputs(call)
    copies += _take_copies(call, memory_format, weight)
    _compute(call, "forward", tensor, weight, call.outputs[0], call.args[3:9])
    call.give_back(*reversed(copies))


def _each(numbers: Sequence[int], tensor: torch.Tensor) -> tuple[int, ...]:
    """A number for each dimension of the images: one alone is all of theirs."""
    return (*numbers,) * (tensor.dim() - 2 if len(numbers) == 1 else 1)


def _compute(
    call: Call, operation: str, tensor: torch.Tensor, weight: torch.Tensor, made: torch.Tensor, options: Sequence[Any]
) -> None:
    """cuDNN's part, if it is cuDNN that computes; ``options`` from the stride on, as ``convolution`` has them."""
    stride, padding, dilation, transposed, _output_padding, groups = options
    if not is_by_cudnn(tensor, weight, transposed, stride, dilation, groups):
        return
    call.gpu.values.assume(
        _("convolutions: what cuDNN's algorithms take inside is known as a range only, and not in the exact figures")
    )
    if transposed:  # a forward is cuDNN's gradient of the image, and the other way round
        tensor, made = made, tensor
        operation = {"forward": "input", "input": "forward"}.get(operation, operation)
    is_last = memory_format_of(tensor, weight) is not torch.contiguous_format
    shapes = (tuple(tensor.shape), tuple(weight.shape), tuple(made.shape))
    sizes = (_each(stride, tensor), _each(padding, tensor), _each(dilation, tensor))
    if tensor.dim() == 3:  # seen as an image
        shapes = tuple((*shape[:2], 1, shape[2]) for shape in shapes)  # type: ignore[assignment]
        sizes = ((1, *sizes[0]), (0, *sizes[1]), (1, *sizes[2]))
    compute(call, Convolution(operation, *shapes, tensor.dtype, is_last, *sizes, groups))


def _backward(call: Call) -> None:
    """The gradient of the input, that of the weight, then the gradient summed up for the bias."""
    gradient, tensor, weight = call.args[:3]
    memory_format = memory_format_of(tensor, weight)
    wants_input, wants_weight = call.args[-1][:2]  # each is laid out only for the gradient of the other
    is_one_dimensional = tensor.dim() == 3  # laid out before all else, to be seen as an image
    if is_one_dimensional:
        _take_copies(call, memory_format, tensor)
    copies = _take_copies(call, memory_format, gradient, *([tensor] if wants_weight and not is_one_dimensional else []))
    options = call.args[4:10]
    call.output(0)
    laid_out = _take_copies(call, memory_format, *([weight] if wants_input else []))
    if wants_input:
        _compute(call, "input", tensor, weight, gradient, options)
    call.give_back(*laid_out)
    call.output(1)
    if wants_weight:
        _compute(call, "weight", tensor, weight, gradient, options)
    call.give_back(*reversed(copies))
    if call.outputs[2] is not None:
        call.output(2)
        dims = [dim for dim in range(gradient.dim()) if dim != 1]
        take_buffers(call, gradient, dims, max(gradient.element_size(), 4))


def outputs(tensor: torch.Tensor, weight: torch.Tensor, *args: Any) -> torch.Tensor:
    """The output of ``convolution`` in cuDNN's memory format."""
    made = aten.convolution.default(tensor, weight, *args)
    return torch.empty_like(made, memory_format=memory_format_of(tensor, weight))


def gradients(
    gradient: torch.Tensor, tensor: torch.Tensor, weight: torch.Tensor, *args: Any
) -> tuple[torch.Tensor | None, ...]:
    """The outputs of ``convolution_backward``, likewise."""
    memory_format = memory_format_of(tensor, weight)
    mask = args[-1]
    bias = weight.new_empty(gradient.shape[1]) if mask[2] else None
    made = (torch.empty_like(t, memory_format=memory_format) for t in (tensor, weight))
    return (*(t if wanted else None for t, wanted in zip(made, mask, strict=False)), bias)


KERNELS: dict[OpOverload, Callable[..., Any]] = {
    aten.convolution.default: outputs,
    aten.convolution_backward.default: gradients,
}
RULES: dict[OpOverload, Rule] = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}
