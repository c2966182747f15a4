"""Notebooks with the habits of users at their sizes for a physical GPU, whose loops, masks and searches read real values."""

from __future__ import annotations

from tests.gpu.notebooks.library_device_notebooks import DEVICE_NOTEBOOKS, EARLIER, filled, other
from tests.gpu.notebooks.notebook_cases import FILLED, STEP, names

__all__ = ["DEVICE_NOTEBOOKS", "EARLIER"]
_TORCH = "import torch, torch.nn as nn, torch.nn.functional as F\n"
_LEAK = names("leak_or_retained_reference")

filled(
    "own attention, settings in a dataclass",
    """
import argparse, math
from dataclasses import dataclass
import torch, torch.nn as nn
from torch.nn import functional as F

@dataclass
class TrainConfig:
    batch_size: int = 4
    block_size: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.1
    learning_rate: float = 6e-4
    max_iters: int = 3

class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.attn_dropout, self.resid_dropout = nn.Dropout(config.dropout), nn.Dropout(config.dropout)
        self.n_head, self.n_embd = config.n_head, config.n_embd
        mask = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("bias", mask.view(1, 1, config.block_size, config.block_size))
    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.c_attn(x).split(self.n_embd, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))

class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.mlp = nn.Sequential(nn.Linear(config.n_embd, 4 * config.n_embd), nn.GELU(), nn.Linear(4 * config.n_embd, config.n_embd))
    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):
    def __init__(self, config, vocab_size=50304):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, config.n_embd), nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(config.n_embd), nn.Linear(config.n_embd, vocab_size, bias=False)
    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
""",
    """
class Trainer:
    def __init__(self, config, model):
        self.config, self.model = config, model.to("cuda")
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))
    def get_batch(self):
        data = torch.randint(0, 50257, (self.config.batch_size, self.config.block_size + 1))
        return data[:, :-1].to("cuda"), data[:, 1:].to("cuda")
    def run(self):
        self.model.train()
        for iter_num in range(self.config.max_iters):
            x, y = self.get_batch()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits, loss = self.model(x, y)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            if loss.item() < 0.1:
                break

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=16)
args = parser.parse_args([])
cfg = TrainConfig(**vars(args))
trainer = Trainer(cfg, GPT(cfg))
""",
    "trainer.run()",
)

other(
    "history of scores",
    _LEAK,
    names("keep_on_host"),
    _TORCH
    + """
from collections import defaultdict
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
n_items = 60_000
sessions, clicks = torch.randint(1, n_items, (80_000, 20)), torch.randint(1, n_items, (80_000,))
loader = DataLoader(TensorDataset(sessions, clicks), batch_size=512, shuffle=True)

class NextItem(nn.Module):
    def __init__(self, d=128):
        super().__init__()
        self.items = nn.Embedding(n_items, d, padding_idx=0)
        self.gru = nn.GRU(d, d, batch_first=True)
    def forward(self, x):
        _, h = self.gru(self.items(x))
        return h[-1] @ self.items.weight.T
""",
    """
model = NextItem().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
history = defaultdict(list)
""",
    """
for epoch in range(2):
    pbar = tqdm(loader, desc=f"epoch {epoch}", disable=True)
    for x, y in pbar:
        x, y = x.cuda(), y.cuda()
        scores = model(x)
        loss = F.cross_entropy(scores, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history["loss"].append(loss.item())
        history["scores"].append(scores.detach())
        history["target"].append(y)
        pbar.set_postfix(loss=loss.item())
    hit = (torch.cat(history["scores"]).topk(20).indices == torch.cat(history["target"])[:, None]).any(1).float().mean()
    history["hit@20"].append(hit.item())
""",
)

other(
    "teacher inside the module",
    FILLED | _LEAK,
    STEP | {"no_grad"},
    _TORCH
    + """
from torchvision.models import resnet18, resnet101

class Distiller(nn.Module):
    def __init__(self, teacher, student, T=4.0, alpha=0.7):
        super().__init__()
        self.teacher, self.student, self.T, self.alpha = teacher, student, T, alpha
    def forward(self, x, y):
        teacher_logits = self.teacher(x)
        student_logits = self.student(x)
        soft = F.kl_div(F.log_softmax(student_logits / self.T, 1), F.softmax(teacher_logits.detach() / self.T, 1), reduction="batchmean")
        return self.alpha * self.T ** 2 * soft + (1 - self.alpha) * F.cross_entropy(student_logits, y)
""",
    """
distiller = Distiller(resnet101(num_classes=100), resnet18(num_classes=100)).to("cuda")
optimizer = torch.optim.SGD(distiller.parameters(), lr=0.05, momentum=0.9)
batch_size = 160
distiller.train()
losses = []
for i in range(3):
    x, y = torch.randn(batch_size, 3, 224, 224, device="cuda"), torch.randint(0, 100, (batch_size,), device="cuda")
    loss = distiller(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
""",
)

_EXPERIMENT = """
model = T5ForConditionalGeneration(T5Config(d_model=1024, d_ff=4096, num_layers=12, num_heads=16, vocab_size=32128,
                                             decoder_start_token_id=0)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr={LR})
sched = get_linear_schedule_with_warmup(optimizer, 2, 10)
for step in range(3):
    src, tgt = torch.randint(2, 32000, (8, 256), device="cuda"), torch.randint(2, 32000, (8, 64), device="cuda")
    loss = model(input_ids=src, labels=tgt).loss
    loss.backward()
    optimizer.step(); sched.step(); optimizer.zero_grad()
experiments["{NAME}"] = {"model": model, "optimizer": optimizer, "loss": loss.item()}
"""

other(
    "experiments of earlier cells",
    _LEAK | FILLED | names("optimizer_state", "weights_too_big"),
    names("drop_copy"),
    "import torch\nfrom transformers import T5Config, T5ForConditionalGeneration, get_linear_schedule_with_warmup\nexperiments = {}",
    _EXPERIMENT.replace("{LR}", "1e-3").replace("{NAME}", "lr 1e-3"),
    _EXPERIMENT.replace("{LR}", "3e-4").replace("{NAME}", "lr 3e-4"),
    _EXPERIMENT.replace("{LR}", "1e-4").replace("{NAME}", "lr 1e-4"),
)

filled(
    "search for a batch size",
    _TORCH
    + """
import gc
from transformers import RobertaConfig, RobertaForSequenceClassification
model = RobertaForSequenceClassification(RobertaConfig(vocab_size=50265, num_labels=2, max_position_embeddings=514)).cuda()

def fits(batch_size, length=128):
    try:
        ids = torch.randint(3, 50265, (batch_size, length), device="cuda")
        model(input_ids=ids, labels=torch.zeros(batch_size, dtype=torch.long, device="cuda")).loss.backward()
        return True
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        model.zero_grad(set_to_none=True)
        gc.collect(); torch.cuda.empty_cache()
""",
    """
bs = 1024
while not fits(bs):
    bs //= 2
print("batch size", bs)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
model.train()
for step in range(3):
    n = torch.randint(100, 257, (bs,))
    n[0] = 256
    attention_mask = (torch.arange(256)[None] < n[:, None]).long().cuda()
    ids = torch.randint(3, 50265, (bs, 256), device="cuda").masked_fill(attention_mask == 0, 1)
    labels = torch.randint(0, 2, (bs,), device="cuda")
    loss = model(input_ids=ids, attention_mask=attention_mask, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
)

other(
    "running sum of validation losses",
    _LEAK | FILLED,
    names("no_grad", "detach"),
    _TORCH
    + """
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import efficientnet_b0
def pictures(n): return TensorDataset(torch.rand(n, 3, 192, 192), torch.randint(0, 50, (n,)))
train_loader = DataLoader(pictures(96), batch_size=32, shuffle=True)
val_loader = DataLoader(pictures(960), batch_size=48)
net = efficientnet_b0(num_classes=50).cuda()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3, momentum=0.9)
""",
    """
best_val = float("inf")
for epoch in range(2):
    net.train()
    train_loss = 0.0
    for x, y in train_loader:
        x, y = x.cuda(), y.cuda()
        optimizer.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
    net.eval()
    val_loss = 0.0
    for x, y in val_loader:
        x, y = x.cuda(), y.cuda()
        val_loss += criterion(net(x), y)
    val_loss /= len(val_loader)
    if val_loss < best_val:
        best_val = val_loss
    print(epoch, train_loss / len(train_loader), val_loss)
""",
)

other(
    "scores of generated tokens",
    _LEAK | FILLED,
    names("keep_on_host", "smaller_evaluation", "dropped_outputs", "smaller_batch"),
    _TORCH
    + """
from transformers import Qwen2Config, Qwen2ForCausalLM
qwen = Qwen2ForCausalLM(Qwen2Config(hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=16,
                                    num_key_value_heads=4, vocab_size=64000)).to("cuda", torch.bfloat16).eval()
prompts = [torch.randint(10, 64000, (20 + 7 * i % 60,)) for i in range(1024)]

def left_padded(rows, pad=0):
    longest = max(map(len, rows))
    ids = torch.stack([F.pad(row, (longest - len(row), 0), value=pad) for row in rows])
    return ids.cuda(), (ids != pad).long().cuda()
""",
    """
answers, confidences = [], []
for start in range(0, len(prompts), 64):
    ids, mask = left_padded(prompts[start:start + 64])
    out = qwen.generate(ids, attention_mask=mask, max_new_tokens=96, do_sample=True, top_k=50, eos_token_id=2, pad_token_id=0,
                        return_dict_in_generate=True, output_scores=True)
    answers.extend(out.sequences[:, ids.shape[1]:].tolist())
    confidences.append(torch.stack(out.scores, dim=1).softmax(-1))
""",
)

other(
    "copies of the best weights",
    _LEAK | names("weights_too_big", "optimizer_state"),
    names("keep_on_host", "keep_newest", "drop_copy"),
    _TORCH
    + """
import copy
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
lm = GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16)).cuda()
optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-4)
corpus = torch.randint(0, 500, (64, 256))
""",
    """
best, snapshots = float("inf"), []
for epoch in range(12):
    lm.train()
    for ids in corpus.split(8):
        ids = ids.cuda()
        loss = lm(input_ids=ids, labels=ids).loss
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    lm.eval()
    with torch.no_grad():
        val = lm(input_ids=corpus[:8].cuda(), labels=corpus[:8].cuda()).loss.item()
    if val < best:
        best = val
        snapshots.append(copy.deepcopy(lm.state_dict()))
print(len(snapshots), best)
""",
)

filled(
    "module written by a cell",
    """%%writefile finetuning.py
import torch
from torch.optim import AdamW

def tokens(batch_size, seq_len, vocab=128256):
    return torch.randint(0, vocab, (batch_size, seq_len))

def finetune(model, batch_size=16, seq_len=1024, lr=1e-5, steps=3, device="cuda"):
    model.to(device).train()
    optimizer = AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        batch = tokens(batch_size, seq_len).to(device)
        outputs = model(input_ids=batch, labels=batch)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(outputs.loss.item())
    return losses
""",
    """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from finetuning import finetune
config = LlamaConfig(hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12, num_key_value_heads=4,
                     vocab_size=128256, tie_word_embeddings=True)
small = LlamaForCausalLM(config).to(torch.bfloat16)
""",
    "losses = finetune(small)",
)
