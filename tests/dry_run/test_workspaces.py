"""How large workspaces are: of matrix products by card, version and environment, of convolutions by algorithm; pools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import oom_magic as om
from oom_magic.memory.workspaces import Workspaces, private_pools_in
from oom_magic.predict.kernels.convolutions import Convolution
from oom_magic.predict.session import DrySession
from oom_magic.units import MIB

SMALL, LARGE, LT = 8320 * 1024, 2**25, 2**20


def convolution(operation: str, *shapes: tuple[int, ...], padding: int) -> Convolution:
    """One of float32, two-dimensional, without stride, dilation or groups."""
    return Convolution(operation, *shapes, torch.float32, False, (1, 1), (padding, padding), (1, 1), 1)


@pytest.mark.parametrize(
    ("version", "capability", "expected"),
    [
        ("2.13.0", (8, 6), SMALL),
        ("2.6.0", (9, 0), LARGE),
        ("2.6.0", (10, 0), SMALL),
        ("2.13.0+cu130", (10, 0), LARGE),
        ("2.13.0", (12, 0), LARGE),
        ("2.13.0", (11, 0), SMALL),
        ("2.15.0", (11, 0), LARGE),
    ],
)
def test_the_default_is_by_generation_and_version(version, capability, expected, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert Workspaces.here(version).cublas_bytes(capability) == expected


@pytest.mark.parametrize(
    ("setting", "expected"), [(":4096:8", LARGE), (":16:8:4096:2", SMALL), (":16:8", 2**17), ("nonsense", SMALL)]
)
def test_the_environment_decides(setting, expected, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", setting)
    assert Workspaces.here("2.13.0").cublas_bytes((8, 6)) == expected


@pytest.mark.parametrize(
    ("version", "wish", "unified"),
    [((2, 7), "1", False), ((2, 11), "", False), ((2, 11), "1", True), ((2, 13), "", True), ((2, 13), "0", False)],
)
def test_cublas_lt_shares_by_version_and_wish(version, wish, unified):
    environment = {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": wish, "CUBLASLT_WORKSPACE_SIZE": "4096"}
    workspaces = Workspaces(version, environment)
    assert workspaces.is_unified is unified
    assert workspaces.cublas_lt_bytes() == 4 * LT
    lasting = {SMALL} if unified or version < (2, 9) else {SMALL, 4 * LT}
    assert set(workspaces.lasting_bytes((8, 0)).values()) == lasting


def test_nothing_stays_in_the_newest():
    assert Workspaces((2, 15), {}).lasting_bytes((9, 0)) == {}


def test_convolutions_take_what_their_algorithms_transform() -> None:
    """The second convolution of AlexNet, 256 images: cuDNN itself says 213 MiB for FFT (Oyama et al., 2018)."""
    alexnet = convolution("forward", (256, 48, 27, 27), (128, 48, 5, 5), (256, 128, 27, 27), padding=2)
    assert round(alexnet.fourier_bytes() / MIB, 1) == 212.5
    assert alexnet.most_bytes >= alexnet.fourier_bytes()
    strided = replace(alexnet, stride=(2, 2))
    assert strided.most_bytes < alexnet.most_bytes
    assert alexnet.chosen_bytes < alexnet.most_bytes  # what is chosen without a search


def test_what_cudnn_may_take_is_a_range_beside_the_exact_figures() -> None:
    def convolve(groups: int) -> None:
        torch.nn.Conv2d(64, 64, 3, padding=1, groups=groups).to("cuda")(torch.zeros(8, 64, 56, 56, device="cuda"))

    report = om.dry_run(convolve, 1, gpu="RTX 3060")
    allocated, reserved = report.most_bytes
    assert report.peak_allocated_bytes < allocated <= reserved
    assert report.peak_reserved_bytes < reserved
    assert "cuDNN's convolutions may briefly take more" in str(report)
    assert "an algorithm that needs less" in str(report)
    assert type(report).from_dict(report.to_dict()).most_bytes == report.most_bytes
    full = om.dry_run(convolve, 1, gpu="RTX 3060", memory=report.minimum_device_bytes + report.device.context_bytes)
    assert full.out_of_memory is None  # what does not fit is not taken
    assert full.most_bytes[1] == full.peak_reserved_bytes
    assert om.dry_run(convolve, 64, gpu="RTX 3060").most_bytes[1] == report.peak_reserved_bytes  # PyTorch's own kernel


def test_one_number_is_of_all_dimensions() -> None:
    def convolve() -> None:
        x, weight = torch.zeros(2, 4, 16, 16, device="cuda"), torch.zeros(8, 4, 3, 3, device="cuda", requires_grad=True)
        torch.convolution(x, weight, None, [1], [1], [1], False, [0], 1).sum().backward()
        torch.conv_transpose3d(x[:, :, None], weight.transpose(0, 1)[:, :, None], stride=2).sum().backward()

    assert om.dry_run(convolve, gpu="RTX 3060").most_bytes[1] > 0


@pytest.mark.parametrize("multiply", ["addmm_", "baddbmm_", "addmv_"])
def test_a_product_that_is_added_in_place_has_a_workspace_too(multiply):
    def add() -> None:
        shapes = {"addmm_": [(8, 8)] * 3, "baddbmm_": [(2, 8, 8)] * 3, "addmv_": [(8,), (8, 8), (8,)]}[multiply]
        into, *factors = (torch.zeros(shape, device="cuda") for shape in shapes)
        getattr(into, multiply)(*factors)

    assert om.dry_run(add, gpu="A100 80GB").peak_allocated_bytes > SMALL


def test_gradients_by_fft_take_planes_twice() -> None:
    """convmixer_1536_20 on an A100: 27,491 MiB in use, of which 1,667 are outside PyTorch and 6.0 GiB were live."""
    wide = convolution("weight", (8, 1536, 32, 32), (1536, 1536, 1, 1), (8, 1536, 32, 32), padding=0)
    assert wide.most_bytes == pytest.approx((27491 - 1667 - 6.0 * 1024) * 2**20, rel=0.01)


def test_those_that_a_process_holds_are_read_off_its_snapshot():
    """They are of a workspace's size, allocated and no tensor's; on each stream the code's own comes first."""

    def block(address: int, requested: int, state: str = "active_allocated") -> dict:
        return {"address": address, "requested_size": requested, "state": state}

    blocks = [block(0, SMALL), block(1, SMALL), block(2, SMALL, "inactive"), block(3, 4 * SMALL), block(4, SMALL)]
    segments = [{"device": 0, "stream": 0, "blocks": blocks}, {"device": 1, "stream": 7, "blocks": [block(9, LARGE)]}]
    found = Workspaces((2, 13), {}).lasting_in(segments, {1}, lambda card: (8 + card, 0))
    assert [(*one,) for one in found] == [
        (0, ("cublas", 0, 1), SMALL),
        (0, ("cublas", 0, 2), SMALL),
        (1, ("cublas", 7, 1), LARGE),
    ]


@pytest.mark.slow
def test_what_a_private_pool_keeps_is_counted_beside_tensors():
    """Its graph alone may use what is free in it: reserved on the card, not allocated."""

    def block(address: int, size: int, state: str = "active_allocated") -> dict[str, Any]:
        return {"address": address, "size": size, "requested_size": size, "state": state}

    def segment(card: int, pool: tuple[int, int], *blocks: dict[str, Any]) -> dict[str, Any]:
        total = sum(block["size"] for block in blocks)
        return {"device": card, "stream": 0, "segment_pool_id": pool, "total_size": total, "blocks": blocks}

    segments = [
        segment(0, (0, 0), block(1, 20 * MIB, "inactive")),
        segment(0, (1, 0), block(2, 8 * MIB), block(3, 12 * MIB, "inactive")),
        segment(0, (1, 0), block(4, MIB), block(5, MIB)),
        segment(1, (0, 7), block(6, SMALL), block(7, 3 * MIB)),
    ]
    pools = private_pools_in(segments, {2, 5})
    assert [(*one,) for one in pools] == [(0, (1, 0), MIB, 12 * MIB), (1, (0, 7), SMALL + 3 * MIB, 0)]
    assert not Workspaces((2, 13), {}).lasting_in(segments, set(), lambda card: (8, 6))

    session = DrySession(has_bar=False, num_gpus=2)
    for _ in range(2):
        session.fake_gpu.keep_private_pools(pools)
        session.fake_gpu.clear_workspaces()
        report = session.run(lambda: torch.cuda.empty_cache())
        cards = [(one.peak_allocated_bytes, one.peak_reserved_bytes) for one in report.cards]
        assert cards == [(MIB, 14 * MIB), (SMALL + 3 * MIB, 12 * MIB)]


@pytest.mark.parametrize(
    ("mode", "side", "forward", "backward"),
    [  # bytes above what was there, on PyTorch 2.13.0's CUDA build
        ("nearest", 16, 131_072, 131_072),
        ("nearest-exact", 16, 131_072, 131_072),
        ("bilinear", 16, 131_072, 131_072),
        ("nearest", 32, 655_360, 655_360),
        ("bilinear", 32, 524_288, 655_360),
    ],
)
def test_pictures_that_keep_their_size_are_copied_however_they_lie(mode: str, side: int, forward: int, backward: int):
    """A decoder that brings all of its features to the finest one's size: a copy of each was counted, too."""
    found = []

    def program() -> None:
        inputs = torch.zeros(2, 128, 16, 16, device="cuda", requires_grad=True)[:, :64]
        gradient = torch.zeros(2, 128, side, side, device="cuda")[:, :64]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = torch.nn.functional.interpolate(inputs, size=(side, side), mode=mode)
        found.append(torch.cuda.max_memory_allocated() - before)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(output, inputs, gradient)
        found.append(torch.cuda.max_memory_allocated() - before)

    DrySession(has_bar=False).run(program)
    assert found == [forward, backward]


@pytest.mark.parametrize(("mode", "expected"), [("nearest", 24_576), ("nearest-exact", 24_576), ("linear", 16_384)])
def test_signals_that_lie_apart_are_copied_by_the_nearest(mode: str, expected: int):
    found = []

    def program() -> None:
        inputs = torch.zeros(2, 128, 16, device="cuda")[:, :64]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.nn.functional.interpolate(inputs, size=32, mode=mode)
        found.append(torch.cuda.max_memory_allocated() - before)

    DrySession(has_bar=False).run(program)
    assert found == [expected]
