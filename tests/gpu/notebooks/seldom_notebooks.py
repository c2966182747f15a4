"""Notebooks of models that others lack: translation with arguments inside the trainer, GradScaler and convolutions, two
encoders, a recurrent model that fits itself, a leak into a dictionary of lists, outputs whose backward comes later, a text
in pieces with its state, a teacher in a function of the step, a generator with its critic, large embeddings, a
search for a batch size, and large crops."""

from __future__ import annotations

from tests.gpu.notebooks.failing_notebooks import NOTEBOOKS
from tests.gpu.notebooks.notebook_cases import FILLED, HEAD, SMALL, STEP, Notebook, after, names, put, too_large_a_batch

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
    names("smaller_batch", "combination"),
)

NOTEBOOKS["text in pieces"] = too_large_a_batch(
    (
        HEAD
        + """
vocabulary, width, layers = 10000, 640, 2
class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.drop = nn.Embedding(vocabulary, 400), nn.Dropout(0.3)
        self.rnn = nn.GRU(400, width, layers, dropout=0.3)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, x, h):
        out, h = self.rnn(self.drop(self.encoder(x)), h)
        return self.decoder(self.drop(out)), h

def batchify(data, bsz):
    return data[:data.size(0) // bsz * bsz].view(bsz, -1).t().contiguous().cuda()

def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)

corpus = torch.randint(0, vocabulary, (400_000,))
""",
        """
batch_size, bptt = {B}, 70
train_data = batchify(corpus, batch_size)
model = RNNModel().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=20)
hidden = torch.zeros(layers, batch_size, width, device="cuda")
for i in range(0, train_data.size(0) - 1, bptt):
    seq = min(bptt, train_data.size(0) - 1 - i)
    x, y = train_data[i:i + seq], train_data[i + 1:i + 1 + seq].reshape(-1)
    hidden = repackage_hidden(hidden)
    out, hidden = model(x, hidden)
    loss = F.cross_entropy(out.view(-1, vocabulary), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
""",
    ),
    {"B": 256},
)

NOTEBOOKS["teacher in a function of the step"] = Notebook(
    (
        HEAD
        + """
from transformers import BertConfig, BertForSequenceClassification
def classifier(width, layers, heads):
    return BertForSequenceClassification(BertConfig(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                                                    intermediate_size=4 * width, vocab_size=16000, num_labels=5)).cuda()
teacher = classifier(512, 8, 8).eval()
""",
        """
student = classifier(256, 4, 4)
opt = torch.optim.AdamW(student.parameters(), lr=1e-4)
temperature, alpha = 2.0, 0.5

def kd_step(ids, labels):
    {FROZEN}t_logits = teacher(input_ids=ids).logits
    s = student(input_ids=ids, labels=labels)
    kd = F.kl_div(F.log_softmax(s.logits / temperature, -1), F.softmax(t_logits / temperature, -1), reduction="batchmean")
    return alpha * s.loss + (1 - alpha) * temperature ** 2 * kd
""",
        """
student.train()
for step in range(4):
    ids, labels = torch.randint(0, 16000, (48, 256), device="cuda"), torch.randint(0, 5, (48,), device="cuda")
    loss = kd_step(ids, labels)
    opt.zero_grad(); loss.backward(); opt.step()
    print(step, loss.item())
""",
    ),
    {"FROZEN": ""},
    FILLED,
    names("no_grad"),
    {"no_grad": put(FROZEN="with torch.no_grad(): ")},
)

_AUTOCAST = 'with torch.autocast("cuda", dtype=torch.bfloat16): '

NOTEBOOKS["generator and critic"] = Notebook(
    (
        HEAD
        + """
def critic(c=64):
    return nn.Sequential(nn.Conv2d(3, c, 4, 2, 1), nn.LeakyReLU(.2), nn.Conv2d(c, 2 * c, 4, 2, 1), nn.LeakyReLU(.2),
                         nn.Conv2d(2 * c, 4 * c, 4, 2, 1), nn.LeakyReLU(.2), nn.Flatten(), nn.LazyLinear(1))

def up(a, b): return nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(True))

gen = nn.Sequential(nn.Linear(128, 8192), nn.Unflatten(1, (512, 4, 4)), up(512, 256), up(256, 128), up(128, 64), up(64, 64),
                    nn.Conv2d(64, 3, 3, padding=1), nn.Tanh()).cuda()
disc = critic().cuda()
disc(torch.zeros(1, 3, 64, 64, device="cuda"))
opt_g = torch.optim.Adam(gen.parameters(), 2e-4, betas=(.5, .999))
opt_d = torch.optim.Adam(disc.parameters(), 2e-4, betas=(.5, .999))
bce = nn.BCEWithLogitsLoss()
real_data = torch.rand(1024, 3, 64, 64)
""",
        """
batch_size = 256
for i in range(0, len(real_data), batch_size):
    real = real_data[i:i + batch_size].cuda()
    ones, zeros = torch.ones(len(real), 1, device="cuda"), torch.zeros(len(real), 1, device="cuda")
    z = torch.randn(len(real), 128, device="cuda")
    {AMP}fake = gen(z)
    opt_d.zero_grad()
    {AMP}d_loss = bce(disc(real), ones) + bce(disc(fake.detach()), zeros)
    d_loss.backward()
    opt_d.step()
    opt_g.zero_grad()
    {AMP}g_loss = bce(disc(fake), ones)
    g_loss.backward()
    opt_g.step()
""",
    ),
    {"AMP": ""},
    FILLED,
    names("mixed_precision"),
    {"mixed_precision": put(AMP=_AUTOCAST)},
)

NOTEBOOKS["recommender"] = Notebook(
    (
        HEAD
        + """
class Recommender(nn.Module):
    def __init__(self, users, items, width):
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.head = nn.Sequential(nn.Linear(2 * width, 256), nn.ReLU(), nn.Linear(256, 1))
    def forward(self, u, i):
        return self.head(torch.cat([self.users(u), self.items(i)], 1)).squeeze(1)
""",
        """
model = Recommender(500_000, 300_000, 256).cuda(){HALF}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    u, i = torch.randint(0, 500_000, (8192,), device="cuda"), torch.randint(0, 300_000, (8192,), device="cuda")
    loss = F.mse_loss(model(u, i), torch.rand(8192, device="cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    {"HALF": ""},
    names("weights_too_big"),
    names("half_weights"),
    {"half_weights": put(HALF=".to(torch.bfloat16)")},
)

NOTEBOOKS["search for a batch size"] = Notebook(
    (
        SMALL
        + """
model = GPT2LMHeadModel(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

def step(batch_size, seq_len=512):
    ids = torch.randint(0, 8192, (batch_size, seq_len), device="cuda")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

def find_batch_size(start=2, limit=256):
    batch_size = start
    while batch_size <= limit:
        try:
            step(batch_size)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            optimizer.zero_grad(set_to_none=True)
            return batch_size // 2
        batch_size *= 2
    return limit
""",
        "best = find_batch_size()",
        """
for i in range(10):
    step({B})
""",
    ),
    {"B": "best * 2"},
    FILLED,
    STEP,
    {"smaller_batch": after("B")},
)

NOTEBOOKS["large crops"] = too_large_a_batch(
    (
        HEAD
        + """
import random
from torch.utils.data import Dataset, DataLoader

def double(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
                         nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))

class UNet(nn.Module):
    def __init__(self, widths=(32, 64, 128, 256)):
        super().__init__()
        pairs = list(zip(widths, widths[1:]))
        self.first, self.last = double(3, widths[0]), nn.Conv2d(widths[0], 19, 1)
        self.down = nn.ModuleList(double(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairs)
        self.join = nn.ModuleList(double(2 * a, a) for a, _ in pairs)
    def forward(self, x):
        skips = [self.first(x)]
        for block in self.down:
            skips.append(block(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, block in zip(reversed(self.up), reversed(self.join)):
            x = block(torch.cat([up(x), skips.pop()], 1))
        return self.last(x)

class Crops(Dataset):
    def __len__(self): return 24
    def __getitem__(self, i):
        y, x = random.randint(0, 256), random.randint(0, 512)
        return torch.rand(3, 640, 1024)[:, y:y + 384, x:x + 384], torch.randint(0, 19, (640, 1024))[y:y + 384, x:x + 384]
""",
        """
model = UNet().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Crops(), batch_size={B}, shuffle=True, drop_last=True)
""",
        """
def dice(logits, target):
    p, t = logits.softmax(1), F.one_hot(target, 19).permute(0, 3, 1, 2).float()
    return 1 - (2 * (p * t).sum((0, 2, 3)) / (p.sum((0, 2, 3)) + t.sum((0, 2, 3)) + 1e-6)).mean()

for images, labels in loader:
    images, labels = images.cuda(), labels.cuda()
    logits = model(images)
    loss = F.cross_entropy(logits, labels, ignore_index=255) + dice(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    {"B": 12},
)
