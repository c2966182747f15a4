"""torchvision's operators on the pretend GPU: the temporary tensors of its CUDA kernels.

Sources: torchvision/csrc/ops/cuda, files deform_conv2d_kernel.cu, nms_kernel.cu, roi_align_kernel.cu and their like.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.places import Handler, Place, tensors_in
from oom_magic.predict.kernels.copies import make_outputs
from oom_magic.predict.libraries.adapters import Adapter, Run
from oom_magic.predict.libraries.composed_kernels import Kernel, composed, operators_of

_MOST_PARALLEL_IMAGES = 32  # kMaxParallelImgs of torchvision/csrc/ops/cuda/deform_conv2d_kernel.cu
_BOXES_A_WORD = 64  # of the mask of boxes that overlap (threadsPerBlock of nms_kernel.cu beside it)


def _deform_conv2d(
    images: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor,
    *sizes: Any,
) -> torch.Tensor:  # fmt: skip
    """All images' results twice, and the patches of as many images as are lowered at a time."""
    images, offset, weight = images.contiguous(), offset.contiguous(), weight.contiguous()
    mask, bias = mask.contiguous(), bias.contiguous()
    parallel, groups = _parallel_images(images), sizes[6]
    out = images.new_zeros(images.shape[0], weight.shape[0], *offset.shape[2:])
    made = images.new_zeros(out.shape[0] // parallel, weight.shape[0], parallel * out.shape[2], out.shape[3])
    columns = images.new_zeros(_columns_of(images, weight, offset))
    for block in made.view(made.shape[0], groups, -1, columns.shape[1]):
        for part, filters, patches in zip(block, _by_group(weight, groups), _by_group(columns, groups), strict=True):
            part.addmm_(filters, patches)
    out.view(-1, parallel, *out.shape[1:]).copy_(made.view(-1, out.shape[1], parallel, *out.shape[2:]).transpose(1, 2))
    del columns
    return out + bias.view(1, -1, 1, 1)


def _deform_conv2d_backward(
    grad: torch.Tensor, images: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor, mask: torch.Tensor,
    bias: torch.Tensor, *sizes: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The gradients of what was sampled, then those of the filters: each with the patches."""
    grad, images, weight = grad.contiguous(), images.contiguous(), weight.contiguous()
    offset, mask, bias = offset.contiguous(), mask.contiguous(), bias.contiguous()
    groups = sizes[6]
    sampled = _gradients_of_inputs(grad, images, weight, offset, mask, groups)
    of_weight = _gradient_of_weight(grad, images, weight, offset, groups)
    of_bias = torch.ones_like(bias) * grad.sum((0, 2, 3))
    return sampled[0], of_weight, sampled[1], sampled[2], of_bias


def _gradients_of_inputs(
    grad: torch.Tensor,
    images: torch.Tensor,
    weight: torch.Tensor,
    offset: torch.Tensor,
    mask: torch.Tensor,
    groups: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.zeros_like(images), torch.zeros_like(offset), torch.zeros_like(mask)
    columns = images.new_empty(_columns_of(images, weight, offset))
    for block in _grouped(grad, _parallel_images(images), groups):
        columns.zero_()
        for patches, filters, part in zip(_by_group(columns, groups), _by_group(weight, groups), block, strict=True):
            patches.addmm_(filters.t(), part.flatten(1))
    return made


def _gradient_of_weight(
    grad: torch.Tensor, images: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor, groups: int
) -> torch.Tensor:
    made = torch.zeros_like(weight)
    blocks = _grouped(grad, _parallel_images(images), groups).contiguous()
    columns = images.new_empty(_columns_of(images, weight, offset))
    for block in blocks:
        for part, out, patches in zip(_by_group(made, groups), block, _by_group(columns, groups), strict=True):
            part.addmm_(out.flatten(1), patches.t())
    return made


def _parallel_images(images: torch.Tensor) -> int:
    """``get_greatest_divisor_below_bound``."""
    batch = images.shape[0]
    return next(count for count in range(min(batch, _MOST_PARALLEL_IMAGES), 0, -1) if batch % count == 0)


def _columns_of(images: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor) -> tuple[int, int]:
    """The shape of the patches: filter places of every channel, by output places of the images lowered at a time."""
    patch = images.shape[1] * weight.shape[2] * weight.shape[3]
    return patch, _parallel_images(images) * offset.shape[2] * offset.shape[3]


def _grouped(grad: torch.Tensor, parallel: int, groups: int) -> torch.Tensor:
    """The gradient by blocks of images and groups of channels; a view."""
    batch, channels, height, width = grad.shape
    blocks = grad.view(batch // parallel, parallel, groups, channels // groups, height, width)
    return blocks.permute(0, 2, 3, 1, 4, 5)


def _by_group(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """A matrix for each group; a view."""
    return tensor.view(groups, tensor.shape[0] // groups, -1)


def _nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Boxes in the order of their scores, and a bit for each pair of them. What remains is as long as the boxes."""
    if not boxes.numel():
        return boxes.new_empty(0, dtype=torch.long)
    order = scores.sort(0, descending=True)[1]
    ordered = boxes.index_select(0, order).contiguous()
    words = -(-len(ordered) // _BOXES_A_WORD)
    pairs = ordered.new_empty(len(ordered) * words, dtype=torch.long)
    chosen = torch.empty_like(order)
    del pairs
    return order.index_select(0, chosen)


_COMPOSED: dict[str, Kernel] = {
    "torchvision::deform_conv2d": _deform_conv2d,
    "torchvision::_deform_conv2d_backward": _deform_conv2d_backward,
    "torchvision::nms": _nms,
}
_WITHOUT_SCRATCH = {"roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool"}  # and their gradients


def _all_boxes_left(run_operator: Handler) -> Handler:
    """The handler of ``nms``, which leaves as many boxes as do not overlap."""

    def run(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(gpu.place(tensor) is Place.GPU for tensor in tensors_in(args, kwargs)):
            gpu.values.assume_as_long(func)
        return run_operator(gpu, func, args, kwargs)

    return run


@contextmanager
def _kernels_followed(module: ModuleType, run: Run) -> Iterator[None]:
    """Run torchvision's operators with the memory that its CUDA kernels take."""
    operators = operators_of("torchvision")
    names = {operator: operator.name().partition("::")[2].removeprefix("_") for operator in operators}
    alone = {operator for operator, name in names.items() if name.removesuffix("_backward") in _WITHOUT_SCRATCH}
    handler = composed(_COMPOSED)
    handlers = {operator: handler for operator in operators if operator.name() in _COMPOSED}
    handlers |= {operator: _all_boxes_left(handler) for operator in handlers if names[operator] == "nms"}
    with run.gpu.operators.extended(handlers, dict.fromkeys(alone, make_outputs)):
        yield


ADAPTERS: dict[str, Adapter] = {"torchvision": _kernels_followed}
