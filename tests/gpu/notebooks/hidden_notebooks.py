"""Notebooks whose sizes and leaks lie where the failed cell does not show them: in objects, hooks, closures, data."""

from __future__ import annotations

from tests.gpu.notebooks.failing_notebooks import NOTEBOOKS
from tests.gpu.notebooks.notebook_cases import FILLED, HEAD, Notebook, after, names, put, too_large_a_batch

NOTEBOOKS["queue of keys"] = Notebook(
    (
        HEAD
        + """
import copy
encoder = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 2048)).cuda()
slow = copy.deepcopy(encoder)
queue = torch.randn(4096, 2048, device="cuda")
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.03)
""",
        """
for step in range(600):
    x = torch.rand(256, 512, device="cuda")
    query = F.normalize(encoder(x))
    with torch.no_grad():
        key = F.normalize(slow(x + 0.1 * torch.randn_like(x)))
    logits = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.t()], 1) / 0.07
    loss = F.cross_entropy(logits, torch.zeros(256, dtype=torch.long, device="cuda"))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    queue = torch.cat([queue, key]){NEWEST}
""",
    ),
    {"NEWEST": ""},
    names("leak_or_retained_reference"),
    names("keep_newest"),
    {"keep_newest": put(NEWEST="[-4096:]")},
)

NOTEBOOKS["points of a closure"] = Notebook(
    (
        HEAD
        + """
net = nn.Sequential(nn.Linear(2, 256), *(nn.Sequential(nn.Tanh(), nn.Linear(256, 256)) for _ in range(4)),
                    nn.Tanh(), nn.Linear(256, 1)).cuda()
""",
        """
num_points = {B}
x = torch.rand(num_points, device="cuda", requires_grad=True)
t = torch.rand(num_points, device="cuda", requires_grad=True)
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
""",
        """
def closure():
    optimizer.zero_grad()
    u = net(torch.stack([x, t], 1)).squeeze(1)
    u_t, = torch.autograd.grad(u.sum(), t, create_graph=True)
    u_x, = torch.autograd.grad(u.sum(), x, create_graph=True)
    loss = (u_t + u * u_x).square().mean()
    loss.backward()
    return loss
for step in range(2):
    print(optimizer.step(closure).item())
""",
    ),
    {"B": 60_000},
    FILLED,
    names("smaller_batch", "mixed_precision"),
    {"smaller_batch": after("B")},
)

NOTEBOOKS["loader in an object"] = too_large_a_batch(
    (
        HEAD
        + """
from torch.utils.data import DataLoader, TensorDataset
class Segmenter:
    def __init__(self, net, images, masks, batch_size=8):
        self.batch_size = batch_size
        self.net = net.cuda()
        self.loader = DataLoader(TensorDataset(images, masks), batch_size=batch_size, shuffle=True)
        self.optimizer = torch.optim.Adam(self.net.parameters())
    def epoch(self):
        self.net.train()
        for images, masks in self.loader:
            loss = F.cross_entropy(self.net(images.cuda()), masks.cuda())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
def conv(before, after): return nn.Sequential(nn.Conv2d(before, after, 3, 1, 1), nn.BatchNorm2d(after), nn.ReLU())
""",
        """
net = nn.Sequential(conv(3, 32), *(conv(32, 32) for _ in range(6)), nn.Conv2d(32, 8, 1))
segmenter = Segmenter(net, torch.rand(64, 3, 128, 128), torch.randint(0, 8, (64, 128, 128)), batch_size={B})
""",
        "segmenter.epoch()",
    ),
    {"B": 64},
)

NOTEBOOKS["sampling with its graph"] = Notebook(
    (
        HEAD
        + """
net = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1), *(nn.Sequential(nn.SiLU(), nn.Conv2d(64, 64, 3, 1, 1)) for _ in range(4)),
                    nn.Conv2d(64, 3, 3, 1, 1)).cuda()
def sample(count=32, steps=50):
    x = torch.randn(count, 3, 64, 64, device="cuda")
    {NG}
    for step in range(steps):
        x = x - 0.02 * net(x)
    return x
""",
        "pictures = sample()",
    ),
    {"NG": ""},
    FILLED,
    names("no_grad"),
    {"no_grad": put(NG="torch.set_grad_enabled(False)")},
)

NOTEBOOKS["hooks that close over names"] = Notebook(
    (
        HEAD
        + """
blocks = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6))).cuda().eval()
features = {}
def keeping(name):
    def hook(module, inputs, output):
        features.setdefault(name, []).append((output[0] if isinstance(output, tuple) else output){CPU})
    return hook
for number, block in enumerate(blocks):
    block.register_forward_hook(keeping(f"block {number}"))
""",
        """
with torch.no_grad():
    for batch in torch.rand(300, 512, 1024).split(1):
        blocks(batch[0].cuda())
""",
    ),
    {"CPU": ""},
    names("leak_or_retained_reference"),
    names("keep_on_host"),
    {"keep_on_host": put(CPU=".cpu()")},
)

NOTEBOOKS["narrow memory of keys"] = Notebook(
    (
        """import torch, torch.nn as nn, torch.nn.functional as F, copy
class Enc(nn.Module):
    def __init__(self, w=512, d=256):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(784, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, d))
    def forward(self, x): return F.normalize(self.net(x), dim=1)
query_encoder = Enc().cuda()
key_encoder = copy.deepcopy(query_encoder).requires_grad_(False)
memory = F.normalize(torch.randn(4096, 256, device="cuda"), dim=1)
opt = torch.optim.AdamW(query_encoder.parameters(), lr=1e-3)
""",
        """
for it in range(2000):
    x = torch.rand(512, 784, device="cuda")
    q = query_encoder(x)
    with torch.no_grad():
        for a, b in zip(query_encoder.parameters(), key_encoder.parameters()):
            b.lerp_(a, 0.01)
        k = key_encoder(x + 0.05 * torch.randn_like(x))
    pos = (q * k).sum(1, keepdim=True)
    neg = q @ memory.t()
    logits = torch.cat([pos, neg], dim=1) / 0.2
    loss = F.cross_entropy(logits, torch.zeros(512, dtype=torch.long, device="cuda"))
    opt.zero_grad()
    loss.backward()
    opt.step()
    memory = torch.cat([memory, k], dim=0){NEWEST}
""",
    ),
    {"NEWEST": ""},
    names("leak_or_retained_reference"),
    names("keep_newest"),
)

NOTEBOOKS["style of a picture"] = Notebook(
    (
        """import torch, torch.nn as nn, torch.nn.functional as F
class VGG(nn.Module):
    def __init__(self):
        super().__init__()
        layers, c = [], 3
        for v in [64, 64, "M", 128, 128, "M", 256, 256, 256, 256, "M", 512, 512, 512, 512, "M", 512]:
            if v == "M":
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(c, v, 3, padding=1), nn.ReLU(inplace=False)]; c = v
        self.features = nn.Sequential(*layers)
    def forward(self, x, taps=(0, 5, 10, 19, 28)):
        out = []
        for i, layer in enumerate(self.features):
            x = layer(x)
            if i in taps: out.append(x)
        return out
vgg = VGG().cuda().eval().requires_grad_(False)
def gram(f):
    b, c, h, w = f.shape
    f = f.view(b, c, h * w)
    return f @ f.transpose(1, 2) / (c * h * w)
""",
        """
size = 768
content = torch.rand(1, 3, size, size, device="cuda")
style = torch.rand(1, 3, size, size, device="cuda")
with torch.no_grad():
    style_grams = [gram(f) for f in vgg(style)]
    content_feats = [f.clone() for f in vgg(content)]
img = content.clone().requires_grad_(True)
optimizer = torch.optim.LBFGS([img], max_iter=1)
for step in range(10):
    def closure():
        optimizer.zero_grad()
        {AMP}:
            feats = vgg(img)
            s = sum(F.mse_loss(gram(f), g) for f, g in zip(feats, style_grams))
            loss = 1e5 * s + F.mse_loss(feats[3], content_feats[3])
        loss.backward()
        return loss
    optimizer.step(closure)
""",
    ),
    {"AMP": "if True"},
    FILLED,
    names("mixed_precision", "half_weights"),
    {"mixed_precision": put(AMP='with torch.autocast("cuda", dtype=torch.bfloat16)')},
)
