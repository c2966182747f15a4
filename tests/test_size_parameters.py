"""What sets a size in the user's code: a number, a setting, or how much a model is given at once."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import torch

from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.remedies.rehearsal import Variation
from oom_magic.explain.remedies.size_parameters import find_size_parameters


def test_sizes_in_settings_within_settings_and_computed_ones_are_found():
    names = {"cfg": {"train": {"batch_size": 8}}, "run": SimpleNamespace(args=SimpleNamespace(bs=8))}
    found = find_size_parameters(ast.parse("batch = 2**3"), names, "batch", 8)
    assert {one.label for one in found} == {"batch", "cfg['train']['batch_size']", "run.args.bs"}


def test_a_whole_data_set_is_evaluated_in_parts():
    """Once all of it is given to the model at once, what sets the size is no number."""
    cell = "net.eval()\nwith torch.no_grad():\n    out = net(data.float())\n    wrong = out != labels"
    names = {"torch": torch, "net": torch.nn.Linear(4, 2), "data": torch.zeros(4096, 4), "labels": torch.zeros(4096, 2)}
    tree = ast.parse(cell)
    rehearsal = CellRehearsal(lambda code, seen: exec(compile(code, "<cell>", "exec"), seen), tree, names)
    rehearsal.begin((), 0)
    rehearsal.run(Variation(sizes={"batch": 1024}))
    code = rehearsal.own_code("smaller_evaluation", {"after": 1024})
    assert "out = torch.cat([net(part.float()) for part in data.split(1024)])" in code
    assert rehearsal.own_code("mixed_precision", {"dtype": "bf16"}) == "" and ast.unparse(tree) == cell
