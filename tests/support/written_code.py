"""A training loop, and what is written in its place."""

from __future__ import annotations

import ast
from itertools import cycle

import torch

from oom_magic.explain.remedies.own_code.accumulation import accumulating
from oom_magic.explain.remedies.own_code.loops import shown
from oom_magic.explain.remedies.own_code.writing import own_code

LOOP = """\
net = make()
opt = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.9, 0.99))
losses = []
for images, labels in loader:
    opt.zero_grad()
    out = net(images)
    loss = torch.nn.functional.mse_loss(out, labels)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    losses.append(loss.item())
"""
VALUES = {"name": "batch_size", "after": 2, "accumulation": 3, "dtype": "bf16"}


def make():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)


def trained(code, batches):
    names = {"torch": torch, "make": make, "loader": batches, "drawn": cycle(batches), "net": make()}
    exec(code, names)
    return names["net"].weight.detach(), names["losses"]


def execute(tree, names):
    exec(compile(tree, "<cell>", "exec"), names)


def rewritten(key, source=LOOP, **names):
    tree = ast.parse(source)
    if key != "smaller_batch":
        return own_code(tree, {"net": make(), **names}, key, VALUES)
    made = accumulating(tree, names, VALUES["accumulation"])
    return "" if made is None else "\n".join(shown(made, set(map(ast.unparse, tree.body))))
