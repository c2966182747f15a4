"""Notebooks that keep the graphs of a whole step, or of a validation, until its end, or that compute in float64."""

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

NOTEBOOKS["validation whose sum is read by its caller"] = Notebook(
    (
        """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        c = [3, 64, 128, 256]
        self.f = nn.Sequential(*[m for a, b in zip(c, c[1:]) for m in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))])
        self.h = nn.Linear(256, 10)
    def forward(self, x):
        return self.h(self.f(x).mean((2, 3)))
def train_epoch(model, loader, opt):
    model.train()
    for x, y in loader:
        opt.zero_grad()
        F.cross_entropy(model(x.cuda()), y.cuda()).backward()
        opt.step()
{DECORATED}def validate(model, loader):
    model.eval()
    total, preds = 0.0, []
    for x, y in loader:
        out = model(x.cuda())
        total += F.cross_entropy(out, y.cuda())
        preds.append(out.argmax(1))
    return total / len(loader), torch.cat(preds)
""",
        """
train_ds = TensorDataset(torch.rand(128, 3, 64, 64), torch.randint(0, 10, (128,)))
val_ds = TensorDataset(torch.rand(1536, 3, 64, 64), torch.randint(0, 10, (1536,)))
model = CNN().cuda()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
train_loader = DataLoader(train_ds, batch_size=32, shuffle=True)
val_loader = DataLoader(val_ds, batch_size=256)
for epoch in range(2):
    train_epoch(model, train_loader, opt)
    val_loss, preds = validate(model, val_loader)
    print(epoch, val_loss.item())
""",
    ),
    {"DECORATED": ""},
    FILLED | names("leak_or_retained_reference"),
    names("no_grad"),
    {"no_grad": put(DECORATED="@torch.no_grad()\n")},
)
