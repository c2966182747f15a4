"""Models called in training mode whose graphs no backward walks: an evaluation that forgot ``no_grad``."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.remedies.evaluation import RemedyEvaluator
from oom_magic.explain.remedies.own_code.gradients_off import lines_without_gradients
from oom_magic.explain.remedies.remedy import Situation, ranked
from oom_magic.predict.setups.gpus import find_gpu

STEPS = """
for epoch in range(2):
    for rows in train.split(64):
        loss = net(rows.cuda()).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""
FUNCTION = """
def one_epoch(batches, trains=True):
    for rows in batches:
        loss = net(rows.cuda()).square().mean()
        if trains:
            opt.zero_grad()
            loss.backward()
            opt.step()
    return loss.item()
for epoch in range(2):
    one_epoch(train.split(64))
    score = one_epoch(held.split(2048), trains=False)
"""


def rehearsed(cell: str) -> list[Any]:
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24))).cuda
    names = {"torch": torch, "train": torch.zeros(128, 1024), "held": torch.zeros(4096, 1024), "made": net}
    text = "net = made()\nopt = torch.optim.SGD(net.parameters(), lr=0.1)" + cell
    rehearsal = CellRehearsal(
        lambda code, seen: exec(compile(code, "<ipython-input-2-held>", "exec"), seen), ast.parse(text), names
    )
    situation = Situation(330 * 2**20, find_gpu("RTX 3060"), total_bytes=440 * 2**20)
    return ranked(list(RemedyEvaluator(rehearsal, situation).remedies()))


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        (STEPS + "    score = net(held[:2048].cuda()).mean().item()", "with torch.no_grad():\n        score = net(held"),
        (STEPS + "    for rows in held.split(2048):\n        far = net(rows.cuda()).max()\n",
         "        with torch.no_grad():\n            far = net(rows.cuda()).max()"),
        (FUNCTION, "with torch.no_grad():\n        score = one_epoch(held.split(2048), trains=False)"),
    ],
)  # fmt: skip
def test_no_grad_is_advised_for_the_lines_whose_graphs_nothing_walks(cell: str, shown: str) -> None:
    first = rehearsed(cell)[0]
    assert first.key == "no_grad" and first.verdict == "safe"
    assert shown in first.code and first.code.count("no_grad") == 1


def test_what_is_walked_back_later_is_no_evaluation() -> None:
    """Two calls make one loss, as those of a discriminator: both are trained."""
    two = STEPS.replace(
        "loss = net(rows.cuda())",
        "first = net(rows.cuda().repeat(20, 1))\n        loss = (first - net(rows.cuda().repeat(20, 1)))",
    )
    assert "no_grad" not in [one.key for one in rehearsed(two)]


def test_code_is_as_before_once_its_lines_are_written_out() -> None:
    tree = ast.parse("for a in b:\n    c = net(a)\n    d = net(c); e = 1\nf = net(d)")
    before = ast.unparse(tree)
    assert lines_without_gradients(tree, {2, 4}) == (
        "for a in b:\n    with torch.no_grad():\n        c = net(a)\n    d = net(c)\n    e = 1\n"
        "with torch.no_grad():\n    f = net(d)"
    )
    assert ast.unparse(tree) == before and lines_without_gradients(tree, {1}) == ""
