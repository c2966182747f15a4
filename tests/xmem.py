"""NVML peaks that xMem's authors measured on an RTX 3060, beside dry runs and beside their estimate: ``python tests/xmem.py``.

The rows (data/xmem.json) were chosen before any figure was seen. Their repository has more: of the transformers the
length of the sequences is not said, so they are not here. ConvNeXt is written out as torchvision has it.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import oom_magic as om
from oom_magic.memory.report import MemoryReport

TABLE = json.loads((Path(__file__).parent / "data" / "xmem.json").read_text("utf-8"))
DEPTHS = {"ConvNeXtTiny": (3, 3, 9, 3), "ConvNeXtBase": (3, 3, 27, 3)}
WIDTHS = {"ConvNeXtTiny": (96, 192, 384, 768), "ConvNeXtBase": (128, 256, 512, 1024)}
MOST_DROPPED = {"ConvNeXtTiny": 0.1, "ConvNeXtBase": 0.5}
ITERATIONS = 4  # theirs breaks after the one numbered 3
_norm = partial(nn.LayerNorm, eps=1e-6)


class ImageNorm(nn.LayerNorm):
    """Layer normalisation over the channels of images."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Permute(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.permute(x, self.dims)


class Block(nn.Module):
    """A residual block, left out for some images of a batch."""

    def __init__(self, width: int, dropped: float) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(width, width, 7, padding=3, groups=width),
            Permute(0, 2, 3, 1),
            _norm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            Permute(0, 3, 1, 2),
        )
        self.layer_scale = nn.Parameter(torch.ones(width, 1, 1) * 1e-6)
        self.dropped = dropped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.layer_scale * self.block(x)
        if self.dropped:
            kept = torch.empty([len(x), 1, 1, 1], dtype=x.dtype, device=x.device).bernoulli_(1 - self.dropped)
            result = result * kept.div_(1 - self.dropped)
        return result + x


def convnext(name: str) -> nn.Module:
    """torchvision's ``convnext_tiny`` or ``convnext_base``."""
    widths, depths = WIDTHS[name], DEPTHS[name]
    layers: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, widths[0], 4, stride=4), ImageNorm(widths[0], eps=1e-6))]
    number = 0
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        if stage:
            before = widths[stage - 1]
            layers.append(nn.Sequential(ImageNorm(before, eps=1e-6), nn.Conv2d(before, width, 2, stride=2)))
        for _unused in range(depth):
            layers.append(Block(width, MOST_DROPPED[name] * number / (sum(depths) - 1)))
            number += 1
    head = (nn.AdaptiveAvgPool2d(1), ImageNorm(widths[-1], eps=1e-6), nn.Flatten(1), nn.Linear(widths[-1], 1000))
    return nn.Sequential(*layers, *head)


def train(name: str, optimizer_name: str, batch_size: int) -> None:
    """Their loop on CIFAR-10, in images of 86 x 86."""
    model = convnext(name).to("cuda")
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.001)
    for _unused in range(ITERATIONS):
        optimizer.zero_grad()
        inputs, labels = torch.randn(batch_size, 3, 86, 86).to("cuda"), torch.randint(10, (batch_size,)).to("cuda")
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()
        torch.max(outputs, 1)


def predict(row: dict[str, Any]) -> MemoryReport:
    """The dry run of a row, on the card that it was measured on."""
    name, optimizer_name, batch_size = row["run"].split("/")[1].split("_")[:3]
    return om.dry_run(train, name, optimizer_name, int(batch_size), gpu=TABLE["card"], stop_after_steps=None)


def main() -> None:
    """Print the table."""
    for row in TABLE["rows"]:
        report = predict(row)
        ours = report.peak_reserved_bytes + report.device.context_bytes
        mark = "out of memory" if report.out_of_memory else f"{ours / row['measured'] - 1:+.1%}"
        theirs = "out of memory" if row["xmem_oom"] else f"{row['xmem'] / row['measured'] - 1:+.1%}"
        span = [(size - row["measured"]) / 2**20 for size in (report.peak_reserved_bytes, report.most_bytes[1])]
        print(f"{row['run']:38}{row['measured']:15,}{mark:>15}{theirs:>15}  oom {row['oom']}  {span}", flush=True)


if __name__ == "__main__":
    main()
