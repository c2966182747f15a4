"""Notebooks that keep the graphs of a whole step, or of all trials, until the end."""

from __future__ import annotations

from failing_notebooks import NOTEBOOKS
from notebook_cases import SMALL, Notebook, names, put

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
