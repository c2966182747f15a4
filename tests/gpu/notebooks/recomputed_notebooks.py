"""Notebooks whose models have their blocks in several lists, or none; and loops, hooks and trainers of one's own."""

from __future__ import annotations

from tests.gpu.notebooks.failing_notebooks import NOTEBOOKS
from tests.gpu.notebooks.notebook_cases import FILLED, HEAD, STEP, Notebook, after, names, put, too_large_a_batch

NOTEBOOKS["encoder and decoder"] = Notebook(
    (
        HEAD
        + """
class Translator(nn.Module):
    def __init__(self, vocab=8000, d=256, heads=8):
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, d), nn.Embedding(vocab, d)
        self.encoder = nn.ModuleList([nn.TransformerEncoderLayer(d, heads, 4 * d, batch_first=True) for _ in range(6)])
        self.decoder = nn.ModuleList([nn.TransformerDecoderLayer(d, heads, 4 * d, batch_first=True) for _ in range(6)])
        self.out = nn.Linear(d, vocab)
    def forward(self, source, target):
        memory, x = self.source(source), self.target(target)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.out(x)
model = Translator().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
batch_size = {B}
""",
        """
{CHECKPOINTS}
model.train()
for step in range(3):
    src = torch.randint(0, 8000, (batch_size, 1024), device="cuda")
    tgt = torch.randint(0, 8000, (batch_size, 1024), device="cuda")
    logits = model(src, tgt[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, 8000), tgt[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    {"B": 4, "CHECKPOINTS": ""},
    FILLED,
    STEP,
    {
        "smaller_batch": after("B"),
        "checkpointing": put(
            CHECKPOINTS="""from functools import partial
from torch.utils.checkpoint import checkpoint
for block in (*model.encoder, *model.decoder):
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)"""
        ),
    },
)

NOTEBOOKS["single layers in a row"] = Notebook(
    (
        HEAD
        + """
middle = [layer for _ in range(4) for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.LeakyReLU(0.2, inplace=True))]
net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), *middle, nn.Conv2d(64, 3, 3, padding=1)).cuda()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
""",
        """
{CHECKPOINTS}
noisy, clean = torch.rand(1, 3, 1024, 1024, device="cuda"), torch.rand(1, 3, 1024, 1024, device="cuda")
for i in range(5):
    opt.zero_grad()
    loss = F.mse_loss(noisy - net(noisy), clean)
    loss.backward()
    opt.step()
""",
    ),
    {"CHECKPOINTS": ""},
    FILLED,
    STEP,
    {
        "checkpointing": put(
            CHECKPOINTS="""from functools import partial
from torch.utils.checkpoint import checkpoint_sequential
parts = [net[0:5], net[5:8], net[8:11], net[11:15]]
net.forward = partial(checkpoint_sequential, parts, len(parts), use_reentrant=False)"""
        ),
    },
)

NOTEBOOKS["hooks of an object"] = Notebook(
    (
        HEAD
        + """
class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc1, self.fc2, self.norm = nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.LayerNorm(d)
    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))
class Probe:
    def __init__(self, model):
        self.acts = []
        for module in model.modules():
            if isinstance(module, Block):
                module.register_forward_hook(self.save)
    def save(self, module, inputs, output):
        self.acts.append(output.detach(){CPU})
model = nn.Sequential(*[Block(512) for _ in range(6)], nn.Linear(512, 10)).cuda()
probe = Probe(model)
opt = torch.optim.AdamW(model.parameters())
""",
        """
for step in range(200):
    x, y = torch.randn(2048, 512, device="cuda"), torch.randint(0, 10, (2048,), device="cuda")
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
""",
    ),
    {"CPU": ""},
    names("leak_or_retained_reference"),
    names("keep_on_host"),
    {"keep_on_host": put(CPU=".cpu()")},
)

NOTEBOOKS["trainer of one's own"] = too_large_a_batch(
    (
        HEAD
        + """
from torch.utils.data import DataLoader, TensorDataset
class Classifier(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.stem, self.fc = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, 10)
        conv = lambda: (nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.stages = nn.ModuleList([nn.Sequential(*conv(), *conv()) for _ in range(4)])
    def training_step(self, batch):
        x = self.stem(batch[0])
        for stage in self.stages:
            x = x + stage(x)
        return F.cross_entropy(self.fc(x.mean((2, 3))), batch[1])
    forward = training_step
class Trainer:
    def __init__(self, device="cuda", limit=3):
        self.device, self.limit = device, limit
    def fit(self, module, loader):
        module.to(self.device)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for number, batch in enumerate(loader):
            loss = module([one.to(self.device) for one in batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number + 1 >= self.limit:
                break
loader = DataLoader(TensorDataset(torch.rand(512, 3, 64, 64), torch.randint(0, 10, (512,))), batch_size={B})
""",
        "Trainer().fit(Classifier(), loader)",
    ),
    {"B": 128},
)
