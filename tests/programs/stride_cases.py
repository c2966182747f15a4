"""How results lie whose arguments lie in different ways: what PyTorch's kernels for CUDA decide (record_strides.py)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch.nn import functional as F

aten = torch.ops.aten
SHAPE = (4, 6, 5, 7)
Two = Callable[[torch.Tensor, torch.Tensor], Any]


def _lying(how: int) -> torch.Tensor:
    """In order, channels last, the first dimensions exchanged, or with gaps."""
    made = torch.rand(*SHAPE[:-1], 2 * SHAPE[-1], device="cuda")
    ways: tuple[Callable[[], torch.Tensor], ...] = (
        made[..., :7].contiguous,
        lambda: made[..., :7].contiguous(memory_format=torch.channels_last),
        lambda: made[..., :7].transpose(0, 1).contiguous().transpose(0, 1),
        lambda: made[..., ::2],
    )
    return ways[how]()


CASES: dict[str, Two] = {  # of a gradient and an input, or of two tensors
    "silu": aten.silu_backward,
    "mish": aten.mish_backward,
    "gelu": aten.gelu_backward,
    "elu": lambda g, x: aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
    "hardtanh": lambda g, x: aten.hardtanh_backward(g, x, 0.0, 6.0),
    "hardsigmoid": aten.hardsigmoid_backward,
    "hardswish": aten.hardswish_backward,
    "hardshrink": lambda g, x: aten.hardshrink_backward(g, x, 0.5),
    "softplus": lambda g, x: aten.softplus_backward(g, x, 1.0, 20.0),
    "leaky_relu": lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False),
    "threshold": lambda g, x: aten.threshold_backward(g, x, 0.0),
    "log_sigmoid": lambda g, x: aten.log_sigmoid_backward(g, x, torch.empty(0, device="cuda")),
    "sigmoid": aten.sigmoid_backward,
    "rrelu": lambda g, x: aten.rrelu_with_noise_backward(g, x, torch.rand_like(x), 0.1, 0.3, True, False),
    "mse_loss": lambda g, x: aten.mse_loss_backward(g, x, torch.rand_like(x), 0),
    "huber_loss": lambda g, x: aten.huber_loss_backward(g, x, torch.rand_like(x), 0, 1.0),
    "binary_cross_entropy": lambda g, x: aten.binary_cross_entropy_backward(g, x, torch.rand_like(x)),
    "native_dropout": lambda g, x: aten.native_dropout_backward(g, x > 0.5, 2.0),
    "softmax": lambda g, x: aten._softmax_backward_data(g, x, 1, x.dtype),
    "log_softmax": lambda g, x: aten._log_softmax_backward_data(g, x, 1, x.dtype),
    "glu": lambda g, x: aten.glu_backward(g[:, :3], x, 1),
    "sum": torch.add,
    "quotient": torch.floor_divide,
    "chosen": lambda g, x: torch.where(g > 0.5, g, x),
    "filled": lambda g, x: g.masked_fill(x > 0.5, 0.0),
    "noisy": lambda _, x: F.rrelu(x, training=True),
    "normalized": lambda _, x: F.rms_norm(x, (7,)),
    "joined": lambda g, x: torch.cat([g, x], 1),
}


def strides() -> dict[str, list[tuple[int, ...]]]:
    """Of the result of each case, for each pair of ways to lie."""
    pairs = [(_lying(one), _lying(other)) for one, other in product(range(4), repeat=2)]
    return {name: [case(*pair).stride() for pair in pairs] for name, case in CASES.items()}
