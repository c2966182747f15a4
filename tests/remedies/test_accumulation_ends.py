"""Loops that accumulate as they are and end after a number of batches: with smaller ones they make as many steps."""

from __future__ import annotations

import ast
import contextlib
import itertools
import types

import pytest
import torch

from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.remedies.own_code.accumulation import accumulating
from oom_magic.explain.remedies.own_code.writing import own_code
from oom_magic.explain.remedies.rehearsal import Variation
from oom_magic.explain.remedies.sizes.parameters import find_size_parameters
from oom_magic.predict.what_if.loop_changes import AccumulatedGradients
from tests.support.written_code import LOOP, VALUES, make, rewritten

ENDED = """
step, batches = 0, iter(loader)
{turns}
    {first}
    with together():
        loss = torch.nn.functional.mse_loss(net(images), labels) / STEPS
        loss.backward()
        number += 1
        if number % STEPS == 0:
            opt.step()
            opt.zero_grad()
    {last}
    step += 1
"""


@pytest.mark.parametrize(
    ("turns", "first", "last"),
    [
        ("for i, (images, labels) in enumerate(loader):", "", "if i == 3: break"),
        ("for i, (images, labels) in enumerate(loader):", "if i >= 4: break", ""),
        ("for i, (images, labels) in enumerate(loader, 1):", "", "if i == 4: break"),
        ("for i, (images, labels) in enumerate(loader, 1):", "if i > 4: break", ""),
        ("for i, (images, labels) in enumerate(loader, 2):", "", "if i == 5: break"),
        ("for images, labels in itertools.islice(loader, 4):", "", ""),
        ("for images, labels in loader:", "if step == 4: break", ""),
        ("for i in range(4):", "images, labels = next(batches)", ""),
        ("for i in range(2 * STEPS):", "images, labels = next(batches)", ""),
        ("for images, labels in loader:", "if step >= 2 * STEPS: break", ""),
        ("while step < 4:", "images, labels = next(batches)", ""),
    ],
)
@pytest.mark.parametrize("batches", [3, 6])
def test_a_loop_that_accumulates_and_ends_after_a_number_of_batches_makes_as_many_steps(turns, first, last, batches):
    """With twice as many batches for a step it made half of the steps, or none."""
    source = ENDED.format(turns=turns, first=first, last=last)
    names = {"net": make(), "BATCH": 6, "STEPS": 2}
    rehearsal = CellRehearsal(exec, ast.parse(source), names)
    rehearsal.accumulation = 2
    rehearsal.parameters["batch"] = find_size_parameters(ast.parse(source), names, "batch", 6)[0]
    code = rehearsal.own_code("smaller_batch", {**VALUES, "after": 2, "accumulation": batches})
    assert f"{code}\n".startswith(f"BATCH = 2\nSTEPS = {batches}\n")
    if "backward" not in code:  # its end follows from the number
        code = source
    counted = []
    for steps, written in ((2, source), (batches, "step, batches = 0, iter(loader)\n" + code)):
        net = make()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        opt.register_step_post_hook(lambda *_, number=steps: counted.append(number))
        data = [(torch.randn(2, 4), torch.randn(2, 2)) for _ in range(40)]
        seen = {"torch": torch, "net": net, "opt": opt, "loader": data, "number": 0, "STEPS": steps}
        exec(written, {**seen, "together": contextlib.nullcontext, "itertools": itertools})
    assert counted == [2, 2, batches, batches]


KEPT = """
net = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 8)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.randn(8192, 64)
kept = []
for epoch in range(2):
    net.train()
    for images in torch.utils.data.DataLoader(data, batch_size=2048):
        net(images.cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    net.eval()
    for part in range(8 - 8 * epoch):
        kept.append(net(torch.randn(1024, 64, device="cuda")).sum())
"""


@pytest.mark.parametrize(
    "follows",
    [
        "update_ema(average, net)",
        "ema.update_parameters(net)",
        "for ours, its in zip(average.parameters(), net.parameters()):\n        ours.data = its.data",
        "with torch.no_grad():\n        for ours, its in zip(a.parameters(), b.parameters()):\n            ours.lerp_(its, 0.1)",
    ],
)
def test_weights_that_follow_the_trained_ones_do_so_once_a_step(follows: str) -> None:
    code = rewritten("smaller_batch", f"{LOOP}    {follows}\n    show(images)\n")
    step, _, each = code.partition("if number % accumulation == 0:")[2].partition("losses.append")
    assert follows.split("\n")[0] in step and "show(images)" in each


def test_what_reads_a_batch_by_such_a_name_is_done_for_each():
    code = rewritten("smaller_batch", f"{LOOP}    soft_update(teacher, images)\n")
    assert "soft_update" in code.partition("losses.append")[2]


def test_smaller_batches_are_followed_as_far_as_the_run_that_evaluates_between_its_steps():
    """They made more steps than were followed: what an evaluation had kept was never reached, and it fitted."""

    def execute(tree, names):
        exec(compile(tree, "<ipython-input-1-k>", "exec"), names)

    rehearsal = CellRehearsal(execute, ast.parse(KEPT), {"torch": torch, "nn": torch.nn}, gpu="T4")
    rehearsal.begin([], 200 * 2**20)
    smaller = Variation(((AccumulatedGradients(), {}),), {"batch": 512}, batches=(2, 2))
    assert rehearsal.is_step and rehearsal.sizes["batch"] == 2048
    assert rehearsal.run(smaller).peak_allocated_bytes > 8 * 1024 * 4096 * 4  # what is kept


LIMITED = "trainer = L.Trainer(max_epochs=1, limit_train_batches=20, limit_val_batches=STEPS, val_check_interval=0.5{})"
LOADERS = "held = DataLoader(parts, batch)\nfit(batch)\n"


@pytest.mark.parametrize(
    ("cell", "accumulation", "code"),
    [
        (
            "fit(batch)\ntrainer = L.Trainer(max_epochs=1)\ntrainer.fit(lit)",
            1,
            "batch = 2\ntrainer = L.Trainer(max_epochs=1, accumulate_grad_batches=3)",
        ),
        ("trainer.fit(lit)", 1, "batch = 2\n\ntrainer.accumulate_grad_batches = 3\ntrainer.overfit_batches = 12"),
        (
            f"fit(batch)\n{LIMITED.format(', accumulate_grad_batches=1')}\ntrainer.fit(lit)",
            1,
            "batch = 2\n" + LIMITED.format(", accumulate_grad_batches=3").replace("=20", "=60"),
        ),
        (
            f"{LOADERS}{LIMITED.format('')}\ntrainer.fit(lit, train, held)",
            1,
            "batch = 2\n"
            + LIMITED.format(", accumulate_grad_batches=3").replace("=20", "=60").replace("=STEPS", "=STEPS * 3"),
        ),
        (
            f"fit(batch)\n{LIMITED.format(', accumulate_grad_batches=2')}\ntrainer.fit(lit)",
            2,
            "batch = 2\n" + LIMITED.format(", accumulate_grad_batches=6").replace("=20", "=60"),
        ),
    ],
)
def test_a_trainer_of_lightnings_accumulates_and_makes_as_many_steps(cell, accumulation, code):
    """limit_train_batches=20 stayed: with batches of a third, it made a third of the steps."""
    kind = type("Trainer", (), {"__module__": "lightning.pytorch.trainer.trainer", "overfit_batches": 4})
    names = {"batch": 6, "STEPS": 5, "L": types.SimpleNamespace(Trainer=kind)}
    names |= {"trainer": kind()} if "L." not in cell else {}
    rehearsal = CellRehearsal(exec, ast.parse(cell), names)
    rehearsal.parameters["batch"] = find_size_parameters(ast.parse(cell), {"batch": 6}, "batch", 6)[0]
    rehearsal.accumulation = accumulation
    assert rehearsal.own_code("smaller_batch", {**VALUES, "accumulation": 3 * accumulation}) == code


@pytest.mark.parametrize(
    ("first", "last", "is_written"),
    [
        ("", "norms.append(norm.item())", True),
        ("", "value = norm.item()\n    norms.append(value)", True),
        ("if norms and norm > 9: print(norm)", "norms.append(norm)", False),
        ("", "if norm > 1e9: break", False),
    ],
)
def test_a_norm_that_is_read_behind_the_step_is_read_once_a_step(first, last, is_written):
    source = LOOP.replace("torch.nn.utils.clip", "norm = torch.nn.utils.clip")
    head, turn, rest = source.partition("for images, labels in loader:\n")
    made = accumulating(ast.parse(f"{head}norms = []\n{turn}    {first}\n{rest}    {last}\n"), {}, 3)
    assert (made is not None) == is_written
    if made is not None:
        data = [(torch.randn(2, 4), torch.randn(2, 2)) for _ in range(6)]
        names = {"torch": torch, "make": make, "loader": data}
        exec(ast.unparse(made), names)
        assert len(names["losses"]) == 6 and len(names["norms"]) == 2


@pytest.mark.parametrize(
    ("phases", "is_written"),
    [
        ("[dict(batch=6, lr=1e-3), dict(batch=24, lr=1e-4)]", False),
        ("({'batch': 6, 'lr': 1e-3}, {'batch': 24, 'lr': 1e-4})", False),
        ("[dict(batch=24, lr=1e-3), dict(batch=24, lr=1e-4)]", True),
    ],
)
def test_where_one_phase_of_several_has_a_smaller_batch_the_others_do_not_accumulate(phases, is_written):
    """All phases accumulated, those too whose batches were as before: their steps had four times the samples."""
    inner = LOOP[LOOP.index("for ") :].replace("in loader", "in loader(phase['batch'])").replace("\n", "\n    ")
    head = LOOP[: LOOP.index("for ")]
    tree = ast.parse(f"{head}phases = {phases}\nfor phase in phases:\n    {inner}")
    assert (accumulating(tree, {}, 4, {"batch"}) is not None) == is_written


def test_a_trainer_of_lightnings_gets_its_precision() -> None:
    kind = type("Trainer", (), {"__module__": "lightning.pytorch.trainer.trainer"})
    for cell, shown in (
        ("t = Trainer(max_steps=4)\nt.fit(net)", "t = Trainer(max_steps=4, precision='bf16-mixed')"),
        ("Trainer().fit(net)", "Trainer(precision='bf16-mixed').fit(net)"),
        ("t = Trainer(precision=32)", ""),
        ("t = Trainer(**how)", ""),
        ("t = Other()", ""),
    ):
        names = {"Trainer": kind}
        assert own_code(ast.parse(cell), names, "mixed_precision", {"dtype": "bf16"}) == shown
    assert own_code(ast.parse("t = Trainer()"), names, "mixed_precision", {"dtype": "fp16"}).endswith("'16-mixed')")
