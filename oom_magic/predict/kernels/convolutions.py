"""How CUDA's convolutions take their memory: cuDNN's memory format, the copies into it, and cuDNN's workspaces.

Sources: aten/src/ATen/native/Convolution.cpp (``convolution_backward``), aten/src/ATen/native/cudnn/ConvShared.cpp.

cuDNN decides on the card which algorithm runs. The most memory that each algorithm can take follows from its
definition: cuDNN's API reference (``cudnnConvolutionFwdAlgo_t`` and its table of supported configurations) says which
of them keep transformed tensors, for which filters, strides and sizes; the sizes are those of the transforms. For the
second convolution of AlexNet, 256 images, that gives the 213 MiB that Oyama et al., "Accelerating Deep Learning
Frameworks with Micro-Batches" (2018), read from cuDNN. That gradients by FFT take twice as much is not documented: it
was measured with networks of wide 1 x 1 convolutions on an A100 (``tests/data/cudnn_search.json``).

Without a search cuDNN chooses by its heuristics: 1,620 operations on an H200 (cuDNN 9.19, single precision as TF32,
``tests/data/device_h200.json``) took copies in channels-last layout, and partial sums, never more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.language import _
from oom_magic.predict.fake_cuda.operator_table import Rule
from oom_magic.predict.kernels.copies import make_outputs
from oom_magic.predict.kernels.matrix_products import work_by_cublas
from oom_magic.predict.kernels.reductions import take_buffers
from oom_magic.predict.operators.calls import Call
from oom_magic.units import MIB

_COMPLEX_BYTES, _FLOAT_BYTES = 8, 4  # transformed tensors are of single precision, whatever the convolution's
_LARGEST_FFT = 256  # of an image with its padding
_TILE = 32  # side of FFT_TILING's tiles
_WINOGRAD_OUTPUTS = {3: 4, 5: 9}  # side of a tile's outputs, by the filter's
_FULL = (torch.float32, torch.float64)
_FEWEST_CHANNELS = 32  # of a depthwise convolution in half precision that cuDNN computes
_LAYOUT_MULTIPLE = 8  # channels of a tensor laid out for tensor cores are filled up to it
_GROUP_MULTIPLE = 32  # those of each group, where there are several
# Sums that several thread blocks share, as measured: of any result, and how often a filter's gradient can be there.
_SHARED_SUMS, _FILTER_SUMS, _MOST_FILTER_SUMS = 32 * MIB, 32, 256 * MIB
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Convolution:
    """One of cuDNN's three operations on an image, a filter and what they make; sizes as of the forward."""

    operation: str  # "forward", "input" or "weight": what is computed
    image: tuple[int, ...]
    filter: tuple[int, ...]
    made: tuple[int, ...]
    dtype: torch.dtype
    is_channels_last: bool
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def most_bytes(self) -> int:
        """The largest workspace of the algorithms that can compute it."""
        return max(self.chosen_bytes, self._lowered(), self.fourier_bytes(), self._tiled(), self._winograd())

    @property
    def chosen_bytes(self) -> int:
        """The largest workspace that cuDNN's heuristics chose on a card whose tensor cores take single precision."""
        filter_sums = min(_FILTER_SUMS * math.prod(self.filter) * _FLOAT_BYTES, _MOST_FILTER_SUMS)
        return self._layouts() + max(_SHARED_SUMS, filter_sums if self.operation == "weight" else 0)

    def _is_image(self) -> bool:
        """Whether the algorithms that transform can have it: two-dimensional, each filter at each place."""
        has_type = self.dtype in (torch.float32, torch.float16) and not self.is_channels_last
        return has_type and len(self.image) == 4 and {*self.stride, *self.dilation} == {1}

    def _planes(self, num_tiles: int) -> int:
        """Transformed planes: of the image's channels and what is made for each tile, and of the filter."""
        return (self.image[0] * (self.image[1] + self.made[1])) * num_tiles + self.filter[0] * self.filter[1]

    def _num_tiles(self, sides: tuple[int, ...]) -> int:
        return math.prod(-(-size // side) for size, side in zip(self.made[2:], sides, strict=True))

    def _layouts(self) -> int:
        """IMPLICIT_PRECOMP_GEMM on tensor cores: copies of all three tensors in channels-last layout, filled up; those
        that lie so can be copied, too."""
        multiple = _LAYOUT_MULTIPLE if self.groups == 1 else _GROUP_MULTIPLE
        shapes = ((self.groups, self.image), (1, self.filter), (self.groups, self.made))
        return sum(
            shape[0] * parts * -(-shape[1] // parts // multiple) * multiple * math.prod(shape[2:]) * self.dtype.itemsize
            for parts, shape in shapes
        )

    def _lowered(self) -> int:
        """GEMM: the matrix of one image's patches."""
        if self.is_channels_last or self.dtype is not torch.float32:
            return 0
        return self.image[1] * math.prod(self.filter[2:]) * math.prod(self.made[2:]) * self.dtype.itemsize

    def fourier_bytes(self) -> int:
        """FFT: every plane in the next power of two that holds the image with its padding; a gradient's take twice."""
        sides = [size + 2 * padding for size, padding in zip(self.image[2:], self.padding, strict=True)]
        if not self._is_image() or max(sides) > _LARGEST_FFT or not self._is_padded_less():
            return 0
        height, width = (1 << (side - 1).bit_length() for side in sides)
        times = 1 if self.operation == "forward" else 2
        return times * self._planes(1) * height * (width // 2 + 1) * _COMPLEX_BYTES

    def _tiled(self) -> int:
        """FFT_TILING: tiles of 32 x 32, of which the filter's border is lost."""
        if not self._is_image() or max(self.filter[2:]) > _TILE or not self._is_padded_less():
            return 0
        num_tiles = self._num_tiles(tuple(_TILE + 1 - side for side in self.filter[2:]))
        return self._planes(num_tiles) * _TILE * (_TILE // 2 + 1) * _COMPLEX_BYTES

    def _winograd(self) -> int:
        """WINOGRAD_NONFUSED: tiles of 4 x 4 outputs for filters of 3 x 3, of 9 x 9 for 5 x 5."""
        side = self.filter[-1]
        if not self._is_image() or self.filter[2:] != (side, side) or side not in _WINOGRAD_OUTPUTS:
            return 0
        outputs = _WINOGRAD_OUTPUTS[side]
        return self._planes(self._num_tiles((outputs, outputs))) * (outputs + side - 1) ** 2 * _FLOAT_BYTES

    def _is_padded_less(self) -> bool:
        return all(side > padding for side, padding in zip(self.filter[2:], self.padding, strict=True))


def compute(call: Call, convolution: Convolution) -> None:
    """The workspace that cuDNN may take, and with ``cudnn.benchmark`` the search for the fastest algorithm.

    The search takes the largest workspace of them all, once for each convolution, and empties the cache after it
    (``run_single_conv`` in aten/src/ATen/native/cudnn/Conv_v8.cpp); each thread has its own cache of plans, and
    autograd's backward runs in a thread of its own.
    """
    gpu = call.gpu
    gpu.recorder.note_transient(convolution.most_bytes)
    if torch.backends.cudnn.benchmark:
        key = (gpu.current, torch._C._current_graph_task_id() != -1, convolution)
        if key not in gpu.tried_convolutions:
            gpu.tried_convolutions.add(key)
            gpu.recorder.empty_cache()


def is_by_cudnn(
    tensor: torch.Tensor, weight: torch.Tensor, transposed: bool, stride: list[int], dilation: list[int], groups: int
) -> bool:
    """Whether the convolution is cuDNN's: depthwise ones are most often PyTorch's own kernel.

    ``use_cudnn`` and ``use_cudnn_depthwise`` of aten/src/ATen/native/Convolution.cpp.
    """
    if not torch.backends.cudnn.enabled or tensor.dtype not in (torch.float16, torch.bfloat16, *_FULL):
        return False
    if not _is_depthwise(tensor, weight, transposed, groups):
        return True
    return memory_format_of(tensor, weight) is not torch.contiguous_format or (
        tensor.dtype is weight.dtype is torch.float16
        and tensor.dim() <= 4
        and set(dilation) == {1}
        and len(set(stride)) == 1
        and groups >= _FEWEST_CHANNELS
    )


def _is_supported(call: Call, tensor: torch.Tensor) -> bool:
    """Whether the card's cuDNN takes the type (cuda/detail/CUDAHooks.cpp,
    ``supportsBFloat16ConvolutionWithCuDNNv8``)."""
    return tensor.dtype is not torch.bfloat16 or call.gpu.card.capability >= (8, 0)


def _is_depthwise(tensor: torch.Tensor, weight: torch.Tensor, transposed: bool, groups: int) -> bool:
    return not transposed and tensor.shape[1] == groups > 1 and weight.shape[0] % tensor.shape[1] == 0


def _is_in(tensor: torch.Tensor, memory_format: torch.memory_format) -> bool:
    return tensor.is_contiguous(memory_format=memory_format)


def memory_format_of(tensor: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """The format that cuDNN computes in (ConvUtils.h, ``cudnn_conv_suggest_memory_format``): channels last if the
    strides of either say so, though one channel lies in order either way; never in double precision."""
    if torch.float64 not in (tensor.dtype, weight.dtype):
        for argument in (tensor, weight):
            suggested = torch._prims_common.suggest_memory_format(argument)
            if suggested is not torch.contiguous_format:
                return suggested
    return torch.contiguous_format


def _take_copies(call: Call, memory_format: torch.memory_format, *tensors: torch.Tensor) -> list[int]:
    return [call.take_like(tensor) for tensor in tensors if not _is_in(tensor, memory_format)]


def _forward(call: Call) -> None:
    """``_convolution`` lays out the input, ``cudnn_convolution_forward_out`` both as the output suggests: a single
    number of each image lies in order."""
    tensor, weight = call.args[:2]
    options = call.args[3:9]
    stride, _padding, dilation, transposed, _output_padding, groups = options
    memory_format = _format(tensor, weight, options)
    copies = _take_copies(call, memory_format, tensor)
    make_outputs(call)
    own = memory_format
    if not transposed and is_by_cudnn(tensor, weight, transposed, stride, dilation, groups):
        own = torch._prims_common.suggest_memory_format(call.outputs[0])
    copies += _take_copies(call, own, weight, _laid_out(tensor, memory_format))
    _compute(call, "forward", tensor, weight, call.outputs[0], options)
    call.give_back(*reversed(copies))


def _each(numbers: Sequence[int], tensor: torch.Tensor) -> tuple[int, ...]:
    """A number for each dimension of the images; a single one holds for all."""
    return (*numbers,) * (tensor.dim() - 2 if len(numbers) == 1 else 1)


def _compute(
    call: Call, operation: str, tensor: torch.Tensor, weight: torch.Tensor, made: torch.Tensor, options: Sequence[Any]
) -> None:
    """What computes it: cuDNN, or PyTorch's products; ``options`` from the stride on, as ``convolution`` has them."""
    stride, padding, dilation, transposed, _output_padding, groups = options
    if not (_is_supported(call, tensor) and is_by_cudnn(tensor, weight, transposed, stride, dilation, groups)):
        is_plain = set(weight.shape[2:]) == set(stride) == {1} and not any(padding)
        if not (is_plain or _is_depthwise(tensor, weight, transposed, groups)):
            columns = call.take(_column_bytes(weight, tensor if transposed else made))
            work_by_cublas(call)
            call.give_back(columns)
        return
    call.gpu.values.assume(
        _(
            "convolutions: the workspaces of cuDNN's algorithms are known only as a range and are not in the"
            " exact figures"
        )
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


def _column_bytes(weight: torch.Tensor, images: torch.Tensor) -> int:
    """What one image's patches take as columns of a matrix, where cuDNN is switched off (``columns`` in
    aten/src/ATen/native/cuda: ConvolutionMM2d.cu, NaiveConvolutionTranspose2d.cu, NaiveDilatedConvolution.cu)."""
    return math.prod(weight.shape[1:]) * math.prod(images.shape[2:]) * images.element_size()


def _format(tensor: torch.Tensor, weight: torch.Tensor, options: Sequence[Any]) -> torch.memory_format:
    """The format that the images are laid out in: PyTorch's own kernels read them in order."""
    stride, _padding, dilation, transposed, _output_padding, groups = options
    is_suggested = is_by_cudnn(tensor, weight, transposed, stride, dilation, groups)
    return memory_format_of(tensor, weight) if is_suggested else torch.contiguous_format


def _as_image(tensor: torch.Tensor) -> torch.Tensor:
    """A line of images as ``view4d`` shows it."""
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor


def _laid_out(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """``tensor.contiguous(memory_format)``, or one that lies so."""
    return tensor if _is_in(tensor, memory_format) else torch.empty_like(tensor, memory_format=memory_format)


def _gradient_for(tensor: torch.Tensor, gradient: torch.Tensor, transposed: bool) -> torch.Tensor:
    """The gradient as ``cudnn_convolution_backward`` has it: ``.to(memory_format)`` leaves what suggests this format as
    it lies, and copies one channel that suggests another; the transposed one is made contiguous."""
    suggested = torch._prims_common.suggest_memory_format(tensor)
    if transposed:
        return _laid_out(gradient, suggested)
    if torch._prims_common.suggest_memory_format(gradient) is suggested:
        return gradient
    return torch.empty_like(gradient, memory_format=suggested)


def _backward(call: Call) -> None:
    """``convolution_backward``: cuDNN's, or the kernels for depthwise convolutions; then the bias's gradient."""
    gradient, tensor, weight = call.args[:3]
    options = call.args[4:10]
    stride, _padding, dilation, transposed, _output_padding, groups = options
    if tensor.dim() == 3 and not tensor.is_contiguous():
        call.take_like(tensor)
        tensor = tensor.contiguous()
    is_cudnn = _is_supported(call, tensor) and is_by_cudnn(tensor, weight, transposed, stride, dilation, groups)
    copies: list[int] = []
    if is_cudnn:
        _backward_of_cudnn(call, gradient, tensor, weight, options)
    elif not _is_depthwise(tensor, weight, transposed, groups):
        _backward_by_columns(call, gradient, tensor, weight, transposed)
    elif tensor.dim() == 5:
        copies, gradient = _backward_of_volumes(call, gradient, tensor, weight)
    else:
        _backward_of_depthwise(call, gradient, tensor, weight)
    if call.outputs[2] is not None:
        call.output(2)
        dims = [dim for dim in range(gradient.dim()) if dim != 1]
        take_buffers(call, gradient, dims, max(gradient.element_size(), 4))
    call.give_back(*copies)


def _backward_of_cudnn(
    call: Call, gradient: torch.Tensor, tensor: torch.Tensor, weight: torch.Tensor, options: Sequence[Any]
) -> None:
    """ConvShared.cpp, ``cudnn_convolution_backward`` and ``cudnn_convolution_transpose_backward``: each of the two
    gradients copies what does not lie in its own format."""
    wants_input, wants_weight = call.args[-1][:2]
    transposed = options[3]
    image, given, filters = (_as_image(one) for one in (tensor, gradient, weight))
    memory_format = memory_format_of(image, filters)
    copies = _take_copies(call, memory_format, *([image] if wants_weight else []))
    image = _laid_out(image, memory_format) if wants_weight else image
    made = _gradient_for(image, given, transposed)
    copies += [] if made is given else [call.take_like(given)]
    if wants_input:
        call.output(0)
        own = memory_format_of(made, filters)
        laid_out = _take_copies(call, own, filters, made)
        _compute(call, "input", tensor, weight, gradient, options)
        call.give_back(*reversed(laid_out))
    if wants_weight:
        laid_out = _take_copies(call, memory_format_of(image, made), *((image, made) if transposed else (made, image)))
        call.output(1)
        _compute(call, "weight", tensor, weight, gradient, options)
        call.give_back(*reversed(laid_out))
    call.give_back(*reversed(copies))


def _backward_by_columns(
    call: Call, gradient: torch.Tensor, tensor: torch.Tensor, weight: torch.Tensor, transposed: bool
) -> None:
    """aten/src/ATen/native/cuda/ConvolutionMM2d.cu, ``slow_conv2d_backward_cuda``: columns to the end, the weight's
    gradient last."""
    if call.args[-1][0]:
        call.output(0)
    call.take(_column_bytes(weight, tensor if transposed else gradient))
    work_by_cublas(call)
    for position in (2, 1):
        if call.outputs[position] is not None:
            call.output(position)


def _backward_of_depthwise(call: Call, gradient: torch.Tensor, tensor: torch.Tensor, weight: torch.Tensor) -> None:
    """aten/src/ATen/native/cuda/DepthwiseConv2d.cu, ``conv_depthwise2d_backward_cuda_out``: the weight's first."""
    in_order = torch.contiguous_format
    copies = _take_copies(call, in_order, gradient)
    for position, read in ((1, tensor), (0, weight)):
        if call.args[-1][position]:
            read_copies = _take_copies(call, in_order, read)
            call.output(position)
            call.give_back(*read_copies)
    call.give_back(*copies)


def _backward_of_volumes(
    call: Call, gradient: torch.Tensor, tensor: torch.Tensor, weight: torch.Tensor
) -> tuple[list[int], torch.Tensor]:
    """aten/src/ATen/native/cuda/DepthwiseConv3d.cu, ``conv_depthwise3d_backward_cuda``: its copies, and the gradient
    that is summed up for the bias."""
    in_order = torch.contiguous_format
    for position in (0, 1):
        if call.args[-1][position]:
            call.output(position)
    copies = _take_copies(call, in_order, gradient)
    call.give_back(*reversed(_take_copies(call, in_order, tensor, weight)))
    return copies, _laid_out(gradient, in_order)


def outputs(tensor: torch.Tensor, weight: torch.Tensor, *args: Any) -> torch.Tensor:
    """The output of ``convolution`` in cuDNN's memory format."""
    made = aten.convolution.default(tensor, weight, *args)
    return torch.empty_like(made, memory_format=_format(tensor, weight, args[1:7]))


def gradients(
    gradient: torch.Tensor, tensor: torch.Tensor, weight: torch.Tensor, *args: Any
) -> tuple[torch.Tensor | None, ...]:
    """The outputs of ``convolution_backward``, likewise."""
    options, mask = args[1:7], args[-1]
    stride, _padding, dilation, transposed, _output_padding, groups = options
    image, given, filters = (_as_image(one) for one in (tensor, gradient, weight))
    formats = [torch.contiguous_format] * 2
    if is_by_cudnn(tensor, weight, transposed, stride, dilation, groups) and tensor.dim() > 3:
        image = _laid_out(image, memory_format_of(image, filters)) if mask[1] else image
        given = _gradient_for(image, given, transposed)
        formats = [memory_format_of(given, filters), memory_format_of(image, given)]
    made = (torch.empty_like(one, memory_format=way) for one, way in zip((tensor, weight), formats, strict=True))
    bias = weight.new_empty(gradient.shape[1]) if mask[2] else None
    return (*(one if wanted else None for one, wanted in zip(made, mask, strict=False)), bias)


KERNELS: dict[OpOverload, Callable[..., Any]] = {
    aten.convolution.default: outputs,
    aten.convolution_backward.default: gradients,
}
RULES: dict[OpOverload, Rule] = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}
