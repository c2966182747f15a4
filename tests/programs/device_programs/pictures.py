"""Networks of convolutions: pictures, volumes and sounds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.programs.device_programs.table import BF16, CUDA, FP16, OnStep, program, searching, train


def pictures(
    on_step: OnStep,
    family: str,
    batch: int = 32,
    size: int = 224,
    amp: torch.dtype | None = None,
    channels_last: bool = False,
    search: bool = False,
    **sizes: Any,
) -> None:
    """An image classifier of transformers."""
    import transformers

    model = getattr(transformers, f"{family}ForImageClassification")(getattr(transformers, f"{family}Config")(**sizes))
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = model.to(CUDA, memory_format=layout).train()

    def loss() -> torch.Tensor:
        x = torch.randn(batch, 3, size, size, device=CUDA).to(memory_format=layout)
        return F.cross_entropy(model(x).logits, torch.zeros(batch, dtype=torch.long, device=CUDA))

    with searching(search):
        train(model, on_step, loss, amp, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


for search in (False, True):
    also = ", benchmark" if search else ""
    program(pictures, f"resnet50{also}", family="ResNet", search=search)
    program(pictures, f"resnet50 float16 channels last{also}", family="ResNet", amp=FP16, channels_last=True,
            batch=64, search=search)  # fmt: skip
    program(pictures, f"convnext{also}", family="ConvNextV2", search=search)
    program(pictures, f"efficientnet b0{also}", family="EfficientNet", search=search, hidden_dim=1280,
            width_coefficient=1.0, depth_coefficient=1.0)  # fmt: skip
    program(pictures, f"regnet{also}", family="RegNet", search=search)
    program(pictures, f"mobilenet v2{also}", family="MobileNetV2", amp=BF16, search=search)
program(pictures, "vit", family="ViT", amp=BF16, batch=64)
program(pictures, "swin", family="Swin", amp=FP16)
program(pictures, "segformer", family="Segformer", size=256)


class Unet(nn.Module):
    """Down and up again, with skips."""

    def __init__(self, rank: int, inputs: int, width: int) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        turned = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]

        def block(a: int, b: int) -> nn.Module:
            return nn.Sequential(conv(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU(), conv(b, b, 3, padding=1),
                                 nn.GroupNorm(8, b), nn.SiLU())  # fmt: skip

        self.first, self.second, self.middle = (
            block(inputs, width),
            block(width, 2 * width),
            block(2 * width, 4 * width),
        )
        self.up2, self.up1 = turned(4 * width, 2 * width, 2, stride=2), turned(2 * width, width, 2, stride=2)
        self.third, self.fourth, self.last = (
            block(4 * width, 2 * width),
            block(2 * width, width),
            conv(width, inputs, 1),
        )
        self.pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        b = self.second(self.pool(a, 2))
        c = self.third(torch.cat([b, self.up2(self.middle(self.pool(b, 2)))], 1))
        return self.last(self.fourth(torch.cat([a, self.up1(c)], 1)))


def unet(on_step: OnStep, shape: tuple[int, ...], width: int, amp: torch.dtype | None, search: bool) -> None:
    model = Unet(len(shape) - 2, shape[1], width).to(CUDA)
    x = torch.randn(shape, device=CUDA)
    with searching(search):
        train(model, on_step, lambda: F.mse_loss(model(x), x), amp)


for search in (False, True):
    also = ", benchmark" if search else ""
    program(unet, f"unet{also}", shape=(8, 3, 256, 256), width=64, amp=None, search=search)
    program(unet, f"unet bfloat16{also}", shape=(8, 3, 256, 256), width=64, amp=BF16, search=search)
    program(unet, f"unet of volumes{also}", shape=(1, 1, 64, 128, 128), width=32, amp=None, search=search)
    program(unet, f"unet of volumes float16{also}", shape=(1, 1, 64, 128, 128), width=32, amp=FP16, search=search)
program(unet, "unet of sounds", shape=(8, 2, 65536), width=32, amp=None, search=False)


def gan(on_step: OnStep, search: bool) -> None:
    """DCGAN at 64 pixels."""

    def up(a: int, b: int, stride: int = 2, padding: int = 1) -> nn.Module:
        return nn.Sequential(nn.ConvTranspose2d(a, b, 4, stride, padding, bias=False), nn.BatchNorm2d(b), nn.ReLU(True))

    def down(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2, True))

    make = nn.Sequential(up(100, 512, 1, 0), up(512, 256), up(256, 128), up(128, 64),
                         nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()).to(CUDA)  # fmt: skip
    judge = nn.Sequential(down(3, 64), down(64, 128), down(128, 256), down(256, 512), nn.Conv2d(512, 1, 4)).to(CUDA)
    for_make, for_judge = (torch.optim.Adam(one.parameters(), 2e-4, (0.5, 0.999)) for one in (make, judge))
    with searching(search):
        for _ in range(3):
            real, noise = torch.randn(128, 3, 64, 64, device=CUDA), torch.randn(128, 100, 1, 1, device=CUDA)
            judge.zero_grad()
            fake = make(noise)
            score = judge(real).view(-1)
            F.binary_cross_entropy_with_logits(score, torch.ones_like(score)).backward()
            score = judge(fake.detach()).view(-1)
            F.binary_cross_entropy_with_logits(score, torch.zeros_like(score)).backward()
            for_judge.step()
            make.zero_grad()
            score = judge(fake).view(-1)
            F.binary_cross_entropy_with_logits(score, torch.ones_like(score)).backward()
            for_make.step()
            on_step()


program(gan, "dcgan", search=False)
program(gan, "dcgan, benchmark", search=True)


def timm_net(on_step: OnStep, net: str, batch: int, search: bool, amp: torch.dtype | None = None) -> None:
    import timm

    model = timm.create_model(net).to(CUDA).train()
    shape = (batch, *model.default_cfg["input_size"])

    def loss() -> torch.Tensor:
        return F.cross_entropy(
            model(torch.randn(shape, device=CUDA)), torch.zeros(batch, dtype=torch.long, device=CUDA)
        )

    with searching(search):
        train(model, on_step, loss, amp, optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


for name, batch in (("coatnet_nano_cc_224", 8), ("xception41", 16), ("convmixer_768_32", 8), ("tf_efficientnet_lite3", 16),
                    ("regnetx_040", 16), ("resnetv2_50d", 16), ("halonet_h1", 8)):  # fmt: skip
    program(timm_net, f"timm {name}", net=name, batch=batch, search=False)
    program(timm_net, f"timm {name}, benchmark", net=name, batch=batch, search=True)


def vision(on_step: OnStep, net: str, batch: int, size: int, amp: torch.dtype | None = None) -> None:
    """torchvision's segmentation or classification."""
    import torchvision

    if "deeplab" in net:
        model = getattr(torchvision.models.segmentation, net)(weights=None, weights_backbone=None).to(CUDA).train()
    else:
        model = getattr(torchvision.models, net)(weights=None).to(CUDA).train()

    def loss() -> torch.Tensor:
        found = model(torch.randn(batch, 3, size, size, device=CUDA))
        return (found["out"] if isinstance(found, dict) else found).float().pow(2).mean()

    train(model, on_step, loss, amp, optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


program(vision, "deeplab", net="deeplabv3_resnet50", batch=8, size=320)
program(vision, "deeplab float16", net="deeplabv3_resnet50", batch=8, size=320, amp=FP16)
program(vision, "densenet121", net="densenet121", batch=32, size=224)
program(vision, "vgg16", net="vgg16", batch=16, size=224)


@program
def detection(on_step: OnStep) -> None:
    """A detector, whose boxes depend on values."""
    import torchvision

    model = torchvision.models.detection.retinanet_resnet50_fpn(weights=None, weights_backbone=None).to(CUDA).train()
    boxes = torch.tensor([[20.0, 20.0, 200.0, 200.0], [100.0, 50.0, 300.0, 280.0]], device=CUDA)
    wanted = [{"boxes": boxes, "labels": torch.ones(2, dtype=torch.long, device=CUDA)} for _ in range(4)]

    def loss() -> torch.Tensor:
        losses: dict[str, torch.Tensor] = model(list(torch.rand(4, 3, 320, 320, device=CUDA)), wanted)
        return torch.stack(list(losses.values())).sum()

    train(model, on_step, loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.001))
