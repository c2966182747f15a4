"""Notebooks whose sizes stand in settings of the author's own: dataclasses, namespaces, data sets that make their batches."""

from __future__ import annotations

from tests.gpu.notebooks.failing_notebooks import NOTEBOOKS
from tests.gpu.notebooks.notebook_cases import FILLED, HEAD, Notebook, after, names, too_large_a_batch

NOTEBOOKS["settings of a dataclass"] = too_large_a_batch(
    (
        HEAD
        + """
from dataclasses import dataclass
@dataclass
class TrainConfig:
    vocab_size: int = 12000
    block_size: int = 256
    n_embd: int = 384
    n_layer: int = 6
    batch_size: int = {B}
    max_iters: int = 5
    learning_rate: float = 3e-4
class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(c.n_embd), nn.LayerNorm(c.n_embd)
        self.qkv, self.proj = nn.Linear(c.n_embd, 3 * c.n_embd), nn.Linear(c.n_embd, c.n_embd)
        self.mlp = nn.Sequential(nn.Linear(c.n_embd, 4 * c.n_embd), nn.GELU(), nn.Linear(4 * c.n_embd, c.n_embd), nn.Dropout(0.1))
    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, 6, C // 6).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(C, 2))
        att = (q @ k.transpose(-2, -1)) * (C // 6) ** -0.5
        att = att.masked_fill(torch.tril(torch.ones(T, T, device=x.device)) == 0, float("-inf")).softmax(-1)
        x = x + self.proj((att @ v).transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln2(x))
class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(c.block_size, c.n_embd)
        self.blocks, self.ln, self.head = nn.Sequential(*[Block(c) for _ in range(c.n_layer)]), nn.LayerNorm(c.n_embd), nn.Linear(c.n_embd, c.vocab_size)
    def forward(self, idx, targets=None):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1), device=idx.device))
        logits = self.head(self.ln(self.blocks(x)))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss
class Runner:
    def __init__(self, cfg, data):
        self.cfg, self.data = cfg, data
        self.model = GPT(cfg).to("cuda")
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.learning_rate, betas=(0.9, 0.95))
    def get_batch(self):
        ix = torch.randint(len(self.data) - self.cfg.block_size, (self.cfg.batch_size,))
        x = torch.stack([self.data[i:i + self.cfg.block_size] for i in ix]); y = torch.stack([self.data[i + 1:i + 1 + self.cfg.block_size] for i in ix])
        return x.to("cuda"), y.to("cuda")
    def run(self):
        for it in range(self.cfg.max_iters):
            xb, yb = self.get_batch()
            logits, loss = self.model(xb, yb)
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()
""",
        """
runner = Runner(TrainConfig(), torch.randint(0, 12000, (100000,)))
runner.run()
""",
    ),
    {"B": 48},
)


NOTEBOOKS["pairs of a batch"] = too_large_a_batch(
    (
        HEAD
        + """
class SupConLoss(nn.Module):
    def __init__(self, t=0.07): super().__init__(); self.t = t
    def forward(self, features, labels):
        features = F.normalize(features, dim=1)
        sim = features @ features.T / self.t
        mask = labels[:, None].eq(labels[None, :]).float()
        logits_mask = 1 - torch.eye(len(labels), device=features.device)
        mask = mask * logits_mask
        exp = torch.exp(sim) * logits_mask
        log_prob = sim - torch.log(exp.sum(1, keepdim=True))
        return -((mask * log_prob).sum(1) / mask.sum(1).clamp(min=1)).mean()
X = torch.randn(40000, 256); Y = torch.randint(0, 50, (40000,))
""",
        """
encoder = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128)).cuda()
criterion = SupConLoss().cuda()
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9)
for epoch in range(3):
    perm = torch.randperm(len(X))
    for i in range(0, len(X), {B}):
        idx = perm[i:i + {B}]
        xb, yb = X[idx].cuda(), Y[idx].cuda()
        loss = criterion(encoder(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    ),
    {"B": 8192},
)


NOTEBOOKS["codes chosen from a book"] = Notebook(
    (
        HEAD
        + """
from types import SimpleNamespace
class VQ(nn.Module):
    def __init__(self, k=1024, d=64): super().__init__(); self.e = nn.Embedding(k, d)
    def forward(self, z):
        b, d, h, w = z.shape
        flat = z.permute(0, 2, 3, 1).reshape(-1, d)
        dist = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.e.weight.t() + self.e.weight.pow(2).sum(1)
        enc = F.one_hot(dist.argmin(1), self.e.num_embeddings).float()
        q = (enc @ self.e.weight).view(b, h, w, d).permute(0, 3, 1, 2)
        loss = F.mse_loss(q.detach(), z) * 0.25 + F.mse_loss(q, z.detach())
        return z + (q - z).detach(), loss
class VQVAE(nn.Module):
    def __init__(self, ch=96):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(3, ch, 4, 2, 1), nn.ReLU(), nn.Conv2d(ch, ch, 4, 2, 1), nn.ReLU(), nn.Conv2d(ch, 64, 3, 1, 1))
        self.vq = VQ()
        self.dec = nn.Sequential(nn.Conv2d(64, ch, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(ch, ch, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(ch, 3, 4, 2, 1))
    def forward(self, x):
        q, l = self.vq(self.enc(x))
        return self.dec(q), l
""",
        """
hp = SimpleNamespace(bs={B}, lr=2e-4, size=128, steps=6)
vq = VQVAE().cuda()
optimizer = torch.optim.Adam(vq.parameters(), hp.lr)
data = torch.rand(512, 3, hp.size, hp.size)
for step in range(hp.steps):
    xb = data[torch.randint(0, len(data), (hp.bs,))].cuda()
    rec, vq_loss = vq(xb)
    loss = F.mse_loss(rec, xb) + vq_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    {"B": 64},
    names("fragmentation"),
    names("expandable_segments"),
    {"smaller_batch": after("B")},
)


NOTEBOOKS["batches of a stream"] = too_large_a_batch(
    (
        HEAD
        + """
from torch.utils.data import DataLoader, IterableDataset
from transformers import BertConfig, BertForMaskedLM
class Stream(IterableDataset):
    def __init__(self, vocab, seq_len, batch_size):
        self.vocab, self.seq_len, self.batch_size = vocab, seq_len, batch_size
    def __iter__(self):
        for _ in range(30):
            ids = torch.randint(5, self.vocab, (self.batch_size, self.seq_len))
            labels = torch.where(torch.rand(ids.shape) < 0.15, ids, torch.full_like(ids, -100))
            yield ids, labels
""",
        """
mlm = BertForMaskedLM(BertConfig(vocab_size=30000, hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536)).cuda()
stream = Stream(vocab=30000, seq_len=256, batch_size={B})
loader = DataLoader(stream, batch_size=None)
optim = torch.optim.AdamW(mlm.parameters(), lr=5e-5)
for step, (ids, labels) in enumerate(loader):
    ids, labels = ids.cuda(), labels.cuda()
    loss = mlm(input_ids=ids, labels=labels).loss
    loss.backward()
    optim.step()
    optim.zero_grad()
    if step >= 4: break
""",
    ),
    {"B": 48},
)


NOTEBOOKS["arrays as one batch"] = Notebook(
    (
        HEAD
        + """
import numpy as np
features, labels = np.random.randn(150000, 200).astype("float32"), np.random.randint(0, 10, 150000)
n = int(0.8 * len(features))
model = nn.Sequential(nn.Linear(200, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
""",
        """
net = model.cuda()
X_tr, y_tr = torch.FloatTensor(features[:n]).cuda(), torch.LongTensor(labels[:n]).cuda()
X_te, y_te = torch.FloatTensor(features[n:]).cuda(), torch.LongTensor(labels[n:]).cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for epoch in range(8):
    net.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(net(X_tr), y_tr)
    loss.backward()
    optimizer.step()
    net.eval()
    with torch.no_grad():
        accuracy = (net(X_te).argmax(1) == y_te).float().mean()
    print(epoch, loss.item(), accuracy.item())
""",
    ),
    {},
    FILLED,
    names("smaller_batch"),
)


NOTEBOOKS["a kernel of all rows"] = Notebook(
    (
        HEAD
        + """
def rbf(a, b, length=1.0):
    diff = a.unsqueeze(1) - b.unsqueeze(0)
    return torch.exp(-(diff**2).sum(-1) / (2 * length**2))
X_train = torch.randn(4000, 32).cuda()
""",
        "K = rbf(X_train, X_train)",
    ),
    {},
    FILLED,
    names("smaller_evaluation"),
)


NOTEBOOKS["a function that also validates, with a graph"] = Notebook(
    (
        HEAD
        + """
from torch.utils.data import DataLoader, TensorDataset
net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).cuda()
opt = torch.optim.Adam(net.parameters())
data = TensorDataset(torch.randn(1024, 3, 64, 64), torch.randint(0, 10, (1024,)))
train_loader, held_loader = DataLoader(data, batch_size=64, shuffle=True), DataLoader(data, batch_size=512)
def run_epoch(loader, train=True):
    total = 0
    for x, y in loader:
        loss = F.cross_entropy(net(x.cuda()), y.cuda())
        if train:
            opt.zero_grad(); loss.backward(); opt.step()
        total += loss.item()
    return total / len(loader)
""",
        """
for epoch in range(2):
    print(run_epoch(train_loader), run_epoch(held_loader, train=False))
""",
    ),
    {},
    FILLED,
    names("no_grad", "smaller_evaluation"),
)


NOTEBOOKS["texts embedded at once by a function"] = Notebook(
    (
        """import numpy as np, torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "word": 2}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
bert = BertModel(BertConfig(hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048)).cuda().eval()
def embed(sentences):
    inputs = tokenizer(sentences, padding=True, return_tensors="pt").to("cuda")
    with torch.no_grad():
        hidden = bert(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    return ((hidden * mask).sum(1) / mask.sum(1)).cpu().numpy()
texts = ["word " * 128 for _ in range(600)]
""",
        "vectors = embed(texts)",
    ),
    {},
    FILLED,
    names("smaller_evaluation"),
)
