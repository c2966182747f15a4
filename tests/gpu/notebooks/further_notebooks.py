"""Notebooks in which a sample is several rows, what leaks lies in an attribute or a hook, and a checkpoint stays."""

from __future__ import annotations

from tests.gpu.notebooks.failing_notebooks import NOTEBOOKS
from tests.gpu.notebooks.notebook_cases import FILLED, HEAD, SMALL, STEP, Notebook, after, names, put, too_large_a_batch

NOTEBOOKS["beams"] = Notebook(
    (
        SMALL
        + 'model = GPT2LMHeadModel(config).cuda().eval()\nmodel.set_attn_implementation("eager")\neval_batch_size = {B}',
        """
ids = torch.randint(2, 8192, (eval_batch_size, 448), device="cuda")
with torch.no_grad():
    out = model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=4, max_new_tokens=4, do_sample=False,
                         eos_token_id=None, pad_token_id=0)
""",
    ),
    {"B": 128},
    FILLED,
    names("smaller_evaluation"),
    {"smaller_evaluation": after("B")},
    reads_values=True,
)

NOTEBOOKS["two views of a picture"] = too_large_a_batch(
    (
        HEAD
        + """
encoder = nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.BatchNorm2d(128), nn.ReLU(),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 64)).cuda()
opt = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9)
""",
        """
batch_size = {B}
for step in range(4):
    pictures = torch.rand(batch_size, 3, 64, 64, device="cuda")
    views = torch.cat([pictures, pictures.flip(-1)])
    z = F.normalize(encoder(views), dim=1)
    scores = z @ z.T / 0.1
    scores.fill_diagonal_(-1e4)
    target = torch.arange(2 * batch_size, device="cuda").roll(batch_size)
    loss = F.cross_entropy(scores, target)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    {"B": 1280},
)

NOTEBOOKS["several choices"] = too_large_a_batch(
    (
        """import torch
from transformers import BertConfig, BertForMultipleChoice
bert = BertForMultipleChoice(BertConfig(hidden_size=256, num_hidden_layers=6, num_attention_heads=4,
                                        intermediate_size=1024, vocab_size=8192)).to("cuda")
optimizer = torch.optim.AdamW(bert.parameters(), lr=2e-5)
""",
        """
bs = {B}
for _ in range(3):
    batch = {"input_ids": torch.randint(5, 8192, (bs, 4, 256)), "attention_mask": torch.ones(bs, 4, 256, dtype=torch.long),
             "labels": torch.randint(0, 4, (bs,))}
    batch = {key: value.to("cuda") for key, value in batch.items()}
    loss = bert(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    {"B": 32},
    reads_values=True,
)

NOTEBOOKS["history in an attribute"] = Notebook(
    (
        HEAD
        + """
class Fit:
    def __init__(self, net):
        self.net, self.history = net, {"train": {"loss": []}}
        self.opt = torch.optim.Adam(net.parameters())
    def epoch(self, steps=400):
        for _ in range(steps):
            x = torch.randn(1024, 1024, device="cuda")
            loss = self.net(x).square().mean()
            self.history["train"]["loss"].append(loss{ITEM})
            self.opt.zero_grad()
            loss.backward(retain_graph={KEEP})
            self.opt.step()
net = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(4))).cuda()
fit = Fit(net)
""",
        "fit.epoch()",
    ),
    {"ITEM": "", "KEEP": "True"},
    names("leak_or_retained_reference"),
    names("detach"),
    {"detach": put(ITEM=".item()")},
)

NOTEBOOKS["distillation"] = too_large_a_batch(
    (
        SMALL
        + """
teacher = GPT2LMHeadModel(GPT2Config(n_embd=384, n_layer=8, n_head=6, vocab_size=8192, n_positions=512)).cuda()
student = GPT2LMHeadModel(config).cuda()
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)
""",
        """
def distill(steps=3, batch_size={B}, seq_len=256, temperature=2.0):
    for _ in range(steps):
        ids = torch.randint(0, 8192, (batch_size, seq_len), device="cuda")
        with torch.no_grad():
            wanted = teacher(ids).logits
        given = student(ids).logits
        loss = F.kl_div(F.log_softmax(given / temperature, -1), F.softmax(wanted / temperature, -1), reduction="batchmean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
distill()
""",
    ),
    {"B": 32},
)

NOTEBOOKS["time series"] = Notebook(
    (
        HEAD
        + """
from torch.utils.data import DataLoader, TensorDataset
class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(16, 256, num_layers=2, batch_first=True)
        self.out = nn.Linear(256, 1)
    def forward(self, x):
        return self.out(self.rnn(x)[0])
data = TensorDataset(torch.randn(4096, 200, 16), torch.randn(4096, 200, 1))
""",
        """%%time
model = Forecast().cuda()
optimizer = torch.optim.RMSprop(model.parameters())
loader = DataLoader(data, batch_size={B}, shuffle=True, drop_last=True)
for step, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x.cuda()), y.cuda())
    loss.backward()
    optimizer.step(); optimizer.zero_grad()
    if step == 2: break
""",
    ),
    {"B": 1024},
    names(*FILLED, "request_alone_too_big"),
    STEP,
    {"smaller_batch": after("B")},
)

NOTEBOOKS["method in the line form"] = too_large_a_batch(
    (
        SMALL
        + """
class Runner:
    batch_size = {B}
    def __init__(self):
        self.model = GPT2LMHeadModel(config).cuda()
        self.opt = torch.optim.AdamW(self.model.parameters())
    def fit(self, epochs=1):
        for _ in range(3 * epochs):
            ids = torch.randint(0, 8192, (self.batch_size, 512), device="cuda")
            self.model(input_ids=ids, labels=ids).loss.backward()
            self.opt.step(); self.opt.zero_grad()
runner = Runner()
""",
        "%gpumem --no-plot runner.fit(epochs=1)",
    ),
    {"B": 24},
)

NOTEBOOKS["accelerate that accumulates"] = too_large_a_batch(
    (
        SMALL
        + """
from accelerate import Accelerator
from torch.utils.data import DataLoader
accelerator = Accelerator(gradient_accumulation_steps=2)
train_batch_size = {B}
loader = DataLoader([torch.randint(0, 8192, (512,)) for _ in range(16 * train_batch_size)], batch_size=train_batch_size)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
""",
        """
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for number, ids in enumerate(loader):
    with accelerator.accumulate(model):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if number == 5: break
""",
    ),
    {"B": 24},
)

NOTEBOOKS["features of a hook"] = Notebook(
    (
        SMALL
        + """
model = GPT2LMHeadModel(config).cuda().eval()
features = []
def keep(module, inputs, output):
    features.append(output[0]{CPU})
""",
        """
handle = model.transformer.h[3].mlp.register_forward_hook(keep)
with torch.no_grad():
    for _ in range(200):
        model(torch.randint(0, 8192, (32, 512), device="cuda"))
handle.remove()
""",
    ),
    {"CPU": ""},
    names("leak_or_retained_reference"),
    names("keep_on_host"),
    {"keep_on_host": put(CPU=".cpu()")},
)

NOTEBOOKS["checkpoint that stays"] = Notebook(
    (
        HEAD
        + """
big = GPT2Config(n_embd=768, n_layer=8, n_head=12, vocab_size=8192, n_positions=512)
torch.save({"model": GPT2LMHeadModel(big).state_dict(), "step": 100}, "last.pt")
""",
        """
checkpoint = torch.load("last.pt", map_location="cuda")
model = GPT2LMHeadModel(big).cuda()
model.load_state_dict(checkpoint["model"])
before = GPT2LMHeadModel(big).cuda()
before.load_state_dict(checkpoint["model"])
{DEL}
""",
        """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(3):
    ids = torch.randint(0, 8192, (1, 512), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step(); optimizer.zero_grad()
""",
    ),
    {"DEL": ""},
    names("leak_or_retained_reference", *FILLED, "optimizer_state"),
    names("drop_copy"),
    {"drop_copy": put(DEL="del checkpoint, before")},
    num_writing=1,
)

NOTEBOOKS["a sampler with its graph"] = Notebook(
    (
        HEAD
        + """
class Denoiser(nn.Module):
    def __init__(self, c=64):
        super().__init__()
        self.t = nn.Embedding(200, c)
        self.a, self.b, self.c = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, 3, 3, padding=1)
    def forward(self, x, t):
        return self.c(F.silu(self.b(F.silu(self.a(x)) + self.t(t)[:, :, None, None])))
beta = 1e-3
net = Denoiser().cuda()
def sample(net, n=16, size=64):
    net.eval()
    x = torch.randn(n, 3, size, size, device="cuda")
    for i in reversed(range(200)):
        noise = net(x, torch.full((n,), i, device="cuda"))
        x = (x - beta * noise) / (1 - beta) ** 0.5
        if i > 0: x = x + beta ** 0.5 * torch.randn_like(x)
    return x.clamp(-1, 1)
""",
        """
{WITH}
    images = sample(net)
    grid = images.detach().cpu()
""",
    ),
    {"WITH": "if True:"},
    names("leak_or_retained_reference", "activations"),
    names("no_grad"),
    {"no_grad": put(WITH="with torch.no_grad():")},
)

_SEARCH = "sim = e @ e.T\nsim.fill_diagonal_(-1)\nscores, neighbours = sim.topk(10, dim=1)"
_SEARCH_IN_PARTS = """parts = []
for at, e_part in zip(range(0, len(e), {after}), e.split({after})):
    sim = e_part @ e.T
    sim.diagonal(at).fill_(-1)
    scores, neighbours = sim.topk(10, dim=1)
    parts.append((scores, neighbours))
    del sim
scores, neighbours = map(torch.cat, zip(*parts))"""
NOTEBOOKS["neighbours but each itself"] = Notebook(
    (HEAD + "e = F.normalize(torch.randn(30000, 256), dim=1).cuda()\n", "{SEARCH}\nprint(neighbours.shape)\n"),
    {"SEARCH": _SEARCH},
    names("request_alone_too_big", "activations"),
    names("smaller_evaluation"),
    {"smaller_evaluation": lambda before, remedy: {**before, "SEARCH": _SEARCH_IN_PARTS.format(after=remedy["after"])}},
)
