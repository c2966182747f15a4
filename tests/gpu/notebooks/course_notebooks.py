"""Notebooks as courses and competitions have them: a perplexity over windows, models of folds, a large vocabulary."""

from __future__ import annotations

from tests.gpu.notebooks.failing_notebooks import NOTEBOOKS
from tests.gpu.notebooks.notebook_cases import FILLED, HEAD, Notebook, names, put, too_large_a_batch

NOTEBOOKS["perplexity over windows"] = Notebook(
    (
        HEAD
        + """
model = GPT2LMHeadModel(GPT2Config(n_embd=384, n_layer=6, n_head=6, vocab_size=30000)).to("cuda").eval()
encodings = torch.randint(0, 30000, (1, 20000))
""",
        """
max_length, stride = 1024, 512
seq_len = encodings.size(1)
nlls, prev_end_loc = [], 0
for begin_loc in range(0, seq_len, stride):
    end_loc = min(begin_loc + max_length, seq_len)
    trg_len = end_loc - prev_end_loc
    input_ids = encodings[:, begin_loc:end_loc].to("cuda")
    target_ids = input_ids.clone()
    target_ids[:, :-trg_len] = -100
    outputs = model(input_ids, labels=target_ids)
    neg_log_likelihood = outputs.loss
    nlls.append(neg_log_likelihood{CUT})
    prev_end_loc = end_loc
    if end_loc == seq_len:
        break
ppl = torch.exp(torch.stack(nlls).mean())
""",
    ),
    {"CUT": ""},
    names("leak_or_retained_reference"),
    names("detach"),
    {"detach": put(CUT=".detach()")},  # a number could not be stacked
)

NOTEBOOKS["models of folds"] = Notebook(
    (
        HEAD
        + """
rows = (50000, 80000, 120000)
class Tabular(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(count, dim) for count in rows)
        self.mlp = nn.Sequential(nn.Linear(3 * dim + 64, 1024), nn.ReLU(), nn.Linear(1024, 1))
    def forward(self, cat, cont):
        parts = [embed(cat[:, i]) for i, embed in enumerate(self.embeddings)]
        return self.mlp(torch.cat([*parts, cont], 1)).squeeze(1)
cat = torch.stack([torch.randint(0, count, (20000,)) for count in rows], 1)
cont, y = torch.randn(20000, 64), torch.rand(20000)
""",
        """
fold_of = torch.arange(20000) % 5
models, oof = [], torch.zeros(20000)
for fold in range(5):
    train, valid = (fold_of != fold).nonzero().squeeze(1), (fold_of == fold).nonzero().squeeze(1)
    model = Tabular().cuda()
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    for idx in train.split(4096):
        loss = F.binary_cross_entropy_with_logits(model(cat[idx].cuda(), cont[idx].cuda()), y[idx].cuda())
        opt.zero_grad(); loss.backward(); opt.step()
    model.eval()
    with torch.no_grad():
        for idx in valid.split(8192):
            oof[idx] = torch.sigmoid(model(cat[idx].cuda(), cont[idx].cuda())).cpu()
    models.append(model{MOVED})
""",
    ),
    {"MOVED": ""},
    names("leak_or_retained_reference"),
    names("keep_on_host"),
    {"keep_on_host": put(MOVED=".cpu()")},
)

_CHUNKED = """
from torch.utils.checkpoint import checkpoint
owner = model.base_model.model
head = owner.lm_head
def chunk_loss(hidden, targets):
    return F.cross_entropy(type(head).forward(head, hidden).float(), targets, reduction="sum")
def in_chunks(logits, labels, **options):
    hidden, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    parts = zip(hidden.split(256), targets.split(256))
    return sum(checkpoint(chunk_loss, *part, use_reentrant=False) for part in parts) / (targets != -100).sum()
head.forward = lambda hidden: hidden
owner.loss_function = in_chunks
"""
NOTEBOOKS["large vocabulary, all else set"] = Notebook(
    (
        HEAD
        + """
from peft import LoraConfig, get_peft_model
config = LlamaConfig(vocab_size=128256, hidden_size=512, intermediate_size=1408, num_hidden_layers=8,
                     num_attention_heads=8, num_key_value_heads=4)
base = LlamaForCausalLM(config).to(torch.bfloat16).cuda()
base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
base.enable_input_require_grads()
model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
docs = torch.randint(0, 128256, (100, 4096))
""",
        """
{CHUNKED}
max_len = {S}
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
model.train()
for step in range(20):
    ids = docs[step : step + 1, :max_len].cuda()
    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
""",
    ),
    {"S": 3072, "CHUNKED": ""},
    names("logits_or_loss"),
    names("chunked_loss"),
    {"chunked_loss": put(CHUNKED=_CHUNKED)},
    reads_values=True,
)

NOTEBOOKS["forecasts fed back, by rows of a number"] = too_large_a_batch(
    (
        HEAD
        + """
class Seq2Seq(nn.Module):
    def __init__(self, d=16, h=768):
        super().__init__()
        self.enc, self.cell, self.out = nn.Linear(d, h), nn.GRUCell(d, h), nn.Linear(h, d)
    def forward(self, x, steps):
        h, y, ys = self.enc(x[:, 0]), x[:, -1], []
        for _ in range(steps):
            h = self.cell(y, h)
            y = self.out(h)
            ys.append(y)
        return torch.stack(ys, 1)
series = torch.randn(8000, 400, 16)
net = Seq2Seq().cuda()
opt = torch.optim.Adam(net.parameters(), 1e-3)
""",
        """
horizon = 200
for i in range(0, 8000, {B}):
    b = series[i:i + {B}].cuda()
    x, y = b[:, :200], b[:, 200:200 + horizon]
    loss = F.mse_loss(net(x, horizon), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    {"B": 1000},
)

_IN_PARTS = "torch.cat([model(x_test[at:at + {after}].cuda()).argmax(1) for at in range(0, 10000, {after})])"
NOTEBOOKS["test set at once, in each epoch"] = Notebook(
    (
        HEAD
        + """
model = nn.Sequential(nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
                      nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 14 * 14, 10)).cuda()
x_train, y_train = torch.rand(6000, 1, 28, 28), torch.randint(0, 10, (6000,))
x_test, y_test = torch.rand(10000, 1, 28, 28), torch.randint(0, 10, (10000,))
opt = torch.optim.Adam(model.parameters())
""",
        """
for epoch in range(2):
    model.train()
    for i in range(0, 6000, 128):
        loss = F.cross_entropy(model(x_train[i:i+128].cuda()), y_train[i:i+128].cuda())
        opt.zero_grad(); loss.backward(); opt.step()
    model.eval()
    {NG}preds = {PREDS}
    torch.set_grad_enabled(True)
    print(epoch, (preds == y_test.cuda()).float().mean().item())
""",
    ),
    {"NG": "", "PREDS": "model(x_test.cuda()).argmax(1)"},
    FILLED,
    names("combination"),
    {
        "combination": lambda before, remedy: {
            "NG": "torch.set_grad_enabled(False); ",
            "PREDS": _IN_PARTS.replace("{after}", str(remedy["after"])),
        }
    },
)

NOTEBOOKS["rows of a number in a function of an earlier cell"] = too_large_a_batch(
    (
        HEAD
        + """
net = nn.Sequential(nn.Linear(1024, 8192), nn.ReLU(), nn.Linear(8192, 8192), nn.ReLU(), nn.Linear(8192, 1)).cuda()
X, y = torch.randn(60000, 1024), torch.randn(60000, 1)
opt = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
def train_one(net, X, y, opt):
    for i in range(0, len(X), {B}):
        loss = F.mse_loss(net(X[i:i+{B}].cuda()), y[i:i+{B}].cuda())
        opt.zero_grad(); loss.backward(); opt.step()
""",
        """
for epoch in range(2):
    train_one(net, X, y, opt)
""",
    ),
    {"B": 8192},
)

_NARROW = """
def narrow(module, args):
    return tuple(one.to(torch.bfloat16) for one in args)
net.to(torch.bfloat16).register_forward_pre_hook(narrow)
"""
NOTEBOOKS["wide weights and float32 rows"] = Notebook(
    (
        HEAD
        + """
net = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1)).cuda()
{NARROW}
opt = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
""",
        """
for step in range(4):
    x = torch.randn(24000, 1024).cuda()
    loss = net(x).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    {"NARROW": ""},
    FILLED,
    names("half_weights", "smaller_batch"),
    {"half_weights": put(NARROW=_NARROW)},
)

NOTEBOOKS["runs that a function returns whole"] = Notebook(
    (
        HEAD
        + """
def on_host(run):
    run["model"].cpu()
    run["opt"].load_state_dict(run["opt"].state_dict())
    return run
def run_experiment(seed, dim=512, bs=24):
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(dim, 8, 4 * dim, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda()
    opt = torch.optim.AdamW(model.parameters(), 1e-4)
    for step in range(5):
        x = torch.randn(bs, 128, dim, device="cuda")
        loss = (model(x) - x).square().mean()
        loss.backward(); opt.step(); opt.zero_grad()
    return {"seed": seed, "model": model, "opt": opt}
""",
        """
runs = []
for seed in range(8):
    runs.append({KEPT}(run_experiment(seed)))
""",
    ),
    {"KEPT": ""},
    names("leak_or_retained_reference"),
    names("keep_on_host"),
    {"keep_on_host": put(KEPT="on_host")},
)
