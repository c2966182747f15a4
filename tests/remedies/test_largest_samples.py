"""Samples of different sizes: prices hold for the largest, or say that they are lower bounds."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.predict.instrumentation.loop_code import compiled_with_loops
from oom_magic.predict.session import DrySession

CELL = """
generator = torch.Generator().manual_seed(7)
model = torch.nn.Sequential(torch.nn.Embedding(4096, 128), torch.nn.Linear(128, 4096)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
lengths = torch.randint(20, 200, (400,), generator=generator).tolist()
data = [{sample} for n in lengths]
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, collate_fn=collate, generator=generator)
for tokens in loader:
    model(tokens.cuda()).logsumexp(-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SAMPLES = {
    "tensors": "torch.ones(n, dtype=torch.long)",
    "lists": "{'input_ids': [1] * n, 'label': 0}",
    "texts": "('x' * n, 1)",
}
DRAWN = CELL.format(sample="n").replace(
    "for tokens in loader:", "for n in lengths:\n    tokens = torch.ones(4, n).long()"
)


def collate(samples: list[Any]) -> torch.Tensor:
    rows = [one["input_ids"] if isinstance(one, dict) else one for one in samples]
    rows = [[1] * len(one[0]) if isinstance(one, tuple) else one for one in rows]
    return pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True)


def rehearsed(cell: str) -> CellRehearsal:
    return CellRehearsal(
        lambda tree, names: exec(compiled_with_loops(tree, "<cell>"), names),
        ast.parse(cell),
        {"torch": torch, "collate": collate},
        gpu="RTX 3060",
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_a_shuffled_epoch_takes_what_its_largest_sample_does(sample: str) -> None:
    cell = CELL.format(sample=sample)
    rehearsal = rehearsed(cell)
    report = rehearsal.begin([], 0)
    session = DrySession("RTX 3060", is_limited=False, has_bar=False, stop_after_steps=None)
    names = {"torch": torch, "collate": collate}
    true = session.run(lambda: exec(compile(cell, "<cell>", "exec"), names))
    assert report.peak_allocated_bytes == true.peak_allocated_bytes and report.timeline.num_steps() < 25
    assert rehearsal.samples_compared == 400 and not report.is_lower_bound and not rehearsal.steps_differ


def test_where_sizes_are_drawn_in_the_loop_prices_are_lower_bounds() -> None:
    rehearsal = rehearsed(DRAWN)
    assert rehearsal.begin([], 1).is_lower_bound
    assert rehearsal.steps_differ and not rehearsal.samples_compared
