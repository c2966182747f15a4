"""Architectures as papers describe them, by PyTorch alone."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.programs.device_programs.table import CUDA, OnStep, mlp, program, train


class Block(nn.Module):
    """A pre-norm transformer block; groups of heads may share keys and values."""

    def __init__(self, width: int, heads: int, shared: int = 1, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.shared, self.causal = heads, shared, causal
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width // shared)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        normed = self.first(x)
        source = normed if memory is None else torch.cat([memory, normed], 1)
        query = self.query(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = self.key_value(source).chunk(2, -1)
        key = key.unflatten(-1, (self.heads // self.shared, -1)).transpose(1, 2)
        value = value.unflatten(-1, (self.heads // self.shared, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=self.causal and memory is None, enable_gqa=self.shared > 1
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


@program
def grouped_queries(on_step: OnStep) -> None:
    """Grouped-query attention in bfloat16, 4096 tokens."""
    net = nn.Sequential(*(Block(1024, 16, shared=4) for _ in range(4))).to(CUDA, torch.bfloat16)
    x = torch.randn(2, 4096, 1024, device=CUDA, dtype=torch.bfloat16)
    train(net, on_step, lambda: net(x).float().pow(2).mean())


@program
def segments(on_step: OnStep) -> None:
    """Transformer-XL: each segment attends to the last one's states, which have no gradient."""
    layers = nn.ModuleList(Block(512, 8) for _ in range(4)).to(CUDA)
    optimizer = torch.optim.Adam(layers.parameters())
    memory: list[torch.Tensor | None] = [None] * 4
    for _ in range(5):
        x, new = torch.randn(8, 512, 512, device=CUDA), []
        for layer, one in zip(layers, memory, strict=True):
            new.append(x.detach())
            x = layer(x, one)
        memory = new  # type: ignore[assignment]
        x.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step()


@program
def perceiver(on_step: OnStep) -> None:
    """Latents that attend to a long input, by nn.MultiheadAttention with its weights."""
    attend = nn.MultiheadAttention(256, 8, batch_first=True, dropout=0.1).to(CUDA)
    latents = nn.Parameter(torch.randn(1, 128, 256, device=CUDA))
    head = mlp(256, 1024, 10)

    def loss() -> torch.Tensor:
        x = torch.randn(16, 8192, 256, device=CUDA)
        mixed, weights = attend(latents.expand(16, -1, -1), x, x, average_attn_weights=False)
        return F.cross_entropy(head(mixed.mean(1)), torch.randint(10, (16,), device=CUDA)) + weights.amax()

    train(nn.ModuleList([nn.ParameterList([latents]), attend, head]), on_step, loss)


@program
def windows(on_step: OnStep) -> None:
    """Swin: attention within shifted windows, with a table of relative biases."""
    qkv, out = nn.Linear(192, 576).to(CUDA), nn.Linear(192, 192).to(CUDA)
    table = nn.Parameter(torch.zeros(169, 6, device=CUDA))
    places = torch.randint(169, (49, 49), device=CUDA)

    def loss() -> torch.Tensor:
        x = torch.randn(16, 56, 56, 192, device=CUDA)
        for shift in (0, 3):
            rolled = torch.roll(x, (-shift, -shift), (1, 2))
            cut = rolled.view(16, 8, 7, 8, 7, 192).permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, 192)
            query, key, value = qkv(cut).reshape(-1, 49, 3, 6, 32).permute(2, 0, 3, 1, 4).unbind(0)
            scores = query @ key.transpose(-2, -1) / math.sqrt(32) + table[places].permute(2, 0, 1)
            mixed = out((scores.softmax(-1) @ value).transpose(1, 2).reshape(-1, 49, 192))
            x = x + mixed.view(16, 8, 8, 7, 7, 192).permute(0, 1, 3, 2, 4, 5).reshape(x.shape)
        return x.pow(2).mean()

    train(nn.ModuleList([qkv, out, nn.ParameterList([table])]), on_step, loss)


@program
def experts(on_step: OnStep) -> None:
    """A mixture of eight experts with a fixed capacity, the two best for each token."""
    router, hidden = nn.Linear(512, 8).to(CUDA), 2048
    first = nn.Parameter(torch.randn(8, 512, hidden, device=CUDA) * 0.02)
    second = nn.Parameter(torch.randn(8, hidden, 512, device=CUDA) * 0.02)

    def loss() -> torch.Tensor:
        x = torch.randn(8192, 512, device=CUDA)
        weight, chosen = router(x).softmax(-1).topk(2)
        mask = F.one_hot(chosen, 8).float()
        place = (mask.flatten(0, 1).cumsum(0).view_as(mask) * mask).sum(-1).long().clamp(max=2047)
        slots = torch.zeros(8, 2048, 512, device=CUDA)
        slots = slots.index_put((chosen, place), x[:, None].expand(-1, 2, -1), accumulate=True)
        made = torch.bmm(F.gelu(torch.bmm(slots, first)), second)
        return ((made[chosen, place] * weight[..., None]).sum(1) - x).pow(2).mean()

    train(nn.ModuleList([router, nn.ParameterList([first]), nn.ParameterList([second])]), on_step, loss)


@program
def masked_autoencoder(on_step: OnStep) -> None:
    """MAE: the patches are shuffled by sorting noise, and a quarter is kept."""
    embed, head = nn.Linear(768, 512).to(CUDA), nn.Linear(512, 768).to(CUDA)
    encoder = nn.Sequential(*(Block(512, 8, causal=False) for _ in range(3))).to(CUDA)
    token = nn.Parameter(torch.zeros(1, 1, 512, device=CUDA))

    def loss() -> torch.Tensor:
        patches = torch.randn(64, 196, 768, device=CUDA)
        shuffled = torch.rand(64, 196, device=CUDA).argsort(1)
        restored = shuffled.argsort(1)
        kept = torch.gather(embed(patches), 1, shuffled[:, :49, None].expand(-1, -1, 512))
        full = torch.cat([encoder(kept), token.expand(64, 147, -1)], 1)
        full = torch.gather(full, 1, restored[..., None].expand(-1, -1, 512))
        return (head(full) - patches).pow(2).mean()

    train(nn.ModuleList([nn.ParameterList([token]), embed, head, encoder]), on_step, loss)


@program
def checkpointed(on_step: OnStep) -> None:
    """Both kinds of checkpointing, with dropout, and a sequence in pieces."""
    blocks = nn.Sequential(*(nn.Sequential(Block(512, 8), nn.Dropout(0.1)) for _ in range(6))).to(CUDA)

    def loss() -> torch.Tensor:
        x = torch.randn(8, 1024, 512, device=CUDA, requires_grad=True)
        x = checkpoint_sequential(blocks[:4], 2, x, use_reentrant=False)
        x = checkpoint(blocks[4], x, use_reentrant=True)
        return checkpoint(blocks[5], x, use_reentrant=False).pow(2).mean()

    train(blocks, on_step, loss)


# Generative models


@program
def variational(on_step: OnStep) -> None:
    """A variational autoencoder by torch.distributions."""
    encoder, decoder = mlp(3072, 2048, 1024), mlp(512, 2048, 3072)

    def loss() -> torch.Tensor:
        x = torch.rand(1024, 3072, device=CUDA)
        mean, spread = encoder(x).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, F.softplus(spread) + 1e-4)
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        rebuilt = decoder(posterior.rsample())
        divergence = torch.distributions.kl_divergence(posterior, prior).sum(-1).mean()
        return F.binary_cross_entropy_with_logits(rebuilt, x, reduction="none").sum(-1).mean() + divergence

    train(nn.ModuleList([encoder, decoder]), on_step, loss)


@program
def flow(on_step: OnStep) -> None:
    """RealNVP: eight coupling layers and the logarithm of their determinant."""
    nets = nn.ModuleList(mlp(256, 1024, 512, activation=nn.SiLU) for _ in range(8))

    def loss() -> torch.Tensor:
        z, volume = torch.randn(4096, 512, device=CUDA), torch.zeros(4096, device=CUDA)
        for net in nets:
            kept, changed = z.chunk(2, -1)
            scale, shift = net(kept).chunk(2, -1)
            scale = torch.tanh(scale)
            z, volume = torch.cat([changed * scale.exp() + shift, kept], -1), volume + scale.sum(-1)
        return (0.5 * z.pow(2).sum(-1) - volume).mean()

    train(nets, on_step, loss)


@program
def radiance_field(on_step: OnStep) -> None:
    """NeRF: positional encoding, 64 samples a ray, composited by a cumulative product."""
    net = mlp(63, 256, 256, 256, 256, 4)
    bands = 2.0 ** torch.arange(10, device=CUDA)

    def loss() -> torch.Tensor:
        rays = torch.randn(4096, 1, 3, device=CUDA) + torch.linspace(2, 6, 64, device=CUDA)[:, None]
        angles = rays[..., None, :] * bands[:, None]
        encoded = torch.cat([rays, angles.sin().flatten(-2), angles.cos().flatten(-2)], -1)
        raw = net(encoded)
        opacity = 1 - torch.exp(-F.relu(raw[..., 3]) * 0.06)
        through = torch.cumprod(1 - opacity + 1e-10, -1).roll(1, -1)
        colour = ((opacity * through)[..., None] * raw[..., :3].sigmoid()).sum(1)
        return (colour - torch.rand(4096, 3, device=CUDA)).pow(2).mean()

    train(net, on_step, loss)


# Sequences


@program
def speech(on_step: OnStep) -> None:
    """CTC over a bidirectional LSTM, with packed sequences."""
    lstm = nn.LSTM(80, 256, 2, batch_first=True, bidirectional=True).to(CUDA)
    head = nn.Linear(512, 40).to(CUDA)
    lengths = torch.arange(400, 400 - 16 * 10, -10)

    def loss() -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(16, 400, 80, device=CUDA), lengths, batch_first=True)
        made, _ = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)
        scores = head(made).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, torch.randint(1, 40, (16, 50), device=CUDA), lengths, torch.full((16,), 50))

    train(nn.ModuleList([lstm, head]), on_step, loss)


@program
def fourier_operator(on_step: OnStep) -> None:
    """FNO: weights on the lowest frequencies, in complex numbers."""
    lift, drop = nn.Linear(3, 64).to(CUDA), nn.Linear(64, 1).to(CUDA)
    weights = nn.ParameterList(
        nn.Parameter(torch.randn(64, 64, 16, 16, dtype=torch.cfloat, device=CUDA) * 0.01) for _ in range(4)
    )

    def loss() -> torch.Tensor:
        x = lift(torch.randn(16, 64, 64, 3, device=CUDA)).permute(0, 3, 1, 2)
        for weight in weights:
            low = torch.fft.rfft2(x)
            out = torch.zeros_like(low)
            out[:, :, :16, :16] = torch.einsum("bixy,ioxy->boxy", low[:, :, :16, :16], weight)
            x = F.gelu(torch.fft.irfft2(out, s=(64, 64)) + x)
        return drop(x.permute(0, 2, 3, 1)).pow(2).mean()

    train(nn.ModuleList([lift, drop, weights]), on_step, loss)
