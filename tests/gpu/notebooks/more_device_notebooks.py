"""More notebooks at sizes of users for a physical GPU: what is kept, what grows, and what earlier cells hold."""

from __future__ import annotations

from tests.gpu.notebooks.device_notebooks import DEVICE_NOTEBOOKS, filled, other
from tests.gpu.notebooks.notebook_cases import FILLED, names

__all__ = ["DEVICE_NOTEBOOKS"]
_TORCH = "import torch, torch.nn as nn, torch.nn.functional as F\n"
_LEAK = names("leak_or_retained_reference")

other(
    "tokens written one by one",
    FILLED | _LEAK,
    names("smaller_batch", "shorter_sequences", "half_weights", "smaller_evaluation"),
    _TORCH
    + """
from transformers import GPT2Config, GPT2LMHeadModel
writer = GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16)).cuda().eval()
prompts = torch.randint(0, 50257, (192, 32))
""",
    """
n_samples, new_tokens = 192, 700
with torch.no_grad():
    ids = prompts[:n_samples].cuda()
    past, out = None, []
    for _ in range(new_tokens):
        r = writer(input_ids=ids, past_key_values=past, use_cache=True)
        past = r.past_key_values
        ids = r.logits[:, -1].argmax(-1, keepdim=True)
        out.append(ids.cpu())
texts = torch.cat(out, 1)
""",
)

filled(
    "reviews of any length",
    _TORCH
    + """
import random
from torch.utils.data import DataLoader
from torch.nn.utils.rnn import pad_sequence
from transformers import RobertaConfig, RobertaForSequenceClassification
random.seed(0)
reviews = [(torch.randint(5, 50000, (random.randint(20, 500),)), random.randint(0, 1)) for _ in range(4000)]
def collate(rows):
    ids = pad_sequence([r[0] for r in rows], batch_first=True, padding_value=1)
    return {'input_ids': ids, 'attention_mask': (ids != 1).long(), 'labels': torch.tensor([r[1] for r in rows])}
roberta = RobertaForSequenceClassification(RobertaConfig(vocab_size=50265, max_position_embeddings=514)).cuda()
""",
    """
batch_size = 80
train_loader = DataLoader(reviews, batch_size=batch_size, shuffle=True, collate_fn=collate)
optim = torch.optim.AdamW(roberta.parameters(), lr=2e-5)
roberta.train()
for step, batch in enumerate(train_loader, 1):
    batch = {k: v.to('cuda') for k, v in batch.items()}
    loss = roberta(**batch).loss
    loss.backward()
    optim.step()
    optim.zero_grad()
    if step == 12:
        break
""",
)

filled(
    "adapters",
    _TORCH
    + """
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM
base = Qwen2ForCausalLM(Qwen2Config(hidden_size=1536, intermediate_size=8960, num_hidden_layers=14,
                                    num_attention_heads=12, num_key_value_heads=2)).to('cuda', torch.bfloat16)
model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=['q_proj', 'v_proj'], task_type='CAUSAL_LM'))
""",
    """
micro_bs, ctx = 8, 1024
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
for it in range(4):
    x = torch.randint(0, 150000, (micro_bs, ctx), device='cuda')
    loss = model(input_ids=x, labels=x).loss
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
""",
)

filled(
    "teacher and student",
    _TORCH
    + """
from transformers import BertConfig, BertForMaskedLM
teacher = BertForMaskedLM(BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)).cuda()
student = BertForMaskedLM(BertConfig(num_hidden_layers=6)).cuda()
""",
    """
T, bs, length = 2.0, 48, 256
opt = torch.optim.AdamW(student.parameters(), lr=1e-4)
for step in range(4):
    ids = torch.randint(0, 30000, (bs, length), device='cuda')
    soft = teacher(input_ids=ids).logits
    logits = student(input_ids=ids).logits
    kd = F.kl_div(F.log_softmax(logits / T, -1), F.softmax(soft / T, -1), reduction='batchmean') * T * T
    opt.zero_grad()
    kd.backward()
    opt.step()
""",
)

other(
    "rollouts kept",
    FILLED | _LEAK,
    names("detach", "no_grad", "dropped_outputs", "smaller_batch", "cpu"),
    _TORCH
    + """
class Policy(nn.Module):
    def __init__(self, c=4, n=6):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(c, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
                                  nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU())
        self.pi, self.v = nn.Linear(512, n), nn.Linear(512, 1)
    def forward(self, x):
        h = self.body(x)
        return torch.distributions.Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)
policy = Policy().cuda()
adam = torch.optim.Adam(policy.parameters(), lr=2.5e-4)
""",
    """
n_envs, horizon = 768, 160
for update in range(2):
    logps, values, rewards = [], [], []
    obs = torch.rand(n_envs, 4, 84, 84, device='cuda')
    for t in range(horizon):
        dist, value = policy(obs)
        action = dist.sample()
        logps.append(dist.log_prob(action)); values.append(value)
        obs, reward = torch.rand(n_envs, 4, 84, 84, device='cuda'), torch.rand(n_envs, device='cuda')
        rewards.append(reward)
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    adv = returns - torch.stack(values)
    loss = -(torch.stack(logps) * adv.detach()).mean() + 0.5 * adv.pow(2).mean()
    adam.zero_grad(); loss.backward(); adam.step()
""",
)

filled(
    "speech",
    _TORCH
    + """
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC
asr = Wav2Vec2ForCTC(Wav2Vec2Config(vocab_size=32, ctc_loss_reduction='mean', ctc_zero_infinity=True)).cuda()
asr.freeze_feature_encoder()
""",
    """
clips, seconds = 64, 12
optimizer = torch.optim.AdamW(asr.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler()
asr.train()
for i in range(4):
    wave = torch.randn(clips, 16000 * seconds, device='cuda')
    text = torch.randint(1, 32, (clips, 60), device='cuda')
    with torch.autocast('cuda', torch.float16):
        loss = asr(wave, labels=text).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
""",
)

other(
    "search over a corpus",
    FILLED | names("request_alone_too_big"),
    names("smaller_batch", "half_weights", "mixed_precision", "smaller_evaluation"),
    _TORCH
    + """
queries = torch.randn(20_000, 768, device='cuda')
corpus = torch.randn(400_000, 768, device='cuda')
""",
    """
chunk = 10_000
best = []
for start in range(0, len(queries), chunk):
    q = F.normalize(queries[start:start + chunk], dim=-1)
    scores = q @ F.normalize(corpus, dim=-1).T
    best.append(scores.topk(10, dim=-1).indices.cpu())
""",
)
