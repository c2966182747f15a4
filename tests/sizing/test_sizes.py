"""Sizes as functions: equal to the dry run to the byte, at any point."""

from __future__ import annotations

import logging
import random
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from oom_magic.memory.report import MemoryReport
from oom_magic.predict.dry_run import dry_run
from oom_magic.predict.sizing.regions import Border, Region, find_border
from oom_magic.predict.sizing.sizes import Sizes, size
from oom_magic.units import MIB

GPU = "A100 80GB"


def train_mlp(batch_size: int, width: int = 64, activation: str = "relu") -> None:
    middle = nn.ReLU() if activation == "relu" else nn.GELU()
    model = nn.Sequential(nn.Linear(100, width), middle, nn.Linear(width, 10)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        inputs, labels = torch.randn(batch_size, 100).cuda(), torch.randint(10, (batch_size,)).cuda()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_adapter(batch_size: int, seq_len: int, rank: int) -> None:
    weight = torch.randn(256, 256, device="cuda")
    down, up = nn.Linear(256, rank, bias=False).cuda(), nn.Linear(rank, 256, bias=False).cuda()
    optimizer = torch.optim.SGD([*down.parameters(), *up.parameters()], lr=0.1)
    for _ in range(2):
        tokens = torch.randn(batch_size, seq_len, 256, device="cuda")
        scores = (tokens @ weight + up(down(tokens))) @ tokens.transpose(1, 2)
        mixed = scores.softmax(-1) @ tokens
        mixed.backward(mixed.detach())
        optimizer.step()
        optimizer.zero_grad()


def train_padded(seq_len: int) -> None:
    """Rows of an attention mask are padded to a multiple of 8, and long sequences take another way."""
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        tokens = torch.randn(seq_len, 64, device="cuda")
        mask = torch.zeros(seq_len, -(-seq_len // 8) * 8, device="cuda")
        scores = (tokens @ weight @ tokens.T) + mask[:, :seq_len]
        if seq_len > 300:
            scores = scores.clone()
        scores.backward(scores.detach())
        optimizer.step()
        optimizer.zero_grad()


def train_gpt2(batch_size: int, seq_len: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=1000, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        tokens = torch.randint(0, 1000, (batch_size, seq_len), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def same(one: MemoryReport, other: MemoryReport) -> bool:
    """Whether two reports agree to the byte."""
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "breakdown", "modules", "lines", "steps", "kept_bytes")
    return all(getattr(one, name) == getattr(other, name) for name in names) and np.array_equal(
        one.timeline.requested_bytes, other.timeline.requested_bytes
    )


def agrees(sizes: Sizes, function: Callable[..., None], **point: Any) -> bool:
    run = dry_run(function, gpu=GPU, **point)
    quick = sizes.peak_allocated_bytes(**point)
    assert abs(quick / run.peak_allocated_bytes - 1) < 0.001
    assert sizes.peak_reserved_bytes(**point) == run.peak_reserved_bytes
    assert sizes.breakdown(**point).total_bytes == quick
    return same(sizes.report(**point), run)


@pytest.fixture(scope="module")
def mlp() -> Sizes:
    sizes = size(train_mlp, gpu=GPU, batch_size=(1, 1000), width=(8, 512, 8), activation=["relu", "gelu"])
    sizes.trace(activation="gelu")
    return sizes


@pytest.fixture(scope="module")
def adapter() -> Sizes:
    return size(train_adapter, gpu=GPU, batch_size=(2, 64), seq_len=(16, 1024), rank=(4, 64))


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.integers(1, 1000), st.integers(1, 64), st.sampled_from(["relu", "gelu"]))
def test_mlp_to_the_byte(mlp: Sizes, batch_size: int, width: int, activation: str) -> None:
    assert agrees(mlp, train_mlp, batch_size=batch_size, width=8 * width, activation=activation)


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.integers(2, 64), st.integers(16, 1024), st.integers(4, 64))
@pytest.mark.slow
def test_adapter_to_the_byte(adapter: Sizes, batch_size: int, seq_len: int, rank: int) -> None:
    assert agrees(adapter, train_adapter, batch_size=batch_size, seq_len=seq_len, rank=rank)


@pytest.mark.slow
def test_padding_and_a_branch_on_size() -> None:
    sizes = size(train_padded, gpu=GPU, seq_len=(16, 1024))
    assert all(agrees(sizes, train_padded, seq_len=seq_len) for seq_len in (17, 64, 299, 300, 301, 302, 1001, 1024))


def train_pooled(batch_size: int, side: int) -> None:
    """Two poolings, and parts of an image that attend to each other and to one more, padded to 32."""
    mix = nn.Conv2d(3, 8, 3, padding=1).cuda()
    cut = nn.Conv2d(8, 16, 14, 14).cuda()
    images = torch.randn(batch_size, 3, side, side, device="cuda")
    parts = functional.pad(cut(functional.avg_pool2d(mix(images), 1)).flatten(2), (1, 0))
    scores = (parts.transpose(1, 2) @ parts).softmax(-1)
    scores = scores.sum() + torch.ones(batch_size, -(-parts.shape[-1] // 32) * 32, device="cuda").sum()
    pooled = functional.max_pool2d(functional.max_pool2d(mix(images), 2), 2)
    (scores + pooled.square().sum()).backward()


@pytest.mark.slow
def test_pooled_and_cut_images_of_any_side() -> None:
    sizes = size(train_pooled, gpu=GPU, batch_size=(1, 16), side=(28, 300))
    assert not any("polynomial" in assumption.text for assumption in sizes.assumptions)
    traces = sizes.num_traces
    points = [(1, 28), (3, 31), (7, 54), (2, 97), (16, 225), (5, 226), (5, 227), (11, 300)]
    assert all(agrees(sizes, train_pooled, batch_size=batch, side=side) for batch, side in points)
    assert sizes.num_traces == traces


@pytest.mark.slow
def test_a_length_that_is_cut() -> None:
    def train(batch_size: int, seq_len: int) -> None:
        torch.randn(batch_size, min(seq_len, 512), 64, device="cuda", requires_grad=True).square().sum().backward()

    sizes = size(train, gpu=GPU, batch_size=(1, 64), seq_len=(16, 2048))
    assert sizes.borders in [("seq_len <= 511",), ("seq_len <= 512",)]
    assert all(agrees(sizes, train, batch_size=7, seq_len=seq_len) for seq_len in (100, 511, 512, 513, 2001))


@pytest.mark.slow
def test_a_loop_over_chunks() -> None:
    def train(batch_size: int, seq_len: int) -> None:
        head = nn.Linear(64, 500).cuda()
        rows = torch.randn(batch_size, seq_len, 64, device="cuda", requires_grad=True)
        sum(head(part).logsumexp(-1).sum() for part in rows.split(128, 1)).backward()

    sizes = size(train, gpu=GPU, batch_size=(1, 32), seq_len=(64, 1024))
    assert "seq_len: every 128 values, traced when first needed" in sizes.borders
    assert all(agrees(sizes, train, batch_size=7, seq_len=seq_len) for seq_len in (100, 128, 1024))


@pytest.mark.slow
def test_what_follows_no_polynomial_is_run_where_a_report_is_asked_for() -> None:
    def train(batch_size: int) -> None:
        torch.ones(10_000 * int(batch_size**0.5), 1000, device="cuda").square().add(1)

    sizes = size(train, gpu=GPU, batch_size=(1, 500))
    assert any("are not polynomials" in assumption.text for assumption in sizes.assumptions)
    assert not sizes.is_exact(batch_size=77)
    assert same(sizes.report(batch_size=77), dry_run(train, 77, gpu=GPU))
    memory = dry_run(train, 200, gpu=GPU).minimum_device_bytes + sizes.device.context_bytes
    assert sizes.largest("batch_size", memory=memory) == 224  # 15 * 15 - 1


@pytest.mark.slow
def test_the_number_of_layers_is_an_argument() -> None:
    def train(batch_size: int, num_layers: int) -> None:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(num_layers))).cuda()
        model(torch.randn(batch_size, 64, device="cuda")).sum().backward()

    sizes = size(train, gpu=GPU, batch_size=(2, 40_000), num_layers=(1, 6))
    assert sizes.borders == ("num_layers: at each value, traced when first needed",)
    before = sizes.num_traces
    assert all(agrees(sizes, train, batch_size=batch_size, num_layers=5) for batch_size in (3, 1001, 39_999))
    assert before < 12
    assert sizes.num_traces < before + 8
    largest = sizes.largest("num_layers", memory="536MiB", batch_size=40_000)
    assert dry_run(train, 40_000, largest, gpu=GPU, memory="536MiB").out_of_memory is None
    assert dry_run(train, 40_000, largest + 1, gpu=GPU, memory="536MiB").out_of_memory is not None


@pytest.mark.slow
def test_language_model_to_the_byte() -> None:
    sizes = size(train_gpt2, gpu=GPU, batch_size=(1, 8), seq_len=(32, 256))
    points = [(1, 33), (1, 256), (2, 255), (4, 255), (4, 256), (7, 146), (8, 256), (8, 129)]
    assert all(agrees(sizes, train_gpt2, batch_size=batch, seq_len=length) for batch, length in points)


def test_largest_is_where_the_dry_run_stops(adapter: Sizes) -> None:
    for memory in ("550MiB", "600MiB"):
        largest = adapter.largest("seq_len", memory=memory, batch_size=32, rank=8)
        assert 16 < largest < 1024
        point = {"batch_size": 32, "rank": 8, "gpu": GPU, "memory": memory}
        assert dry_run(train_adapter, seq_len=largest, **point).out_of_memory is None
        assert dry_run(train_adapter, seq_len=largest + 1, **point).out_of_memory is not None
    assert adapter.largest("seq_len", memory="460MiB", batch_size=32, rank=8) == 0
    assert adapter.largest("seq_len", memory="80GiB", batch_size=2, rank=8) == 1024


@pytest.mark.slow
def test_out_of_memory_is_reported_as_the_dry_run_does() -> None:
    sizes = size(train_adapter, gpu=GPU, memory="600MiB", batch_size=(2, 64), seq_len=(16, 1024), rank=8)
    run = dry_run(train_adapter, gpu=GPU, memory="600MiB", batch_size=64, seq_len=1000, rank=8)
    predicted = sizes.report(batch_size=64, seq_len=1000)
    assert run.out_of_memory is not None and predicted.out_of_memory is not None
    assert predicted.out_of_memory.message == run.out_of_memory.message
    assert predicted.peak_allocated_bytes == run.peak_allocated_bytes
    assert not sizes.fits(batch_size=64, seq_len=1000)


@pytest.mark.slow
def test_another_card_without_tracing_anew() -> None:
    sizes = size(train_gpt2, gpu=GPU, batch_size=(2, 8), seq_len=(32, 256))
    smaller = sizes.on("RTX 3060")
    for point in ({"batch_size": 2, "seq_len": 33}, {"batch_size": 7, "seq_len": 255}):
        assert same(smaller.report(**point), dry_run(train_gpt2, gpu="RTX 3060", **point))
    assert smaller.num_traces == 2
    assert smaller.device.name == "NVIDIA GeForce RTX 3060"


@pytest.mark.slow
def test_another_card_with_other_kernels_is_traced_anew() -> None:
    def attend(seq_len: int) -> None:
        query = torch.randn(1, 8, seq_len, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        functional.scaled_dot_product_attention(query, query, query).sum().backward()

    sizes = size(attend, gpu=GPU, seq_len=(32, 512)).on("Tesla T4")
    assert same(sizes.report(seq_len=77), dry_run(attend, gpu="Tesla T4", seq_len=77))
    assert sizes.num_traces > 3


def test_map_agrees_with_single_points(adapter: Sizes) -> None:
    grid = adapter.map(batch_size=[2, 9, 64], seq_len=range(100, 1001, 300), rank=8)
    assert grid.shape == (3, 4)
    for row, batch_size in enumerate((2, 9, 64)):
        for column, seq_len in enumerate(range(100, 1001, 300)):
            single = adapter.peak_allocated_bytes(batch_size=batch_size, seq_len=seq_len, rank=8)
            assert grid[row, column] == pytest.approx(single, abs=2 * MIB)


def test_a_map_as_a_table(adapter: Sizes) -> None:
    pytest.importorskip("pandas")
    points: dict[str, Any] = {"batch_size": [2, 9], "seq_len": range(100, 1001, 300), "rank": 8}
    table = adapter.to_dataframe(**points)
    assert list(table) == [*points, "peak_allocated_bytes"]
    assert table["peak_allocated_bytes"].tolist() == adapter.map(**points).ravel().tolist()
    last = adapter.map(batch_size=[9], seq_len=[1000], rank=8).item()
    assert table.iloc[-1].tolist() == [9, 1000, 8, last]


@pytest.mark.parametrize(
    ("ranges", "error", "words"),
    [
        ({"batch_size": (64, 1)}, ValueError, "batch_size=(64, 1) is reversed; write (1, 64)"),
        ({"batch_size": (1, 10**12)}, ValueError, "has over 1,000,000 values; write (1, 1000000000000, 1000000)"),
        ({"batch_size": (0, 8)}, ValueError, "starts at 0"),
        ({"batch_size": (-4, 8)}, ValueError, "starts at -4"),
        ({"batch_size": (8, 8)}, ValueError, "only one value"),
        ({"batch_size": (1, 8, 0)}, ValueError, "step 0"),
        ({"batch_size": (1.5, 8)}, TypeError, "whole numbers"),
        ({"batch_size": (1, 2, 3, 4)}, TypeError, "not a range"),
        ({"batch_size": []}, ValueError, "no choices"),
        ({"batch_size": 8}, ValueError, "Nothing varies"),
        ({"batchsize": (1, 8)}, TypeError, "train_mlp() has no argument 'batchsize'; did you mean 'batch_size'?"),
        ({"colour": (1, 8)}, TypeError, "train_mlp() has no argument 'colour'."),
        ({"width": (1, 8)}, TypeError, "also needs batch_size; give a range such as batch_size=(1, 64), a list"),
    ],
)
def test_ranges_that_make_no_sense(ranges: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        size(train_mlp, gpu=GPU, **ranges)
    assert words in str(caught.value)
    assert not re.search(r"[?.]\.$", str(caught.value))


def test_points_that_make_no_sense(mlp: Sizes) -> None:
    with pytest.raises(ValueError, match="outside its range, 1 to 1000"):
        mlp.report(batch_size=5000, width=8, activation="relu")
    with pytest.raises(ValueError, match="the closest values are 8 and 16"):
        mlp.report(batch_size=1, width=9, activation="relu")
    with pytest.raises(ValueError, match="not one of 'relu', 'gelu'; did you mean 'gelu'"):
        mlp.report(batch_size=1, width=8, activation="glu")
    with pytest.raises(TypeError, match="did you mean 'batch_size'"):
        mlp.report(batch_sizes=1, width=8, activation="relu")
    with pytest.raises(TypeError, match="width must also be given, such as width=8"):
        mlp.report(batch_size=1, activation="relu")
    with pytest.raises(TypeError, match="has no range to search"):
        mlp.largest("activation", batch_size=1, width=8)


def test_what_differs_from_run_to_run_is_named() -> None:
    def forgetful(batch_size: int) -> None:
        kept = torch.empty(batch_size, time.monotonic_ns() % 1_000_003, device="cuda")
        kept.add_(1)

    with pytest.raises(ValueError, match=r"does not do the same twice \(aten::empty.* at .*test_sizes.py:\d+ took \d+"):
        size(forgetful, batch_size=(1, 8))


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(()).item()])
def test_a_function_that_draws_lots_is_not_sized(draw: Callable[[], float]) -> None:
    def lucky(batch_size: int) -> None:
        torch.empty(batch_size, int(1000 * draw()), device="cuda").add_(1)

    with pytest.raises(ValueError, match="does not do the same twice"):
        size(lucky, batch_size=(1, 8))


def test_a_function_that_fails_says_where() -> None:
    def narrow(batch_size: int) -> None:
        torch.empty(4, device="cuda").view(batch_size, 4)

    with pytest.raises(ValueError, match=r"narrow\(batch_size=8\) failed: RuntimeError: shape"):
        size(narrow, batch_size=(1, 8))


def test_a_function_without_a_gpu_takes_nothing() -> None:
    sizes = size(lambda batch_size: torch.zeros(batch_size), batch_size=(1, 8))
    assert sizes.peak_allocated_bytes(batch_size=3) == sizes.report(batch_size=3).peak_allocated_bytes == 0
    assert sizes.largest("batch_size") == 8


def test_description_and_plain_data(adapter: Sizes) -> None:
    assert "train_adapter()" in str(adapter)
    plain = adapter.to_dict()
    assert plain["ranges"]["rank"] == [4, 64, 1]
    assert plain["peak_bytes"]["highest"] == adapter.peak_allocated_bytes(batch_size=64, seq_len=1024, rank=64)


def test_runs_that_teach_sizes_say_nothing(capfd):
    def train(batch_size):
        print("a word")
        warnings.warn("a warning", stacklevel=1)
        logging.getLogger("transformers").warning("a library's")
        torch.zeros(batch_size, 4096, device="cuda")

    assert size(train, batch_size=(1, 3), gpu="T4").num_traces > 1
    said = capfd.readouterr()
    assert not said.out and not re.search("word|warning|library", said.err)


def test_a_border_that_leaves_each_structure_whole_comes_first():
    """As a quantized model has it: batches, single samples, and single samples of at most 128 tokens."""
    asked = []

    def structure(point):
        asked.append(point)
        return "batch" if point[0] > 1 else "long" if point[1] > 128 else "short"

    points = [(1, 128, 4), (64, 4096, 128), (1, 512, 16), (7, 1023, 31), (64, 128, 4), (1, 4096, 4), (1, 128, 128)]
    axes = [np.arange(1, 65), np.arange(128, 4097), np.arange(4, 129)]
    region = Region(axes)
    chance = np.random.default_rng(0)
    assert find_border(region, points, structure, [], chance) == Border((1, 0, 0), 1)
    single = region.within(Border((1, 0, 0), 1), True)
    del asked[:]
    inside = [point for point in points if point in single]
    assert find_border(single, inside, structure, [], chance) == Border((0, 1, 0), 128)
    assert len(asked) <= len(inside) + 6  # 129 is asked for before what lies between
