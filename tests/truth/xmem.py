"""NVML peaks that xMem's authors measured on an RTX 3060 and a 4060, beside dry runs: ``python tests/truth/xmem.py``.

How the hundred rows of data/xmem.json were drawn is said there; it was done before any figure was seen. Of the
transformers in their repository the length of the sequences is not said, so they are not here. Needs torchvision.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import oom_magic as om
from oom_magic.memory.report import MemoryReport
from tests.support.folders import DATA

TABLE = json.loads((DATA / "xmem.json").read_text("utf-8"))
ITERATIONS = 4  # theirs breaks after the one numbered 3


@contextmanager
def without_its_operators() -> Iterator[None]:
    """Importing torchvision: one that was built for CUDA describes operators that are not there beside a CPU build."""
    register = torch.library.register_fake

    def register_others(operator: Any, *args: Any, **options: Any) -> Any:
        if isinstance(operator, str) and operator.startswith("torchvision::"):
            return lambda function: function
        return register(operator, *args, **options)

    torch.library.register_fake = register_others  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.library.register_fake = register


def models() -> dict[str, Callable[[], nn.Module]]:
    """Their names (perf_estimator/models.py) and torchvision's networks. Raises ImportError without torchvision."""
    with without_its_operators():
        from torchvision import models as vision
    from torchvision.models.mobilenetv3 import MobileNetV3, _mobilenet_v3_conf

    return {
        "ConvNeXtBase": vision.convnext_base,
        "ConvNeXtTiny": vision.convnext_tiny,
        "MnasNet": lambda: vision.MNASNet(1.0, num_classes=10),
        "MobeNetV3Large": lambda: MobileNetV3(_mobilenet_v3_conf("mobilenet_v3_large")[0], 1280, num_classes=10),
        "MobeNetV3Small": lambda: MobileNetV3(_mobilenet_v3_conf("mobilenet_v3_small")[0], 1024, num_classes=10),
        "MobileNetV2": vision.mobilenet_v2,
        "RegNetX400MF": vision.regnet_x_400mf,
        "RegNetY400MF": vision.regnet_y_400mf,
        "ResNet101": vision.resnet101,
        "ResNet152": vision.resnet152,
        "VGG16": vision.vgg16,
        "VGG19": vision.vgg19,
    }


def train(make_model: Callable[[], nn.Module], optimizer_name: str, batch_size: int) -> None:
    """Their loop on CIFAR-10, in images of 86 x 86."""
    model = make_model().to("cuda")
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
    name, optimizer_name, batch_size, card = row["run"].split("/")[-1].split("_")[:4]
    arguments = (models()[name], optimizer_name, int(batch_size))
    return om.dry_run(train, *arguments, gpu=TABLE["cards"][int(card)], stop_after_steps=None)


def main() -> None:
    """Print the table, and of both estimates the median and the range."""
    ours, theirs = [], []
    for row in TABLE["rows"]:
        report, measured = predict(row), row["measured"]
        error, their_error = report.peak_reserved_bytes / measured - 1, row["xmem"] / measured - 1
        if not row["oom"] and report.out_of_memory is None:
            ours.append(error)
            theirs.append(their_error)
        at_most = report.most_bytes[1]
        ooms = f"out of memory {row['oom']!s:6} {report.out_of_memory is not None!s:6} {row['xmem_oom']!s:6}"
        print(f"{row['run']:62}{measured:15,}{error:+8.1%}{their_error:+8.1%}  up to {at_most:15,}  {ooms}", flush=True)
    for errors in (ours, theirs):
        print(f"median {median(map(abs, errors)):.1%}, {min(errors):+.1%} to {max(errors):+.1%} of {len(errors)}")


if __name__ == "__main__":
    main()
