"""What is known of an operator is looked up once, and again where the tables change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import oom_magic as om
from oom_magic.predict.fake_cuda.operator_table import OperatorTable
from oom_magic.predict.kernels.copies import make_outputs
from tests.support.put_back import observed
from tests.support.versions import recorded_with

aten = torch.ops.aten


def test_a_handler_is_used_inside_its_block_only() -> None:
    table = OperatorTable({}, {})
    assert table.of(aten.mul.Tensor).handler is None and table.of(aten.mul.Tensor).rule is None
    with table.extended({aten.mul.Tensor: print}, {aten.mul.Tensor: make_outputs}):
        inside = table.of(aten.mul.Tensor)
        assert inside.handler is print and inside.rule is make_outputs
    assert table.of(aten.mul.Tensor).handler is None and table.of(aten.mul.Tensor).rule is None


def test_what_is_one_kernel_on_cuda_is_no_composite() -> None:
    table = OperatorTable({}, {})
    assert table.of(aten.silu_backward.default).is_composite
    table.fuse({aten.silu_backward.default: torch.empty_like})
    assert not table.of(aten.silu_backward.default).is_composite


def test_autocast_has_its_rules_whenever_it_is_turned_on() -> None:
    """Before the run, in it, and in a run in which another ended inside it."""
    weights = torch.nn.Linear(64, 64)

    def product() -> torch.dtype:
        weights.cuda()
        return weights(torch.ones(4, 64, device="cuda")).dtype

    def program() -> None:
        found = [product()]
        with torch.autocast("cuda", torch.bfloat16):
            found.append(product())
        found.append(product())
        with torch.autocast("cuda", torch.float16):
            found.append(product())
        assert found == [torch.float32, torch.bfloat16, torch.float32, torch.float16]

    def check_inside() -> None:
        assert product() is torch.bfloat16

    def stopped_inside() -> None:
        with torch.autocast("cuda", torch.float16):
            torch.optim.SGD(weights.parameters(), 0.1).step()

    om.dry_run(program, stop_after_steps=None)
    om.dry_run(stopped_inside, stop_after_steps=1)
    om.dry_run(program, stop_after_steps=None)
    torch.set_autocast_enabled("cuda", True)  # what a block does where there is a GPU
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        om.dry_run(check_inside, stop_after_steps=None)
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)


# The bytes are those of PyTorch 2.13.0's CUDA build.
WITH_OUT: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], int]] = {
    "sum": (lambda x, out: torch.sum(x, 0, out=out), 8389120),
    "mean": (lambda x, out: torch.mean(x, 0, out=out), 8389120),
    "prod": (lambda x, out: torch.prod(x, 0, out=out), 8389120),
    "amax": (lambda x, out: torch.amax(x, 0, out=out), 8389120),
    "logsumexp": (lambda x, out: torch.logsumexp(x, 0, out=out), 12587520),
    "nansum": (lambda x, out: torch.nansum(x, 0, out=out), 8389120),
    "sum_float64": (
        lambda x, out: torch.sum(x, 0, dtype=torch.float64, out=out.new_empty(1024, dtype=torch.float64)),
        25166336,
    ),
    "max": (lambda x, out: torch.max(x, 0, out=(out, out.new_empty(1024, dtype=torch.int64))), 33554944),
    "dot": (lambda x, out: torch.dot(x[0], x[1], out=out[0]), 512),
    "histc": (lambda x, out: torch.histc(x, 1024, 0, 1, out=out), 4096),
    "multinomial": (lambda x, out: torch.multinomial(x, 8, out=out.new_empty(1024, 8, dtype=torch.int64)), 5832192),
    "randperm": (lambda x, out: torch.randperm(1 << 20, device="cuda", generator=torch.Generator("cuda")), 42236416),
}


# Likewise; accumulators are as wide as what is read, but of all() a bool, and of max() a place beside the value.
REDUCED: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], int]] = {
    "logsumexp": (lambda x, out: torch.logsumexp(x, 0), 12587520),
    "logsumexp_int": (lambda x, out: torch.logsumexp(x.int(), 0), 20976128),
    "nansum": (lambda x, out: torch.nansum(x, 0), 8389120),
    "max": (lambda x, out: torch.max(x, 0), 33554944),
    "argmax_int": (lambda x, out: x.int().argmax(0), 37749248),
    "all": (lambda x, out: x.all(0), 2097664),
    "std_mean": (lambda x, out: torch.std_mean(x, 0), 33554944),
    "var_float64": (lambda x, out: x.double().var(0), 75497984),
    "aminmax_half": (lambda x, out: x.half().aminmax(dim=0), 10486272),
    "topk_int": (lambda x, out: x.long().topk(3), 10003968),
    "mode": (lambda x, out: x.mode(0), 4194304),
}


@pytest.mark.parametrize("name", WITH_OUT)
def test_variants_of_an_operator_take_what_it_takes(name: str) -> None:
    """Those with ``out=`` under a name of their own (``sum.IntList_out``), or with a generator, took nothing."""
    run, num_bytes = WITH_OUT[name]
    assert bytes_taken(run) == num_bytes


@pytest.mark.parametrize("name", REDUCED)
def test_reductions_take_what_their_accumulators_need(name: str) -> None:
    """logsumexp, nansum, max(dim) and std_mean took nothing (max 33.6 MB here), some of the others too much."""
    run, num_bytes = REDUCED[name]
    assert bytes_taken(run) == num_bytes


@recorded_with("2.13.0")
@pytest.mark.parametrize(
    ("make", "peak"),
    [
        (lambda: torch.randint(0, 50, (4, 1_000_000), device="cuda"), 88778240),
        (lambda: torch.rand(64, 5000, device="cuda"), 2672640),
        (lambda: torch.rand(5_000_000, device="cuda"), 143620096),
    ],
)
def test_the_mode_of_long_slices_takes_what_thrust_takes_to_sort_one(make: Callable[[], Any], peak: int) -> None:
    """It was left out: 71 % too little for one long slice."""
    report = om.dry_run(lambda: make().mode(-1), gpu="A100 80GB")
    assert report.peak_allocated_bytes == peak


def bytes_taken(run: Callable[[torch.Tensor, torch.Tensor], Any]) -> int:
    """What an operator takes inside, beside its results."""

    def program() -> None:
        tensors = torch.ones(1024, 1024, device="cuda"), torch.empty(1024, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        made = run(*tensors)
        found.append(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
        del made

    found: list[int] = []
    observed(program, gpu="A100 80GB")
    return found[0]


def test_gamma_variates_are_drawn_without_a_meta_kernel() -> None:
    """PyTorch 2.11 has none."""
    report = om.dry_run(lambda: torch.distributions.Beta(*[torch.ones(1024, device="cuda")] * 2).sample())
    assert report.peak_allocated_bytes >= 2 * 4096
