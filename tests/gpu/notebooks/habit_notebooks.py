"""Notebooks of other habits: tables of results, batches of different lengths, an optimizer whose state does not fit."""

from __future__ import annotations

from tests.gpu.notebooks.failing_notebooks import NOTEBOOKS
from tests.gpu.notebooks.notebook_cases import FILLED, HEAD, SMALL, Notebook, names, put, too_large_a_batch

NOTEBOOKS["table of metrics"] = Notebook(
    (
        HEAD
        + """
from collections import defaultdict
net = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(6)), nn.Linear(1024, 10)).cuda()
opt = torch.optim.Adam(net.parameters())
metrics = defaultdict(list)
""",
        """
for step in range(300):
    x = torch.randn(512, 1024, device="cuda"); y = torch.randint(0, 10, (512,), device="cuda")
    out = net(x)
    loss = F.cross_entropy(out, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    metrics["loss"].append(loss.item())
    metrics["correct"].append((out.argmax(1) == y).float().mean())
    metrics["logits"].append(net(x){CPU})
""",
    ),
    {"CPU": ""},
    names("leak_or_retained_reference"),
    names("detach"),
    {"detach": put(CPU=".detach().cpu()")},
)

NOTEBOOKS["attention maps kept"] = Notebook(
    (
        SMALL
        + """
eager = GPT2Config(n_embd=256, n_layer=6, n_head=8, vocab_size=8192, n_positions=512, attn_implementation="eager")
model = GPT2LMHeadModel(eager).cuda().eval()
maps = []
""",
        """
for number in range(12):
    ids = torch.randint(0, 8192, (4, 512), device="cuda")
    with torch.no_grad():
        out = model(ids, output_attentions=True)
    maps.append({MAPS})
""",
    ),
    {"MAPS": "out.attentions"},
    names("leak_or_retained_reference"),
    names("keep_on_host"),
    {"keep_on_host": put(MAPS="[one.cpu() for one in out.attentions]")},
)

NOTEBOOKS["state that does not fit"] = Notebook(
    (
        HEAD
        + """
class Recommender(nn.Module):
    def __init__(self, users=300_000, items=200_000, dim=256):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1)
rec = Recommender().cuda()
optimizer = torch.optim.{OPTIMIZER}(rec.parameters(), lr=1e-3)
""",
        """
for step in range(3):
    u, i = torch.randint(0, 1000, (2, 4096), device="cuda")
    loss = F.binary_cross_entropy_with_logits(rec(u, i), torch.ones(4096, device="cuda"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    {"OPTIMIZER": "Adam"},
    names("optimizer_state"),
    names("optimizer_8bit", "offload_optimizer"),
    {"sgd": put(OPTIMIZER="SGD"), "adafactor": put(OPTIMIZER="Adafactor")},
)

NOTEBOOKS["batches of different lengths"] = too_large_a_batch(
    (
        SMALL
        + """
model = GPT2LMHeadModel(config).cuda()
opt = torch.optim.AdamW(model.parameters())
batch_size = {B}
""",
        """
for length in [128, 384, 256, 512, 500]:
    ids = torch.randint(0, 8192, (batch_size, length), device="cuda")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
""",
    ),
    {"B": 32},
)

NOTEBOOKS["older model that is not all"] = Notebook(
    (
        HEAD
        + """
config = GPT2Config(n_embd=768, n_layer=8, n_head=12, vocab_size=16384, n_positions=512)
def make():
    with torch.device("cuda"):
        return GPT2LMHeadModel(config)
""",
        """
baseline = make()
opt_base = torch.optim.AdamW(baseline.parameters())
ids = torch.randint(0, 16384, (2, 512), device="cuda")
baseline(ids, labels=ids).loss.backward(); opt_base.step()
""",
        """
model = make()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    ids = torch.randint(0, 16384, (4, 512), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step(); optimizer.zero_grad()
""",
    ),
    {},
    names("leak_or_retained_reference"),
    names("combination"),
)

WHOLE = "llm.generate(prompts, attention_mask=torch.ones_like(prompts), **how)"
PART = "llm.generate(prompts[at:at + {after}], attention_mask=torch.ones_like(prompts[at:at + {after}]), **how)"

NOTEBOOKS["generation in one call"] = Notebook(
    (
        HEAD
        + """
llm = LlamaForCausalLM(LlamaConfig(hidden_size=1024, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
                                   num_key_value_heads=8, vocab_size=8192)).cuda().half().eval()
prompts = torch.randint(3, 8192, (200, 128), device="cuda")
how = {"max_new_tokens": 400, "min_new_tokens": 400, "do_sample": False, "pad_token_id": 0}
""",
        "with torch.no_grad():\n    out = {OUT}",
    ),
    {"OUT": WHOLE},
    FILLED,
    names("smaller_evaluation"),
    {
        "smaller_evaluation": lambda before, remedy: {
            **before,
            "OUT": f"torch.cat([{PART.format(**remedy)} for at in range(0, 200, {remedy['after']})])",
        }
    },
)

NOTEBOOKS["several answers to each prompt"] = Notebook(
    (
        HEAD
        + """
llm = LlamaForCausalLM(LlamaConfig(hidden_size=1024, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
                                   num_key_value_heads=8, vocab_size=8192)).cuda().half().eval()
prompts = torch.randint(3, 8192, (64, 128), device="cuda")
how = {"max_new_tokens": 200, "min_new_tokens": 200, "do_sample": True, "num_return_sequences": 8, "pad_token_id": 0}
""",
        "out = {OUT}",
    ),
    {"OUT": WHOLE},
    FILLED,
    names("smaller_evaluation"),
    {
        "smaller_evaluation": lambda before, remedy: {
            **before,
            "OUT": f"torch.cat([{PART.format(**remedy)} for at in range(0, 64, {remedy['after']})])",
        }
    },
)

NOTEBOOKS["embeddings with their graphs"] = Notebook(
    (
        SMALL
        + """
class Embedder:
    def __init__(self):
        self.model = GPT2LMHeadModel(config).transformer.cuda().eval()
    def encode(self, texts, batch_size=64):
        out = []
        for start in range(0, len(texts), batch_size):
            ids = torch.stack([torch.full((256,), 5 + len(text)) for text in texts[start:start + batch_size]]).cuda()
            out.append(F.normalize(self.model(input_ids=ids).last_hidden_state.mean(1), dim=-1))
        return torch.cat(out)
embedder = Embedder()
texts = [f"document {i}" for i in range(1024)]
""",
        "{NG}embeddings = embedder.encode(texts, batch_size={B})\nscores = embeddings @ embeddings.T",
    ),
    {"B": 256, "NG": ""},
    FILLED | names("leak_or_retained_reference"),
    names("combination"),
    {"combination": lambda before, remedy: {"B": remedy["after"], "NG": "torch.set_grad_enabled(False); "}},
)

ENCODER = (
    SMALL
    + """
model = GPT2LMHeadModel(config).cuda().eval()
batches = torch.randint(0, 8192, (60, 32, 512))
"""
)

NOTEBOOKS["states collected and joined"] = Notebook(
    (
        ENCODER,
        """
hidden = []
with torch.no_grad():
    for ids in batches:
        hidden.append(model.transformer(ids.cuda()).last_hidden_state{CPU})
hidden = torch.cat(hidden)
print(hidden.mean().item())
""",
    ),
    {"CPU": ""},
    names("leak_or_retained_reference"),
    names("keep_on_host"),
    {"keep_on_host": put(CPU=".cpu()")},
)

NOTEBOOKS["states joined by a comprehension"] = Notebook(
    (
        ENCODER,
        """
@torch.no_grad()
def encode(batches):
    return torch.cat([model.transformer(ids.cuda()).last_hidden_state{CPU} for ids in batches])

hidden = encode(batches)
print(hidden.mean().item())
""",
    ),
    {"CPU": ""},
    names("leak_or_retained_reference"),
    names("keep_on_host"),
    {"keep_on_host": put(CPU=".cpu()")},
)

NOTEBOOKS["labels collected beside predictions"] = Notebook(
    (
        HEAD
        + """
from torch.utils.data import DataLoader, TensorDataset
seg = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 8, 3, padding=1)).cuda().eval()
val_loader = DataLoader(TensorDataset(torch.rand(400, 3, 256, 256), torch.randint(0, 8, (400, 256, 256))), batch_size=8)
def validate(model, loader):
    preds, targets = [], []
    with torch.no_grad():
        for img, mask in loader:
            img, mask = img.cuda(), mask.cuda()
            preds.append(torch.softmax(model(img), dim=1){CPU})
            targets.append(mask{CPU})
    preds = torch.cat(preds); targets = torch.cat(targets)
    return (preds.argmax(1) == targets).float().mean().item()
""",
        "print(validate(seg, val_loader))",
    ),
    {"CPU": ""},
    names("leak_or_retained_reference"),
    names("keep_on_host"),
    {"keep_on_host": put(CPU=".cpu()")},
)

NOTEBOOKS["graph as a sparse matrix"] = Notebook(
    (
        HEAD
        + """
N = 60000
adj = torch.sparse_coo_tensor(torch.randint(0, N, (2, 500000)), torch.ones(500000), (N, N)).coalesce().cuda()
feats, labels = torch.randn(N, 256).cuda(), torch.randint(0, 40, (N,)).cuda()
class GCN(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims, dims[1:]))
    def forward(self, x, adj):
        rows, columns = adj.indices()
        for lin in self.lins:
            x = F.relu(lin(x))
            x = torch.zeros_like(x).index_add_(0, rows, x[columns])
        return x
""",
        """
gcn = GCN((256, 256, 256, 40)).cuda()
opt = torch.optim.Adam(gcn.parameters(), lr=0.01)
for epoch in range(10):
    {WITH}
        loss = F.cross_entropy(gcn(feats, adj), labels)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    {"WITH": "if True:"},
    names("activations"),
    names("mixed_precision"),
    {"mixed_precision": put(WITH='with torch.autocast("cuda", dtype=torch.bfloat16):')},
)
