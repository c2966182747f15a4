"""The parts of the sliders alone: controls, ranges, the map's grid, cards, and what an estimate says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import oom_magic as om
from oom_magic.memory.categories import Breakdown
from oom_magic.notebook.sliders.cards import offered_cards
from oom_magic.notebook.sliders.fit_map import Cells, Grid, state_of
from oom_magic.notebook.sliders.panel import NumberControl
from oom_magic.notebook.sliders.ranges import inferred_ranges, landmarks, start_of, stops_of
from oom_magic.notebook.sliders.source import Estimator
from oom_magic.notebook.sliders.view import Estimate, live_blocks, verdict
from oom_magic.units import GIB, MIB
from oom_magic.views.blocks import Facts, Sentence
from tests.support.samples import RTX_3060


def test_a_value_between_the_stops_can_be_typed() -> None:
    control = NumberControl("seq_len", np.arange(128, 4097), 512)
    moves: list[int] = []
    control.observe(lambda change: moves.append(change["new"]), names="value")
    control.field.value = 777
    assert (control.value, control.slider.value, moves) == (777, 768, [777])
    control.slider.value = 1024
    assert (control.value, control.field.value, moves) == (1024, 1024, [777, 1024])
    stepped = NumberControl("seq_len", np.arange(64, 513, 64), 64)
    stepped.field.value = 90
    assert (stepped.value, stepped.field.value) == (64, 64)
    control.disabled = True
    assert control.slider.disabled


def test_ranges_are_inferred() -> None:
    def run(batch_size: int, layers: int = 6, width: int = 256, flag: bool = True, name: str = "a") -> None: ...

    assert inferred_ranges(run) == {
        "batch_size": (1, 64), "layers": (1, 24), "width": (64, 1024), "flag": [True, False]
    }  # fmt: skip


@pytest.mark.parametrize("axis", [np.arange(1, 65), np.arange(128, 4097), np.arange(64, 100_000, 7), np.arange(5, 7)])
def test_stops_span_the_axis(axis: np.ndarray) -> None:
    stops = stops_of(axis)
    assert (stops[0], stops[-1]) == (axis[0], axis[-1])
    assert stops == sorted(set(stops)) and set(stops) <= set(axis.tolist()) and len(stops) <= 128
    marks = landmarks(axis, 8)
    assert (marks[0], marks[-1]) == (axis[0], axis[-1])
    assert 2 <= len(marks) <= 8 and set(marks) <= set(axis.tolist())
    assert start_of(axis, None) in stops and start_of(axis, int(axis[1])) == axis[1]


@pytest.mark.slow
def test_what_is_compiled_is_an_upper_bound_to_the_hand() -> None:
    def train(batch_size: int) -> None:
        model = torch.compile(nn.Linear(1024, 1024).cuda())
        model(torch.randn(1024 * batch_size, 1024, device="cuda")).sum().backward()

    sizes = om.size(train, gpu="RTX 3060", batch_size=(1, 8192))
    assert "peak allocated, at most" in str(sizes) and "all figures are upper bounds" in str(sizes)
    for batch_size, words in ((1, "all figures are upper bounds"), (8192, "compiled code needs less and may fit")):
        values = {"batch_size": batch_size}
        quick = Estimate(values, sizes.device, sizes.breakdown(**values), assumptions=sizes.assumptions)
        for estimate in (quick, replace(quick, report=sizes.report(**values))):
            blocks = live_blocks(estimate)
            assert any(words in block.text for block in blocks if isinstance(block, Sentence))
            assert "at least" not in verdict(estimate).text
            facts = next(block for block in blocks if isinstance(block, Facts))
            assert [fact.label for fact in facts.facts[:2]] == ["peak allocated, at most", "peak reserved, at most"]


def test_grid_without_usual_names() -> None:
    assert Grid.of({}) is None
    one = Grid.of({"width": np.arange(1, 9)})
    assert one is not None and (one.across, one.down, one.names) == ("width", None, ("width",))
    two = Grid.of({"width": np.arange(1, 9), "depth": np.arange(1, 5)})
    assert two is not None and (two.down, two.across) == ("width", "depth")
    assert two.values(len(two.columns) + 1) == {"width": two.rows[1], "depth": two.columns[1]}


def test_states_by_the_thresholds_of_a_report() -> None:
    total, context = RTX_3060.total_bytes, RTX_3060.context_bytes
    for share, state, word in ((0.5, "safe", "Safe"), (0.87, "tight", "Tight"), (0.93, "danger", "Danger")):
        held = int(share * total) - context
        assert state_of(held, RTX_3060) == state
        breakdown = om.Breakdown({"activation": held})
        assert verdict(Estimate({}, RTX_3060, breakdown)).text.startswith(word)
    assert state_of(total, RTX_3060) == "over"
    cells = Cells(np.array([[GIB, 8 * GIB, 11 * GIB, 20 * GIB]]), np.zeros((1, 4), np.int64))
    assert cells.doubtful(RTX_3060) == [2, 1]


def test_cards() -> None:
    cards = offered_cards("RTX 3060", None)
    assert cards[0].gpu == "RTX 3060" and len(cards) == len(set(cards)) > 60
    assert offered_cards("RTX 3060", "8GiB")[0].device.total_bytes == 8 * GIB
    assert [card.gpu for card in offered_cards(["T4", "RTX 3060"], None)] == ["T4", "RTX 3060"]
    assert offered_cards(None, "500MiB")[0].device.total_bytes == 500 * MIB


class Setup:
    """A setup that fits with checkpointing and a chunked loss only."""

    def ways_out(self, values):
        return [("activation_checkpointing", True), ("loss", "chunked"), ("method", "qlora")]

    def point(self, values):
        return values

    def is_known(self, sizes, values):
        return True

    def sizes(self, values, card):
        fits = values["activation_checkpointing"] and values["loss"] == "chunked"
        return SimpleNamespace(
            report=lambda **_: SimpleNamespace(out_of_memory=None if fits else "over", peak_reserved_bytes=9 * GIB)
        )


def test_what_does_not_fit_says_what_would() -> None:
    values = {
        "microbatch_size": 1,
        "seq_len": 512,
        "activation_checkpointing": False,
        "loss": "plain",
        "method": "full",
    }
    device = offered_cards("RTX 3060", None)[0].device
    estimate = Estimate(values, device, Breakdown({"activation": 20 * GIB}), arguments=values)
    found = Estimator(Setup(), None).with_way_out(values, offered_cards("RTX 3060", None)[0], estimate)
    said = [block.text for block in live_blocks(found) if isinstance(block, Sentence)]
    assert said[1] == (
        "This would fit: tick activation_checkpointing and set loss to chunked; 1 x 512 then needs 9.00 GiB."
    )
    assert (
        Estimator(Setup(), None).with_way_out(values, None, replace(estimate, breakdown=Breakdown({}))).way_out is None
    )


def layer(batch_size: int = 4, seq_len: int = 128, kind: str = "plain") -> None:
    nn.Linear(64, 64).to("cuda")(torch.randn(batch_size, seq_len, 64, device="cuda"))


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"batch_size": (8, 1)}, r"batch_size=\(8, 1\) is reversed; write \(1, 8\)"),
        ({"batch_size": (0, 8)}, "starts at 0"),
        ({"batch_size": (4, 4)}, "only one value"),
        ({"batch_size": (1.5, 8)}, "whole numbers"),
        ({"batch_sise": (1, 8)}, "did you mean 'batch_size'"),
        ({"batch_size": (1, 8), "gpu": "RTX 3061"}, "RTX 3060"),
        ({"batch_size": (1, 8), "memory": "12"}, "did you mean '12GiB'"),
        ({"kind": []}, "no choices"),
        ({"batch_size": 4}, "Nothing varies"),
    ],
)
def test_bad_ranges(ranges: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        om.sliders(layer, **ranges)
