"""Compiled training of models and with settings that nobody looked at while the engine was made (compiled_programs.py)."""

from __future__ import annotations

import torch
from compiled_cases import SIZES
from compiled_programs import PROGRAMS as PROGRAMS
from compiled_programs import Body, OnStep, plain, program, steps
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


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
