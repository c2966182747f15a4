"""What a real A100 had in use while timm's networks were trained with ``cudnn.benchmark``: within the range that is said."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

import oom_magic as om
from tests.support.folders import DATA
from tests.truth.xmem import without_its_operators

TABLE = json.loads((DATA / "cudnn_search.json").read_text("utf-8"))
MIB = 2**20


def train(name: str, batch_size: int) -> None:
    """timm's ``train.py`` with its defaults, three steps."""
    import timm

    torch.backends.cudnn.benchmark = True
    model = timm.create_model(name).cuda()
    sizes = model.default_cfg["input_size"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=2e-5)
    for _unused in range(3):
        images = torch.randn(batch_size, *sizes, device="cuda")
        labels = torch.randint(0, 1000, (batch_size,), device="cuda")
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.slow
def test_what_an_a100_had_in_use_is_within_the_range() -> None:
    """With a search that takes four times what PyTorch holds otherwise, and with one that takes nothing."""
    try:
        with without_its_operators():
            import timm  # noqa: F401
    except ImportError as error:
        pytest.skip(f"needs timm and torchvision: {error}")
    for name, batch_size, measured_mib in TABLE["rows"]:
        report = om.dry_run(train, name, batch_size, gpu=TABLE["card"], stop_after_steps=None)
        assert report.out_of_memory is None, name
        in_use = (measured_mib - TABLE["outside_mib"]) * MIB
        assert in_use <= report.most_bytes[1], name
        assert in_use > 0.8 * report.peak_reserved_bytes, name
