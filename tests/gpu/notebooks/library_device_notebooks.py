"""Notebooks of libraries at sizes of users for a physical GPU: Trainer, accelerate, Lightning, timm, graphs, sentences, speech."""

from __future__ import annotations

from tests.gpu.notebooks.more_device_notebooks import DEVICE_NOTEBOOKS, filled, other
from tests.gpu.notebooks.notebook_cases import FILLED, STEP, names

__all__ = ["DEVICE_NOTEBOOKS", "EARLIER", "filled", "other"]
_TORCH = "import torch, torch.nn as nn, torch.nn.functional as F\n"
_LEAK = names("leak_or_retained_reference")
EARLIER = frozenset(DEVICE_NOTEBOOKS)  # those of the files before

filled(
    "masked words, accumulated by accelerate",
    _TORCH
    + """
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup
lengths = torch.randint(200, 385, (2048,)).tolist()
lines = [torch.randint(5, 30522, (n,)) for n in lengths]

def collate(rows):
    ids = pad_sequence(rows, batch_first=True)
    mask = (ids != 0).long()
    hidden = (torch.rand(ids.shape) < 0.15) & mask.bool()
    return {"input_ids": ids.masked_fill(hidden, 4), "attention_mask": mask, "labels": ids.masked_fill(~hidden, -100)}
""",
    """
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
model = BertForMaskedLM(BertConfig())
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
train_dataloader = DataLoader(lines, batch_size=96, shuffle=True, collate_fn=collate)
lr_scheduler = get_linear_schedule_with_warmup(optimizer, 10, 100)
model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(model, optimizer, train_dataloader, lr_scheduler)
""",
    """
model.train()
total_loss = 0
for step, batch in enumerate(train_dataloader):
    with accelerator.accumulate(model):
        outputs = model(**batch)
        loss = outputs.loss
        total_loss += loss.detach().float()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
    if step == 11:
        break
""",
)

other(
    "metrics of a trainer, padded",
    FILLED | _LEAK,
    names("eval_accumulation", "smaller_evaluation", "preprocess_logits"),
    """
import numpy as np, torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

class Lines(torch.utils.data.Dataset):
    def __init__(self, n):
        self.rows = [torch.randint(1, 50257, (96 + 7 * i % 160,)) for i in range(n)]
    def __len__(self): return len(self.rows)
    def __getitem__(self, i): return self.rows[i]

def collate(rows):
    ids = pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}

def compute_metrics(eval_pred):
    logits, labels = eval_pred
    hits = np.argmax(logits[:, :-1], -1) == labels[:, 1:]
    return {"accuracy": float(hits[labels[:, 1:] != -100].mean())}
""",
    """
training_args = TrainingArguments("/tmp/with_metrics", num_train_epochs=1, per_device_train_batch_size=8,
                                  per_device_eval_batch_size=16, eval_strategy="epoch", learning_rate=5e-5,
                                  report_to="none", disable_tqdm=True, save_strategy="no", logging_strategy="no")
trainer = Trainer(model=GPT2LMHeadModel(GPT2Config(n_layer=6)), args=training_args, train_dataset=Lines(48),
                  eval_dataset=Lines(1024), data_collator=collate, compute_metrics=compute_metrics)
""",
    "trainer.train()",
)

filled(
    "adapters on long texts in a trainer",
    """
import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator
config = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=16,
                     num_key_value_heads=4, vocab_size=32000, max_position_embeddings=8192)
model = LlamaForCausalLM(config).to(torch.bfloat16)
MAX_LENGTH = 8192
""",
    """
lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=16, lora_alpha=32, lora_dropout=0.05,
                  target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
model = get_peft_model(model, lora)
texts = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 32000, (32, MAX_LENGTH))]
""",
    """
trainer = Trainer(
    model=model,
    train_dataset=texts,
    args=TrainingArguments("/tmp/adapters", per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=2, bf16=True,
                           learning_rate=2e-4, warmup_steps=1, report_to="none", disable_tqdm=True, save_strategy="no",
                           logging_strategy="no"),
    data_collator=default_data_collator,
)
trainer.train()
""",
)

filled(
    "sentences in pairs",
    """
import random, tempfile, torch
from transformers import BertConfig, BertModel, BertTokenizerFast
from sentence_transformers import SentenceTransformer, losses, models
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(8000))]
folder = tempfile.mkdtemp()
with open(f"{folder}/vocab.txt", "w") as f:
    f.write("\\n".join(words))
BertTokenizerFast(f"{folder}/vocab.txt", model_max_length=512).save_pretrained(folder)
BertModel(BertConfig(num_hidden_layers=6)).save_pretrained(folder)
def sentence(): return " ".join(random.choices(words[5:], k=random.randint(40, 250)))
pairs = [(sentence(), sentence()) for _ in range(1200)]
""",
    """
transformer = models.Transformer(folder, max_seq_length=256)
model = SentenceTransformer(modules=[transformer, models.Pooling(transformer.get_word_embedding_dimension())], device="cuda")
train_loss = losses.MultipleNegativesRankingLoss(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
""",
    """
train_batch_size = 192
model.train()
for start in range(0, 768, train_batch_size):
    batch = pairs[start:start + train_batch_size]
    features = [{k: v.to("cuda") for k, v in model.tokenize(list(texts)).items() if torch.is_tensor(v)} for texts in zip(*batch)]
    loss = train_loss(features, None)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
""",
)

other(
    "scores in a comprehension",
    FILLED | _LEAK,
    names("no_grad"),
    """
import timm, torch
from torch.utils.data import DataLoader, TensorDataset
net = timm.create_model("convnext_tiny", pretrained=False, num_classes=200).cuda()
test_loader = DataLoader(TensorDataset(torch.rand(512, 3, 224, 224), torch.randint(0, 200, (512,))), batch_size=64)
""",
    """
net.eval()
scores = torch.cat([net(images.cuda()) for images, _ in test_loader])
truth = torch.cat([labels for _, labels in test_loader])
print("accuracy", (scores.argmax(1).cpu() == truth).float().mean())
""",
)

other(
    "validation of Lightning keeps logits",
    _LEAK | FILLED,
    names("keep_on_host"),
    _TORCH
    + """
import lightning as L

class Scenes(torch.utils.data.Dataset):
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): return torch.rand(3, 256, 256), torch.randint(0, 40, (256, 256))

def block(a, b): return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))

class Segmenter(L.LightningModule):
    def __init__(self, width=32, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(block(3, width), block(width, width), nn.Conv2d(width, 40, 1))
        self.validation_step_outputs = []
    def training_step(self, batch, batch_idx):
        images, masks = batch
        loss = F.cross_entropy(self.net(images), masks)
        self.log("train_loss", loss)
        return loss
    def validation_step(self, batch, batch_idx):
        images, masks = batch
        logits = self.net(images)
        self.validation_step_outputs.append(logits)
        self.log("val_loss", F.cross_entropy(logits, masks))
    def on_validation_epoch_end(self):
        classes = torch.cat(self.validation_step_outputs).argmax(1)
        self.log("share_of_background", (classes == 0).float().mean())
        self.validation_step_outputs.clear()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
""",
    """
loaders = [torch.utils.data.DataLoader(Scenes(n), batch_size=16) for n in (64, 1792)]
trainer = L.Trainer(max_epochs=1, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Segmenter(), *loaders)
""",
)

filled(
    "pictures in Lightning",
    _TORCH
    + """
import lightning as L, timm

class Pictures(torch.utils.data.Dataset):
    def __len__(self): return 4096
    def __getitem__(self, i): return torch.full((3, 224, 224), i / 4096), i % 100

class Classifier(L.LightningModule):
    def __init__(self, name="vit_small_patch16_224", batch_size=64, lr=5e-4):
        super().__init__()
        self.save_hyperparameters()
        self.model = timm.create_model(name, pretrained=False, num_classes=100)
    def forward(self, x):
        return self.model(x)
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss
    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean())
    def train_dataloader(self):
        return torch.utils.data.DataLoader(Pictures(), batch_size=self.hparams.batch_size, shuffle=True)
    def val_dataloader(self):
        return torch.utils.data.DataLoader(Pictures(), batch_size=self.hparams.batch_size)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.05)
""",
    """
lit = Classifier(batch_size=640)
trainer = L.Trainer(max_epochs=1, limit_train_batches=4, limit_val_batches=1, precision="16-mixed", gradient_clip_val=1.0,
                    accelerator="gpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                    enable_model_summary=False, num_sanity_val_steps=0)
trainer.fit(lit)
""",
)

filled(
    "segmentation at high resolution",
    _TORCH
    + """
from torchvision.models.segmentation import deeplabv3_resnet50
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
net = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21, aux_loss=True).to(device)

def criterion(outputs, target):
    return F.cross_entropy(outputs["out"], target, ignore_index=255) + 0.5 * F.cross_entropy(outputs["aux"], target, ignore_index=255)

params = [{"params": net.backbone.parameters(), "lr": 0.01}, {"params": net.classifier.parameters(), "lr": 0.1},
          {"params": net.aux_classifier.parameters(), "lr": 0.1}]
optimizer = torch.optim.SGD(params, momentum=0.9, weight_decay=1e-4)
""",
    """
crop_size, images_per_gpu = 768, 12
net.train()
for i in range(3):
    image = torch.rand(images_per_gpu, 3, crop_size, crop_size).to(device)
    target = torch.randint(0, 21, (images_per_gpu, crop_size, crop_size)).to(device)
    loss = criterion(net(image), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
)

other(
    "whole graph",
    FILLED | names("request_alone_too_big"),
    STEP | {"half_weights"},
    _TORCH
    + """
from torch_geometric.data import Data
from torch_geometric.nn import GATConv
num_nodes, num_edges = 150_000, 4_000_000
data = Data(x=torch.randn(num_nodes, 128), edge_index=torch.randint(0, num_nodes, (2, num_edges)), y=torch.randint(0, 40, (num_nodes,)))
data.train_mask = torch.rand(num_nodes) < 0.6

class GAT(nn.Module):
    def __init__(self, hidden=64, heads=4):
        super().__init__()
        self.conv1 = GATConv(128, hidden, heads=heads, dropout=0.3)
        self.conv2 = GATConv(hidden * heads, hidden, heads=heads, dropout=0.3)
        self.lin = nn.Linear(hidden * heads, 40)
    def forward(self, x, edge_index):
        x = F.elu(self.conv1(x, edge_index))
        x = F.elu(self.conv2(F.dropout(x, 0.5, self.training), edge_index))
        return self.lin(x)
""",
    """
device = torch.device("cuda")
model, data = GAT().to(device), data.to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)

def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return float(loss)

for epoch in range(1, 4):
    print(f"Epoch: {epoch:03d}, Loss: {train():.4f}")
""",
)

filled(
    "speech to text in a trainer",
    """
from dataclasses import dataclass
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, WhisperConfig, WhisperForConditionalGeneration

class Clips(torch.utils.data.Dataset):
    def __len__(self): return 512
    def __getitem__(self, i):
        return {"input_features": torch.full((80, 3000), i / 512), "labels": list(range(50, 90 + i % 40))}

@dataclass
class SpeechCollator:
    pad_id: int = 50257
    def __call__(self, rows):
        longest = max(len(row["labels"]) for row in rows)
        labels = [row["labels"] + [-100] * (longest - len(row["labels"])) for row in rows]
        return {"input_features": torch.stack([row["input_features"] for row in rows]), "labels": torch.tensor(labels)}

config = WhisperConfig(d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12, decoder_attention_heads=12,
                       encoder_ffn_dim=3072, decoder_ffn_dim=3072)
whisper = WhisperForConditionalGeneration(config)
""",
    """
training_args = Seq2SeqTrainingArguments(
    output_dir="/tmp/whisper-small", per_device_train_batch_size=48, learning_rate=1e-5, max_steps=3, fp16=True,
    remove_unused_columns=False, report_to="none", disable_tqdm=True, save_strategy="no", logging_strategy="no",
)
trainer = Seq2SeqTrainer(args=training_args, model=whisper, train_dataset=Clips(), data_collator=SpeechCollator())
trainer.train()
""",
)
