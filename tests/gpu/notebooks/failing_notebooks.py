"""Notebooks that run out of memory, small ones on a small card: what is right to say, and how a remedy changes the cells."""

from __future__ import annotations

from tests.gpu.notebooks.notebook_cases import FILLED, HEAD, SMALL, STEP, Notebook, after, names, put, too_large_a_batch

NOTEBOOKS: dict[str, Notebook] = {}

NOTEBOOKS["plain loop"] = Notebook(
    (
        SMALL + "model = GPT2LMHeadModel(config)",
        "batch_size = {B}\nseq_len = {S}",
        """
model.cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(4):
    ids = torch.randint(0, 8192, (batch_size, seq_len), device="cuda")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    {"B": 32, "S": 512},
    FILLED,
    STEP,
    {"smaller_batch": after("B"), "shorter_sequences": after("S")},
)

NOTEBOOKS["function with defaults"] = Notebook(
    (
        SMALL
        + """
model = GPT2LMHeadModel(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
def train(steps=3, batch_size={B}, length={S}):
    for _ in range(steps):
        ids = torch.randint(0, 8192, (batch_size, length), device="cuda")
        optimizer.zero_grad()
        {CKPT}
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
""",
        "train()",
    ),
    {"B": 32, "S": 512, "CKPT": ""},
    FILLED,
    STEP,
    {"smaller_batch": after("B"), "shorter_sequences": after("S")},
)

NOTEBOOKS["trainer"] = Notebook(
    (
        SMALL
        + """
from transformers import Trainer, TrainingArguments
model = GPT2LMHeadModel(config)
class Data(torch.utils.data.Dataset):
    def __len__(self): return 256
    def __getitem__(self, i):
        ids = torch.arange(512) % 8192
        return dict(input_ids=ids, labels=ids)
args = TrainingArguments("out", per_device_train_batch_size={B}, max_steps=3, report_to=[], disable_tqdm=True,
                         save_strategy="no", {MORE})
trainer = Trainer(model=model, args=args, train_dataset=Data())
""",
        "trainer.train()",
    ),
    {"B": 32, "MORE": ""},
    FILLED,
    STEP,
    {
        "smaller_batch": after("B"),
        "checkpointing": put(
            MORE='gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}'
        ),
    },
    reads_values=True,
)

NOTEBOOKS["adapters"] = Notebook(
    (
        HEAD
        + """
from peft import LoraConfig, get_peft_model
config = LlamaConfig(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
                     num_key_value_heads=4, vocab_size=8192)
model = LlamaForCausalLM(config).to(torch.bfloat16)
""",
        """
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")).cuda()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for step in range(3):
    batch = torch.randint(0, 8192, ({B}, 512), device="cuda")
    out = model(input_ids=batch, labels=batch)
    out.loss.backward()
    optimizer.step(); optimizer.zero_grad()
""",
    ),
    {"B": 24},
    FILLED,
    STEP | {"dropped_outputs"},
    {"smaller_batch": after("B")},
)

NOTEBOOKS["leak"] = Notebook(
    (
        HEAD
        + """
net = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(4)), nn.Linear(1024, 10)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
history = []
""",
        """
for step in range(200):
    x = torch.randn(1024, 1024, device="cuda")
    loss = net(x).square().mean()
    history.append(loss{ITEM})
    if step % 4 == 3:
        optimizer.zero_grad(); loss.backward(retain_graph=True); optimizer.step()
""",
    ),
    {"ITEM": ""},
    names("leak_or_retained_reference"),
    names("detach"),
    {"detach": put(ITEM=".item()")},
)

NOTEBOOKS["collected outputs"] = Notebook(
    (
        HEAD
        + """
net = nn.Sequential(nn.Embedding(8192, 256), nn.Linear(256, 8192)).cuda()
def predict(batches=64):
    outputs = []
    net.eval()
    with torch.no_grad():
        for _ in range(batches):
            x = torch.randint(0, 8192, (4, 512), device="cuda")
            outputs.append(net(x){CPU})
    return outputs
""",
        "predictions = predict()",
    ),
    {"CPU": ""},
    names("leak_or_retained_reference"),
    names("keep_on_host"),
    {"keep_on_host": put(CPU=".cpu()")},
)

NOTEBOOKS["evaluation"] = Notebook(
    (
        SMALL + "model = GPT2LMHeadModel(config).cuda(); optimizer = torch.optim.AdamW(model.parameters())",
        """
def run_epoch(train_batch_size=4):
    for _ in range(3):
        ids = torch.randint(0, 8192, (train_batch_size, 512), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step(); optimizer.zero_grad()
@torch.no_grad()
def validate(valid_batch_size={B}):
    model.eval()
    total = 0
    for _ in range(2):
        ids = torch.randint(0, 8192, (valid_batch_size, 512), device="cuda")
        total += model(input_ids=ids, labels=ids).loss.item()
    return total
run_epoch(); print(validate())
""",
    ),
    {"B": 96},
    FILLED | {"request_alone_too_big"},
    names("smaller_evaluation"),
    {"smaller_evaluation": after("B")},
)

NOTEBOOKS["two models"] = Notebook(
    (
        HEAD
        + """
def build(layers): return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(layers)))
first_try = build(16).cuda()
first_optimizer = torch.optim.Adam(first_try.parameters())
first_try(torch.randn(8, 2048, device="cuda")).sum().backward(); first_optimizer.step()
""",
        "{DEL}",
        """
net = build(12).cuda()
optimizer = torch.optim.Adam(net.parameters())
for _ in range(2):
    net(torch.randn(64, 2048, device="cuda")).sum().backward()
    optimizer.step(); optimizer.zero_grad()
""",
    ),
    {"DEL": ""},
    names("leak_or_retained_reference"),
    names("drop_copy", "free_held"),
    {"drop_copy": put(DEL="del first_try, first_optimizer; import gc; gc.collect(); torch.cuda.empty_cache()")},
)

NOTEBOOKS["run twice"] = Notebook(
    (
        SMALL,
        "batch_size = 4",
        "{TRAIN}",
        "batch_size = {B}",
        "{TRAIN}",
    ),
    {
        "B": 48,
        "TRAIN": """%%time
model = GPT2LMHeadModel(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    ids = torch.randint(0, 8192, (batch_size, 512), device="cuda")
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    },
    FILLED,
    STEP | {"dropped_outputs"},
    {"smaller_batch": after("B")},
)

NOTEBOOKS["another process"] = Notebook(
    (
        SMALL,
        """
model = GPT2LMHeadModel(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    ids = torch.randint(0, 8192, (8, 512), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step(); optimizer.zero_grad()
""",
    ),
    {},
    names("other_process"),
    names("close_processes"),
    others_mib=1400,
)

NOTEBOOKS["line form"] = too_large_a_batch(
    (
        SMALL
        + """
from my_training import fit
model = GPT2LMHeadModel(config).cuda()
""",
        "%gpumem --no-plot fit(model, batch_size={B})",
    ),
    {"B": 48},
    files={
        "my_training.py": """
import torch
def fit(model, batch_size, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        ids = torch.randint(0, 8192, (batch_size, 512), device="cuda")
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    },
)

NOTEBOOKS["script"] = Notebook(
    ("import torch", "%run train.py"),
    {},
    FILLED,
    STEP,
    files={
        "train.py": SMALL
        + """
batch_size = 48
def main():
    model = GPT2LMHeadModel(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(3):
        ids = torch.randint(0, 8192, (batch_size, 512), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
if __name__ == "__main__":
    main()
"""
    },
)

NOTEBOOKS["trainer that evaluates"] = Notebook(
    (
        SMALL
        + """
from transformers import Trainer, TrainingArguments
class Data(torch.utils.data.Dataset):
    def __len__(self): return 128
    def __getitem__(self, i):
        ids = torch.arange(512) % 8192
        return dict(input_ids=ids, labels=ids)
args = TrainingArguments("out", per_device_train_batch_size=4, per_device_eval_batch_size={E}, max_steps=2,
                         eval_strategy="steps", eval_steps=1, report_to=[], disable_tqdm=True, save_strategy="no")
trainer = Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Data(), eval_dataset=Data())
""",
        "trainer.train()",
    ),
    {"E": 64},
    FILLED | {"request_alone_too_big"},
    names("smaller_evaluation"),
    {"smaller_evaluation": after("E")},
    reads_values=True,
)

NOTEBOOKS["class that trains"] = too_large_a_batch(
    (
        SMALL
        + """
class Fitter:
    def __init__(self, model, batch_size=8, lr=1e-4):
        self.model, self.batch_size = model.cuda(), batch_size
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.losses = []
    def batches(self, number):
        for _ in range(number):
            yield torch.randint(0, 8192, (self.batch_size, 512), device="cuda")
    def fit(self, steps=3):
        for ids in self.batches(steps):
            loss = self.model(input_ids=ids, labels=ids).loss
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
""",
        "fitter = Fitter(GPT2LMHeadModel(config), batch_size={B})",
        "fitter.fit()",
    ),
    {"B": 48},
)

NOTEBOOKS["module with a runner"] = too_large_a_batch(
    (
        SMALL
        + """
class LitModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = GPT2LMHeadModel(config)
    def training_step(self, batch, index):
        return self.net(input_ids=batch, labels=batch).loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)
class Runner:
    def __init__(self, max_steps=3, accelerator="cuda"):
        self.max_steps, self.device = max_steps, torch.device(accelerator)
    def fit(self, module, loader):
        module.to(self.device)
        optimizer = module.configure_optimizers()
        for index, batch in enumerate(loader):
            if index == self.max_steps: break
            loss = module.training_step(batch.to(self.device), index)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
data = torch.zeros(512, 512, dtype=torch.long)
""",
        """
loader = torch.utils.data.DataLoader(data, batch_size={B}, shuffle=True)
lit = LitModel()
Runner().fit(lit, loader)
""",
    ),
    {"B": 48},
)

NOTEBOOKS["accelerate"] = too_large_a_batch(
    (
        SMALL
        + """
from accelerate import Accelerator
batch_size = {B}
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = torch.utils.data.DataLoader(torch.zeros(512, 512, dtype=torch.long), batch_size=batch_size)
""",
        """
accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, ids in enumerate(loader):
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step == 3: break
""",
    ),
    {"B": 48},
)

NOTEBOOKS["imported function, its defaults"] = Notebook(
    ("import torch, engine", "engine.run({ARGS})"),
    {"ARGS": ""},
    FILLED,
    STEP,
    {"smaller_batch": lambda before, remedy: {**before, "ARGS": f"batch_size={remedy['after']}"}},
    files={
        "engine.py": SMALL
        + """
def run(batch_size=48, steps=3, lr=1e-4):
    with torch.device("cuda"):
        model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        ids = torch.randint(0, 8192, (batch_size, 512), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    },
)

NOTEBOOKS["built on the device"] = too_large_a_batch(
    (
        SMALL
        + """
def train(model, batch_size={B}, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        ids = torch.randint(0, 8192, (batch_size, 512))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
""",
        """
torch.set_default_device("cuda")
with torch.device("cuda"):
    model = GPT2LMHeadModel(config)
train(model)
""",
    ),
    {"B": 48},
)

NOTEBOOKS["two cards"] = too_large_a_batch(
    (
        """
import torch, torch.nn as nn

def half(out):
    blocks = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(8)]
    return nn.Sequential(*blocks, nn.Linear(1024, out))

first, second = half(1024).to("cuda:0"), half(16384).to("cuda:1")
optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
batch_size = {B}
""",
        """
for _ in range(3):
    x = torch.randn(batch_size, 1024, device="cuda:0")
    target = torch.zeros(batch_size, dtype=torch.long, device="cuda:1")
    loss = nn.functional.cross_entropy(second(first(x).to("cuda:1")), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    {"B": 6144},
    num_cards=2,
)
