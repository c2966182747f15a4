"""Dry runs of single operators and modules against PyTorch's own counters (tests/data/record_truth.py)."""

from __future__ import annotations

import json
import statistics

import pytest
import torch

from oom_magic.predict.session import DrySession
from tests.programs.module_cases import MODULES
from tests.programs.operator_cases import OPERATORS, Case, measure, pointwise
from tests.programs.sorting_cases import CARDS, SORTING
from tests.support.folders import DATA
from tests.support.stub_estimates import stub_of_cudnn  # noqa: F401 - a fixture
from tests.support.versions import recorded_with

pytestmark = pytest.mark.usefixtures("stub_of_cudnn")
VERSION = torch.__version__.partition("+")[0]
RECORDED = {path.stem.removeprefix("ops_truth_"): path for path in sorted(DATA.glob("ops_truth_*.json"))}
TRUTH = json.loads(RECORDED.get(VERSION, min(RECORDED.values())).read_text())
recorded_here = pytest.mark.skipif(
    VERSION not in RECORDED, reason=f"the truth was recorded with torch {' and '.join(RECORDED)}, this is {VERSION}"
)

# Not followed exactly: kernels whose temporary storage is not modelled, derivatives that go another way without data, and
# encoder_masked, whose mask the stub that was measured on cannot read (a card sees that it is causal, and drops it).
INEXACT = set(
    """
bilinear combinations cov encoder_masked index_put_accumulate masked_scatter
""".split()  # noqa: SIM905
)
if VERSION.startswith("2.15"):  # in evaluation: products inside the fused layer; three copies that live to the end
    INEXACT |= {"encoder", "encoder_layer", "encoder_layer_gelu", "transformer", "multinomial_replacement"}
NOT_THERE = {"aminmax"} if VERSION.startswith(("2.6", "2.11")) else set()  # it has no derivative there


def dry_numbers(cases: dict[str, Case], card: str = "A100 80GB", **how: bool) -> dict[str, list[int]]:
    """What ``measure`` finds on the pretend GPU."""
    found: dict[str, list[int]] = {}
    session = DrySession(card, stop_after_steps=None, has_bar=False)
    session.run(lambda: found.update(measure(cases, **how)))
    return found


@pytest.fixture(scope="module")
def operators() -> dict[str, list[int]]:
    return dry_numbers(OPERATORS)


@pytest.fixture(scope="module")
def turned() -> dict[str, list[int]]:
    return dry_numbers(OPERATORS, turned=True)


@pytest.fixture(scope="module")
def modules() -> dict[str, list[int]]:
    return dry_numbers(MODULES)


@recorded_here
@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in INEXACT])
def test_operator_equals_cuda(name: str, operators: dict[str, list[int]]) -> None:
    assert operators[name] == TRUTH["operators"][name]


# The last four raise an error on CUDA.
INEXACT_TURNED = INEXACT | set(
    """
topk_sorted baddbmm cdist_one logsigmoid cross_entropy_probabilities affine_grid histc scatter_reduce_mean unfold
multi_margin_loss multilabel_margin_loss nll_loss_2d channel_shuffle
""".split()  # noqa: SIM905
)


@recorded_here
@pytest.mark.skipif("turned" not in TRUTH, reason="recorded with torch 2.13.0")
@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in INEXACT_TURNED])
def test_an_operator_whose_inputs_lie_in_another_order_equals_cuda(name: str, turned: dict[str, list[int]]) -> None:
    assert turned[name] == TRUTH["turned"][name]


@recorded_here
@pytest.mark.parametrize("name", [name for name in MODULES if name not in INEXACT])
def test_module_equals_cuda(name: str, modules: dict[str, list[int]]) -> None:
    assert modules[name] == TRUTH["modules"][name]


@recorded_with("2.13")
@pytest.mark.sampled(1)  # half a minute each
@pytest.mark.parametrize("card", CARDS)
def test_sorts_and_distinct_values_take_what_they_take_on_each_card(card: str) -> None:
    true = json.loads((DATA / "sorting_truth.json").read_text())[card]
    found = dry_numbers(SORTING, CARDS[card])
    assert {name: found[name][:2] for name in SORTING} == {name: true[name][:2] for name in SORTING}


def test_any_version_runs_what_one_runs(operators: dict[str, list[int]], modules: dict[str, list[int]]) -> None:
    """Other versions take somewhat more or less, and their workspaces may stay or go; no case fails in them."""
    found, true = {**operators, **modules}, {**TRUTH["operators"], **TRUTH["modules"]}
    assert {name for name, numbers in found.items() if len(numbers) != len(true[name])} == NOT_THERE
    compared = found.keys() - INEXACT - NOT_THERE
    errors = [abs(found[name][2] / true[name][2] - 1) for name in compared]
    assert statistics.median(errors) < 0.02  # in the number of allocations


def test_inexact_are_few_and_known() -> None:
    assert {*OPERATORS, *MODULES} >= INEXACT
    assert len(INEXACT) < 0.1 * len({**OPERATORS, **MODULES})


@recorded_with("2.13")
def test_attention_of_images_seen_as_sequences_keeps_its_scores() -> None:
    """``flatten(2).transpose(1, 2)`` in an evaluation: flash and its like want the last dimension together."""

    def evaluate() -> None:
        attention = torch.nn.MultiheadAttention(32, 4, batch_first=True).cuda().eval()
        images = torch.randn(4, 32, 16, 16, device="cuda").flatten(2).transpose(1, 2)
        with torch.inference_mode():
            attention(images, images, images, need_weights=False)

    timeline = DrySession("A100 80GB").run(evaluate).timeline
    sizes = timeline.requested_bytes.tolist()
    assert sizes[-7:] == [131072, 393216, 8519680, 393216, 4194304, 131072, 131072]  # as the CUDA build


@pytest.mark.parametrize(("name", "is_said"), [("isin", False), ("isin_many", True), ("irfft", True)])
def test_what_a_kernel_takes_uncounted_is_said(name: str, is_said: bool) -> None:
    """Few numbers are compared with each element, many are sorted."""
    many = pointwise(lambda _: torch.isin(torch.arange(1000, device="cuda"), torch.arange(30, device="cuda")), (8,))
    session = DrySession("A100 80GB", has_bar=False)
    session.run({**OPERATORS, "isin_many": many}[name])
    said = [one for one in session.report.assumptions if "but not what its kernel allocates internally" in one.text]
    assert bool(said) == is_said
