"""The most that cuDNN's convolutions take besides their tensors, and when PyTorch tries all of their algorithms.

cuDNN decides on the card which algorithm runs. What each can take follows from what it does: cuDNN's API reference
(``cudnnConvolutionFwdAlgo_t`` and its table of supported configurations) says which of them keep transformed tensors,
for which filters, strides and sizes; the sizes are those of the transforms. For the second convolution of AlexNet, 256
images, that gives the 213 MiB that Oyama et al., "Accelerating Deep Learning Frameworks with Micro-Batches" (2018),
read from cuDNN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from oom_magic.predict.operators.calls import Call

_COMPLEX_BYTES, _FLOAT_BYTES = 8, 4  # transformed tensors are of single precision, whatever the convolution's
_LARGEST_FFT = 256  # of an image with its padding
_TILE = 32  # side of FFT_TILING's tiles
_WINOGRAD_OUTPUTS = {3: 4, 5: 9}  # side of a tile's outputs, by the filter's
_FULL = (torch.float32, torch.float64)
_FEWEST_CHANNELS = 32  # of a depthwise convolution in half precision that cuDNN computes
_LAYOUT_MULTIPLE = 8  # channels of a tensor laid out for tensor cores are filled up to it


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
        return max(self._layouts(), self._lowered(), self._fourier(), self._tiled(), self._winograd())

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
        """IMPLICIT_PRECOMP_GEMM on tensor cores: all three tensors once more, with the channels last."""
        if self.is_channels_last:
            return 0
        return sum(
            math.prod((shape[0], -(-shape[1] // _LAYOUT_MULTIPLE) * _LAYOUT_MULTIPLE, *shape[2:])) * self.dtype.itemsize
            for shape in (self.image, self.filter, self.made)
        )

    def _lowered(self) -> int:
        """GEMM: the matrix of one image's patches."""
        if self.is_channels_last or self.dtype is not torch.float32:
            return 0
        return self.image[1] * math.prod(self.filter[2:]) * math.prod(self.made[2:]) * self.dtype.itemsize

    def _fourier(self) -> int:
        """FFT: every plane in the next power of two that holds the image with its padding."""
        sides = [size + 2 * padding for size, padding in zip(self.image[2:], self.padding, strict=True)]
        if not self._is_image() or max(sides) > _LARGEST_FFT or not self._is_padded_less():
            return 0
        height, width = (1 << (side - 1).bit_length() for side in sides)
        return self._planes(1) * height * (width // 2 + 1) * _COMPLEX_BYTES

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
    """What cuDNN's workspace may be, and with ``cudnn.benchmark`` the search for the fastest algorithm.

    The search takes the largest workspace of them all, once for each convolution, and empties the cache after it
    (``run_single_conv`` in aten/src/ATen/native/cudnn/Conv_v8.cpp); its cache of plans is one of each thread, and
    autograd's backward has a thread of its own.
    """
    gpu = call.gpu
    gpu.recorder.note_passing(convolution.most_bytes)
    if torch.backends.cudnn.benchmark:
        key = (gpu.current, torch._C._current_graph_task_id() != -1, convolution)
        if key not in gpu.tried_convolutions:
            gpu.tried_convolutions.add(key)
            gpu.recorder.empty_cache()


def is_by_cudnn(
    tensor: torch.Tensor, weight: torch.Tensor, transposed: bool, stride: list[int], dilation: list[int], groups: int
) -> bool:
    """Whether the convolution is cuDNN's: depthwise ones are most often PyTorch's own kernel.

    ``use_cudnn``, ``is_depthwise`` and ``use_cudnn_depthwise`` of aten/src/ATen/native/Convolution.cpp.
    """
    if not torch.backends.cudnn.enabled or tensor.dtype not in (torch.float16, torch.bfloat16, *_FULL):
        return False
    is_depthwise = not transposed and tensor.shape[1] == groups > 1 and weight.shape[0] % tensor.shape[1] == 0
    if not is_depthwise:
        return True
    is_last = any(
        one.is_contiguous(memory_format=torch.channels_last) and not one.is_contiguous()
        for one in (tensor, weight)
        if one.dim() == 4
    )
    return is_last or (
        tensor.dtype is weight.dtype is torch.float16
        and tensor.dim() <= 4
        and set(dilation) == {1}
        and len(set(stride)) == 1
        and groups >= _FEWEST_CHANNELS
    )
