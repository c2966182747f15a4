"""Notebooks of models that others lack: translation with arguments inside the trainer, GradScaler and convolutions, two
encoders, a recurrent model that fits itself, a leak into a dictionary of lists, and outputs whose backward comes later."""

from __future__ import annotations

from failing_notebooks import NOTEBOOKS
from notebook_cases import HEAD, SMALL, Notebook, names, too_large_a_batch

NOTEBOOKS["arguments inside a trainer"] = too_large_a_batch(
    (
        """import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration
model = T5ForConditionalGeneration(T5Config(d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_heads=4, vocab_size=16384,
                                            decoder_start_token_id=0))
pairs = [{"input_ids": torch.randint(2, 16384, (128,)), "labels": torch.randint(2, 16384, (128,))} for _ in range(4096)]
""",
        """
trainer = Seq2SeqTrainer(model, args=Seq2SeqTrainingArguments("out", per_device_train_batch_size={B}, max_steps=3,
                         report_to=[], disable_tqdm=True, save_strategy="no", learning_rate=3e-4), train_dataset=pairs)
""",
        "trainer.train()",
    ),
    {"B": 128},
)

NOTEBOOKS["scaled convolutions"] = too_large_a_batch(
    (
        HEAD
        + """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm(self.mix(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)

net = nn.Sequential(nn.Conv2d(3, 96, 4, 4), *[Block(96) for _ in range(3)], nn.Conv2d(96, 192, 2, 2),
                    *[Block(192) for _ in range(3)], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 100)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.05)
scaler = torch.amp.GradScaler("cuda")
""",
        """
BATCH = {B}
for i in range(4):
    images = torch.rand(BATCH, 3, 128, 128, device="cuda")
    labels = torch.zeros(BATCH, dtype=torch.long, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(net(images), labels, label_smoothing=0.1)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
""",
    ),
    {"B": 160},
)

NOTEBOOKS["two encoders"] = too_large_a_batch(
    (
        """import torch
from transformers import CLIPConfig, CLIPModel
clip = CLIPModel(CLIPConfig(text_config={"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6,
                                         "num_attention_heads": 4, "vocab_size": 16384},
                            vision_config={"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6,
                                           "num_attention_heads": 4, "image_size": 112, "patch_size": 16})).to("cuda")
opt = torch.optim.AdamW(clip.parameters(), lr=1e-5)
""",
        """
pairs_per_step = {B}
for step in range(3):
    batch = {"input_ids": torch.randint(1, 16000, (pairs_per_step, 64), device="cuda"),
             "pixel_values": torch.rand(pairs_per_step, 3, 112, 112, device="cuda")}
    out = clip(**batch, return_loss=True)
    out.loss.backward()
    opt.step()
    opt.zero_grad()
""",
    ),
    {"B": 384},
)

NOTEBOOKS["recurrent model that fits itself"] = too_large_a_batch(
    (
        HEAD
        + """
class Language(nn.Module):
    def __init__(self, vocabulary=20000, width=512):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        hidden, _ = self.lstm(self.embed(ids))
        return self.head(hidden)

    def fit(self, tokens, batch_size=32, epochs=1, lr=1e-3):
        optimizer = torch.optim.Adam(self.parameters(), lr=lr)
        for epoch in range(epochs):
            for ids in tokens.split(batch_size):
                ids = ids.to("cuda")
                logits = self(ids[:, :-1])
                loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

tokens = torch.randint(0, 20000, (1024, 129))
""",
        "lm = Language().cuda()\nlm.fit(tokens, batch_size={B})",
    ),
    {"B": 128},
)

NOTEBOOKS["leak into a dictionary of lists"] = Notebook(
    (
        SMALL + "model = GPT2LMHeadModel(config).cuda()\noptim = torch.optim.AdamW(model.parameters())",
        """
history = {"loss": [], "logits": []}
for step in range(200):
    ids = torch.randint(0, 8192, (4, 256), device="cuda")
    out = model(ids, labels=ids)
    out.loss.backward()
    optim.step(); optim.zero_grad()
    history["loss"].append(out.loss.item())
    history["logits"].append(out.logits)
""",
    ),
    {},
    names("leak_or_retained_reference"),
    names("detach"),
)

NOTEBOOKS["outputs whose backward comes later"] = Notebook(
    (
        HEAD
        + """
vae = nn.ModuleDict({"enc": nn.Sequential(nn.Linear(4096, 8192), nn.ReLU(), nn.Linear(8192, 512)),
                     "dec": nn.Sequential(nn.Linear(256, 8192), nn.ReLU(), nn.Linear(8192, 4096))}).cuda()
opt = torch.optim.Adam(vae.parameters(), lr=1e-3)
""",
        """
batch_size = {B}
x = torch.rand(batch_size, 4096, device="cuda")
mu, logvar = vae["enc"](x).chunk(2, dim=1)
z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
recon = vae["dec"](z)
recon = torch.sigmoid(recon)
""",
    ),
    {"B": 12288},
    names("activations"),
    names("smaller_batch"),
)
