"""Training at sizes that users train at, for what a physical GPU held (data/record_device.py).

``PROGRAMS[name](on_step)`` runs a few steps and calls ``on_step()`` after each. Weights and data are random.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CUDA = "cuda"
OnStep = Callable[[], None]
PROGRAMS: dict[str, Callable[[OnStep], None]] = {}


def program(function: Callable[..., None], name: str = "", **how: Any) -> Callable[..., None]:
    """Take a function into the table, under its own name or another with arguments."""
    PROGRAMS[name or function.__name__] = partial(function, **how) if how else function
    return function


@contextlib.contextmanager
def searching(is_on: bool) -> Iterator[None]:
    """``torch.backends.cudnn.benchmark``."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, is_on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def train(
    model: nn.Module,
    on_step: OnStep,
    loss_of: Callable[[], torch.Tensor],
    amp: torch.dtype | None = None,
    steps: int = 3,
    optimizer: Any = None,
    accumulate: int = 1,
) -> None:
    """The usual loop; float16 has a scaler."""
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    scaler = torch.amp.GradScaler(CUDA, enabled=amp is torch.float16)
    for _ in range(steps):
        for _ in range(accumulate):
            with torch.autocast(CUDA, amp or torch.bfloat16, enabled=amp is not None):
                loss = loss_of()
            scaler.scale(loss / accumulate).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        on_step()


def tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(5, vocabulary, shape, device=CUDA)


# Language models


def language(
    on_step: OnStep,
    family: str = "GPT2",
    head: str = "LMHeadModel",
    batch: int = 4,
    length: int = 1024,
    amp: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    checkpointing: bool = False,
    lora: int = 0,
    optimizer: Callable[[Any], Any] | None = None,
    accumulate: int = 1,
    attention: str | None = None,
    **sizes: Any,
) -> None:
    """A language model of transformers, with labels, as its examples train it."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**sizes)
    if attention:
        config._attn_implementation = attention
    model = getattr(transformers, f"{family}{head}")(config).to(CUDA, dtype)
    if lora:
        import peft

        names = ["q_proj", "v_proj"] if "num_key_value_heads" in sizes else ["c_attn"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=lora, target_modules=names))
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
        if lora:
            model.enable_input_require_grads()

    def loss() -> torch.Tensor:
        x = tokens(config.vocab_size, batch, length)
        labels = torch.zeros(batch, dtype=torch.long, device=CUDA) if head == "ForSequenceClassification" else x
        return model(input_ids=x, labels=labels).loss

    made = optimizer and optimizer([p for p in model.parameters() if p.requires_grad])
    train(model, on_step, loss, amp, optimizer=made, accumulate=accumulate)


BF16, FP16 = torch.bfloat16, torch.float16
LLAMA = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 32,
         "num_key_value_heads": 4, "vocab_size": 32000}  # fmt: skip
WIDE = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000}  # fmt: skip
QWEN = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip


program(language, "gpt2", batch=4)
program(language, "gpt2, bfloat16 autocast", amp=BF16, batch=8)
program(language, "gpt2, float16 with a scaler", amp=FP16, batch=8)
program(language, "gpt2, checkpointing", amp=BF16, batch=16, checkpointing=True)
program(language, "gpt2, eager attention", attention="eager", batch=2)
program(language, "gpt2, flex attention", attention="flex_attention", batch=2, length=512)
program(language, "gpt2, fused AdamW", amp=BF16, optimizer=partial(torch.optim.AdamW, fused=True))
program(language, "gpt2, Adafactor", optimizer=torch.optim.Adafactor)
program(language, "gpt2, SGD one by one", optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False))
program(language, "gpt2, accumulated", amp=BF16, accumulate=4)
program(language, "bert", family="Bert", head="ForMaskedLM", batch=16, length=512)
program(
    language, "roberta classifies", family="Roberta", head="ForSequenceClassification", batch=32, length=256, amp=FP16
)
program(language, "deberta", family="DebertaV2", head="ForSequenceClassification", batch=8, length=512, amp=BF16,
        hidden_size=768, num_hidden_layers=6, num_attention_heads=12, intermediate_size=3072)  # fmt: skip
program(language, "llama 0.4B in bfloat16", family="Llama", head="ForCausalLM", dtype=BF16, length=2048, **LLAMA)
program(
    language,
    "llama 7B, LoRA",
    family="Llama",
    head="ForCausalLM",
    dtype=BF16,
    lora=16,
    batch=2,
    checkpointing=True,
    **WIDE,
)
program(language, "qwen2 0.5B", family="Qwen2", head="ForCausalLM", amp=BF16, **QWEN)
program(language, "qwen2 0.5B, LoRA", family="Qwen2", head="ForCausalLM", dtype=BF16, lora=8, **QWEN)
program(language, "mixtral", family="Mixtral", head="ForCausalLM", dtype=BF16, batch=2, length=512, hidden_size=1024, intermediate_size=2048,
        num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4, vocab_size=32000, num_local_experts=8)  # fmt: skip
program(
    language,
    "mamba",
    family="Mamba",
    head="ForCausalLM",
    batch=2,
    length=128,
    hidden_size=512,
    num_hidden_layers=4,
    vocab_size=8000,
)


@program
def t5(on_step: OnStep) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).to(CUDA).train()
    train(model, on_step, lambda: model(input_ids=tokens(32000, 16, 512), labels=tokens(32000, 16, 128)).loss)


@program
def whisper(on_step: OnStep) -> None:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12,
                           decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072)  # fmt: skip
    model = WhisperForConditionalGeneration(config).to(CUDA).train()
    sounds = torch.randn(8, 80, 3000, device=CUDA)
    train(model, on_step, lambda: model(input_features=sounds, labels=tokens(50000, 8, 128)).loss, FP16)


@program
def wav2vec2(on_step: OnStep) -> None:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    model = Wav2Vec2ForCTC(Wav2Vec2Config(apply_spec_augment=False)).to(CUDA).train()
    sounds = torch.randn(4, 16000 * 5, device=CUDA)
    train(model, on_step, lambda: model(sounds, labels=tokens(32, 4, 40)).loss)


@program
def trainer(on_step: OnStep) -> None:
    """transformers' Trainer with an evaluation."""
    import tempfile

    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class AfterStep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            on_step()

    rows = [{"input_ids": torch.arange(512), "labels": torch.arange(512)} for _ in range(96)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=4, bf16=True,
            report_to="none", disable_tqdm=True, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=16,
            save_strategy="no", logging_strategy="no",
        )  # fmt: skip
        model = GPT2LMHeadModel(GPT2Config(n_layer=6))
        Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:32], callbacks=[AfterStep()]).train()


@program
def quantized(on_step: OnStep) -> None:
    """4-bit layers of bitsandbytes with LoRA's pairs beside them."""
    import bitsandbytes as bnb

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = bnb.nn.Linear4bit(4096, 11008, bias=False, compute_dtype=BF16, quant_type="nf4")
            self.down = bnb.nn.Linear4bit(11008, 4096, bias=False, compute_dtype=BF16, quant_type="nf4")
            self.a, self.b = nn.Linear(4096, 16, bias=False), nn.Linear(16, 11008, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.silu(self.up(x) + self.b(self.a(x))))

    model = nn.Sequential(*[Layer() for _ in range(4)]).to(CUDA)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith(("a.weight", "b.weight"))
    train(model, on_step, lambda: model(torch.randn(4, 1024, 4096, device=CUDA)).float().pow(2).mean(), BF16)


@program
def generated(on_step: OnStep) -> None:
    """A model that generates with a cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).to(CUDA, BF16).eval()
    for _ in range(2):
        model.generate(tokens(32000, 16, 256), min_new_tokens=48, max_new_tokens=48, do_sample=False, pad_token_id=0)
        on_step()


# Images and volumes


def pictures(
    on_step: OnStep,
    family: str,
    batch: int = 32,
    size: int = 224,
    amp: torch.dtype | None = None,
    channels_last: bool = False,
    search: bool = False,
    **sizes: Any,
) -> None:
    """An image classifier of transformers."""
    import transformers

    model = getattr(transformers, f"{family}ForImageClassification")(getattr(transformers, f"{family}Config")(**sizes))
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = model.to(CUDA, memory_format=layout).train()

    def loss() -> torch.Tensor:
        x = torch.randn(batch, 3, size, size, device=CUDA).to(memory_format=layout)
        return F.cross_entropy(model(x).logits, torch.zeros(batch, dtype=torch.long, device=CUDA))

    with searching(search):
        train(model, on_step, loss, amp, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


for search in (False, True):
    also = ", benchmark" if search else ""
    program(pictures, f"resnet50{also}", family="ResNet", search=search)
    program(pictures, f"resnet50 float16 channels last{also}", family="ResNet", amp=FP16, channels_last=True,
            batch=64, search=search)  # fmt: skip
    program(pictures, f"convnext{also}", family="ConvNextV2", search=search)
    program(pictures, f"efficientnet b0{also}", family="EfficientNet", search=search, hidden_dim=1280,
            width_coefficient=1.0, depth_coefficient=1.0)  # fmt: skip
    program(pictures, f"regnet{also}", family="RegNet", search=search)
    program(pictures, f"mobilenet v2{also}", family="MobileNetV2", amp=BF16, search=search)
program(pictures, "vit", family="ViT", amp=BF16, batch=64)
program(pictures, "swin", family="Swin", amp=FP16)
program(pictures, "segformer", family="Segformer", size=256)


class Unet(nn.Module):
    """Down and up again, with skips."""

    def __init__(self, rank: int, inputs: int, width: int) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        turned = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]

        def block(a: int, b: int) -> nn.Module:
            return nn.Sequential(conv(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU(), conv(b, b, 3, padding=1),
                                 nn.GroupNorm(8, b), nn.SiLU())  # fmt: skip

        self.first, self.second, self.middle = (
            block(inputs, width),
            block(width, 2 * width),
            block(2 * width, 4 * width),
        )
        self.up2, self.up1 = turned(4 * width, 2 * width, 2, stride=2), turned(2 * width, width, 2, stride=2)
        self.third, self.fourth, self.last = (
            block(4 * width, 2 * width),
            block(2 * width, width),
            conv(width, inputs, 1),
        )
        self.pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        b = self.second(self.pool(a, 2))
        c = self.third(torch.cat([b, self.up2(self.middle(self.pool(b, 2)))], 1))
        return self.last(self.fourth(torch.cat([a, self.up1(c)], 1)))


def unet(on_step: OnStep, shape: tuple[int, ...], width: int, amp: torch.dtype | None, search: bool) -> None:
    model = Unet(len(shape) - 2, shape[1], width).to(CUDA)
    x = torch.randn(shape, device=CUDA)
    with searching(search):
        train(model, on_step, lambda: F.mse_loss(model(x), x), amp)


for search in (False, True):
    also = ", benchmark" if search else ""
    program(unet, f"unet{also}", shape=(8, 3, 256, 256), width=64, amp=None, search=search)
    program(unet, f"unet bfloat16{also}", shape=(8, 3, 256, 256), width=64, amp=BF16, search=search)
    program(unet, f"unet of volumes{also}", shape=(1, 1, 64, 128, 128), width=32, amp=None, search=search)
    program(unet, f"unet of volumes float16{also}", shape=(1, 1, 64, 128, 128), width=32, amp=FP16, search=search)
program(unet, "unet of sounds", shape=(8, 2, 65536), width=32, amp=None, search=False)


def gan(on_step: OnStep, search: bool) -> None:
    """DCGAN at 64 pixels."""

    def up(a: int, b: int, stride: int = 2, padding: int = 1) -> nn.Module:
        return nn.Sequential(nn.ConvTranspose2d(a, b, 4, stride, padding, bias=False), nn.BatchNorm2d(b), nn.ReLU(True))

    def down(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2, True))

    make = nn.Sequential(up(100, 512, 1, 0), up(512, 256), up(256, 128), up(128, 64),
                         nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()).to(CUDA)  # fmt: skip
    judge = nn.Sequential(down(3, 64), down(64, 128), down(128, 256), down(256, 512), nn.Conv2d(512, 1, 4)).to(CUDA)
    for_make, for_judge = (torch.optim.Adam(one.parameters(), 2e-4, (0.5, 0.999)) for one in (make, judge))
    with searching(search):
        for _ in range(3):
            real, noise = torch.randn(128, 3, 64, 64, device=CUDA), torch.randn(128, 100, 1, 1, device=CUDA)
            judge.zero_grad()
            fake = make(noise)
            score = judge(real).view(-1)
            F.binary_cross_entropy_with_logits(score, torch.ones_like(score)).backward()
            score = judge(fake.detach()).view(-1)
            F.binary_cross_entropy_with_logits(score, torch.zeros_like(score)).backward()
            for_judge.step()
            make.zero_grad()
            score = judge(fake).view(-1)
            F.binary_cross_entropy_with_logits(score, torch.ones_like(score)).backward()
            for_make.step()
            on_step()


program(gan, "dcgan", search=False)
program(gan, "dcgan, benchmark", search=True)


def timm_net(on_step: OnStep, net: str, batch: int, search: bool, amp: torch.dtype | None = None) -> None:
    import timm

    model = timm.create_model(net).to(CUDA).train()
    shape = (batch, *model.default_cfg["input_size"])

    def loss() -> torch.Tensor:
        return F.cross_entropy(
            model(torch.randn(shape, device=CUDA)), torch.zeros(batch, dtype=torch.long, device=CUDA)
        )

    with searching(search):
        train(model, on_step, loss, amp, optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


for name, batch in (("coatnet_nano_cc_224", 8), ("xception41", 16), ("convmixer_768_32", 8), ("tf_efficientnet_lite3", 16),
                    ("regnetx_040", 16), ("resnetv2_50d", 16), ("halonet_h1", 8)):  # fmt: skip
    program(timm_net, f"timm {name}", net=name, batch=batch, search=False)
    program(timm_net, f"timm {name}, benchmark", net=name, batch=batch, search=True)


def vision(on_step: OnStep, net: str, batch: int, size: int, amp: torch.dtype | None = None) -> None:
    """torchvision's segmentation or classification."""
    import torchvision

    if "deeplab" in net:
        model = getattr(torchvision.models.segmentation, net)(weights=None, weights_backbone=None).to(CUDA).train()
    else:
        model = getattr(torchvision.models, net)(weights=None).to(CUDA).train()

    def loss() -> torch.Tensor:
        found = model(torch.randn(batch, 3, size, size, device=CUDA))
        return (found["out"] if isinstance(found, dict) else found).float().pow(2).mean()

    train(model, on_step, loss, amp, optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


program(vision, "deeplab", net="deeplabv3_resnet50", batch=8, size=320)
program(vision, "deeplab float16", net="deeplabv3_resnet50", batch=8, size=320, amp=FP16)
program(vision, "densenet121", net="densenet121", batch=32, size=224)
program(vision, "vgg16", net="vgg16", batch=16, size=224)


@program
def detection(on_step: OnStep) -> None:
    """A detector, whose boxes depend on values."""
    import torchvision

    model = torchvision.models.detection.retinanet_resnet50_fpn(weights=None, weights_backbone=None).to(CUDA).train()
    boxes = torch.tensor([[20.0, 20.0, 200.0, 200.0], [100.0, 50.0, 300.0, 280.0]], device=CUDA)
    wanted = [{"boxes": boxes, "labels": torch.ones(2, dtype=torch.long, device=CUDA)} for _ in range(4)]

    def loss() -> torch.Tensor:
        losses: dict[str, torch.Tensor] = model(list(torch.rand(4, 3, 320, 320, device=CUDA)), wanted)
        return torch.stack(list(losses.values())).sum()

    train(model, on_step, loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.001))


# Others


def recurrent(on_step: OnStep, kind: str, amp: torch.dtype | None, **how: Any) -> None:
    model = getattr(nn, kind)(512, 1024, num_layers=3, batch_first=True, **how).to(CUDA)
    x = torch.randn(32, 200, 512, device=CUDA)
    train(model, on_step, lambda: model(x)[0].float().pow(2).mean(), amp)


program(recurrent, "lstm", kind="LSTM", amp=None)
program(recurrent, "lstm both ways with dropout", kind="LSTM", amp=None, bidirectional=True, dropout=0.2)
program(recurrent, "gru float16", kind="GRU", amp=FP16)
program(recurrent, "rnn", kind="RNN", amp=None)


@program
def transformer(on_step: OnStep) -> None:
    """nn.Transformer with masks."""
    model = nn.Transformer(512, 8, 6, 6, 2048, batch_first=True).to(CUDA)
    hidden = torch.arange(256, device=CUDA)[None] >= torch.randint(100, 256, (16, 1), device=CUDA)
    ahead = nn.Transformer.generate_square_subsequent_mask(256, device=CUDA)

    def loss() -> torch.Tensor:
        x = torch.randn(16, 256, 512, device=CUDA)
        found: torch.Tensor = model(x, x, tgt_mask=ahead, src_key_padding_mask=hidden, tgt_is_causal=True)
        return found.pow(2).mean()

    train(model, on_step, loss)


@program
def evaluated(on_step: OnStep) -> None:
    """A validation after each epoch, under inference_mode and autocast."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    model = nn.TransformerEncoder(layer, 6).to(CUDA)
    x = torch.randn(64, 256, 768, device=CUDA)
    train(model, on_step, lambda: model(x[:16]).float().pow(2).mean(), BF16)
    model.eval()
    with torch.inference_mode(), torch.autocast(CUDA, BF16):
        model(x)
    on_step()


@program
def sparse_rows(on_step: OnStep) -> None:
    """Embedding with sparse gradients, and SparseAdam."""
    model = nn.EmbeddingBag(500_000, 128, sparse=True).to(CUDA)
    made = torch.optim.SparseAdam(model.parameters())
    train(model, on_step, lambda: model(tokens(500_000, 4096, 16)).pow(2).mean(), optimizer=made)


@program
def sparse_products(on_step: OnStep) -> None:
    """A graph convolution by torch.sparse.mm."""
    weight = nn.Linear(256, 256).to(CUDA)
    places = torch.randint(0, 20_000, (2, 400_000), device=CUDA)
    matrix = torch.sparse_coo_tensor(places, torch.ones(400_000, device=CUDA), (20_000, 20_000)).coalesce()
    x = torch.randn(20_000, 256, device=CUDA)
    train(weight, on_step, lambda: torch.sparse.mm(matrix, F.relu(weight(torch.sparse.mm(matrix, x)))).pow(2).mean())


@program
def masked(on_step: OnStep) -> None:
    """Rows are chosen by a mask of random values."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to(CUDA)

    def loss() -> torch.Tensor:
        x = torch.randn(32_768, 512, device=CUDA)
        chosen = x[torch.rand(32_768, device=CUDA) < 0.15]
        return model(chosen).pow(2).mean()

    train(model, on_step, loss)


@program
def penalized(on_step: OnStep) -> None:
    """WGAN-GP's gradient penalty: a double backward."""
    judge = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1), nn.LeakyReLU(0.2),
                          nn.Flatten(), nn.Linear(128 * 16 * 16, 1)).to(CUDA)  # fmt: skip

    def loss() -> torch.Tensor:
        x = torch.randn(64, 3, 64, 64, device=CUDA, requires_grad=True)
        score = judge(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).pow(2).mean()

    train(judge, on_step, loss)


@program
def prefetched(on_step: OnStep) -> None:
    """The next batch is copied on a stream of its own."""
    model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096)).to(CUDA)
    stream = torch.cuda.Stream()
    batches = [torch.randn(4096, 4096).pin_memory() for _ in range(2)]
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.cuda.stream(stream):
        coming = batches[0].to(CUDA, non_blocking=True)
    for number in range(4):
        torch.cuda.current_stream().wait_stream(stream)
        x = coming
        x.record_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            coming = batches[number % 2].to(CUDA, non_blocking=True)
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step()


@program
def captured(on_step: OnStep) -> None:
    """A training step in a CUDA graph, as PyTorch's notes write it."""
    model = nn.Sequential(nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 2048)).to(CUDA)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(1024, 2048, device=CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            model(x).pow(2).mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        model(x).pow(2).mean().backward()
        optimizer.step()
    for _ in range(2):
        graph.replay()
        on_step()


@program
def lightning(on_step: OnStep) -> None:
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            found: torch.Tensor = self.net(batch[0])
            return found.pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, *_: Any) -> None:
            on_step()

    data = torch.utils.data.TensorDataset(torch.randn(4 * 2048, 1024))
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=4, **quiet)
    trainer.fit(Net(), torch.utils.data.DataLoader(data, 2048))


@program
def graph_net(on_step: OnStep) -> None:
    """torch_geometric's GCN on one large graph."""
    from torch_geometric.nn import GCNConv

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(128, 256), GCNConv(256, 40)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.second(F.relu(self.first(x, edges)), edges)
            return found

    model = Net().to(CUDA)
    x, edges = torch.randn(50_000, 128, device=CUDA), torch.randint(0, 50_000, (2, 600_000), device=CUDA)
    train(model, on_step, lambda: F.cross_entropy(model(x, edges), tokens(40, 50_000)))


@program
def gaussian_process(on_step: OnStep) -> None:
    """gpytorch's exact regression: a Cholesky factor."""
    import gpytorch

    class Model(gpytorch.models.ExactGP):
        def __init__(self, x: torch.Tensor, y: torch.Tensor, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    x, y = torch.rand(700, 4, device=CUDA), torch.rand(700, device=CUDA)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(CUDA)
    model = Model(x, y, likelihood).to(CUDA).train()
    likelihood.train()
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    train(model, on_step, lambda: -marginal(model(x), y))


@program
def losses_of_distances(on_step: OnStep) -> None:
    """Contrastive learning: all pairs of a batch."""
    model = nn.Sequential(nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(CUDA)

    def loss() -> torch.Tensor:
        a, b = (F.normalize(model(torch.randn(4096, 2048, device=CUDA))) for _ in range(2))
        return F.cross_entropy(a @ b.T / 0.07, torch.arange(4096, device=CUDA)) + torch.cdist(a, b).mean()

    train(model, on_step, loss, BF16)


@program
def linear_algebra(on_step: OnStep) -> None:
    """What cuSOLVER and cuFFT take."""
    x = torch.randn(8, 512, 512, device=CUDA, requires_grad=True)
    matrix = nn.Parameter(torch.randn(8, 512, 512, device=CUDA))

    def loss() -> torch.Tensor:
        positive = matrix @ matrix.mT + 512 * torch.eye(512, device=CUDA)
        solved = torch.cholesky_solve(x, torch.linalg.cholesky(positive))
        return solved.pow(2).mean() + torch.linalg.solve(positive, x).mean() + torch.fft.rfft2(x).abs().mean()

    train(nn.ParameterList([matrix]), on_step, loss, optimizer=torch.optim.SGD([matrix], lr=0.1))
