"""Several cards in one process: tensors on any, copies between them, an allocator each."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from IPython.core.error import UsageError
from torch import nn

import oom_magic as om
from oom_magic.memory.report import MemoryReport
from oom_magic.predict.session import DrySession
from oom_magic.predict.setups.gpus import counted
from oom_magic.predict.what_if.change import InapplicableError
from oom_magic.predict.what_if.placement_changes import BalancedLayers
from oom_magic.predict.what_if.survey import Survey
from oom_magic.units import MIB
from tests.programs.card_programs import (
    DATA_FILE,
    PROGRAMS,
    back_and_forth,
    data_parallel_cnn,
    dispatched_unevenly,
    gpt2,
    peaks,
    shared_head,
    train,
)
from tests.support.put_back import observed
from tests.support.stub_estimates import stub_of_cudnn  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("stub_of_cudnn")
_QUICK = (back_and_forth, shared_head, data_parallel_cnn, dispatched_unevenly)


@pytest.mark.parametrize(
    "program",
    [pytest.param(one, marks=[] if one in _QUICK else pytest.mark.slow, id=one.__name__) for one in PROGRAMS],
)
def test_every_card_equals_cuda(program: Any) -> None:
    """Peak allocated and reserved of each card after each step, to the byte, against PyTorch's CUDA build."""
    known = json.loads(DATA_FILE.read_text())
    if not torch.__version__.startswith(known["torch"].split("+")[0]):
        pytest.skip(f"recorded with torch {known['torch']}")
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")
    seen: list[Any] = []

    def run(into: list[Any]) -> None:
        into.extend(peaks(program, PROGRAMS[program]))

    observed(run, seen, gpu="T4", num_gpus=PROGRAMS[program], stop_after_steps=None)
    assert seen == known["programs"][program.__name__]


def two_halves() -> None:
    """A model on two cards, the activation carried over."""
    first, second = nn.Linear(1024, 1024).to("cuda:0"), nn.Linear(1024, 8192).to("cuda:1")
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    second(first(torch.randn(64, 1024, device="cuda:0")).to("cuda:1")).sum().backward()
    optimizer.step()


def test_each_card_has_its_own_memory() -> None:
    report = om.dry_run(two_halves, gpu="T4", num_gpus=3)
    first, second, third = report.cards
    assert [card.device.index for card in report.cards] == [0, 1, 2]
    assert second.breakdown["parameter"] == 8 * first.breakdown["parameter"] == 8 * (4 * MIB + 4096)
    assert (third.peak_allocated_bytes, third.peak_reserved_bytes, third.used_fraction) == (0, 0, 0)  # not a context
    assert report.to_dict() | {"cards": None} == second.to_dict() | {"cards": None}  # the fullest
    assert len(first.steps) == len(second.steps) == 1


def test_current_device_and_counters() -> None:
    seen = {}

    def code() -> None:
        held = [torch.empty(MIB, dtype=torch.uint8, device="cuda:1")]
        with torch.cuda.device(1):
            held.append(torch.empty(MIB, dtype=torch.uint8, device="cuda"))
            seen["inside"] = torch.cuda.current_device(), str(held[1].device)
        torch.cuda.set_device("cuda:1")
        held.append(torch.ones(1).cuda())
        seen["allocated"] = [torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())]
        free = [torch.cuda.mem_get_info(index)[0] for index in (0, 1)]
        seen["reserved"] = free[0] - free[1]
        seen["added"] = (held[0] + held[1]).get_device()

    observed(code, num_gpus=2)
    assert seen == {
        "inside": (1, "cuda:1"), "allocated": [0, 2 * MIB + 512], "reserved": 4 * MIB, "added": 1,
    }  # fmt: skip


def test_a_backward_is_on_the_card_of_its_forward_though_another_is_in_use_since() -> None:
    def code() -> None:
        x = torch.ones(1024, 1024, device="cuda:0", requires_grad=True)
        loss = (x.exp() * x).sum()
        torch.cuda.set_device(1)
        torch.ones(1, device="cuda")
        loss.backward()

    first, second = om.dry_run(code, num_gpus=2).cards
    assert first.peak_allocated_bytes > 4 * 4 * MIB
    assert second.peak_allocated_bytes == 512


def test_mixed_cards_raise_what_cuda_raises() -> None:
    def code() -> None:
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")

    with pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cuda:1!"):
        om.dry_run(code, num_gpus=2)
    with pytest.raises(RuntimeError, match="has one GPU, cuda:0; use num_gpus=2 for more"):
        om.dry_run(code)
    with pytest.raises(ValueError, match="num_gpus=0 is not a valid count"):
        om.dry_run(code, num_gpus=0)


def test_the_card_that_failed_is_named() -> None:
    def code() -> None:
        kept = [torch.empty(100 * MIB, dtype=torch.uint8, device="cuda:0")]
        kept.append(torch.empty(16384 * MIB, dtype=torch.uint8, device="cuda:1"))

    report = om.dry_run(code, gpu="T4", num_gpus=2)
    assert report.out_of_memory is not None
    assert report.out_of_memory.device_index == report.device.index == 1
    assert "GPU 1 has a total capacity" in report.out_of_memory.message
    assert report.cards[0].out_of_memory is None
    assert report.cards[0].error == "OutOfMemoryError on cuda:1"


def test_gradients_go_back_to_where_tensors_are() -> None:
    seen = {}

    def code() -> None:
        weight = torch.ones(300, 1024, device="cuda:0", requires_grad=True)
        bias = torch.ones(1024, requires_grad=True)
        (weight.to("cuda:1").double() + bias.cuda(1)).sum().backward()
        assert weight.grad is not None and bias.grad is not None
        seen["gradients"] = str(weight.grad.device), str(bias.grad.device)

    observed(code, num_gpus=2)
    assert seen["gradients"] == ("cuda:0", "cpu")


@pytest.mark.parametrize("pieces", [1, 3])
def test_gradients_that_may_come_before_their_turn_are_said(pieces: int) -> None:
    """On the CUDA build five runs of such a program had four peaks, up to this far above the lowest."""

    def code() -> None:
        first, second = torch.nn.Linear(256, 256).to("cuda:0"), torch.nn.Linear(256, 256).to("cuda:1")
        batch = torch.randn(12, 256, device="cuda:0")
        torch.cat([second(first(piece).to("cuda:1")) for piece in batch.chunk(pieces)]).sum().backward()

    said = [one.text for one in om.dry_run(code, num_gpus=2).assumptions if "one thread per card" in one.text]
    assert len(said) == (pieces > 1)
    assert all("8.00 KiB" in text for text in said)


def test_text_names_each_card_and_the_imbalance() -> None:
    def code() -> None:
        kept = [
            torch.empty(size * MIB, dtype=torch.uint8, device=f"cuda:{card}") for card, size in ((0, 9000), (1, 500))
        ]
        kept.clear()

    report = om.dry_run(code, gpu="3x T4")
    text = str(report)
    assert "predicted for 3 x Tesla T4 (14.56 GiB each; below, cuda:0)" in text
    assert "cuda:2 is not used." in text
    assert "The cards are unevenly loaded: cuda:0 is 61 % full at its peak, cuda:1 4 %." in " ".join(text.split())
    again = MemoryReport.from_dict(json.loads(json.dumps(report.to_dict())))
    assert str(again) == text


def _split_unevenly(blocks_on_first: int = 5) -> None:
    from accelerate import dispatch_model

    blocks = {f"transformer.h.{number}": int(number >= blocks_on_first) for number in range(6)}
    ends = {"transformer.wte": 0, "transformer.wpe": 0, "transformer.drop": 0, "transformer.ln_f": 1, "lm_head": 0}
    train(dispatch_model(gpt2(n_layer=6), {**ends, **blocks}), lambda: None)


@pytest.mark.slow
def test_balanced_layers_are_priced_as_the_map_written_out() -> None:
    pytest.importorskip("accelerate")
    change = BalancedLayers()
    survey = Survey([change])
    DrySession("T4", num_gpus=2, has_bar=False, changes=[survey]).run(_split_unevenly)
    assert survey.error(change) is None
    assert (change.values["card"], change.values["held"], change.values["number"]) == ("cuda:0", 5, 6)
    assert eval(change.values["map"])["transformer.h.3"] == 1
    changed = DrySession("T4", num_gpus=2, has_bar=False, changes=[change]).run(_split_unevenly)
    written = om.dry_run(_split_unevenly, 3, gpu="2x T4")
    assert [card.steps for card in changed.cards] == [card.steps for card in written.cards]
    with pytest.raises(InapplicableError, match="layers_balanced_already"):
        DrySession("T4", num_gpus=2, has_bar=False, changes=[BalancedLayers()]).run(partial(_split_unevenly, 3))


@pytest.mark.slow
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_balancing_is_advised_for_the_card_that_failed(shell: Any, lang: str) -> None:
    shell.run_cell(
        "import torch\n"
        "first, second = (torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(n)]) for n in (9, 3))\n"
        "def train():\n"
        "    a, b = first.to('cuda:0'), second.to('cuda:1')\n"
        "    optimizer = torch.optim.AdamW([*a.parameters(), *b.parameters()])\n"
        "    b(a(torch.ones(64, 2048, device='cuda:0')).to('cuda:1')).sum().backward()\n"
        "    optimizer.step()"
    ).raise_error()
    failed = shell.run_cell("%%gpumem --no-plot --gpu '2x T4' --memory 700MiB\ntrain()", store_history=True)
    assert "OutOfMemoryError" in type(failed.error_in_exec).__name__
    told = str(shell.run_cell(f"%oom_explain --lang {lang}", store_history=True).result)
    assert "cuda:0" in told and "9" in told
    assert {"en": "cuda:0 holds 9 of 12", "zh": "均衡各层：12 层中 cuda:0 有 9 层"}[lang] in " ".join(told.split())
    assert {"en": "your own code decides", "zh": "你自己的代码"}[lang] in " ".join(told.split())


@pytest.mark.slow
def test_sizes_are_those_of_the_card_that_is_named() -> None:
    def code(rows: int) -> None:
        torch.ones(rows, 1024, device="cuda:0").mul(2)
        torch.ones(rows, 4096, device="cuda:1").mul(2)

    for card in (0, 1):
        sizes = om.size(code, gpu="2x T4", card=card, rows=(512, 4096))
        report = om.dry_run(code, 3000, gpu="2x T4").cards[card]
        assert sizes.peak_reserved_bytes(rows=3000) == report.peak_reserved_bytes
        assert sizes.report(rows=3000).peak_allocated_bytes == report.peak_allocated_bytes
    with pytest.raises(ValueError, match="2 cards: sizes are those of one card; choose it: card=0, card=1"):
        om.size(code, num_gpus=2, rows=(512, 4096))


@pytest.mark.parametrize(
    ("name", "found"), [("2x T4", (2, "T4")), ("8 × H100 80GB", (8, "H100 80GB")), ("RTX 3060", (None, "RTX 3060"))]
)
def test_number_of_cards_in_a_name(name: str, found: tuple[int | None, str]) -> None:
    assert counted(name) == found


def test_contradictory_counts() -> None:
    def ones(batch_size: int = 8) -> None:
        torch.ones(batch_size, device="cuda")

    for ask in (om.dry_run, partial(om.size, batch_size=(1, 8)), om.sliders):
        with pytest.raises(ValueError, match="num_gpus=3, but '2x T4' names 2; give only one of them"):
            ask(ones, gpu="2x T4", num_gpus=3)
    with pytest.raises(ValueError, match="3 processes need one card each, but only 2 are given; give more"):
        om.dry_run(ones, gpu="2x T4", num_processes=3)


def test_magic_takes_several_cards(shell: Any) -> None:
    shell.run_line_magic("gpumem", "--gpu '2x T4'")
    shell.run_cell("%%gpumem --no-plot -o report\nimport torch\nx = torch.ones(5, device='cuda:1')").raise_error()
    assert [card.peak_allocated_bytes for card in shell.user_ns["report"].cards] == [0, 512]
    shell.run_cell("%%gpumem --num-gpus 3 -o report\nnumber = torch.cuda.device_count()").raise_error()
    assert len(shell.user_ns["report"].cards) == 3
    for wrong in ("--num-gpus 3 --gpu '2x T4'", "--num-processes 3 --gpu '2x T4'"):
        assert isinstance(shell.run_cell(f"%%gpumem {wrong}\n1").error_in_exec, UsageError)
