"""What cuDNN takes on a physical GPU, for record_device.py: workspaces of convolutions that its heuristics choose, and what
recurrent layers reserve and take, read off the allocator's trace.

The rows in device_h200.json are of a wider sweep of the same kind (90 shapes, seven lengths of sequences, bfloat16, too);
this shorter one has not been run on a card itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

aten = torch.ops.aten
FLOAT, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16
# Batch, channels, sides; filters, sides of a filter; stride, padding, dilation, groups.
SHAPES = (
    # ResNet, VGG
    ((32, 3, 224, 224), (64, 7, 7), 2, 3, 1, 1), ((32, 64, 56, 56), (64, 1, 1), 1, 0, 1, 1),
    ((32, 64, 56, 56), (64, 3, 3), 1, 1, 1, 1), ((32, 64, 56, 56), (256, 1, 1), 1, 0, 1, 1),
    ((32, 256, 56, 56), (512, 1, 1), 2, 0, 1, 1), ((32, 128, 56, 56), (128, 3, 3), 2, 1, 1, 1),
    ((32, 512, 14, 14), (512, 3, 3), 2, 1, 1, 1), ((32, 2048, 7, 7), (512, 1, 1), 1, 0, 1, 1),
    ((16, 64, 224, 224), (64, 3, 3), 1, 1, 1, 1), ((16, 512, 28, 28), (512, 3, 3), 1, 1, 1, 1),
    # U-Nets, GANs, diffusion
    ((8, 64, 256, 256), (64, 3, 3), 1, 1, 1, 1), ((8, 256, 128, 128), (128, 3, 3), 1, 1, 1, 1),
    ((8, 256, 64, 64), (128, 2, 2), 2, 0, 1, 1), ((128, 256, 8, 8), (512, 4, 4), 2, 1, 1, 1),
    ((128, 512, 4, 4), (1, 4, 4), 1, 0, 1, 1), ((1, 320, 64, 64), (320, 3, 3), 1, 1, 1, 1),
    ((2, 1280, 16, 16), (1280, 3, 3), 1, 1, 1, 1), ((4, 3, 512, 512), (128, 3, 3), 1, 1, 1, 1),
    # patches, groups, dilation, odd sizes
    ((32, 3, 224, 224), (96, 4, 4), 4, 0, 1, 1), ((16, 80, 56, 56), (80, 3, 3), 1, 1, 1, 2),
    ((16, 240, 28, 28), (240, 3, 3), 1, 1, 1, 10), ((4, 2048, 40, 40), (256, 3, 3), 1, 12, 12, 1),
    ((16, 192, 56, 56), (192, 11, 11), 1, 5, 1, 1), ((3, 17, 33, 29), (23, 3, 3), 1, 1, 1, 1),
    ((64, 1, 28, 28), (6, 5, 5), 1, 2, 1, 1), ((32, 320, 7, 7), (1280, 1, 1), 1, 0, 1, 1),
    # sounds and volumes
    ((8, 32, 65536), (32, 3), 1, 1, 1, 1), ((4, 512, 16000), (512, 3), 2, 0, 1, 1),
    ((4, 768, 249), (768, 128), 1, 64, 1, 16), ((1, 32, 64, 128, 128), (32, 3, 3, 3), 1, 1, 1, 1),
    ((1, 128, 32, 64, 64), (64, 3, 3, 3), 1, 1, 1, 1),
)  # fmt: skip
LAYERS = ("RNN_TANH", "LSTM", "GRU")
SEQUENCES = ((200, 32, 512, 1024), (50, 64, 100, 128), (7, 3, 10, 20), (35, 20, 200, 200), (128, 128, 300, 512))


def taken(work: Callable[[], Any]) -> tuple[Any, list[int]]:
    """The result, and the bytes of each allocation on the way."""
    torch.cuda.memory._record_memory_history(max_entries=4000, stacks="python", context=None)
    result = work()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    return result, [event["size"] for event in trace if event["action"] == "alloc"]


def convolutions() -> Iterator[list[Any]]:
    """A row for each shape, type and layout: the workspace of the forward, of the image's gradient, of the filter's."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    for (image, filters, *sizes, groups), dtype, is_last in itertools.product(SHAPES, (FLOAT, HALF, BFLOAT), (0, 1)):
        rank = len(image) - 2
        how = layouts.get(rank + 2, torch.contiguous_format) if is_last else torch.contiguous_format
        x = torch.randn(image, device="cuda", dtype=dtype).to(memory_format=how)
        shape = (filters[0], image[1] // groups, *filters[1:])
        weight = torch.randn(shape, device="cuda", dtype=dtype).to(memory_format=how)
        stride, padding, dilation = ([one] * rank for one in sizes)
        options = (None, stride, padding, dilation, False, [0] * rank, groups)
        made, forward = taken(lambda x=x, w=weight, o=options: aten.convolution(x, w, *o))
        row = [max(forward[1:], default=0)]
        for wants in ([True, False, False], [False, True, False]):
            work = lambda y=made, x=x, w=weight, o=options, m=wants: aten.convolution_backward(y, x, w, *o, m)  # noqa: E731
            sizes_taken = taken(work)[1]
            sizes_taken.remove(next(one for one in sizes_taken if one >= (x if wants[0] else weight).nbytes))
            row.append(max(sizes_taken, default=0))
        yield [list(image), list(shape), *sizes, groups, str(dtype)[6:], is_last, row]


def recurrent_layers() -> Iterator[list[Any]]:
    """A row for each: the workspace and the reserve, both of the forward of a training."""
    for dtype, mode, sequence, layers, ways, dropout in itertools.product(
        (FLOAT, HALF), LAYERS, SEQUENCES, (1, 2, 3), (1, 2), (0.0, 0.2)
    ):
        if dropout and layers != 2:
            continue
        length, batch, width, hidden = sequence
        kind = getattr(nn, mode.partition("_")[0])
        layer = kind(width, hidden, layers, bidirectional=ways == 2, dropout=dropout).to("cuda", dtype)
        x = torch.randn(length, batch, width, device="cuda", dtype=dtype, requires_grad=True)
        sizes = taken(lambda layer=layer, x=x: layer(x))[1]
        yield [mode, str(dtype)[6:], list(sequence), layers, ways, dropout, sizes[-2], sizes[-1]]
