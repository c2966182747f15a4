"""Notebooks with more around their loops: trainers written as classes, settings in a table, several losses, models in a sweep."""

from __future__ import annotations

from tests.gpu.notebooks.failing_notebooks import NOTEBOOKS
from tests.gpu.notebooks.notebook_cases import FILLED, HEAD, SMALL, STEP, Notebook, after, names, put

NOTEBOOKS["trainer of patches"] = Notebook(
    (
        """import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

CFG = {"batch_size": {B}, "lr": 3e-4, "epochs": 2, "image_size": 96, "patch": 8, "dim": 256, "depth": 6, "heads": 8}
""",
        """
class PatchDataset(Dataset):
    def __init__(self, n=2048, size=96):
        self.n, self.size = n, size
    def __len__(self):
        return self.n
    def __getitem__(self, i):
        return torch.full((3, self.size, self.size), i / self.n), i % 10

class ViT(nn.Module):
    def __init__(self, image_size, patch, dim, depth, heads, num_classes=10):
        super().__init__()
        n = (image_size // patch) ** 2
        self.embed = nn.Conv2d(3, dim, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, n + 1, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, num_classes)
    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        return self.head(self.encoder(x)[:, 0])

class Trainer:
    def __init__(self, model, cfg, train_ds):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = model.to(self.device)
        self.cfg = cfg
        self.loader = DataLoader(train_ds, batch_size=cfg["batch_size"], shuffle=True, drop_last=True)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg["lr"], weight_decay=0.05)
        self.scaler = torch.amp.GradScaler()
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.history = []
    def train_one_epoch(self, epoch):
        self.model.train()
        running = 0.0
        for i, (images, labels) in enumerate(self.loader):
            images = images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            with torch.autocast(device_type=self.device, dtype=torch.float16):
                logits = self.model(images)
                loss = self.criterion(logits, labels)
            self.opt.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.opt)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.opt)
            self.scaler.update()
            running += loss.item()
        self.history.append(running / len(self.loader))
    def fit(self):
        for epoch in range(self.cfg["epochs"]):
            self.train_one_epoch(epoch)
""",
        """
vit = ViT(CFG["image_size"], CFG["patch"], CFG["dim"], CFG["depth"], CFG["heads"])
trainer = Trainer(vit, CFG, PatchDataset())
trainer.fit()
""",
    ),
    {"B": 256},
    FILLED,
    STEP,
    {"smaller_batch": after("B")},
)

NOTEBOOKS["critic with a penalty"] = Notebook(
    (
        """import argparse, itertools
import torch, torch.nn as nn
from torch import autograd, optim
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default={B})
parser.add_argument("--n-critic", type=int, default=2)
parser.add_argument("--nz", type=int, default=100)
opt = parser.parse_args([])
""",
        """
def block(i, o): return [nn.ConvTranspose2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True)]
netG = nn.Sequential(nn.ConvTranspose2d(opt.nz, 256, 4, 1, 0, bias=False), nn.BatchNorm2d(256), nn.ReLU(True),
                     *block(256, 128), *block(128, 64), nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()).cuda()
netD = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1), nn.InstanceNorm2d(128),
                     nn.LeakyReLU(0.2), nn.Conv2d(128, 256, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(256, 1, 4)).cuda()
optimizerD = optim.Adam(netD.parameters(), lr=1e-4, betas=(0.5, 0.9))
optimizerG = optim.Adam(netG.parameters(), lr=1e-4, betas=(0.5, 0.9))

def calc_gradient_penalty(netD, real, fake):
    alpha = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    out = netD(interpolates)
    gradients = autograd.grad(out, interpolates, torch.ones_like(out), create_graph=True, retain_graph=True)[0]
    return ((gradients.flatten(1).norm(2, dim=1) - 1) ** 2).mean() * 10
""",
        """
for iteration in range(3):
    for p in netD.parameters(): p.requires_grad = True
    for _ in range(opt.n_critic):
        netD.zero_grad()
        real = torch.rand(opt.batch_size, 3, 32, 32, device="cuda") * 2 - 1
        noise = torch.randn(opt.batch_size, opt.nz, 1, 1, device="cuda")
        with torch.no_grad():
            fake = netG(noise)
        D_cost = netD(fake).mean() - netD(real).mean() + calc_gradient_penalty(netD, real, fake)
        D_cost.backward()
        optimizerD.step()
    for p in netD.parameters(): p.requires_grad = False
    netG.zero_grad()
    G_cost = -netD(netG(torch.randn(opt.batch_size, opt.nz, 1, 1, device="cuda"))).mean()
    G_cost.backward()
    optimizerG.step()
""",
    ),
    {"B": 3072},
    FILLED,
    STEP,
    {"smaller_batch": after("B")},
)

NOTEBOOKS["teacher with its graph"] = Notebook(
    (
        """import torch, torch.nn as nn, torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification

def bert(hidden, layers):
    return BertForSequenceClassification(BertConfig(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden, vocab_size=8192, num_labels=4, output_hidden_states=True)).cuda()
teacher, student = bert(512, 8), bert(256, 4)
project = nn.Linear(256, 512).cuda()
optimizer = torch.optim.AdamW(list(student.parameters()) + list(project.parameters()), lr=5e-5)
mse = nn.MSELoss()
T, alpha = 4.0, 0.5
""",
        """
def kd_step(input_ids, attention_mask, labels):
    t = teacher(input_ids=input_ids, attention_mask=attention_mask)
    s = student(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
    soft = F.kl_div(F.log_softmax(s.logits / T, dim=-1), F.softmax(t.logits / T, dim=-1), reduction="batchmean") * T * T
    hidden = sum(mse(project(a), b.detach()) for a, b in zip(s.hidden_states[1:], t.hidden_states[2::2]))
    return alpha * s.loss + (1 - alpha) * soft + hidden

BATCH_SIZE = {B}
MAX_LEN = {S}
teacher.eval(); student.train()
for step in range(4):
    input_ids = torch.randint(5, 8192, (BATCH_SIZE, MAX_LEN)).cuda()
    attention_mask = torch.ones(BATCH_SIZE, MAX_LEN, dtype=torch.long).cuda()
    labels = torch.randint(0, 4, (BATCH_SIZE,)).cuda()
    loss = kd_step(input_ids, attention_mask, labels)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    {"B": 48, "S": 256},
    FILLED,
    STEP | {"no_grad"},
    {"smaller_batch": after("B"), "shorter_sequences": after("S")},
    reads_values=True,
)

NOTEBOOKS["predictions of a trainer"] = Notebook(
    (
        SMALL
        + """
import numpy as np
from transformers import Trainer, TrainingArguments
class Lines(torch.utils.data.Dataset):
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i):
        ids = (torch.arange(256) * (i + 1)) % 8192
        return {"input_ids": ids, "labels": ids}
def compute_metrics(eval_pred):
    logits, labels = eval_pred
    return {"accuracy": float(({PREDICTED} == labels).mean())}
model = GPT2LMHeadModel(config)
training_args = TrainingArguments(output_dir="out", per_device_train_batch_size=4, per_device_eval_batch_size=8, max_steps=2,
                                  report_to="none", disable_tqdm=True, save_strategy="no", {MORE})
trainer = Trainer(model=model, args=training_args, train_dataset=Lines(64), eval_dataset=Lines(256), compute_metrics=compute_metrics{KEPT})
""",
        "trainer.train()",
        "metrics = trainer.evaluate()\nprint(metrics)",
    ),
    {"MORE": "", "PREDICTED": "np.argmax(logits, -1)", "KEPT": ""},
    names("leak_or_retained_reference", *FILLED),
    names("eval_accumulation"),
    {
        "eval_accumulation": put(MORE="eval_accumulation_steps=1"),
        "kept_classes": put(
            PREDICTED="logits", KEPT=", preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)"
        ),
    },
    reads_values=True,
    copied_kib=4,
)

NOTEBOOKS["translation from scratch"] = Notebook(
    (
        HEAD
        + """
from torch.utils.data import DataLoader
PAD, VOCAB = 0, 12000
class Seq2Seq(nn.Module):
    def __init__(self, d=256):
        super().__init__()
        self.src, self.tgt = nn.Embedding(VOCAB, d, padding_idx=PAD), nn.Embedding(VOCAB, d, padding_idx=PAD)
        self.pos = nn.Embedding(512, d)
        self.tr = nn.Transformer(d, 8, 3, 3, 1024, dropout=0.1, batch_first=True)
        self.generator = nn.Linear(d, VOCAB)
    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), device=tgt.device)
        at = torch.arange(src.size(1), device=src.device), torch.arange(tgt.size(1), device=tgt.device)
        out = self.tr(self.src(src) + self.pos(at[0]), self.tgt(tgt) + self.pos(at[1]), tgt_mask=mask)
        return self.generator(out)
pairs = [(torch.randint(4, VOCAB, (128,)), torch.randint(4, VOCAB, (129,))) for _ in range(512)]
def collate(samples):
    return torch.stack([s for s, _ in samples]), torch.stack([t for _, t in samples])
""",
        """
def train(epochs=1, batch_size={B}, warmup=400):
    model = Seq2Seq().cuda()
    criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 256 ** -0.5 * min((s + 1) ** -0.5, (s + 1) * warmup ** -1.5))
    loader = DataLoader(pairs, batch_size=batch_size, shuffle=True, collate_fn=collate)
    for epoch in range(epochs):
        model.train()
        total = 0
        for src, tgt in loader:
            src, tgt = src.cuda(), tgt.cuda()
            logits = model(src, tgt[:, :-1])
            loss = criterion(logits.reshape(-1, VOCAB), tgt[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.item()
        print(epoch, total)
""",
        "train()",
    ),
    {"B": 64},
    FILLED,
    STEP,
    {"smaller_batch": after("B")},
)

NOTEBOOKS["writing letter by letter"] = Notebook(
    (
        HEAD
        + """
class CharRNN(nn.Module):
    def __init__(self, vocab=96, hidden=1024):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2, batch_first=True)
        self.out = nn.Linear(hidden, vocab)
    def forward(self, x, state=None):
        y, state = self.lstm(self.embed(x), state)
        return self.out(y), state
model = CharRNN().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(3):
    text = torch.randint(0, 96, (32, 65), device="cuda")
    logits, _ = model(text[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        """
{DEL}
def sample(model, start, length=2000, temperature=0.8):
    model.eval()
    x, state, letters = start, None, []
    for _ in range(length):
        {NG}logits, state = model(x, state)
        p = F.softmax(logits[:, -1] / temperature, dim=-1)
        x = torch.multinomial(p, 1)
        letters.append(x{CPU})
    return torch.cat(letters, 1)
text = sample(model, torch.zeros(64, 1, dtype=torch.long, device="cuda"))
""",
    ),
    {"NG": "", "CPU": "", "DEL": ""},
    names("leak_or_retained_reference", "activations"),
    names("no_grad", "detach"),
    {
        "no_grad": put(NG="with torch.no_grad(): "),
        "drop_copy": lambda values, remedy: {**values, "DEL": remedy["code"].replace("%oom_free", "")},
    },
)

NOTEBOOKS["every pair compared"] = Notebook(
    (
        HEAD
        + """
from types import SimpleNamespace
args = SimpleNamespace(batch_size={B}, dim=128, temperature=0.07, steps=4)
class Tower(nn.Module):
    def __init__(self, inside, dim):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inside, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, dim))
    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)
class TwoTowers(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.image, self.text = Tower(1024, dim), Tower(768, dim)
        self.scale = nn.Parameter(torch.tensor(2.6593))
    def forward(self, image, text):
        return self.image(image), self.text(text), self.scale.exp()
def clip_loss(a, b, scale):
    sim = F.cosine_similarity(a[:, None, :], b[None, :, :], dim=-1) * scale
    target = torch.arange(len(a), device=a.device)
    return (F.cross_entropy(sim, target) + F.cross_entropy(sim.t(), target)) / 2
""",
        """
model = TwoTowers(args.dim).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
def step(batch):
    a, b, scale = model(**batch)
    loss = clip_loss(a, b, scale)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
losses = []
for _ in range(args.steps):
    batch = {"image": torch.randn(args.batch_size, 1024, device="cuda"), "text": torch.randn(args.batch_size, 768, device="cuda")}
    losses.append(step(batch))
""",
    ),
    {"B": 1536},
    names(*FILLED, "request_alone_too_big"),
    STEP,
    {"smaller_batch": after("B")},
)

NOTEBOOKS["models of a sweep"] = Notebook(
    (
        SMALL
        + """
def run_trial(lr, batch_size=4, steps=3):
    model = GPT2LMHeadModel(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        ids = torch.randint(0, 8192, (batch_size, 256), device="cuda")
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model{CPU}, loss.item()
""",
        """
results = {}
for lr in [10 ** (-k / 10) for k in range(20, 70)]:
    results[lr] = run_trial(lr)
best = min(results, key=lambda lr: results[lr][1])
""",
    ),
    {"CPU": ""},
    names("leak_or_retained_reference"),
    names("keep_on_host"),
    {"keep_on_host": put(CPU=".cpu()")},
)

NOTEBOOKS["module imported under a short name"] = Notebook(
    (
        """%load_ext autoreload
%autoreload 2
import torch
from project import model as M, train as T
net = M.build(width=384)
""",
        "history = T.train_model(net, epochs=2)",
    ),
    {"B": 32, "S": 384},
    FILLED,
    STEP,
    {"smaller_batch": after("B"), "shorter_sequences": after("S")},
    files={
        "project/__init__.py": "",
        "project/model.py": HEAD
        + """
def build(width=256):
    return GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=6, n_head=6, vocab_size=8192, n_positions=512))
""",
        "project/train.py": HEAD
        + """
from torch.utils.data import DataLoader, TensorDataset
BATCH_SIZE = {B}
SEQ_LEN = {S}
def get_loader(batch_size=BATCH_SIZE, seq_len=SEQ_LEN):
    ids = torch.randint(0, 8192, (256, seq_len))
    return DataLoader(TensorDataset(ids), batch_size=batch_size, shuffle=True)
def train_model(model, epochs=1, lr=1e-4, device="cuda"):
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    history = {"loss": []}
    for epoch in range(epochs):
        for (ids,) in get_loader():
            ids = ids.to(device)
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history["loss"].append(loss.item())
    return history
""",
    },
)

NOTEBOOKS["cache of keys and values"] = Notebook(
    (
        HEAD
        + """
model = GPT2LMHeadModel(GPT2Config(n_embd=512, n_layer=3, n_head=8, vocab_size=8192, n_positions=1024)).cuda().eval()
batch_size = {B}
prompt = torch.randint(0, 8192, (batch_size, 16), device="cuda")
""",
        """
new_tokens = 400
with torch.no_grad():
    cache, token, tokens = None, prompt, [prompt]
    for t in range(new_tokens):
        out = model(token, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        token = out.logits[:, -1:].argmax(-1)
        tokens.append(token)
text = torch.cat(tokens, 1)
""",
    ),
    {"B": 384},
    names("activations", "leak_or_retained_reference"),
    names("smaller_evaluation"),
    {"smaller_evaluation": after("B")},
)
