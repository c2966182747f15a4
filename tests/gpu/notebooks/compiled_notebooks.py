"""Notebooks of compiled code that run out of memory: what is right to say, and how a remedy changes the cells."""

from __future__ import annotations

from tests.gpu.notebooks.failing_notebooks import NOTEBOOKS
from tests.gpu.notebooks.notebook_cases import FILLED, Notebook, after, names

MODEL = """
import torch, torch.nn as nn, torch.nn.functional as F

model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU()).cuda()
{COMPILE}
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
"""

LOOP = """
batch_size = {B}
for step in range(3):
    x = torch.randn(batch_size, 256, device="cuda")
    y = torch.randint(0, 2048, (batch_size,), device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled={AMP}):
        loss = F.cross_entropy({RUN}(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

OF_COMPILER = names("smaller_batch", "activation_budget", "mixed_precision", "chunked_loss", "combination")

COMPILED = {
    name: Notebook((MODEL, LOOP), values, FILLED, OF_COMPILER, {"smaller_batch": after("B")})
    for name, values in {
        "compiled method": {"B": 60000, "COMPILE": "model.compile()", "RUN": "model", "AMP": False},
        "compiled under autocast": {"B": 80000, "COMPILE": "run = torch.compile(model)", "RUN": "run", "AMP": True},
    }.items()
}
NOTEBOOKS.update(COMPILED)
