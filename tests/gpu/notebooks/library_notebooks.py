"""Notebooks around libraries: what accelerate gathers, what a generator draws, a script of a small project,
what a trainer's loss computes."""

from __future__ import annotations

from tests.gpu.notebooks.failing_notebooks import NOTEBOOKS
from tests.gpu.notebooks.notebook_cases import FILLED, SMALL, STEP, Notebook, after, names, put

NOTEBOOKS["gathered by accelerate"] = Notebook(
    (
        SMALL
        + """
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
accelerator = Accelerator()
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
train_dataloader = DataLoader(TensorDataset(torch.randint(1, 8192, (16, 256))), batch_size=4, shuffle=True)
eval_dataloader = DataLoader(TensorDataset(torch.randint(1, 8192, (400, 256))), batch_size=8)
model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(model, optimizer, train_dataloader, eval_dataloader)
""",
        """
num_epochs = 1
for epoch in range(num_epochs):
    model.train()
    for (ids,) in train_dataloader:
        outputs = model(input_ids=ids, labels=ids)
        accelerator.backward(outputs.loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    predictions, references = [], []
    for (ids,) in eval_dataloader:
        with torch.no_grad():
            outputs = model(input_ids=ids)
        logits, labels = accelerator.gather_for_metrics((outputs.logits, ids))
        predictions.append(logits{CPU})
        references.append(labels{CPU})
    accuracy = (torch.cat(predictions).argmax(-1) == torch.cat(references)).float().mean()
""",
    ),
    {"CPU": ""},
    names("leak_or_retained_reference"),
    names("keep_on_host"),
    {"keep_on_host": put(CPU=".cpu()")},
)

NOTEBOOKS["pictures of a generator"] = Notebook(
    (
        """import torch, torch.nn as nn, torch.optim as optim
nz, ngf, ndf, nc = 100, 64, 64, 3
class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 8, 4, 1, 0, bias=False), nn.BatchNorm2d(ngf * 8), nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 8, ngf * 4, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf * 4), nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 4, ngf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf * 2), nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, nc, 4, 2, 1, bias=False), nn.Tanh())
    def forward(self, input): return self.main(input)
class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(nc, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ndf * 2), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 8, 1, 0, bias=False), nn.Flatten())
    def forward(self, input): return self.main(input)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
netG, netD = Generator().to(device), Discriminator().to(device)
criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(64, nz, 1, 1, device=device)
optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
""",
        """%%time
img_list, G_losses, D_losses = [], [], []
iters = 0
for epoch in range(5):
    for i in range(60):
        netD.zero_grad()
        real = torch.rand(64, nc, 32, 32, device=device)
        label = torch.full((64, 1), 1.0, device=device)
        errD_real = criterion(netD(real), label)
        errD_real.backward()
        fake = netG(torch.randn(64, nz, 1, 1, device=device))
        label.fill_(0.0)
        errD_fake = criterion(netD(fake.detach()), label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1.0)
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()
        G_losses.append(errG.item())
        D_losses.append((errD_real + errD_fake).item())
        if iters % 2 == 0:
            img_list.append(netG(fixed_noise){CPU})
        iters += 1
""",
    ),
    {"CPU": ""},
    names("leak_or_retained_reference"),
    names("detach", "keep_on_host", "no_grad"),
    {"detach": put(CPU=".detach().cpu()")},
)

NOTEBOOKS["small project with a script"] = Notebook(
    ("import torch\nfrom seg.net import UNet", "%run fit.py --crop {S} --batch {B} --width 32 --amp"),
    {"B": 24, "S": 256},
    FILLED,
    STEP,
    {"smaller_batch": after("B")},
    files={
        "seg/__init__.py": "",
        "seg/net.py": """import torch
from torch import nn
def double(i, o): return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.SiLU(), nn.Conv2d(o, o, 3, padding=1), nn.GroupNorm(8, o), nn.SiLU())
class UNet(nn.Module):
    def __init__(self, width=32, depth=3, classes=4):
        super().__init__()
        sizes = [width * 2 ** k for k in range(depth + 1)]
        self.down = nn.ModuleList(double(i, o) for i, o in zip([3, *sizes], sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * s, s, 2, 2) for s in reversed(sizes[:-1]))
        self.merge = nn.ModuleList(double(2 * s, s) for s in reversed(sizes[:-1]))
        self.head = nn.Conv2d(width, classes, 1)
    def forward(self, x):
        skips = []
        for block in self.down[:-1]:
            x = block(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.down[-1](x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips)):
            x = merge(torch.cat([up(x), skip], 1))
        return self.head(x)
""",
        "seg/loop.py": """import torch
from torch.nn import functional as F
def one_epoch(net, opt, scaler, args, steps=3):
    net.train()
    total = 0.0
    for _ in range(steps):
        image = torch.rand(args.batch, 3, args.crop, args.crop).cuda(non_blocking=True)
        target = torch.randint(0, 4, (args.batch, args.crop, args.crop)).cuda(non_blocking=True)
        with torch.amp.autocast("cuda", enabled=args.amp, dtype=torch.float16):
            loss = F.cross_entropy(net(image), target)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        total += loss.item()
    return total / steps
""",
        "fit.py": """import argparse
import torch
from seg.net import UNet
from seg.loop import one_epoch
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--crop", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--amp", action="store_true")
    args = parser.parse_args()
    net = UNet(args.width).cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    for epoch in range(2):
        print(epoch, one_epoch(net, opt, scaler, args))
if __name__ == "__main__":
    main()
""",
    },
)

NOTEBOOKS["teacher in a trainer's loss"] = Notebook(
    (
        """
import torch, torch.nn as nn, torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
torch.manual_seed(0)
big = BertConfig(hidden_size=512, num_hidden_layers=10, num_attention_heads=8, intermediate_size=2048, vocab_size=8000, num_labels=4)
small = BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, vocab_size=8000, num_labels=4)
teacher = BertForSequenceClassification(big).cuda()
teacher.eval()
student = BertForSequenceClassification(small)
class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 512
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return {"input_ids": torch.randint(5, 8000, (256,), generator=g), "attention_mask": torch.ones(256, dtype=torch.long), "labels": i % 4}
class DistillTrainer(Trainer):
    def __init__(self, *args, teacher=None, temperature=2.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher, self.temperature = teacher, temperature
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs)
        {FROZEN}t = self.teacher(**inputs)
        T = self.temperature
        kd = F.kl_div(F.log_softmax(out.logits / T, -1), F.softmax(t.logits / T, -1), reduction="batchmean") * T * T
        loss = 0.5 * out.loss + 0.5 * kd
        return (loss, out) if return_outputs else loss
""",
        """
args = TrainingArguments("out", per_device_train_batch_size=32, max_steps=4, report_to=[], save_strategy="no", dataloader_pin_memory=False, disable_tqdm=True)
trainer = DistillTrainer(model=student, args=args, train_dataset=Texts(), teacher=teacher)
trainer.train()
""",
    ),
    {"FROZEN": ""},
    FILLED,
    names("no_grad"),
    {"no_grad": put(FROZEN="with torch.no_grad(): ")},
    reads_values=True,
)
