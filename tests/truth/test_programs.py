"""Dry runs of small programs against PyTorch's own counters (tests/data/record_programs.py)."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

import oom_magic as om
from oom_magic.memory.categories import Category
from tests.programs.derivative_cases import DERIVATIVES
from tests.programs.layout_cases import LAYOUTS
from tests.programs.notebook_programs import NOTEBOOKS
from tests.programs.program_cases import PROGRAMS
from tests.programs.seldom_cases import SELDOM
from tests.programs.sparse_and_graph_cases import SPARSE_AND_GRAPHS
from tests.support.folders import DATA
from tests.support.put_back import observed
from tests.support.stub_estimates import stub_of_cudnn  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("stub_of_cudnn")
TRUTH = json.loads((DATA / "programs_truth.json").read_text())
VERSION = torch.__version__.partition("+")[0]
ALL = PROGRAMS | DERIVATIVES | SPARSE_AND_GRAPHS | LAYOUTS | NOTEBOOKS | SELDOM


@pytest.mark.sampled(16)
@pytest.mark.skipif(
    TRUTH["torch"] != VERSION, reason=f"the truth was recorded with torch {TRUTH['torch']}, this is {VERSION}"
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ALL)
def test_program_equals_cuda(name: str) -> None:
    report = om.dry_run(ALL[name], gpu="RTX 3060", stop_after_steps=None)
    assert [report.peak_allocated_bytes, report.peak_reserved_bytes] == TRUTH["peaks"][name]


def test_values_of_a_sparse_matrix_can_be_trained() -> None:
    """The gradient of a product's sparse factor is taken at its indices; what is only near is said."""
    shapes = []

    def program() -> None:
        values = torch.randn(50, device="cuda", requires_grad=True)
        matrix = torch.sparse_coo_tensor(torch.randint(0, 100, (2, 50), device="cuda"), values, (100, 100)).coalesce()
        (torch.sparse.mm(matrix, torch.randn(100, 64, device="cuda")).sum() + matrix.to_dense().sum()).backward()
        shapes.append(values.grad.shape)  # type: ignore[union-attr]

    report = observed(program, gpu="RTX 3060")
    assert shapes == [(50,)] and any("cuSPARSE decides" in assumption.text for assumption in report.assumptions)


def test_the_history_of_lbfgs_fills_in_a_loop_that_is_cut_short() -> None:
    """Where equal losses end each step after one iteration it stays empty; it is what LBFGS takes most for."""

    def train() -> None:
        weight = torch.randn(1000, 500, device="cuda", requires_grad=True)
        minimizer = torch.optim.LBFGS([weight], max_iter=4, history_size=20)
        for _ in range(200):
            minimizer.step(lambda: (minimizer.zero_grad(), weight.square().mean().backward(), weight.mean())[-1])

    report = om.dry_run(train, gpu="RTX 3060")
    assert report.breakdown[Category.OPTIMIZER_STATE] > 2 * 20 * 1000 * 500 * 4
    assert any(one.text.startswith("LBFGS: each step makes as many") for one in report.assumptions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_whose_rows_lie_apart_is_none_for_fused_attention(dtype: torch.dtype) -> None:
    """T5's is a permuted embedding: CUDA computes the scores then, on any card (an H200 did, with transformers 5.17)."""

    def attend(lie: Callable[[torch.Tensor], torch.Tensor]) -> None:
        query, key, value = (torch.randn(4, 12, 512, 64, device="cuda", dtype=dtype) for _ in range(3))
        bias = torch.randn(512, 512, 12, device="cuda", dtype=dtype).permute(2, 0, 1)[None]
        torch.nn.functional.scaled_dot_product_attention(query, key, value, lie(bias))

    apart, together = (
        om.dry_run(attend, lie, gpu="H100").peak_allocated_bytes for lie in (lambda one: one, torch.Tensor.contiguous)
    )
    scores = 4 * 12 * 512 * 512 * dtype.itemsize
    assert apart > together + scores


def test_groups_of_one_head_are_fused() -> None:
    """As PyTorch 2.13's CUDA build does in float32 (no kernel there takes larger groups): 18,973,696 bytes."""

    def attend() -> None:
        query, key, value = (torch.randn(8, 4, 256, 64, device="cuda", requires_grad=True) for _ in range(3))
        attention = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        attention.sum().backward()

    assert om.dry_run(attend, gpu="A100 80GB").peak_allocated_bytes == 18_973_696


def test_sparse_rows_are_refused() -> None:
    def program() -> None:
        begins, columns = torch.arange(0, 501, 5, device="cuda"), torch.arange(500, device="cuda") % 100
        torch.sparse_csr_tensor(begins, columns, torch.randn(500, device="cuda"), (100, 100))

    with pytest.raises(NotImplementedError, match="sparse_csr tensors are not supported in a dry run"):
        om.dry_run(program)


def test_checks_of_unknown_values_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that verifies what it computed goes on: torch.distributions, isfinite, asserts."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # Dynamo's first use ends it

    def program() -> None:
        x = torch.randn(64, 10, device="cuda")
        assert torch.isfinite(x).all()
        assert torch.isfinite(x.sum())
        assert not torch.isnan(x).any()
        assert not torch.zeros(3, device="cuda").all()
        for distribution in (
            torch.distributions.Categorical(logits=x),
            torch.distributions.Categorical(probs=x.softmax(-1)),
            torch.distributions.Normal(x, x.exp()),
            torch.distributions.Beta(x.exp(), x.exp()),
            torch.distributions.Binomial(10, x.sigmoid()),
        ):
            distribution.log_prob(distribution.sample())

    report = om.dry_run(program)
    assert any("assumed: True" in assumption.text for assumption in report.assumptions)


def test_endless_loop_of_operators_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from oom_magic.predict.instrumentation import recorder

    monkeypatch.setattr(recorder, "STEP_LIMIT_SECONDS", 0.2)

    def program() -> None:
        while True:
            torch.zeros(10, device="cuda")

    with pytest.raises(TimeoutError, match="No optimizer step"):
        om.dry_run(program)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_of_nested_tensors_by_other_kernels_is_refused() -> None:
    def program() -> None:
        rows = [torch.randn(length, 64) for length in (7, 19)]
        nested = torch.nested.nested_tensor(rows, layout=torch.jagged, device="cuda").requires_grad_()
        heads = nested.unflatten(-1, (4, 16)).transpose(1, 2).double()
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)

    with pytest.raises(RuntimeError, match="nested tensors cannot be dry-run"):
        om.dry_run(program)


@pytest.mark.parametrize("name", ["slogdet", "inv", "cholesky", "qr", "svd", "eigh", "det"])
def test_what_decompositions_take_inside_is_said_to_be_uncounted(name: str) -> None:
    report = om.dry_run(lambda: getattr(torch.linalg, name)(torch.eye(64, device="cuda")))
    assert any("but not what its kernel allocates internally" in assumption.text for assumption in report.assumptions)


@pytest.mark.parametrize(
    ("dtype", "taken"),
    [
        (torch.float32, [1023, 1279, 5119, 13311]),
        (torch.bfloat16, [1279, 1279, 3327, 7423]),
        (torch.float64, [1279, 2815, 18943, 54783]),
    ],
)
def test_running_sums_take_what_cub_asks_for(dtype: torch.dtype, taken: list[int]) -> None:
    """As the CUDA build does, of any card."""
    found = []
    for length in (1000, 100_000, 1_000_000, 3_000_000):
        timeline = om.dry_run(
            lambda n=length: torch.empty(n, dtype=dtype, device="cuda").cumsum(0), gpu="A100"
        ).timeline
        found.append(int(timeline.requested_bytes[-1]))
    assert found == taken


@pytest.mark.parametrize(
    ("gpu", "taken"), [("RTX 3060", [3839, 125951]), ("A100", [17663, 35583]), ("H100", [21503, 19711])]
)
def test_masks_are_counted_and_chosen_by_cub(gpu: str, taken: list[int]) -> None:
    """Ten million elements; the places of those that are set come between."""
    timeline = om.dry_run(lambda: torch.zeros(10**7, dtype=torch.bool, device="cuda").nonzero(), gpu=gpu).timeline
    assert [size for size in timeline.requested_bytes.tolist() if size] == [10**7, 4, *taken]


@pytest.mark.parametrize(("num_rows", "taken"), [(256, 4607), (257, 70655)])
def test_rows_of_as_many_bits_as_one_pass_are_sorted_without_copies(num_rows: int, taken: int) -> None:
    """As the CUDA build does: the largest index counts, not how many there are."""

    def accumulate() -> None:
        rows, index = torch.zeros(num_rows, 2, device="cuda"), torch.zeros(4000, dtype=torch.long, device="cuda")
        rows.index_put_((index,), torch.zeros(4000, 2, device="cuda"), accumulate=True)

    assert taken in om.dry_run(accumulate, gpu="RTX 3060").timeline.requested_bytes.tolist()


@pytest.mark.parametrize(("gpu", "has_columns"), [("T4", True), ("RTX 3060", False)])
def test_convolutions_in_bfloat16_are_products_before_compute_capability_8(gpu: str, has_columns: bool) -> None:
    """The patches of an image as columns, as the CUDA build takes them on a T4."""

    def convolve() -> None:
        images, kernels = (torch.randn(shape, device="cuda").bfloat16() for shape in ((8, 3, 32, 32), (32, 3, 3, 3)))
        torch.nn.functional.conv2d(images, kernels, padding=1)

    assert (3 * 9 * 32 * 32 * 2 in om.dry_run(convolve, gpu=gpu).timeline.requested_bytes.tolist()) is has_columns
