"""Compiled training of models and with settings that nobody looked at while the engine was made (compiled_programs.py)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.programs.compiled_cases import SIZES
from tests.programs.compiled_programs import PROGRAMS as PROGRAMS
from tests.programs.compiled_programs import Body, OnStep, nll, plain, program, steps


class Bottleneck(nn.Module):
    """torchvision's block of ResNet-50."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x += kept
        return self.relu(x)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        self.body = nn.Sequential(Bottleneck(32, 32, 1), Bottleneck(128, 32, 1), Bottleneck(128, 64, 2))
        self.fc = nn.Linear(256, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(F.adaptive_avg_pool2d(self.body(self.stem(x)), 1).flatten(1))


@program
def resnet_channels_last(on_step: OnStep) -> None:
    model = ResNet().cuda().to(memory_format=torch.channels_last)
    run = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        pictures = torch.randn(32, 3, 128, 128, device="cuda").to(memory_format=torch.channels_last)
        return F.cross_entropy(run(pictures), tokens[:, 0] % 100)

    steps(model, loss_of, on_step, sizes=((32, 1),) * 3, amp=True, optimizer=optimizer)


class ViT(nn.Module):
    """Patches, a class token and PyTorch's own encoder."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 65, width))
        layer = nn.TransformerEncoderLayer(width, 3, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.place
        return self.head(self.encoder(x)[:, 0])


@program
def vit_with_dropout(on_step: OnStep) -> None:
    model = ViT().cuda()
    model.compile()

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(torch.randn(64, 3, 128, 128, device="cuda")), tokens[:, 0], label_smoothing=0.1)

    steps(model, loss_of, on_step, sizes=((64, 1),) * 3, amp=True)


class Seq2Seq(nn.Module):
    """An LSTM that reads and one that writes."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1024, width)
        self.encoder = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True)
        self.decoder = nn.LSTM(width, 2 * width, 1, batch_first=True)
        self.mix = nn.Linear(4 * width, 2 * width)
        self.head = nn.Linear(2 * width, 1024)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        read, _ = self.encoder(self.embedding(tokens))
        written, _ = self.decoder(self.embedding(tokens.flip(1)))
        scores = torch.softmax(written @ read.transpose(1, 2), -1)
        return self.head(torch.tanh(self.mix(torch.cat((scores @ read, written), -1))))


@program
def lstm_seq2seq(on_step: OnStep) -> None:
    plain(Seq2Seq().cuda(), on_step)


@program
def llama_lora(on_step: OnStep) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=2000)).to(torch.bfloat16)
    model = get_peft_model(llama, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.05)).cuda()
    run = torch.compile(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    steps(model, lambda tokens: run(input_ids=tokens, labels=tokens).loss, on_step, optimizer=optimizer)


@program
def dynamic_three_lengths(on_step: OnStep) -> None:
    model = Body(depth=3).cuda()
    sizes = ((8, 128), (8, 200), (8, 311), (8, 64), (8, 311))
    plain(model, on_step, run=torch.compile(model, dynamic=True), sizes=sizes)


class Switched(Body):
    """Blocks that are left out, and a number that changes: each is compiled anew."""

    scale = 1.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale


@program
def recompiled(on_step: OnStep) -> None:
    model = Switched(depth=3).cuda()
    run = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for number, is_training in enumerate((True, True, False, True)):
        model.train(is_training)
        model.scale = 1.0 + number // 2
        tokens = torch.randint(0, 1000, (4, 256), device="cuda")
        with torch.set_grad_enabled(is_training):
            loss = nll(run(tokens), tokens)
        if is_training:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        on_step(number)


class Narrow(Body):
    """Autocast within what is compiled."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return super().forward(tokens)


@program
def autocast_inside(on_step: OnStep) -> None:
    plain(Narrow().cuda(), on_step)


class Around(Body):
    """Each block compiled by itself, and recomputed in the backward."""

    use_reentrant = False

    def block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=self.use_reentrant)


@program
def checkpoint_around(on_step: OnStep) -> None:
    model = Around(depth=4).cuda()
    for block in model.blocks:
        block.compile()
    plain(model, on_step, run=model, amp=True)


@program
def generate_loop(on_step: OnStep) -> None:
    model = Body().cuda().eval()
    run = torch.compile(model)
    with torch.inference_mode():
        tokens = torch.randint(0, 1000, (8, 64), device="cuda")
        for number in range(4):
            for _ in range(2):
                tokens = torch.cat((tokens, run(tokens)[:, -1:].argmax(-1)), 1)
            on_step(number)


@program
def activation_budget(on_step: OnStep) -> None:
    import torch._functorch.config as functorch

    with functorch.patch(activation_memory_budget=0.4):
        plain(Body(depth=3).cuda(), on_step, amp=True)


@program
def scheduled_optimizer(on_step: OnStep) -> None:
    model = Body().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    compiled = torch.compile(optimizer.step)

    def step() -> None:
        compiled()
        scheduler.step()

    plain(model, on_step, step=step, optimizer=optimizer)


@program
def nanogpt(on_step: OnStep) -> None:
    """Its loop: accumulation, clipping, a fused optimizer, the loss of a microbatch divided."""
    model = Body(width=192, depth=3).cuda()
    model.head.weight = model.embedding.weight = nn.Parameter(torch.zeros(1024, 192, device="cuda"))
    run = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    for number in range(3):
        for _ in range(2):
            tokens = torch.randint(0, 1000, (6, 256), device="cuda")
            with torch.autocast("cuda", torch.bfloat16):
                logits = run(tokens)
                loss = F.cross_entropy(logits.view(-1, 1024), tokens.view(-1), ignore_index=-1) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        on_step(number)


@program
def two_networks(on_step: OnStep) -> None:
    """A generator and who judges it, each compiled, each with its optimizer."""
    width = 256
    makes = nn.Sequential(nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, 3 * 32 * 32), nn.Tanh()).cuda()
    judges = nn.Sequential(nn.Linear(3 * 32 * 32, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)).cuda()
    make, judge = torch.compile(makes), torch.compile(judges)
    for_makes, for_judges = torch.optim.Adam(makes.parameters()), torch.optim.Adam(judges.parameters())
    for number in range(3):
        real, noise = torch.randn(512, 3 * 32 * 32, device="cuda"), torch.randn(512, 64, device="cuda")
        made = make(noise)
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()
        for_judges.zero_grad()
        loss.backward()
        for_judges.step()
        loss = F.softplus(-judge(made)).mean()
        for_makes.zero_grad()
        loss.backward()
        for_makes.step()
        on_step(number)


class Noised(nn.Module):
    """A residual block of a diffusion model, told the time."""

    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.time = nn.Linear(time, outside)
        self.norm2, self.conv2 = nn.GroupNorm(8, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.dropout(F.silu(self.norm2(h)), 0.1, self.training))


class Attending(nn.Module):
    """Attention between places, whose heads lie so that no fused kernel takes them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(8, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, width, high, wide = x.shape
        heads = self.qkv(self.norm(x)).view(batch, 3, 4, width // 4, high * wide)
        q, k, v = heads.transpose(-1, -2).unbind(1)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2)
        return x + self.out(attended.reshape(batch, width, high, wide))


class UNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width, time = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down1, self.pool1 = Noised(width, width, time), nn.Conv2d(width, width, 3, 2, 1)
        self.down2, self.pool2 = Noised(width, 2 * width, time), nn.Conv2d(2 * width, 2 * width, 3, 2, 1)
        self.attention, self.middle = Attending(2 * width), Noised(2 * width, 2 * width, time)
        self.up2, self.up1 = Noised(4 * width, 2 * width, time), Noised(3 * width, width, time)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        angles = step[:, None].float() * torch.exp(-torch.arange(self.width // 2, device=x.device) * 0.3)
        time = self.time(torch.cat((angles.sin(), angles.cos()), 1))
        a = self.down1(self.enter(x), time)
        b = self.attention(self.down2(self.pool1(a), time))
        x = self.middle(self.pool2(b), time)
        x = self.up2(torch.cat((F.interpolate(x, scale_factor=2.0), b), 1), time)
        return self.leave(self.up1(torch.cat((F.interpolate(x, scale_factor=2.0), a), 1), time))


@program
def diffusion(on_step: OnStep) -> None:
    """Its loop: the noise is foretold, gradients are clipped, averages of the weights kept."""
    model = UNet().cuda()
    run = torch.compile(model)
    averages = {name: value.detach().clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for number in range(3):
        x = torch.randn(8, 3, 64, 64, device="cuda")
        noise, step = torch.randn_like(x), torch.randint(0, 1000, (8,), device="cuda")
        with torch.autocast("cuda", torch.float16):
            loss = F.mse_loss(run(x + noise, step).float(), noise)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, value in model.state_dict().items():
                averages[name].lerp_(value, 0.01)
        on_step(number)


@program
def t5(on_step: OnStep) -> None:
    """Biases by position, which learn, under a mask; a number set into the decoder's inputs."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=2000, decoder_start_token_id=0, pad_token_id=0, **sizes)
    model = T5ForConditionalGeneration(config).cuda().train()
    run = torch.compile(model)
    mask = torch.ones(4, 256, dtype=torch.long, device="cuda")

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return run(input_ids=tokens, attention_mask=mask, labels=tokens[:, :64].contiguous()).loss

    steps(model, loss_of, on_step, amp=True)


class Chosen(nn.Module):
    """Numbers beside tensors, chosen by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(512, 512), nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x.where(x > 0, 0.0)
        return self.last(x.where(x > 0, x.exp() - 1))


@program
def where_method(on_step: OnStep) -> None:
    model = Chosen().cuda()
    run = torch.compile(model)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(run(torch.randn(4096, 512, device="cuda")), tokens[:, 0] % 10)

    steps(model, loss_of, on_step, sizes=((4096, 1),) * 3)


class Padded(nn.Module):
    """The lengths of a batch differ, and its padding is masked."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1024, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True)
        self.head = nn.Linear(width, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embedding(tokens), src_key_padding_mask=tokens == 0)
        return self.head(hidden.mean(1))


@program
def masked_lengths(on_step: OnStep) -> None:
    """One graph serves every length but the first: the mask is padded, whether the length is a multiple of 8 or not."""
    model = Padded().cuda()
    run = torch.compile(model)
    sizes = ((64, 120), (64, 80), (64, 100), (64, 160), (64, 77))
    steps(model, lambda tokens: F.cross_entropy(run(tokens), tokens[:, 0] % 8), on_step, sizes=sizes, amp=True)


class Gated(nn.Module):
    """Its gradient goes through SiLU's, a kernel that only CUDA has whole; a value that is read breaks the graph."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True))
        self.b = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.SiLU(), nn.AvgPool2d(2)
        )
        self.head = nn.Linear(2 * width, 100)
        self.means: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        self.means.append(x.abs().mean().item())
        return self.head(self.b(x).mean((2, 3)))


@program
def gated_channels_last(on_step: OnStep) -> None:
    model = Gated().cuda().to(memory_format=torch.channels_last)
    run = torch.compile(model)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        pictures = torch.randn(32, 3, 128, 128, device="cuda").contiguous(memory_format=torch.channels_last)
        return F.cross_entropy(run(pictures), tokens[:, 0] % 100)

    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    steps(model, loss_of, on_step, sizes=((32, 1),) * 3, amp=True, optimizer=optimizer)


@program
def ddp_in_buckets(on_step: OnStep) -> None:
    """Dynamo splits the graph where DDP's buckets end; the parts are compiled one after the other."""
    torch.distributed.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(Body(width=512, depth=4).cuda(), device_ids=[0])
    plain(model, on_step, run=torch.compile(model), amp=True)
