"""Loops that accumulate as they are and end after a number of batches: with smaller ones they make as many steps."""

from __future__ import annotations

import ast
import contextlib
import itertools

import pytest
import torch

from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.remedies.size_parameters import find_size_parameters
from tests.support.written_code import VALUES, make

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
