"""Notebooks that keep the graphs of a whole step until its end, or that compute in float64."""

from __future__ import annotations

from tests.gpu.notebooks.failing_notebooks import NOTEBOOKS
from tests.gpu.notebooks.notebook_cases import FILLED, HEAD, SMALL, Notebook, after, names, put

NOTEBOOKS["losses of a step in a list"] = Notebook(
    (
        SMALL
        + """
model = GPT2LMHeadModel(config).cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
batches = [torch.randint(0, 8192, (4, 512)) for _ in range(12)]
""",
        """
for epoch in range(2):
    losses = []
    {CLEARED_FIRST}
    for b in batches:
        b = b.cuda()
        loss = model(input_ids=b, labels=b).loss
        {BACKWARD}
        losses.append(loss{DETACHED})
    {CLEARED}
    total = sum(losses) / len(losses)
    {TOTAL_BACKWARD}
    opt.step()
""",
    ),
    {
        "CLEARED_FIRST": "",
        "BACKWARD": "",
        "DETACHED": "",
        "CLEARED": "opt.zero_grad()",
        "TOTAL_BACKWARD": "total.backward()",
    },
    names("activations"),
    names("backward_each"),
    {
        "backward_each": put(
            CLEARED_FIRST="opt.zero_grad()",
            BACKWARD="(loss / len(batches)).backward()",
            DETACHED=".detach()",
            CLEARED="",
            TOTAL_BACKWARD="",
        )
    },
)

NOTEBOOKS["data from NumPy in float64"] = Notebook(
    (
        HEAD
        + """
import numpy as np
rng = np.random.default_rng(0)
X, y = torch.from_numpy(rng.standard_normal((4096, 512))){SINGLE}, torch.from_numpy(rng.standard_normal((4096, 512))){SINGLE}
net = nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))]).{TYPE}().cuda()
""",
        """
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
batch_size = {B}
for i in range(0, len(X), batch_size):
    xb, yb = X[i:i + batch_size].cuda(), y[i:i + batch_size].cuda()
    loss = F.mse_loss(net(xb), yb)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    {"B": 2048, "SINGLE": "", "TYPE": "double"},
    FILLED | names("unknown"),
    names("single_weights"),
    {"single_weights": put(SINGLE=".float()", TYPE="float"), "smaller_batch": after("B")},
)
