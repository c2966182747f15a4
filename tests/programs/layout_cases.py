"""Programs whose tensors lie in channels last, or are expanded: which kernels copy them (record_programs.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

IMAGES, VOLUMES = (8, 32, 48, 48), (2, 16, 12, 12, 12)


def channels_last(
    function: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...] = IMAGES, dtype: Any = None,
    is_expanded: bool = False, is_leaf: bool = True,
) -> Callable[[], None]:  # fmt: skip
    """Forward and backward; the gradient lies as the result does, or is one number."""

    def program() -> None:
        memory_format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        images = torch.rand(shape, device="cuda", dtype=dtype).to(memory_format=memory_format).requires_grad_(is_leaf)
        found = function(images)
        found.sum().backward() if is_expanded else found.backward(torch.ones_like(found))  # type: ignore[no-untyped-call]

    return program


def against(function: Callable[[torch.Tensor], torch.Tensor], is_last: bool) -> Callable[[], None]:
    """Forward and backward of images in order, whose gradient has its channels last, or the other way round."""
    orders = (torch.channels_last, torch.contiguous_format)

    def program() -> None:
        images = torch.rand(IMAGES, device="cuda").to(memory_format=orders[not is_last]).requires_grad_()
        found = function(images)
        gradient = torch.ones_like(found, memory_format=torch.contiguous_format).to(memory_format=orders[is_last])
        found.backward(gradient)  # type: ignore[no-untyped-call]

    return program


def of_module(make: Callable[[], nn.Module], **how: Any) -> Callable[[], None]:
    """Likewise of a module, on the GPU."""

    def program() -> None:
        channels_last(make().cuda(), **how)()

    return program


def product(*dims: int) -> Callable[[], None]:
    """The product along dimensions, or of all elements, whose gradient asks whether an element is zero."""

    def program() -> None:
        torch.rand(512, 1024, device="cuda", requires_grad=True).prod(*dims).sum().backward()  # type: ignore[no-untyped-call]

    return program


def resized(mode: str, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda images: F.interpolate(images, scale_factor=2, mode=mode, **options)


def transformed(function: Callable[[torch.Tensor], torch.Tensor], *shape: int, dtype: Any = None) -> Callable[[], None]:
    """A Fourier transform, and its gradient from one number."""

    def program() -> None:
        function(torch.rand(shape, device="cuda", dtype=dtype, requires_grad=True)).abs().sum().backward()  # type: ignore[no-untyped-call]

    return program


def convolved(signals: torch.Tensor) -> torch.Tensor:
    """As state space models convolve: with as many zeros behind."""
    length = signals.shape[-1]
    spectrum = torch.fft.rfft(signals, n=2 * length) * torch.fft.rfft(torch.rand(64, length).cuda(), n=2 * length)
    return torch.fft.irfft(spectrum, n=2 * length)[..., :length]


def frozen() -> nn.Module:
    return nn.BatchNorm2d(32).eval()


def gated() -> nn.Module:
    return nn.Sequential(nn.Conv2d(32, 64, 3, bias=False), nn.Sigmoid()).half()


def judged() -> nn.Module:
    """One channel: it lies in order and with its channels last."""
    return nn.Sequential(nn.Conv2d(32, 1, 3), nn.Sigmoid()).to(memory_format=torch.channels_last)


def drawn() -> None:
    """Weights with their channels last, of images in order."""
    model = nn.Sequential(nn.ConvTranspose2d(1, 32, 3), nn.Conv2d(32, 1, 50), nn.Sigmoid())
    images = torch.rand(8, 1, 48, 48, device="cuda", requires_grad=True)
    model.cuda().to(memory_format=torch.channels_last)(images).sum().backward()


def masked() -> None:
    """Attention whose mask has rows of 64 scores, 66 apart."""
    query = torch.rand(4, 4, 64, 40, device="cuda", dtype=torch.half, requires_grad=True)
    mask = torch.rand(4, 4, 64, 66, device="cuda", dtype=torch.half)[..., :64]
    F.scaled_dot_product_attention(query, query, query, mask).sum().backward()


AGAINST: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "avg_pool": lambda images: F.avg_pool2d(images, 1),
    "max_pool": lambda images: F.max_pool2d(images, 2),
    "reflected": lambda images: F.pad(images, (1, 1, 1, 1), mode="reflect"),
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "relu6": F.relu6,
    "rms_norm": lambda images: F.rms_norm(images, (48,)),
    "max_pool_1d": lambda images: F.max_pool1d(images.flatten(2), 2).unsqueeze(2),
}
LAYOUTS: dict[str, Callable[[], None]] = {
    **{f"{name}_against_last": against(function, False) for name, function in AGAINST.items()},
    **{f"{name}_last_against": against(function, True) for name, function in AGAINST.items()},
    "mask_with_gaps": masked,
    "product": product(),
    "product_rows": product(1),
    "fourier_convolved": transformed(convolved, 8, 64, 784),
    "fourier_back": transformed(torch.fft.irfft, 64, 1000, dtype=torch.complex64),
    "fourier_inside": transformed(lambda images: torch.fft.rfft2(images, dim=(1, 2)), 4, 32, 48, 16),
    "fourier_from_first": transformed(lambda images: torch.fft.irfftn(torch.fft.rfftn(images)), 16, 32, 32),
    "cl_adaptive_max_pool": channels_last(lambda images: F.adaptive_max_pool2d(images, 7)),
    "cl_adaptive_max_pool_3d": channels_last(lambda images: F.adaptive_max_pool3d(images, 4), VOLUMES),
    "cl_adaptive_avg_pool": channels_last(lambda images: F.adaptive_avg_pool2d(images, 24), is_expanded=True),
    "cl_adaptive_avg_pool_3d": channels_last(lambda images: F.adaptive_avg_pool3d(images, 4), VOLUMES),
    "cl_avg_pool_3d": channels_last(lambda images: F.avg_pool3d(images, 2), VOLUMES),
    "cl_bicubic": channels_last(resized("bicubic")),
    "cl_antialias": channels_last(resized("bilinear", antialias=True)),
    "cl_nearest_3d": channels_last(resized("nearest"), VOLUMES),
    "cl_trilinear": channels_last(resized("trilinear"), VOLUMES),
    "cl_glu": channels_last(lambda images: F.glu(images, 1)),
    "cl_unshuffled": channels_last(lambda images: F.pixel_unshuffle(images, 2).flatten(1)),
    "cl_batch_norm_frozen": of_module(frozen),
    "cl_batch_norm_first": of_module(lambda: nn.BatchNorm2d(32), is_leaf=False),
    "cl_batch_norm_bf16": of_module(lambda: nn.BatchNorm2d(32), shape=(64, 32, 4, 4), dtype=torch.bfloat16),
    "cl_batch_norm_3d_bf16": of_module(lambda: nn.BatchNorm3d(16), shape=VOLUMES, dtype=torch.bfloat16, is_leaf=False),
    "cl_batch_norm_3d_half": of_module(
        lambda: nn.BatchNorm3d(16).half(), shape=VOLUMES, dtype=torch.half, is_expanded=True
    ),
    "turned_batch_norm": channels_last(
        lambda images: F.batch_norm(images.mT, None, None, training=True), dtype=torch.half, is_expanded=True
    ),
    "reflected": channels_last(lambda images: F.pad(images, [1] * 6, mode="reflect"), VOLUMES, is_expanded=True),
    "cl_half_of_one_number": of_module(gated, dtype=torch.half, is_expanded=True),
    "cl_convolution_double": of_module(lambda: nn.Conv2d(32, 64, 3).double(), dtype=torch.double, is_expanded=True),
    "cl_convolution_of_one_channel": of_module(lambda: nn.Conv2d(1, 16, 3), shape=(8, 1, 48, 48), is_leaf=False),
    "cl_convolution_to_one_channel": of_module(judged),
    "cl_weights_of_one_channel": drawn,
    "cl_depthwise_double": of_module(
        lambda: nn.Conv2d(32, 32, 3, groups=32).double(), dtype=torch.double, is_expanded=True
    ),
    "cl_instance_norm": of_module(lambda: nn.InstanceNorm2d(32), is_expanded=True),
    "cl_group_norm_half": of_module(lambda: nn.GroupNorm(32, 32).half(), shape=(512, 32, 2, 2), dtype=torch.half),
    "group_norm_of_rows": of_module(lambda: nn.GroupNorm(4, 256), shape=(1024, 256, 1, 1)),
    "group_norm_of_rows_half": of_module(
        lambda: nn.GroupNorm(32, 256).half(), shape=(2048, 256, 1, 1), dtype=torch.half
    ),
    "group_norm_of_rows_plain": of_module(lambda: nn.GroupNorm(64, 256, affine=False), shape=(4096, 256, 1, 1)),
    "cl_group_norm_plain": of_module(lambda: nn.GroupNorm(2, 512, affine=False), shape=(256, 512, 1, 2)),
}
