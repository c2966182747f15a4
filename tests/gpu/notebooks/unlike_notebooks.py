"""More notebooks that run out of memory: pictures and other models, other habits of training, evaluating and scripting."""

from __future__ import annotations

from tests.gpu.notebooks.failing_notebooks import NOTEBOOKS
from tests.gpu.notebooks.notebook_cases import FILLED, HEAD, SMALL, STEP, Notebook, after, names, put, too_large_a_batch

NOTEBOOKS["pictures with a scaler"] = too_large_a_batch(
    (
        HEAD
        + """
class Block(nn.Module):
    def __init__(self, before, after, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.skip = nn.Identity() if before == after and stride == 1 else nn.Conv2d(before, after, 1, stride)
    def forward(self, x):
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.skip(x))
net = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1), Block(64, 64), Block(64, 128, 2), Block(128, 256, 2),
                    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100))
""",
        """
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
net = net.to(device)
""",
        """
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
bs = {B}
for epoch in range(2):
    for i in range(3):
        images = torch.randn(bs, 3, 64, 64, device=device)
        labels = torch.randint(0, 100, (bs,), device=device)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(net(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    ),
    {"B": 512},
)

NOTEBOOKS["vision transformer, accumulating"] = too_large_a_batch(
    (
        """import torch
from transformers import ViTConfig, ViTForImageClassification
torch.set_default_device("cuda")
vit = ViTForImageClassification(ViTConfig(hidden_size=384, num_hidden_layers=8, num_attention_heads=6,
                                          intermediate_size=1536, image_size=128, patch_size=8, num_labels=10))
optim = torch.optim.AdamW(vit.parameters(), lr=3e-4)
BATCH, ACCUM = {B}, 4
""",
        """
vit.train()
for step in range(8):
    pixel_values = torch.rand(BATCH, 3, 128, 128)
    labels = torch.randint(10, (BATCH,))
    loss = vit(pixel_values=pixel_values, labels=labels).loss / ACCUM
    loss.backward()
    if (step + 1) % ACCUM == 0:
        torch.nn.utils.clip_grad_norm_(vit.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
""",
    ),
    {"B": 48},
)

NOTEBOOKS["diffusion"] = Notebook(
    (
        HEAD
        + """
class UNet(nn.Module):
    def __init__(self, c=64):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, c), nn.SiLU(), nn.Linear(c, c))
        self.into = nn.Conv2d(3, c, 3, padding=1)
        self.down1, self.down2 = nn.Conv2d(c, 2 * c, 3, 2, 1), nn.Conv2d(2 * c, 4 * c, 3, 2, 1)
        self.middle = nn.Sequential(nn.GroupNorm(8, 4 * c), nn.SiLU(), nn.Conv2d(4 * c, 4 * c, 3, padding=1))
        self.up1, self.up2 = nn.ConvTranspose2d(4 * c, 2 * c, 2, 2), nn.ConvTranspose2d(4 * c, c, 2, 2)
        self.out = nn.Conv2d(2 * c, 3, 3, padding=1)
    def forward(self, x, t):
        a = F.silu(self.into(x) + self.time(t[:, None])[:, :, None, None])
        b = F.silu(self.down1(a))
        m = self.middle(F.silu(self.down2(b)))
        u = torch.cat([F.silu(self.up1(m)), b], 1)
        u = torch.cat([F.silu(self.up2(u)), a], 1)
        return self.out(u)
def train_ddpm(model, steps=4, batch_size=16, size=64):
    alphas = torch.linspace(1, 0.01, 1000, device="cuda")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ema = {k: v.detach().clone() for k, v in model.state_dict().items()}
    for _ in range(steps):
        x0 = torch.randn(batch_size, 3, size, size, device="cuda")
        t = torch.randint(0, 1000, (batch_size,), device="cuda")
        a = alphas[t].view(-1, 1, 1, 1)
        noise = torch.randn_like(x0)
        {AMP}:
            loss = F.mse_loss(model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t.float() / 1000), noise)
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for k, v in model.state_dict().items():
                ema[k].lerp_(v, 0.01)
""",
        "unet = UNet().cuda()",
        "train_ddpm(unet, batch_size={B}, size=64)",
    ),
    {"B": 192, "AMP": "if True"},
    FILLED,
    STEP,
    {"smaller_batch": after("B"), "mixed_precision": put(AMP='with torch.autocast("cuda", dtype=torch.bfloat16)')},
)

NOTEBOOKS["translation"] = Notebook(
    (
        """import torch
from transformers import T5Config, T5ForConditionalGeneration
from torch.utils.data import DataLoader, TensorDataset
config = T5Config(d_model=256, d_ff=1024, num_layers=4, num_heads=4, vocab_size=16384, decoder_start_token_id=0)
source = torch.randint(1, 16384, (512, 256)); target = torch.randint(1, 16384, (512, 128))
train_loader = DataLoader(TensorDataset(source, target), batch_size={B}, shuffle=True)
t5 = T5ForConditionalGeneration(config).to("cuda")
optimizer = torch.optim.Adafactor(t5.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
""",
        """%%time
t5.train()
for epoch in range(1):
    for number, (src, tgt) in enumerate(train_loader):
        src, tgt = src.to("cuda"), tgt.to("cuda")
        outputs = t5(input_ids=src, attention_mask=torch.ones_like(src), labels=tgt)
        outputs.loss.backward()
        optimizer.step(); scheduler.step(); optimizer.zero_grad()
        if number >= 3: break
""",
    ),
    {"B": 64},
    FILLED,
    STEP | {"dropped_outputs"},
    {"smaller_batch": after("B")},
    reads_values=True,
)

NOTEBOOKS["preferences"] = too_large_a_batch(
    (
        SMALL
        + """
policy = GPT2LMHeadModel(config).cuda()
reference = GPT2LMHeadModel(config).cuda().eval().requires_grad_(False)
optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-6)
def logps(model, ids):
    logits = model(ids).logits[:, :-1]
    return torch.gather(logits.log_softmax(-1), 2, ids[:, 1:, None]).squeeze(2).sum(-1)
""",
        """
per_device_batch_size = {B}
for step in range(3):
    chosen = torch.randint(0, 8192, (per_device_batch_size, 256), device="cuda")
    rejected = torch.randint(0, 8192, (per_device_batch_size, 256), device="cuda")
    with torch.no_grad():
        ref_chosen, ref_rejected = logps(reference, chosen), logps(reference, rejected)
    pi_chosen, pi_rejected = logps(policy, chosen), logps(policy, rejected)
    loss = -F.logsigmoid(0.1 * ((pi_chosen - ref_chosen) - (pi_rejected - ref_rejected))).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
""",
    ),
    {"B": 32},
)

NOTEBOOKS["logits kept while validating"] = Notebook(
    (
        SMALL + "model = GPT2LMHeadModel(config).cuda(); opt = torch.optim.AdamW(model.parameters(), lr=1e-4)",
        """
def train_epoch(batch_size=4):
    model.train()
    for _ in range(3):
        ids = torch.randint(0, 8192, (batch_size, 512), device="cuda")
        opt.zero_grad(); model(input_ids=ids, labels=ids).loss.backward(); opt.step()
@torch.inference_mode()
def validate(batches=40):
    model.eval()
    all_logits = []
    for _ in range(batches):
        ids = torch.randint(0, 8192, (4, 512), device="cuda")
        out = model(input_ids=ids)
        all_logits.append(out.logits{CPU})
    return torch.cat(all_logits).argmax(-1)
""",
        """
for epoch in range(2):
    train_epoch()
    validate()
""",
    ),
    {"CPU": ""},
    names("leak_or_retained_reference"),
    names("keep_on_host"),
    {"keep_on_host": put(CPU=".cpu()")},
)

NOTEBOOKS["validation with gradients"] = Notebook(
    (
        SMALL + "model = GPT2LMHeadModel(config).cuda(); opt = torch.optim.AdamW(model.parameters(), lr=1e-4)",
        """
for epoch in range(1):
    for _ in range(3):
        ids = torch.randint(0, 8192, (2, 512), device="cuda")
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward(); opt.step(); opt.zero_grad()
    model.eval()
    {NG}
    total = 0
    for _ in range(3):
        ids = torch.randint(0, 8192, ({B}, 512), device="cuda")
        total += model(input_ids=ids, labels=ids).loss.item()
""",
    ),
    {"B": 24, "NG": ""},
    FILLED,
    names("no_grad", "smaller_evaluation"),
    {"no_grad": put(NG="torch.set_grad_enabled(False)"), "smaller_evaluation": after("B")},
)

NOTEBOOKS["script with arguments"] = too_large_a_batch(
    ("%run finetune.py --epochs 1 --train-batch-size {B}",),
    {"B": 48},
    files={
        "finetune.py": SMALL
        + """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--train-batch-size", type=int, default=8)
args = parser.parse_args()
model = GPT2LMHeadModel(config).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for epoch in range(args.epochs):
    for step in range(4):
        ids = torch.randint(0, 8192, (args.train_batch_size, 512), device="cuda")
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    },
)

NOTEBOOKS["imported trainer class"] = too_large_a_batch(
    (
        """from lab.trainer import Config, Trainer
cfg = Config(batch_size={B})
trainer = Trainer(cfg)
""",
        "trainer.run()",
    ),
    {"B": 48},
    files={
        "lab/__init__.py": "",
        "lab/trainer.py": SMALL
        + """
from dataclasses import dataclass
@dataclass
class Config:
    batch_size: int = 8
    block_size: int = 512
    lr: float = 3e-4
    max_iters: int = 4
class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.device = "cuda"
        self.model = GPT2LMHeadModel(config).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
    def get_batch(self):
        return torch.randint(0, 8192, (self.cfg.batch_size, self.cfg.block_size)).to(self.device)
    def run(self):
        for it in range(self.cfg.max_iters):
            x = self.get_batch()
            loss = self.model(x, labels=x).loss
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
""",
    },
)

NOTEBOOKS["state carried over"] = Notebook(
    (
        HEAD
        + """
rnn = nn.LSTM(512, 1024, num_layers=2, batch_first=True).cuda()
readout = nn.Linear(1024, 512).cuda()
opt = torch.optim.Adam([*rnn.parameters(), *readout.parameters()])
""",
        """
running = 0
for step in range(400):
    x = torch.randn(64, 64, 512, device="cuda")
    out, _ = rnn(x)
    loss = F.mse_loss(readout(out), x)
    running += loss{ITEM}
    if step % 10 == 0:
        opt.zero_grad(); loss.backward(retain_graph=True); opt.step()
print(running / 400)
""",
    ),
    {"ITEM": ""},
    names("leak_or_retained_reference"),
    names("detach"),
    {"detach": put(ITEM=".item()")},
)

NOTEBOOKS["two networks against each other"] = Notebook(
    (
        HEAD
        + """
class Config: pass
cfg = Config(); cfg.batch_size = {B}; cfg.z = 128
G = nn.Sequential(nn.Linear(128, 4 * 4 * 256), nn.Unflatten(1, (256, 4, 4)),
                  *[m for a, b in ((256, 128), (128, 64), (64, 32)) for m in
                    (nn.Upsample(scale_factor=2), nn.Conv2d(a, b, 3, 1, 1), nn.BatchNorm2d(b), nn.ReLU())],
                  nn.Upsample(scale_factor=2), nn.Conv2d(32, 3, 3, 1, 1), nn.Tanh())
D = nn.Sequential(*[m for a, b in ((3, 64), (64, 128), (128, 256)) for m in
                    (nn.Conv2d(a, b, 4, 2, 1), nn.LeakyReLU(0.2))], nn.Flatten(), nn.Linear(256 * 64, 1))
""",
        """
G.cuda(); D.cuda()
opt_g = torch.optim.Adam(G.parameters(), lr=2e-4); opt_d = torch.optim.Adam(D.parameters(), lr=2e-4)
bce = nn.BCEWithLogitsLoss()
for it in range(4):
    real = torch.randn(cfg.batch_size, 3, 64, 64, device="cuda")
    z = torch.randn(cfg.batch_size, cfg.z, device="cuda")
    fake = G(z)
    d_real, d_fake = D(real), D(fake.detach())
    loss_d = bce(d_real, torch.ones_like(d_real)) + bce(d_fake, torch.zeros_like(d_fake))
    opt_d.zero_grad(); loss_d.backward(); opt_d.step()
    d_fake = D(fake)
    loss_g = bce(d_fake, torch.ones_like(d_fake))
    opt_g.zero_grad(); loss_g.backward(); opt_g.step()
""",
    ),
    {"B": 512},
    FILLED,
    STEP,
    {"smaller_batch": after("B")},
)

LIGHTNING = Notebook(
    (
        SMALL
        + """
import pytorch_lightning as pl
class Lit(pl.LightningModule):
    def __init__(self, lr=1e-4):
        super().__init__()
        self.lr = lr
        self.net = GPT2LMHeadModel(config)
    def training_step(self, batch, index):
        loss = self.net(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)
data = torch.zeros(512, 512, dtype=torch.long)
""",
        """
loader = torch.utils.data.DataLoader(data, batch_size={B})
trainer = pl.Trainer(max_steps=3, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Lit(), loader)
""",
    ),
    {"B": 48},
    FILLED,
    STEP,
    {"smaller_batch": after("B")},
)
