"""Notebooks at sizes of users, which run out of 16 GiB: for a physical GPU (tests/data/record_device_advice.py)."""

from __future__ import annotations

from tests.gpu.notebooks.notebook_cases import FILLED, STEP, Notebook, names

LIMIT_GIB = 16
DEVICE_NOTEBOOKS: dict[str, Notebook] = {}

_TORCH = "import torch, torch.nn as nn, torch.nn.functional as F\n"
_LEAK = names("leak_or_retained_reference")


def filled(name: str, *cells: str) -> None:
    """A notebook whose steps fill the card."""
    DEVICE_NOTEBOOKS[name] = Notebook(cells, {}, FILLED | names("request_alone_too_big", "attention_scores"), STEP)


def other(name: str, causes: frozenset[str], first: frozenset[str], *cells: str) -> None:
    """A notebook that fails for another reason."""
    DEVICE_NOTEBOOKS[name] = Notebook(cells, {}, causes, first)


filled(
    "llama from a loader",
    _TORCH
    + """
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16,
                     num_key_value_heads=4, vocab_size=32000, max_position_embeddings=2048)
model = LlamaForCausalLM(config).to("cuda", dtype=torch.bfloat16)
corpus = torch.randint(0, 32000, (512, 1024))
loader = DataLoader(TensorDataset(corpus), batch_size=32, shuffle=True, drop_last=True)
""",
    """
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
model.train()
for i, (tokens,) in enumerate(loader):
    tokens = tokens.to("cuda", non_blocking=True)
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(); schedule.step(); optimizer.zero_grad(set_to_none=True)
    if i == 3:
        break
""",
)

filled(
    "function with defaults",
    _TORCH
    + """
from transformers import BertConfig, BertForSequenceClassification

def fit(model, batch_size=160, max_len=256, lr=2e-5, steps=4):
    model.train()
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        ids = torch.randint(0, 30522, (batch_size, max_len), device="cuda")
        mask = torch.ones_like(ids)
        y = torch.randint(0, 3, (batch_size,), device="cuda")
        loss = model(input_ids=ids, attention_mask=mask, labels=y).loss
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()
""",
    "classifier = BertForSequenceClassification(BertConfig(num_labels=3)).cuda()",
    "fit(classifier)",
)

filled(
    "Trainer",
    """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
rows = [{"input_ids": torch.arange(512), "labels": torch.arange(512)} for _ in range(256)]
gpt = GPT2LMHeadModel(GPT2Config(n_layer=8))
""",
    """
args = TrainingArguments("/tmp/trained", per_device_train_batch_size=32, max_steps=4, fp16=True, learning_rate=1e-4,
                         report_to="none", disable_tqdm=True, save_strategy="no", logging_strategy="no")
trainer = Trainer(gpt, args, train_dataset=rows)
trainer.train()
""",
)

filled(
    "accelerate",
    _TORCH
    + """
from accelerate import Accelerator
from transformers import OPTConfig, OPTForCausalLM
from torch.utils.data import DataLoader
accelerator = Accelerator(mixed_precision="bf16")
model = OPTForCausalLM(OPTConfig(hidden_size=768, ffn_dim=3072, num_hidden_layers=10, num_attention_heads=12,
                                 word_embed_proj_dim=768))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
train_dl = DataLoader(torch.randint(4, 50000, (400, 768)), batch_size=24)
model, optimizer, train_dl = accelerator.prepare(model, optimizer, train_dl)
""",
    """
for step, batch in enumerate(train_dl):
    loss = model(input_ids=batch, labels=batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step >= 3:
        break
""",
)

other(
    "hidden states kept",
    _LEAK,
    names("detach", "keep_on_host"),
    _TORCH
    + """
from transformers import BertConfig, BertModel
encoder = BertModel(BertConfig(num_hidden_layers=6)).cuda()
probe = nn.Linear(768, 10).cuda()
opt = torch.optim.Adam(probe.parameters(), lr=1e-3)
history = {"loss": [], "features": []}
""",
    """
for step in range(200):
    ids = torch.randint(0, 30000, (32, 256), device="cuda")
    target = torch.randint(0, 10, (32,), device="cuda")
    features = encoder(ids).last_hidden_state[:, 0]
    loss = F.cross_entropy(probe(features), target)
    opt.zero_grad(); loss.backward(); opt.step()
    history["loss"].append(loss)
    history["features"].append(encoder(ids).last_hidden_state)
""",
)

other(
    "validation keeps graphs",
    FILLED | _LEAK,
    names("no_grad", "smaller_evaluation"),
    _TORCH
    + """
from transformers import ViTConfig, ViTForImageClassification
vit = ViTForImageClassification(ViTConfig(num_labels=100)).cuda()
opt = torch.optim.SGD(vit.parameters(), lr=0.01, momentum=0.9)
""",
    """
def batches(n, size):
    for _ in range(n):
        yield torch.randn(size, 3, 224, 224, device="cuda"), torch.randint(0, 100, (size,), device="cuda")

vit.train()
for x, y in batches(3, 16):
    loss = vit(pixel_values=x, labels=y).loss
    loss.backward(); opt.step(); opt.zero_grad()

vit.eval()
right = 0
val_batch_size = 192
for x, y in batches(4, val_batch_size):
    right += (vit(pixel_values=x).logits.argmax(-1) == y).sum().item()
""",
)

other(
    "an older model in the way",
    _LEAK | FILLED | names("weights_too_big", "optimizer_state"),
    names("drop_copy"),
    _TORCH
    + """
from transformers import GPT2Config, GPT2LMHeadModel
first = GPT2LMHeadModel(GPT2Config(n_embd=1280, n_layer=24, n_head=20)).cuda()
first_opt = torch.optim.AdamW(first.parameters(), lr=1e-4)
x = torch.randint(0, 50257, (1, 256), device="cuda")
first(input_ids=x, labels=x).loss.backward()
first_opt.step(); first_opt.zero_grad()
""",
    """
second = GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=16, n_head=16)).cuda()
second_opt = torch.optim.AdamW(second.parameters(), lr=1e-4)
for _ in range(3):
    x = torch.randint(0, 50257, (8, 512), device="cuda")
    second(input_ids=x, labels=x).loss.backward()
    second_opt.step(); second_opt.zero_grad()
""",
)

filled(
    "denoising network",
    _TORCH
    + """
class Res(nn.Module):
    def __init__(self, a, b, t):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(8, a), nn.Conv2d(a, b, 3, padding=1)
        self.n2, self.c2 = nn.GroupNorm(8, b), nn.Conv2d(b, b, 3, padding=1)
        self.t, self.skip = nn.Linear(t, b), nn.Conv2d(a, b, 1) if a != b else nn.Identity()
    def forward(self, x, t):
        h = self.c1(F.silu(self.n1(x))) + self.t(t)[:, :, None, None]
        return self.skip(x) + self.c2(F.silu(self.n2(h)))

class Attend(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.attn = nn.GroupNorm(8, c), nn.MultiheadAttention(c, 4, batch_first=True)
    def forward(self, x):
        b, c, h, w = x.shape
        y = self.norm(x).flatten(2).transpose(1, 2)
        return x + self.attn(y, y, y, need_weights=False)[0].transpose(1, 2).reshape(b, c, h, w)

class Denoiser(nn.Module):
    def __init__(self, c=96, t=256):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(c, t), nn.SiLU(), nn.Linear(t, t))
        self.start = nn.Conv2d(3, c, 3, padding=1)
        self.d1, self.down1 = Res(c, c, t), nn.Conv2d(c, 2 * c, 3, 2, 1)
        self.d2, self.down2 = Res(2 * c, 2 * c, t), nn.Conv2d(2 * c, 4 * c, 3, 2, 1)
        self.m1, self.attend, self.m2 = Res(4 * c, 4 * c, t), Attend(4 * c), Res(4 * c, 4 * c, t)
        self.up2, self.u2 = nn.ConvTranspose2d(4 * c, 2 * c, 2, 2), Res(4 * c, 2 * c, t)
        self.up1, self.u1 = nn.ConvTranspose2d(2 * c, c, 2, 2), Res(2 * c, c, t)
        self.out = nn.Conv2d(c, 3, 3, padding=1)
        self.c = c
    def forward(self, x, step):
        angles = step[:, None].float() * torch.exp(-torch.arange(self.c // 2, device=x.device) / self.c)
        t = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        a = self.d1(self.start(x), t)
        b = self.d2(self.down1(a), t)
        m = self.m2(self.attend(self.m1(self.down2(b), t)), t)
        b = self.u2(torch.cat([self.up2(m), b], 1), t)
        return self.out(self.u1(torch.cat([self.up1(b), a], 1), t))
""",
    """
net = Denoiser().to("cuda")
opt = torch.optim.AdamW(net.parameters(), lr=2e-4)
betas = torch.linspace(1e-4, 0.02, 1000, device="cuda")
keep = torch.cumprod(1 - betas, 0)
n_images = 320
""",
    """
for i in range(4):
    images = torch.rand(n_images, 3, 64, 64, device="cuda") * 2 - 1
    step = torch.randint(0, 1000, (n_images,), device="cuda")
    noise = torch.randn_like(images)
    a = keep[step][:, None, None, None]
    guess = net(a.sqrt() * images + (1 - a).sqrt() * noise, step)
    loss = F.mse_loss(guess, noise)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
""",
)

other(
    "generation with a cache",
    FILLED | _LEAK | names("weights_too_big", "unknown"),
    names("smaller_batch", "smaller_evaluation", "half_weights"),
    _TORCH
    + """
from transformers import LlamaConfig, LlamaForCausalLM
llm = LlamaForCausalLM(LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=8,
                                   num_attention_heads=16, num_key_value_heads=16, vocab_size=32000)).cuda().half().eval()
prompts = torch.randint(0, 32000, (384, 384), device="cuda")
""",
    """
with torch.no_grad():
    out = llm.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=256, min_new_tokens=256,
                       do_sample=False, pad_token_id=0)
print(out.shape)
""",
)

filled(
    "generator and critic",
    _TORCH
    + """
device = "cuda"
def up(a, b): return nn.Sequential(nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(True))
def down(a, b): return nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.InstanceNorm2d(b), nn.LeakyReLU(0.2))
netG = nn.Sequential(nn.ConvTranspose2d(128, 1024, 4), nn.ReLU(True), up(1024, 512), up(512, 256), up(256, 128), up(128, 64),
                     nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()).to(device)
netD = nn.Sequential(down(3, 64), down(64, 128), down(128, 256), down(256, 512), nn.Flatten(), nn.Linear(512 * 64, 1)).to(device)
optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
optD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
BATCH = 1152
""",
    """
for it in range(3):
    real = torch.randn(BATCH, 3, 128, 128, device=device)
    fake = netG(torch.randn(BATCH, 128, 1, 1, device=device))
    lossD = F.relu(1 - netD(real)).mean() + F.relu(1 + netD(fake.detach())).mean()
    optD.zero_grad(); lossD.backward(); optD.step()
    lossG = -netD(fake).mean()
    optG.zero_grad(); lossG.backward(); optG.step()
""",
)

filled(
    "contrastive",
    _TORCH
    + """
class Encoder(nn.Module):
    def __init__(self, width=96, out=128):
        super().__init__()
        def stage(a, b): return nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
                                              nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
        self.body = nn.Sequential(stage(3, width), stage(width, 2 * width), stage(2 * width, 4 * width))
        self.head = nn.Sequential(nn.Linear(4 * width, 512), nn.ReLU(), nn.Linear(512, out))
    def forward(self, x):
        return F.normalize(self.head(self.body(x).mean((2, 3))), dim=1)

def nt_xent(a, b, temperature=0.5):
    z = torch.cat([a, b])
    sim = (z @ z.T / temperature).fill_diagonal_(-1e4)
    n = len(a)
    return F.cross_entropy(sim, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(z.device))
""",
    """
encoder = Encoder().cuda()
opt = torch.optim.SGD(encoder.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)
views_per_batch = 3072
for step in range(3):
    view1 = torch.rand(views_per_batch, 3, 64, 64, device="cuda")
    view2 = torch.rand(views_per_batch, 3, 64, 64, device="cuda")
    loss = nt_xent(encoder(view1), encoder(view2))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
)

filled(
    "scaler",
    _TORCH
    + """
from transformers import SwinConfig, SwinForImageClassification
swin = SwinForImageClassification(SwinConfig(num_labels=200)).cuda()
optimizer = torch.optim.AdamW(swin.parameters(), lr=5e-4)
scaler = torch.amp.GradScaler("cuda")
cfg = {"train": {"batch": 288, "accumulate": 1}, "size": 224}
""",
    """
for it in range(4):
    images = torch.randn(cfg["train"]["batch"], 3, cfg["size"], cfg["size"], device="cuda")
    labels = torch.randint(0, 200, (cfg["train"]["batch"],), device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = swin(pixel_values=images, labels=labels).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(swin.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
)

filled(
    "pictures",
    _TORCH
    + """
from torchvision.models import resnet50
model = resnet50(num_classes=500).to("cuda")
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
bs = 224
""",
    """
model.train()
for batch in range(3):
    x = torch.randn(bs, 3, 224, 224, device="cuda")
    y = torch.randint(0, 500, (bs,), device="cuda")
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
""",
)

filled(
    "volumes",
    _TORCH
    + """
class Net3d(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        def two(a, b): return nn.Sequential(nn.Conv3d(a, b, 3, padding=1), nn.InstanceNorm3d(b), nn.LeakyReLU(inplace=True),
                                            nn.Conv3d(b, b, 3, padding=1), nn.InstanceNorm3d(b), nn.LeakyReLU(inplace=True))
        self.e1, self.e2, self.mid = two(1, c), two(c, 2 * c), two(2 * c, 4 * c)
        self.up2, self.d2 = nn.ConvTranspose3d(4 * c, 2 * c, 2, 2), two(4 * c, 2 * c)
        self.up1, self.d1 = nn.ConvTranspose3d(2 * c, c, 2, 2), two(2 * c, c)
        self.out = nn.Conv3d(c, 4, 1)
    def forward(self, x):
        a = self.e1(x); b = self.e2(F.max_pool3d(a, 2)); m = self.mid(F.max_pool3d(b, 2))
        b = self.d2(torch.cat([self.up2(m), b], 1))
        return self.out(self.d1(torch.cat([self.up1(b), a], 1)))

def dice(logits, target):
    p = logits.softmax(1); t = F.one_hot(target, 4).movedim(-1, 1).float()
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)
""",
    """
unet = Net3d().cuda()
opt = torch.optim.AdamW(unet.parameters(), lr=1e-3)
patches, side = 6, 128
for it in range(3):
    scan = torch.randn(patches, 1, side, side, side, device="cuda")
    seg = torch.randint(0, 4, (patches, side, side, side), device="cuda")
    logits = unet(scan)
    loss = dice(logits, seg) + F.cross_entropy(logits, seg)
    opt.zero_grad(); loss.backward(); opt.step()
""",
)

filled(
    "recurrent",
    _TORCH
    + """
class WordModel(nn.Module):
    def __init__(self, vocab=20000, width=1024):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(vocab, width), nn.LSTM(width, width, 3, batch_first=True, dropout=0.2)
        self.out = nn.Linear(width, vocab)
    def forward(self, x, state=None):
        y, state = self.rnn(self.embed(x), state)
        return self.out(y), state
lm = WordModel().to("cuda")
opt = torch.optim.Adam(lm.parameters(), lr=1e-3)
""",
    """
BPTT, BS = 128, 512
state = None
for i in range(4):
    x = torch.randint(0, 20000, (BS, BPTT + 1), device="cuda")
    logits, state = lm(x[:, :-1], state)
    state = tuple(s.detach() for s in state)
    loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
    opt.zero_grad(); loss.backward(); opt.step()
""",
)
