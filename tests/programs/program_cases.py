"""Small programs for "cuda" as users write them: losses, copies, hooks and loops beyond one module and one optimizer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, default_fused_per_channel_wt_fake_quant
from torch.autograd.graph import save_on_cpu
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

CUDA = "cuda"


def images() -> torch.Tensor:
    return torch.randn(8, 64, 32, 32, device=CUDA, requires_grad=True)


def of_loss(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], None]:
    """Forward and backward of a loss that reduces half a million elements."""

    def program() -> None:
        x = images()
        loss(x, x.detach()).backward()

    return program


def of_copy(move: Callable[[torch.Tensor], object]) -> Callable[[], None]:
    """A copy between host and GPU."""

    def program() -> None:
        move(torch.randn(1024, 1024, device=CUDA))

    return program


def diffusion() -> None:
    """Convolutions, group norms, skip connections, and a moving average of the weights."""

    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU())

    down, middle, up = block(3, 32).to(CUDA), block(32, 64).to(CUDA), block(96, 32).to(CUDA)
    last = nn.Conv2d(32, 3, 1).to(CUDA)
    model = nn.ModuleList([down, middle, up, last])
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        x = torch.randn(8, 3, 128, 128, device=CUDA)
        high = down(x)
        low = F.interpolate(middle(F.avg_pool2d(high, 2)), scale_factor=2, mode="bilinear", align_corners=False)
        loss = F.mse_loss(last(up(torch.cat([low, high], 1))), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.01)


def best_weights() -> None:
    """Copies of a model with buffers and of its state, as those make who keep the best weights or an average."""
    model = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.Linear(512, 2048, bias=False)).to(CUDA)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.NAdam(model.parameters())
    best = copy.deepcopy(model.state_dict())
    for _ in range(3):
        model(torch.rand(64, 512, device=CUDA)).logsumexp(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        best = copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
    pair = torch.rand(1000, device=CUDA)
    copy.deepcopy([pair, pair[:10], pair.untyped_storage()])


def adversarial() -> None:
    """Two optimizers, and a penalty on a gradient (``create_graph``)."""
    maker = nn.Sequential(nn.ConvTranspose2d(64, 64, 4), nn.BatchNorm2d(64), nn.ReLU(), nn.ConvTranspose2d(64, 3, 4, 4))
    critic = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64 * 64, 1))
    maker, critic = maker.to(CUDA), critic.to(CUDA)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (maker, critic)]
    for _ in range(3):
        fake = maker(torch.randn(64, 64, 1, 1, device=CUDA))
        mixed = fake.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = ((gradient.flatten(1).norm(dim=1) - 1) ** 2).mean()
        optimizers[1].zero_grad()
        (F.softplus(critic(fake.detach())).mean() + 10 * penalty).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        optimizers[0].step()


def offloaded() -> None:
    """Saved tensors kept on the host, gradients kept as zeros."""
    blocks = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)]
    model = nn.Sequential(*blocks).to(CUDA)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        with save_on_cpu():
            loss = model(torch.randn(512, 512, device=CUDA)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def graph() -> None:
    """Messages along edges: gathers, ``index_add``, ``scatter_add``."""
    num_nodes, num_edges = 5000, 40000
    first, second = nn.Linear(128, 256).to(CUDA), nn.Linear(256, 40).to(CUDA)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    source, target = (torch.randint(0, num_nodes, (num_edges,)).to(CUDA) for _ in range(2))
    labels = torch.randint(0, 40, (num_nodes,), device=CUDA)
    for _ in range(3):
        hidden = first(torch.randn(num_nodes, 128, device=CUDA))
        hidden = torch.zeros(num_nodes, 256, device=CUDA).index_add(0, target, hidden[source]).relu()
        out = second(hidden)
        out = torch.zeros(num_nodes, 40, device=CUDA).scatter_add(0, target[:, None].expand(-1, 40), out[source])
        F.cross_entropy(out, labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def penalized() -> None:
    """WGAN with a gradient penalty: nodes made in one backward run in another, in the order of their threads."""
    maker = nn.Sequential(nn.Linear(100, 256), nn.BatchNorm1d(256), nn.LeakyReLU(0.2), nn.Linear(256, 784), nn.Tanh())
    critic = nn.Sequential(
        nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)
    )
    maker, critic = maker.to(CUDA), critic.to(CUDA)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (maker, critic)]
    for turn in range(6):
        real, fake = torch.randn(64, 784, device=CUDA), maker(torch.randn(64, 100, device=CUDA))
        share = torch.rand(64, 1, device=CUDA)
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
        optimizers[1].zero_grad()
        (-critic(real).mean() + critic(fake).mean() + 10 * penalty).backward()
        optimizers[1].step()
        if turn % 2 == 0:
            optimizers[0].zero_grad()
            (-critic(maker(torch.randn(64, 100, device=CUDA))).mean()).backward()
            optimizers[0].step()


def differential() -> None:
    """A network that solves a differential equation: gradients of gradients of the outputs, before each backward."""
    sizes = (3, 96, 96, 96)
    layers = [layer for i in range(3) for layer in (nn.Linear(sizes[i], sizes[i + 1]), nn.SiLU())]
    model = nn.Sequential(*layers, nn.Linear(96, 2)).to(CUDA)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        x = torch.rand(3000, 3, device=CUDA, requires_grad=True)
        outputs = model(x)
        firsts = [torch.autograd.grad(outputs[:, i].sum(), x, create_graph=True)[0] for i in range(2)]
        seconds = [torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)[0][:, 0] for first in firsts]
        (outputs.square().mean() + sum(second.square().mean() for second in seconds)).backward()
        optimizer.step()
        optimizer.zero_grad()


def watched() -> None:
    """Under a mode that sees each operator PyTorch writes into fewer tensors: FLOPs counted, operators' outputs kept."""
    from torch.utils.flop_counter import FlopCounterMode  # it warns where there is no triton

    layers = nn.ModuleList([nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True) for _ in range(3)]).to(CUDA)
    optimizer = torch.optim.AdamW(layers.parameters())
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    for turn in range(3):
        x = torch.randn(8, 128, 256, device=CUDA)
        with FlopCounterMode(display=False) if turn == 1 else nullcontext():
            for layer in layers:
                x = layer(x) if turn < 2 else checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
            (x.square().mean() + x.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


def tuned() -> None:
    """``cudnn.benchmark``: the cache is emptied after each new convolution, of images of three sizes and recomputed."""
    torch.backends.cudnn.benchmark = True
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(32 if i else 3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for i in range(3)),
        nn.Conv2d(32, 32, 3, groups=32),
        nn.ConvTranspose2d(32, 16, 2, stride=2),
    ).to(CUDA)
    sound = nn.Conv1d(8, 64, 5).to(CUDA)
    optimizer = torch.optim.Adam([*model.parameters(), *sound.parameters()])
    for size in (64, 96, 48, 64):
        x = torch.randn(16, 3, size, size, device=CUDA)
        x = model[1](checkpoint(model[0], x, use_reentrant=False))
        (model[2:](x).mean() + sound(torch.randn(8, 8, 40 * size, device=CUDA)).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def without_cudnn() -> None:
    """Recurrent layers step by step, packed ones too, and their double backward; convolutions by columns."""
    with torch.backends.cudnn.flags(enabled=False):
        tagger = nn.LSTM(64, 256, 2, dropout=0.1, bidirectional=True, batch_first=True, proj_size=32).to(CUDA)
        reader, simple = nn.GRU(64, 256, batch_first=True).to(CUDA), nn.RNN(256, 64, bias=False).to(CUDA)
        x = torch.randn(64, 24, 64, device=CUDA, requires_grad=True)
        found, _ = simple(reader(tagger(x)[0])[0])
        (gradient,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        gradient.norm().backward()
        packed = pack_padded_sequence(x, torch.tensor([24, 20, 20, 7] + [3] * 60), batch_first=True)
        pad_packed_sequence(tagger(packed)[0])[0].sum().backward()
        images = nn.Sequential(
            nn.Conv2d(8, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.ConvTranspose2d(64, 8, 2, 2, bias=False)
        ).to(CUDA)
        images(torch.randn(4, 8, 96, 96, device=CUDA)).square().mean().backward()


def lazy() -> None:
    """Modules that learn their sizes from what comes, on the GPU; a module moved to where a tensor is."""
    model = nn.Sequential(
        nn.LazyConv2d(32, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(1000)
    ).cuda()
    x = torch.randn(8, 3, 32, 32).cuda()
    out = model(x)
    nn.Linear(1000, 1000).to(out)(out).sum().backward()


def evaluated(mode: Callable[[], Any]) -> Callable[[], None]:
    """Evaluation under autocast, of inputs that do not lie in order too."""

    def program() -> None:
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).to(CUDA)
        attention = nn.MultiheadAttention(512, 8, batch_first=True).to(CUDA)
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 8, batch_first=True), 2).to(CUDA).eval()
        for x in (torch.randn(256, 1024, device=CUDA), torch.randn(4, 1024, 512, device=CUDA).mT):
            for dtype in (torch.float16, torch.bfloat16):
                with mode(), torch.autocast(CUDA, dtype):
                    model(x)
        x = torch.randn(8, 128, 512, device=CUDA)
        with mode(), torch.autocast(CUDA, torch.float16):
            attention(x, x, x, need_weights=False)
            encoder(torch.randn(16, 128, 256, device=CUDA))

    return program


def masked(length: int) -> Callable[[], None]:
    """Evaluation of what has masks: up to 1024 scores a row one kernel takes, longer rows are filled and copied."""

    def program() -> None:
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(CUDA).eval()
        attention = nn.MultiheadAttention(128, 4, batch_first=True).to(CUDA).eval()
        x = torch.randn(200_000 // length**2 + 1, length, 128, device=CUDA)
        padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=CUDA)
        later = nn.Transformer.generate_square_subsequent_mask(length, device=CUDA)
        with torch.no_grad():
            encoder(x, src_key_padding_mask=padding)
            encoder(x, mask=later)
            attention(x, x, x, attn_mask=later.isinf(), key_padding_mask=padding)

    return program


def like_another() -> None:
    """Tensors made where another is, and of its type, from numbers, arrays and tensors of elsewhere."""
    on_gpu, on_host = torch.zeros(1000, dtype=torch.half, device=CUDA), torch.zeros(1024, 1024)
    kept = [
        on_gpu.new(300, 400), on_gpu.new([1.0] * 5000), on_gpu.new_tensor([1, 2]), on_gpu.new_tensor(on_host),
        on_gpu.new_tensor(on_gpu), on_host.new_tensor(on_gpu), on_host.new(3), torch.zeros(2).type_as(on_host),
        on_host.type_as(on_gpu), on_gpu.type_as(on_host), on_gpu.new_tensor([1, 2], dtype=torch.long),
    ]  # fmt: skip
    assert [tensor.is_cuda for tensor in kept] == [True] * 5 + [False] * 3 + [True, False, True]


def renormed() -> None:
    """Rows kept within a norm: by the embedding that looks them up, and by an operator that is trained through."""
    embedding, kernels = nn.Embedding(500, 16, max_norm=1.0).to(CUDA), torch.randn(64, 32, 3, device=CUDA)
    optimizer = torch.optim.SGD(embedding.parameters(), 0.1)
    for count in (64, 90_000):
        embedding(torch.randint(500, (count, 2), device=CUDA)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for dtype, dim in ((torch.float32, 0), (torch.float16, 1), (torch.bfloat16, -1)):
            torch.renorm(kernels.to(dtype).repeat(40, 40, 1).requires_grad_(), 2, dim, 1.0).pow(2).sum().backward()


def warped() -> None:
    """Images and volumes sampled where an affine map or a flow leads: by cuDNN from corner to corner, else not."""
    images, flow = torch.rand(8, 3, 96, 128, device=CUDA), nn.Conv2d(3, 2, 3, padding=1).to(CUDA)
    theta = torch.rand(8, 2, 3, device=CUDA, requires_grad=True)
    for align in (True, False):
        grid = F.affine_grid(theta, list(images.shape), align_corners=align)
        for places in (grid, grid + flow(images).permute(0, 2, 3, 1)):
            F.grid_sample(images, places, align_corners=align).sum().backward()
    theta = torch.rand(2, 3, 4, device=CUDA, requires_grad=True)
    volume = torch.rand(2, 1, 16, 32, 32, device=CUDA)
    F.grid_sample(volume, F.affine_grid(theta, list(volume.shape), align_corners=False), align_corners=False).sum()


def flexible(has_mask: bool, has_score: bool, is_trained: bool = True) -> Callable[[], None]:
    """``flex_attention`` as written, not compiled, with grouped heads and a mask by documents."""

    def program() -> None:
        size = 256
        documents = torch.arange(size, device=CUDA) // 64
        mask = create_block_mask(
            lambda b, h, q, k: (q >= k) & (documents[q] == documents[k]), None, None, size, size, device=CUDA
        )
        query = torch.randn(2, 8, size, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=is_trained)
        key, value = (torch.randn(2, 4, size, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
        out = flex_attention(
            query,
            key,
            value,
            score_mod=(lambda score, b, h, q, k: score + (q - k) * torch.exp2(-h)) if has_score else None,
            block_mask=mask if has_mask else None,
            enable_gqa=True,
        )
        if is_trained:
            out.sum().backward()

    return program


def bilinear() -> None:
    """A product for each output, kept by none of them."""
    model = nn.Bilinear(64, 48, 100).to(CUDA)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        x, y = torch.randn(256, 64, device=CUDA, requires_grad=True), torch.randn(256, 48, device=CUDA)
        model(x, y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def minimizer_that_goes_on() -> type[torch.optim.Optimizer]:
    """``LBFGS``; on the CUDA build as it goes where losses fall, for that build has no values over which to go on."""
    if not torch.version.cuda:
        return torch.optim.LBFGS
    module = import_module("torch.optim.lbfgs")
    source = inspect.getsource(module).replace("from .optimizer", "from torch.optim.optimizer")
    for condition in ("abs(loss - prev_loss) < tolerance_change", "gtd > -tolerance_change"):
        source = source.replace(f"if {condition}", "if False")
    names: dict[str, Any] = {"__name__": "lbfgs_that_goes_on"}
    exec(source.replace("if ys > 1e-10", "if True"), names)

    def first_trial(
        evaluate: Any, x: Any, t: Any, d: Any, _loss: Any, gradient: Any, *_more: Any, **_options: Any
    ) -> Any:
        gradient = gradient.clone()
        return *evaluate(x, t, d), t, 1

    names["_strong_wolfe"] = first_trial
    return names["LBFGS"]  # type: ignore[no-any-return]


def with_history(**options: Any) -> Callable[[], None]:
    """Steps of several iterations, each of which is kept."""

    def train() -> None:
        net = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 1)).cuda()
        minimizer: Any = minimizer_that_goes_on()(net.parameters(), **options)
        x, y = torch.rand(2000, 256, device="cuda"), torch.rand(2000, 1, device="cuda")

        def closure() -> torch.Tensor:
            minimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            return loss

        for _ in range(3):
            minimizer.step(closure)

    return train


def aware_of_quantization() -> None:
    """Weights and activations rounded: ranges observed by channel and by tensor, given, and learned."""
    weight, scale = (nn.Parameter(torch.ones(shape, device=CUDA)) for shape in ((256, 256), (256,)))
    zeros = torch.zeros(256, device=CUDA)
    observer = FusedMovingAvgObsFakeQuantize().to(CUDA)
    by_channel = default_fused_per_channel_wt_fake_quant().to(CUDA)
    optimizer = torch.optim.SGD([weight, scale], 0.1)
    for _ in range(2):
        x = observer(torch.randn(128, 256, device=CUDA)) @ by_channel(weight)
        rounded = [
            torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
            torch.fake_quantize_per_channel_affine(weight, torch.ones_like(zeros), zeros.int(), 0, -128, 127),
            torch._fake_quantize_learnable_per_channel_affine(weight, scale, zeros, 0, -128, 127, 1.0),
            torch._fake_quantize_learnable_per_tensor_affine(x, scale[:1], zeros[:1], -128, 127, 1.0),
        ]
        torch.stack([one.mean() for one in rounded]).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def of_several_lengths() -> None:
    """Attention over rows of several lengths, not padded: by the kernels of each type, under autocast too."""
    model = nn.ModuleDict({"in": nn.Linear(64, 192), "out": nn.Linear(64, 64)}).to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = [torch.randn(length, 64) for length in (170, 400, 90, 330)]
        x = torch.nested.nested_tensor(rows, layout=torch.jagged, device=CUDA)
        with torch.autocast(CUDA, dtype, enabled=dtype is not torch.float32):
            heads = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in model["in"](x).chunk(3, -1))
            dropout = 0.1 * (dtype is torch.float16)
            found = F.scaled_dot_product_attention(*heads, dropout_p=dropout, is_causal=dtype is torch.bfloat16)
            found = model["out"](found.transpose(1, 2).flatten(-2))
        torch.nested.to_padded_tensor(found, 0.0).float().square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def in_another_type(is_batched: bool) -> Callable[[], None]:
    """Products of half precision with results of single precision, new and in a given tensor."""
    product, added = (torch.bmm, torch.baddbmm) if is_batched else (torch.mm, torch.addmm)

    def run() -> None:
        half = torch.randn(*(3,) * is_batched, 512, 512, device=CUDA, dtype=torch.bfloat16)
        sums = added(product(half, half, out_dtype=torch.float32), half, half, out_dtype=torch.float32)
        added(sums, half.mT, half, out_dtype=torch.float32, out=sums)

    return run


PROGRAMS: dict[str, Callable[[], None]] = {
    "diffusion": diffusion,
    "adversarial": adversarial,
    "best_weights": best_weights,
    "offloaded": offloaded,
    "graph": graph,
    "bilinear": bilinear,
    "in_another_type": in_another_type(is_batched=False),
    "in_another_type_batched": in_another_type(is_batched=True),
    "of_several_lengths": of_several_lengths,
    "aware_of_quantization": aware_of_quantization,
    "penalized": penalized,
    "differential": differential,
    "watched": watched,
    "without_cudnn": without_cudnn,
    "lazy": lazy,
    "evaluated": evaluated(torch.no_grad),
    "evaluated_inference": evaluated(torch.inference_mode),
    "masked_short": masked(96),
    "masked_long": masked(1100),
    "renormed": renormed,
    "warped": warped,
    "like_another": like_another,
    "flex_masked": flexible(True, False),
    "flex_scored": flexible(False, True),
    "flex_both": flexible(True, True),
    "lbfgs": with_history(max_iter=5),
    "lbfgs_of_a_line_search": with_history(max_iter=4, history_size=6, line_search_fn="strong_wolfe"),
    "flex_inference": flexible(True, True, is_trained=False),
    "tuned": tuned,
    "mse_loss": of_loss(F.mse_loss),
    "mse_loss_mixed": of_loss(lambda x, y: F.mse_loss(x.half(), y)),
    "smooth_l1_loss": of_loss(F.smooth_l1_loss),
    "huber_loss": of_loss(F.huber_loss),
    "soft_margin_loss": of_loss(F.soft_margin_loss),
    "bce": of_loss(F.binary_cross_entropy),
    "bce_with_logits": of_loss(F.binary_cross_entropy_with_logits),
    "extremes_half": of_copy(lambda x: (x.half().amax(), x.bfloat16().amin(), x.half().max(), x.bfloat16().min())),
    "is_infinite": of_copy(torch.isinf),
    "to_host": of_copy(lambda x: x.cpu()),
    "to_host_transposed": of_copy(lambda x: x.t().cpu()),
    "to_host_strided": of_copy(lambda x: x[:, ::2].cpu()),
    "to_host_expanded": of_copy(lambda x: x[:1].expand(2048, -1).cpu()),
    "to_host_converted": of_copy(lambda x: x.to("cpu", torch.half)),
    "to_host_converted_async": of_copy(lambda x: x.t().to("cpu", torch.half, non_blocking=True)),
    "to_list": of_copy(lambda x: x[:, 0].tolist()),
    "into_host": of_copy(lambda x: torch.empty(1024, 512).copy_(x[:, ::2])),
    "from_host_into_columns": of_copy(lambda x: x[:, ::2].copy_(torch.zeros(1024, 512))),
    "from_host_converted_async": of_copy(lambda x: torch.zeros(1024, 1024).to(CUDA, torch.half, non_blocking=True)),
    "from_host_channels_last": of_copy(lambda x: torch.zeros(4, 8, 64, 64).to(CUDA, memory_format=torch.channels_last)),
}
