"""Ways of using torch.compile, each a program whose peaks the CUDA build counted (data/compiled_truth.json).

``PROGRAMS[name](on_step)`` runs some steps and calls ``on_step(i)`` after each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from tests.programs.compiled_cases import SIZES, Block

OnStep = Callable[[int], None]
PROGRAMS: dict[str, Callable[[OnStep], None]] = {}
SHAPE = (4, 256)


def program(function: Callable[[OnStep], None]) -> Callable[[OnStep], None]:
    """Take a program into the table."""
    PROGRAMS[function.__name__] = function
    return function


def steps(
    model: nn.Module,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    on_step: OnStep,
    sizes: Any = (SHAPE,) * 3,
    amp: bool = False,
    step: Callable[[], Any] | None = None,
    optimizer: Any = None,
) -> None:
    """Train: a loss of random tokens, its backward, a step."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), fused=True)
    for number, size in enumerate(sizes):
        tokens = torch.randint(0, 1000, size, device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            loss = loss_of(tokens)
        loss.backward()
        (step or optimizer.step)()
        optimizer.zero_grad()
        del loss
        on_step(number)


class Body(nn.Module):
    """A transformer that returns logits, with what a subclass does to each block."""

    def __init__(self, width: int = 256, vocabulary: int = 1024, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """What happens to each block."""
        return block(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.block(block, x)
        return self.head(x)


class Checkpointed(Body):
    def block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False)


def nll(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def plain(model: nn.Module, on_step: OnStep, run: Any = None, **options: Any) -> None:
    run = run if run is not None else torch.compile(model)
    steps(model, lambda tokens: nll(run(tokens), tokens), on_step, **options)


@program
def submodule(on_step: OnStep) -> None:
    model = Body().cuda()
    model.blocks[0] = torch.compile(model.blocks[0])
    plain(model, on_step, run=model, amp=True)


@program
def loss_only(on_step: OnStep) -> None:
    model = Body().cuda()
    loss = torch.compile(nll)
    steps(model, lambda tokens: loss(model(tokens), tokens), on_step)


@program
def optimizer_step(on_step: OnStep) -> None:
    model = Body().cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    @torch.compile(fullgraph=False)
    def step() -> None:
        optimizer.step()

    plain(model, on_step, run=model, step=step, optimizer=optimizer)


@program
def checkpoint_inside(on_step: OnStep) -> None:
    plain(Checkpointed(depth=4).cuda(), on_step, amp=True)


@program
def backend_aot_eager(on_step: OnStep) -> None:
    model = Body().cuda()
    plain(model, on_step, run=torch.compile(model, backend="aot_eager"), amp=True)


@program
def train_step(on_step: OnStep) -> None:
    model = Body().cuda()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

    @torch.compile
    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = nll(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for number in range(3):
        step(torch.randint(0, 1000, SHAPE, device="cuda"))
        on_step(number)


@program
def dynamic_amp(on_step: OnStep) -> None:
    model = Body().cuda()
    sizes = ((4, 256), (3, 256), (5, 256), (5, 200), (4, 256))
    plain(model, on_step, sizes=sizes, amp=True)


@program
def fp16_scaler(on_step: OnStep) -> None:
    model = Body().cuda()
    run = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for number in range(3):
        tokens = torch.randint(0, 1000, SHAPE, device="cuda")
        with torch.autocast("cuda", torch.float16):
            loss = nll(run(tokens), tokens)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        on_step(number)


class Pictures(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(
            *[nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(3)]
        )
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(width, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.body(self.stem(x))).mean((2, 3)))


def train_pictures(model: nn.Module, on_step: OnStep, **options: Any) -> None:
    run = torch.compile(model)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        x = torch.randn(16, 3, 64, 64, device="cuda")
        return F.cross_entropy(run(x), tokens[:, 0])

    steps(model, loss_of, on_step, sizes=((16, 1),) * 3, **options)


@program
def pictures(on_step: OnStep) -> None:
    train_pictures(Pictures().cuda(), on_step)


@program
def ran_before(on_step: OnStep) -> None:
    model = Body()
    run = torch.compile(model, backend="eager")
    tokens = torch.randint(0, 1000, (2, 16))
    nll(run(tokens), tokens).backward()
    model.zero_grad()
    model.cuda()
    plain(model, on_step, run=run)


def train_by_trainer(model: Any, on_step: OnStep) -> None:
    """Three steps of Trainer with ``torch_compile``."""
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments

    class EachStep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            on_step(state.global_step - 1)

    data = [{"input_ids": list(range(256)), "labels": list(range(256))} for _ in range(16)]
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=3, bf16=True, torch_compile=True,
        report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=data, callbacks=[EachStep()]).train()


@program
def trainer(on_step: OnStep) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    train_by_trainer(LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=2000)), on_step)


@program
def trainer_lora(on_step: OnStep) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=2000)).to(torch.bfloat16)
    lora = LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.05, task_type="CAUSAL_LM")
    train_by_trainer(get_peft_model(llama, lora), on_step)


@program
def autotuned(on_step: OnStep) -> None:
    """Kernels of products are timed on examples of their arguments, each shape once."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to("cuda", torch.bfloat16)
    run = torch.compile(model, mode="max-autotune-no-cudagraphs")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for number in range(3):
        run(torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step(number)


def train_body(on_step: OnStep, compile_: str = "") -> None:
    """As written, compiled as a whole, or its blocks one by one."""
    model = Body(depth=4).cuda()
    run: Any = torch.compile(model) if compile_ == "whole" else model
    for block in model.blocks if compile_ == "blocks" else ():
        block.compile()
    plain(model, on_step, run=run)


@program
def blocks_one_by_one(on_step: OnStep) -> None:
    train_body(on_step, "blocks")


@program
def half_budget(on_step: OnStep) -> None:
    import torch._functorch.config as functorch

    with functorch.patch(activation_memory_budget=0.5):
        train_body(on_step, "whole")


class Perceptron(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Linear(width, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(F.gelu(self.b(F.gelu(self.a(x)))))


@program
def cuda_graphs(on_step: OnStep) -> None:
    """Steps are warmed up, recorded and replayed; then so is an evaluation between replays."""
    model = Perceptron().cuda()
    run = torch.compile(model, mode="reduce-overhead")
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(6):
        x, y = torch.randn(2048, 512, device="cuda"), torch.randint(0, 100, (2048,), device="cuda")
        loss = F.cross_entropy(run(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number > 2:
            with torch.no_grad():
                _ = run(torch.randn(4096, 512, device="cuda")).argmax(1)
        on_step(number)


class ScaledTanh(torch.autograd.Function):
    """A user's own function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        y = torch.tanh(x * scale)
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y) * ctx.scale, None


class Talking(nn.Module):
    """A print and a value that is read end graphs: the errors with which they end hold the frames that were running."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = ScaledTanh.apply(self.a(x), 0.5)
        print("shape", x.shape)
        x = ScaledTanh.apply(self.b(x), 2.0)
        if x.sum() > 1e30:
            x = x * 2
        return self.c(x)


@program
def graph_breaks(on_step: OnStep) -> None:
    model = Talking().cuda()
    run = torch.compile(model)
    optimizer = torch.optim.RMSprop(model.parameters())
    for number in range(3):
        loss = run(torch.randn(4096, 1024, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step(number)


@program
def compiled_autograd(on_step: OnStep) -> None:
    """The backward is compiled as well, and runs on the thread that asks for it."""
    import torch._dynamo

    with torch._dynamo.config.patch(compiled_autograd=True):
        layers = [nn.Linear(512, 2048), nn.GELU(), nn.LayerNorm(2048), nn.Linear(2048, 512), nn.GELU()]
        model = nn.Sequential(*layers, nn.Linear(512, 50)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())

        @torch.compile
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        for number in range(3):
            step(torch.randn(4096, 512, device="cuda"), torch.randint(0, 50, (4096,), device="cuda"))
            optimizer.step()
            optimizer.zero_grad()
            on_step(number)


@program
def capturable_step(on_step: OnStep) -> None:
    """A compiled step of an optimizer that CUDA graphs could take, where there are none."""
    hidden = [module for _ in range(6) for module in (nn.Linear(768, 768), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(768, 100)).cuda()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3, foreach=True, capturable=True)

    @torch.compile(fullgraph=False)
    def step() -> None:
        optimizer.step()

    for number in range(4):
        x = torch.randn(2048, 768, device="cuda")
        F.cross_entropy(model(x), torch.randint(0, 100, (2048,), device="cuda")).backward()
        step()
        optimizer.zero_grad()
        on_step(number)


@program
def flex_with_captured(on_step: OnStep) -> None:
    """``flex_attention`` by itself compiled, whose score_mod captures a tensor."""
    flex = torch.compile(flex_attention)
    project, out = (nn.Linear(512, width).to("cuda", torch.bfloat16) for width in (1536, 512))
    optimizer = torch.optim.AdamW([*project.parameters(), *out.parameters()])
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 256), None, None, 1024, 1024, device="cuda")
    slopes = torch.exp2(-torch.arange(1, 9, device="cuda").float())
    for number in range(3):
        x = torch.randn(4, 1024, 512, device="cuda", dtype=torch.bfloat16)
        query, key, value = project(x).view(4, 1024, 3, 8, 64).permute(2, 0, 3, 1, 4)
        attended = flex(
            query, key, value, score_mod=lambda score, b, h, q, k: score + slopes[h] * (k - q), block_mask=mask
        )
        out(attended.transpose(1, 2).reshape(4, 1024, 512)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step(number)


class Listed(nn.Module):
    """Rows and columns taken and written by lists of their numbers, as nanoGPT takes the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(256, 512), nn.Linear(512, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.inner(x)[:, [0, 2, 5]])
        mask = torch.zeros_like(hidden)
        mask[:, [1, 2]] = 1.0
        return self.outer(hidden * mask)[:, [-1]]


@program
def listed_numbers(on_step: OnStep) -> None:
    model = Listed().cuda()
    run, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters())
    for number in range(3):
        run(torch.randn(512, 8, 256, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step(number)


@program
def taken_apart(on_step: OnStep) -> None:
    """What autograd takes apart on CUDA, and on "meta" does not: statistics, activations, distances, Fourier transforms."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU6(), nn.Linear(512, 256), nn.SELU(), nn.AlphaDropout(0.1)).cuda()

    @torch.compile
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        hidden = model(x)
        hidden = (hidden - hidden.mean(-1, keepdim=True)) / (hidden.std(-1, keepdim=True) + 1e-5)
        smooth = torch.fft.irfft(torch.fft.rfft(hidden) * 0.5, n=256)
        spread = torch.var_mean(smooth, 0)[0].mean()
        return F.pairwise_distance(smooth, x).mean() + torch.where(hidden > 0, hidden, 0.1).mean() + spread

    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(3):
        loss_of(torch.randn(4096, 256, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step(number)
