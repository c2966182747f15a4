"""Notebooks whose data wait on the card as a whole, where a step needs one batch of them."""

from __future__ import annotations

from tests.gpu.notebooks.failing_notebooks import NOTEBOOKS
from tests.gpu.notebooks.notebook_cases import Notebook, after, names, put

_HEAD = """import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""

NOTEBOOKS["data set on the card"] = Notebook(
    (
        _HEAD
        + """
X, y = torch.zeros(2200, 3, 224, 224), torch.zeros(2200, dtype=torch.long)
""",
        """
X, y = X{WHOLE}, y{WHOLE}
loader = DataLoader(TensorDataset(X, y), batch_size={B}, shuffle=True)
model = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1),
                      nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(2):
    for xb, yb in loader:
        xb, yb = xb{EACH}, yb{EACH}
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
""",
    ),
    {"WHOLE": ".to(device)", "EACH": "", "B": 64},
    names("activations"),
    names("batches_moved"),
    {"batches_moved": put(WHOLE="", EACH=".to(device)"), "smaller_batch": after("B")},
)

NOTEBOOKS["rows of an earlier cell on the card"] = Notebook(
    (
        _HEAD
        + """
X_train, y_train = torch.zeros(540_000, 512){WHOLE}, torch.zeros(540_000, dtype=torch.long){WHOLE}
""",
        """
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()
opt = torch.optim.Adam(model.parameters())
bs = {B}
for epoch in range(2):
    perm = torch.randperm(len(X_train))
    for i in range(0, len(X_train), bs):
        idx = perm[i:i + bs]
        loss = F.cross_entropy(model(X_train[idx]{EACH}), y_train[idx]{EACH})
        opt.zero_grad()
        loss.backward()
        opt.step()
""",
    ),
    {"WHOLE": ".cuda()", "EACH": "", "B": 16384},
    names("activations"),
    names("batches_moved"),
    {"batches_moved": put(WHOLE="", EACH=".cuda()"), "smaller_batch": after("B")},
)
