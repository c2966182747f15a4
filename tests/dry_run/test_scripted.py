"""Modules whose data is exchanged in unusual ways: TorchScript's, whose weights C++ holds, and other types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oom_magic as om
from tests.support.versions import recorded_with


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(512, 256), nn.BatchNorm1d(256)
        self.register_buffer("scale", torch.ones(256))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(self.linear(x)) * self.scale  # type: ignore[no-any-return]


def scripted() -> nn.Module:
    return torch.jit.script(Net())  # type: ignore[no-untyped-call, no-any-return]


def traced() -> nn.Module:
    return torch.jit.trace(Net(), torch.ones(4, 512))  # type: ignore[no-untyped-call, no-any-return]


def part() -> nn.Module:
    return nn.Sequential(scripted())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    model.to(dtype).cuda()
    assert all(one.is_cuda and one.dtype == dtype for one in model.state_dict().values() if one.is_floating_point())
    for _ in range(3):
        model(torch.ones(64, 512, device="cuda", dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def values(model: nn.Module) -> Any:
    grads = [None if one.grad is None else one.grad.tolist() for one in model.parameters()]
    kept = [(one.training, getattr(one, "calls", None)) for one in model.modules()]
    return [(name, one.tolist(), one.device, one.dtype) for name, one in model.state_dict().items()], grads, kept


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [scripted, traced, part])
def test_a_users_module_trains_on_the_pretend_gpu_and_is_as_before(
    make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    model, plain = make(), Net()
    model(torch.ones(4, 512)).square().sum().backward()
    peaks, optimizers = [], [torch.optim.Adam(one.parameters()) for one in (model, plain)]
    before, weights = values(model), list(model.parameters())
    for one, optimizer in zip((model, plain), optimizers, strict=True):
        report = om.dry_run(train, one, optimizer, dtype)
        peaks.append(report.peak_allocated_bytes - 2**20)
    assert values(model) == before and list(map(id, model.parameters())) == list(map(id, weights))
    assert peaks[0] >= peaks[1] > 0
    model(torch.ones(4, 512)).square().sum().backward()
    optimizers[0].step()
    assert values(model) != before


def test_what_it_does_on_the_cpu_is_undone() -> None:
    model = scripted()
    model(torch.ones(4, 512)).square().sum().backward()
    before = values(model)

    def run() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        model(torch.ones(4, 512)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    om.dry_run(run)
    assert values(model) == before


def test_a_saved_or_frozen_one_is_used(here: None) -> None:
    frozen = torch.jit.freeze(scripted().eval())
    torch.jit.save(scripted(), "scripted.pt")  # type: ignore[no-untyped-call]

    def run() -> None:
        assert frozen(torch.ones(4, 512)).shape == (4, 256)
        loaded = torch.jit.load("scripted.pt", map_location="cuda")  # type: ignore[no-untyped-call]
        assert loaded(torch.ones(4, 512, device="cuda")).is_cuda

    assert om.dry_run(run).peak_allocated_bytes > 512 * 256 * 4
    Path("scripted.pt").unlink()


def test_a_model_with_gradients_gets_another_type_on_the_host() -> None:
    model = nn.Linear(4, 4)
    model(torch.ones(4, 4)).sum().backward()

    def run() -> None:
        model.bfloat16()
        assert [one.grad.dtype for one in model.parameters() if one.grad is not None] == [torch.bfloat16] * 2

    om.dry_run(run)
    assert model.weight.dtype == torch.float32 and model.weight.grad is not None


def test_what_torchscript_would_fuse_is_said() -> None:
    report = om.dry_run(lambda: train(scripted(), torch.optim.SGD([torch.zeros(1)]), torch.float32), gpu="RTX 3060")
    assert any(one.text.startswith("torch.jit.script:") for one in report.assumptions)


class Convolved(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean(-1)  # type: ignore[no-any-return]


def traced_there() -> None:
    model = Convolved().cuda()
    model = torch.jit.trace(model, torch.rand(4, 3, 32, 32, device="cuda"))  # type: ignore[no-untyped-call]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        model(torch.rand(32, 3, 32, 32, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@recorded_with("2.13.0")
def test_what_is_traced_on_the_pretend_gpu_is_followed_as_written() -> None:
    """Shapes are tensors while PyTorch traces: a convolution ended the run with an error of PyTorch's."""
    report = om.dry_run(traced_there, gpu="A100 80GB", stop_after_steps=None)
    peaks = [[step.peak_allocated_bytes, step.peak_reserved_bytes] for step in report.steps]
    assert peaks == [[30241792, 46137344], [30398464, 46137344], [30398464, 46137344]]
    assert any(one.text.startswith("torch.jit.trace:") for one in report.assumptions)


class Pooled(nn.Sequential):
    def __init__(self) -> None:
        pooled = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AvgPool2d(4)
        super().__init__(*pooled, nn.Flatten(), nn.Linear(2048, 10))


def unchecked() -> None:
    images = torch.rand(8, 3, 32, 32, device="cuda")
    model = torch.jit.trace(Pooled().cuda(), images, check_trace=False)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.rand(32, 3, 32, 32, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@recorded_with("2.13.0")
def test_what_torchscript_differentiates_keeps_what_it_saves_to_the_end_of_its_backward() -> None:
    """What ``torch.jit.trace`` has not checked is one node of the graph from its second call on. PyTorch runs that node
    once, operator by operator, to profile it, with what its formulas compute in between: 38851072 in the second step."""
    report = om.dry_run(unchecked, gpu="A100 80GB", stop_after_steps=None)
    first, second, third = (step.peak_allocated_bytes for step in report.steps)
    assert (first, third) == (34481664, 34919936)
    assert 1.25 * second >= 38851072
    assert report.is_lower_bound


def test_a_traced_function_and_a_frozen_model_are_used_on_the_pretend_gpu() -> None:
    def run() -> None:
        both = torch.ones(64, 256, device="cuda"), torch.ones(256, 64, device="cuda")
        product = torch.jit.trace(lambda x, y: (x @ y).softmax(-1), both)  # type: ignore[no-untyped-call]
        assert product(torch.ones(128, 256, device="cuda"), both[1]).shape == (128, 64)
        images = torch.rand(4, 3, 32, 32, device="cuda")
        frozen = torch.jit.freeze(torch.jit.trace(Convolved().cuda().eval(), images))  # type: ignore[no-untyped-call]
        assert frozen(images).shape == (4, 64)

    om.dry_run(run)


LIBRARY = """
import torch

@torch.jit.script
def weights(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.softmax(x, dim=-1)
"""


def test_a_library_that_scripts_softmax_is_imported_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt_bigcode in transformers 4.48: PyTorch looks for the source of what stands in its functions' places."""
    library = tmp_path / "site-packages" / "scripting_library.py"
    library.parent.mkdir()
    library.write_text(LIBRARY)
    monkeypatch.syspath_prepend(library.parent)

    def run() -> None:
        from scripting_library import weights  # type: ignore[import-not-found]

        assert weights(torch.ones(4, 4, device="cuda")).is_cuda

    om.dry_run(run)
