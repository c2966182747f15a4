"""What a dry run knows of values on the pretend GPU: known, partly known or unknown, and never garbage."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import oom_magic as om
from tests.support.put_back import observed

Write = Callable[[torch.Tensor], object]
_WRITES: list[Write] = [
    lambda x: x[1].zero_(),
    lambda x: x[0].copy_(torch.arange(4)),
    lambda x: x[::2].fill_(7),
    lambda x: x.__setitem__((slice(None), 1), torch.tensor([5, 6, 7]).to(x.device)),
    lambda x: x.__setitem__(2, torch.tensor(3)),
    lambda x: x.add_(1),
    lambda x: x.t()[1:3].mul_(2),
    lambda x: x.index_fill_(1, torch.tensor([0, 3]).to(x.device), 9),
    lambda x: x.masked_fill_(x > 5, 4),
    lambda x: x.scatter_(1, torch.tensor([[1], [2]]).to(x.device), 8),
    lambda x: x.cumsum_(0),
    lambda x: x.copy_(torch.cat([x[2:], x[:2]])),
]


def test_known_values_are_those_of_the_cpu() -> None:
    """After any writes what is known equals what a real tensor holds; of uninitialised memory nothing is known."""
    numbers = random.Random(0)
    cases = [(numbers.choice(("zeros", "ones", "empty")), numbers.choices(_WRITES, k=6)) for _ in range(100)]

    def write(made: str, writes: list[Write], device: str) -> list[list[int]]:
        x = getattr(torch, made)(3, 4, dtype=torch.int64, device=device)
        if made == "empty":
            x.copy_(torch.full((3, 4), 2))
        for one in writes:
            one(x)
        found: list[list[int]] = x.tolist()
        return found

    seen: list[list[list[int]]] = []
    report = observed(lambda: seen.extend(write(*case, "cuda") for case in cases))
    assert seen == [write(*case, "cpu") for case in cases]
    assert report.assumptions == ()


def test_rest_of_a_tensor_stays_what_it_was() -> None:
    """A size read from a tensor that was filled element by element (it was uninitialised memory once)."""

    def program() -> None:
        counts = torch.zeros(4, dtype=torch.long, device="cuda")
        for i in range(4):
            counts[i] = torch.tensor(100 + i, device="cuda")
        torch.zeros(int(counts.max()), 1024, device="cuda")

    report = om.dry_run(program)
    assert report.peak_allocated_bytes == 103 * 4096 + 512  # the zeros and the counts
    assert report.assumptions == ()


def test_unknown_part_is_read_as_the_default() -> None:
    seen = []

    def program() -> None:
        x = torch.randn(3, 3, device="cuda")
        x[0] = torch.zeros(3, device="cuda")
        seen.append(x.tolist())
        large = torch.zeros(1 << 20, device="cuda")
        seen.append(float(large.max()))
        large[3:5] = torch.full((2,), 9.0, device="cuda")
        seen.append(float(large[3]))

    report = observed(program)
    assert seen == [[[0.0] * 3, [1.0] * 3, [1.0] * 3], 0.0, 1.0]
    assert [assumption.line.line for assumption in report.assumptions if assumption.line] == [
        program.__code__.co_firstlineno + line for line in (3, 7)
    ]


def test_unknown_conditions_let_the_run_go_on() -> None:
    """A mask is neither empty nor full, checks pass, loops end; and the report says so."""
    turns = []

    def program() -> None:
        x = torch.randn(10, 4, device="cuda")
        assert 0 < len(x[x > 0]) < 40
        assert 0 < len((x[:, 0] < 0).nonzero()) < 10
        assert not torch.isnan(x).any()
        assert len(x[torch.isfinite(x)]) == 40
        if (x.abs() > 100).any():
            raise ValueError("too large")
        while x.norm() > 1e-3:
            turns.append("while")
            x = x / 2
        while not (x < 0).all():
            turns.append("while not")
        torch.distributions.Normal(x, x.exp()).sample()

    report = observed(program)
    assert turns == ["while", "while not"]
    texts = [assumption.text for assumption in report.assumptions]
    assert any("assumed: every other element True" in text for text in texts)
    assert any("assumed to be finite" in text for text in texts)


def test_an_adaptive_solver_comes_to_its_end() -> None:
    """Its step is finite, also seen in double precision beside known times, and what it tries is accepted."""
    steps = []

    def program() -> None:
        least, end = torch.zeros((), device="cuda", dtype=torch.float64), torch.ones((), device="cuda")
        y, time = torch.randn(8, 16, device="cuda"), torch.zeros((), device="cuda", dtype=torch.float64)
        while time < end:
            step = (0.01 / y.norm()).double()
            if not torch.isfinite(step):
                step = least
            assert time + step > time, "underflow"
            error = (y.exp() - y).norm()
            accept_step = error <= 1
            steps.append(step.dtype)
            if accept_step:
                time = time + step

    observed(program)
    assert steps == [torch.float64, torch.float64]  # with known times, and with the time that it took


def test_unknown_masks_of_what_was_copied_to_the_host() -> None:
    """Large copies on the host are pretended too, and can be indexed by masks computed there."""
    seen = []

    def program() -> None:
        x = torch.randn(600, 600, device="cuda").double().cpu()
        norm = torch.linalg.norm(x, dim=0)
        mask = norm > 1e-12
        out = torch.zeros_like(x)
        out[:, mask] = x[:, mask] / norm[mask]
        seen.extend([x[:, mask].shape, out.device.type, torch.arange(600.0)[mask].shape])

    observed(program)
    assert seen == [(600, 300), "cpu", (300,)]


def test_constants_cost_nothing() -> None:
    """A billion zeros are known to be zeros, and are not copied."""
    seen = []

    def program() -> None:
        x = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
        y = (x + 1).clone().mul_(3)
        seen.extend([int(y.max()), bool((x == 0).all())])

    observed(program)
    assert seen == [3, True]


def test_routers_spread_tokens_evenly() -> None:
    """Each expert is chosen as often as the others, however code looks for its tokens."""
    counts: list[list[int]] = []

    def program() -> None:
        router = torch.randn(64, 8, device="cuda").softmax(-1)
        best = router.argmax(-1)
        top = router.topk(2, dim=-1).indices
        hit = torch.nn.functional.one_hot(top, 8).permute(2, 1, 0)
        counts.append([int((best == expert).sum()) for expert in range(8)])
        counts.append([len(torch.where(hit[expert])[1]) for expert in range(8)])
        counts.append(torch.bincount(top.flatten(), minlength=8).tolist())
        counts.append([len((router.max(0).indices == row).nonzero()) for row in (31, 32, 39, 40)])
        counts.append([int((torch.multinomial(router, number) == 3).sum()) for number in (1, 2)])
        top.fill_(0)
        counts.append([int(top.sum())])

    report = observed(program)
    assert counts == [[8] * 8, [16] * 8, [16] * 8, [0, 1, 1, 0], [8, 16], [0]]
    assert {one.text for one in report.assumptions} == {
        "what argmax, topk or multinomial chooses among values computed on the pretend GPU is read; all outcomes were"
        " assumed to be equally frequent"
    }
    assert {one.line.line - program.__code__.co_firstlineno for one in report.assumptions if one.line} == {
        5,
        6,
        7,
        8,
        9,
    }


def test_numbers_that_are_known_are_compared() -> None:
    """``torch.allclose`` reads a value inside; unknown numbers are taken to be close."""

    def run() -> None:
        one, other = torch.tensor([1.0, 2.0], device="cuda"), torch.tensor([1.0, 3.0], device="cuda")
        unknown = torch.randn(2, device="cuda")
        answers.extend([torch.allclose(one, other), torch.allclose(one, one + 0), torch.allclose(unknown, other)])

    answers: list[bool] = []
    observed(run)
    assert answers == [False, True, True]


def test_what_only_the_cpu_leaves_out_is_not_known() -> None:
    """EmbeddingBag's kernel on the CPU makes no bag of each index where that of CUDA does."""

    def train() -> None:
        bag = torch.nn.EmbeddingBag(1000, 16, mode="sum", sparse=True).cuda()
        optimizer = torch.optim.SparseAdam(list(bag.parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            bag(torch.randint(0, 1000, (384,), device="cuda"), torch.arange(0, 384, 3, device="cuda")).sum().backward()
            optimizer.step()

    assert om.dry_run(train, gpu="A100 80GB").peak_allocated_bytes > 0


@pytest.mark.parametrize("rows", [[[2, 0, 2, 1], [1, 3, 1, 3]], [[2, 0, 2, 1]]])
def test_indices_of_a_sparse_tensor_are_known_when_they_are_made_distinct(rows: list[list[int]]) -> None:
    def coalesced(device: str) -> list[list[int]]:
        indices = torch.tensor(rows, device=device)
        made = torch.sparse_coo_tensor(
            indices, torch.ones(4, device=device), (3, 4)[: len(rows)], check_invariants=False
        )
        return list(made.coalesce().indices().cpu().tolist())

    found: list[list[list[int]]] = []
    observed(lambda: found.append(coalesced("cuda")))
    assert found == [coalesced("cpu")]


def test_large_constants_that_are_joined_stay_known() -> None:
    """As pruning over several layers joins their masks of ones."""
    found = []

    def program() -> None:
        ones = torch.ones(400_000, device="cuda")
        found.extend(len(joined[joined == 1]) for joined in (torch.cat([ones, ones[1:]]), torch.stack([ones, ones])))
        mixed = torch.cat([ones, ones * 0])
        found.append(len(mixed[mixed == 1]))

    report = observed(program)
    assert found == [799_999, 800_000, 400_000]
    assert any("every other element" in assumption.text for assumption in report.assumptions)  # of the mixed one


# An index, and what the CUDA build holds for ``weights[index]`` with a gradient beyond the rows it is made of.
INDICES: list[tuple[Any, int]] = [
    ([0, 1], 512),
    ([[0, 1], [2, 3]], 1024),
    ((slice(None), [[0, 1], [2, 3]]), 512),
    ([[0], [1, 2]], 1024),
    ((slice(None), (0, 1)), 512),
    (range(3), 512),
    ((slice(None), [0.0, 1.0]), 512),
    ((slice(None), []), 0),
    ([slice(0, 2), 1], 0),
]


@pytest.mark.parametrize(("index", "kept"), INDICES, ids=str)
def test_numbers_that_choose_rows_are_kept_on_the_gpu_for_the_backward(index: Any, kept: int) -> None:
    def run() -> None:
        weights = torch.randn(64, 64, 64, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        rows = weights[index]
        own = 0 if rows._base is not None else -(-rows.nbytes // 512) * 512
        assert torch.cuda.memory_allocated() - before - own == kept

    om.dry_run(run)


def test_edges_of_a_large_graph_are_known() -> None:
    """Every other one was taken to be no loop: half of what attention over 4 million edges takes."""
    edges = torch.arange(6_000_000).view(2, -1)

    def drop_loops() -> None:
        moved = edges.to("cuda")
        assert moved[:, moved[0] != moved[1]].shape[1] == 3_000_000

    assert not om.dry_run(drop_loops, gpu="A100 80GB").assumptions


def test_what_a_tensor_grows_by_is_unknown() -> None:
    """It was read as what lay in the host's memory: another number in each run."""

    def program() -> None:
        grown = torch.full((2,), 3, device="cuda").resize_(5)
        assert grown.tolist() == [3, 3, 1, 1, 1]
        assert grown.resize_(2).tolist() == [3, 3]
        zeros = torch.zeros(4, device="cuda")
        zeros.untyped_storage().resize_(64)
        assert zeros.tolist() == [1.0] * 4

    assert any("assumed: 1.0" in one.text for one in om.dry_run(program).assumptions)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("sides", [(64,), ()])
def test_least_squares_of_unknown_values_have_their_shapes(device: str, sides: tuple[int, ...]) -> None:
    """Splines are fitted on the host when a Kolmogorov-Arnold network is made. CUDA has the driver "gels"."""
    shapes = []

    def solve(device: str, how: str) -> None:
        a = torch.rand(784, 9, 8) if sides else torch.rand(70_000, 8)
        b = torch.rand(*a.shape[:-1], *sides)
        found = torch.linalg.lstsq(a.to(device), b.to(device), driver=how)
        assert found.solution.device.type == device
        shapes.append([one.shape for one in found])

    for how in ("gels",) if device == "cuda" else ("gels", "gelsy", "gelsd"):
        solve("cpu", how)
        report = observed(solve, device, how, gpu="T4")
        assert shapes[-1] == shapes[-2]
    assert any("linalg_lstsq" in one.text for one in report.assumptions) == (device == "cuda")
