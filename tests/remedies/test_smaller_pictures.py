"""Smaller pictures as a change: by the user's own name, twice in a row, in what resizes them, or in words."""

from __future__ import annotations

import ast
import types

import pytest
import torch

from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.remedies.evaluation import RemedyEvaluator
from oom_magic.explain.remedies.rehearsal import NotEvaluatedError, Variation
from oom_magic.explain.remedies.remedy import Situation, ranked
from oom_magic.predict.setups.gpus import find_gpu

_STEP = """
def step(x, y):
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
"""
_LOOP = "for _ in range(3):\n    step(torch.randn(1, 3, {0}, {0}).cuda(), torch.randint(0, 2, (1, {0}, {0})).cuda())"
_OF_DATA = "for _ in range(3):\n    step(*data[0])"
_CASES = {
    "a number of an earlier cell": (_LOOP.format("CROP"), "CROP = 256", {"CROP": 512}),
    "a setting": (
        _LOOP.format("cfg['data']['image_size']"),
        "cfg['data']['image_size'] = 256",
        {"cfg": {"data": {"image_size": 512}}},
    ),
    "a pair": ("H, W = IMG_SIZE\n" + _LOOP.format("H"), "IMG_SIZE = (256, 256)", {"IMG_SIZE": (512, 512)}),
    "numbers in the cell": (_LOOP.format("512"), _LOOP.format("256"), {}),
    "what resizes": (_OF_DATA, "data.transform.transforms[0].size = (256, 256)", {}),
}


class Resize:
    """Pictures of a size, as torchvision makes them."""

    def __init__(self, size):
        self.size = size


class Data:
    """Pictures as they come from the disk, resized."""

    def __init__(self, size):
        self.transform = types.SimpleNamespace(transforms=[Resize(size)])

    def __getitem__(self, at):
        height, width = self.transform.transforms[0].size
        return torch.randn(1, 3, height, width).cuda(), torch.randint(0, 2, (1, height, width)).cuda()


def rehearsed(cell, **known):
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.GroupNorm(4, 16), torch.nn.Conv2d(16, 2, 1)
    )
    names = {"torch": torch, "F": torch.nn.functional, "net": net, "data": Data((512, 512)), **known}
    before = "net.cuda()\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)"
    tree = ast.parse(f"{before}{_STEP}\n{cell}")
    rehearsal = CellRehearsal(lambda code, seen: exec(compile(code, "<cell>", "exec"), seen), tree, names)
    return rehearsal, rehearsal.begin((), 0).peak_allocated_bytes


@pytest.mark.parametrize("name", _CASES)
def test_the_side_is_set_where_the_user_sets_it(name):
    cell, code, known = _CASES[name]
    rehearsal, peak = rehearsed(cell, **known)
    assert rehearsal.sizes == {"batch": 1, "side": 512}
    assert rehearsal.run(Variation(sizes={"side": 256})).peak_allocated_bytes < peak / 3.5
    shown = rehearsal.own_code("smaller_pictures", {"after": 256})
    assert ast.unparse(ast.parse(code)) in ast.unparse(ast.parse(shown))


def test_pictures_whose_labels_have_no_size_are_made_smaller_before_the_model_in_words():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    cell = "for x in pictures:\n    step(x.cuda(), torch.zeros(1, dtype=torch.int64, device='cuda'))"
    rehearsal, peak = rehearsed(cell, net=net, pictures=torch.randn(3, 1, 3, 512, 512))
    assert (
        rehearsal.run(Variation(sizes={"side": 256})).peak_allocated_bytes < peak / 2
    )  # the whole picture is on the card until then
    assert rehearsal.own_code("smaller_pictures", {"after": 256}) == ""


@pytest.mark.parametrize(("room", "is_first"), [(0.5, True), (0.08, True), (0.03, False)])
def test_smaller_pictures_come_first_only_where_nothing_else_leaves_the_card_safe(room, is_first, monkeypatch):
    """A segmentation that needs more than its card with a batch of one was answered with a larger card."""
    cell, _, known = _CASES["a number of an earlier cell"]
    rehearsal, _ = rehearsed(cell, **known)
    check = rehearsal.check

    def only_sizes(variation):
        if variation.changes:
            raise NotEvaluatedError(Evidence("reason_so_already"), applies=False)
        check(variation)

    monkeypatch.setattr(rehearsal, "check", only_sizes)
    rehearsal.begin((), 0)
    needed = RemedyEvaluator(rehearsal, Situation(2**40, find_gpu("RTX 3060"))).needed_bytes
    evaluator = RemedyEvaluator(rehearsal, Situation(int(needed * room), find_gpu("RTX 3060")))
    first = ranked([*evaluator.remedies(), *evaluator.bought()])[0]
    assert (first.key == "smaller_pictures" and bool(first.fits)) is is_first
    assert not is_first or (first.values["after"] % 32 == 0 and "CROP = " in first.code)
