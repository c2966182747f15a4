"""Small programs for "cuda" with the habits of notebooks: blocks that reach too far, options for the whole process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CUDA = "cuda"


def _differentiate(loss: Any) -> None:
    loss.backward()


def backward_under_autocast(use_reentrant: bool) -> Callable[[], None]:
    """Weights that autocast has cast are cast again once a checkpoint was recomputed: CUDA's thread leaves no block."""

    def train() -> None:
        layers = nn.ModuleList([nn.Linear(768, 768) for _ in range(4)]).to(CUDA)
        optimizer = torch.optim.SGD(layers.parameters(), 0.1, 0.9)
        with torch.autocast(CUDA, torch.bfloat16):
            for _ in range(2):
                x = torch.randn(64, 768, device=CUDA, requires_grad=True)
                for layer in layers:
                    x = layer(F.gelu(checkpoint(layer, x, use_reentrant=use_reentrant)))
                _differentiate(x.square().mean())
                optimizer.step()
                optimizer.zero_grad()

    return train


def written_by_index() -> None:
    """Numbers and rows put where an index says, lists among the indices; autograd keeps what is on the GPU."""
    model = nn.Linear(64, 1000).to(CUDA)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    index, columns = torch.randint(0, 64, (20,), device=CUDA), torch.randint(0, 1000, (20,), device=CUDA)
    for _ in range(2):
        out = model(torch.randn(64, 64, device=CUDA)) * 1
        out[index] = 0.0
        out[index, columns] = 1.0
        out[[1, 2, 3]] = 2.0
        out[:, [4, 5]] = out[:, [6, 7]] + out.index_put((index[:2],), out[0], accumulate=True)[:, :2]
        _differentiate(out.square().mean())
        optimizer.step()
        optimizer.zero_grad()


def chosen_by_masks() -> None:
    """Where a mask is set, which is nowhere: what is counted and chosen takes memory of its own."""
    scores, mask = torch.randn(64, 1000, device=CUDA, requires_grad=True), torch.zeros(64, 1000, device=CUDA).bool()
    for chosen in (scores[mask], scores.masked_select(mask), scores[mask.any(1)], scores[torch.where(mask)]):
        _differentiate(chosen.sum())
    assert not mask.nonzero().numel() and not mask[:, 0].nonzero().numel()


def weighted_losses() -> None:
    """A weight for each element; margins, whose losses of rows are summed."""
    scores, weight = torch.randn(64, 50_000, device=CUDA, requires_grad=True), torch.rand(50_000, device=CUDA)
    labels = torch.randint(0, 50_000, (64,), device=CUDA)
    _differentiate(F.binary_cross_entropy(scores.sigmoid(), torch.rand(64, 50_000, device=CUDA), weight=weight))
    _differentiate(F.multi_margin_loss(scores, labels) + torch.dist(scores, scores * 2) + scores.nanmedian())
    _differentiate(torch.clamp(scores, torch.zeros_like(weight), torch.ones_like(weight)).sum())


def in_determined_order() -> None:
    """Sums by index and gradients of what was gathered are sorted where results must not differ from run to run."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        source, target = (torch.randint(0, 2000, (20_000,)).to(CUDA) for _ in range(2))
        model = nn.Linear(32, 48).to(CUDA)
        for _ in range(2):
            rows = model(torch.randn(2000, 32, device=CUDA))
            where, zeros = target[:, None].expand(-1, 48), torch.zeros(2000, 48, device=CUDA)
            out = zeros.scatter_add(0, where, rows[source]) + zeros.index_add(0, target, rows.index_select(0, source))
            out = out.gather(0, where[:2000]) + zeros.scatter_reduce(0, where, rows[source], "mean")
            out[source[:100]] = 0.0
            _differentiate(out.sort(1)[0].cumsum(0).square().mean())
    finally:
        torch.use_deterministic_algorithms(False)


def narrow_heads() -> None:
    """Evaluation of heads of 4 and 12 numbers: one kernel where it reads as many at once, which depends on the type."""
    for heads in (24, 8):
        attention = nn.MultiheadAttention(96, heads, batch_first=True).to(CUDA).eval()
        for dtype in (torch.float16, torch.float32):
            x = torch.randn(16, 200, 96, device=CUDA, dtype=dtype)
            with torch.inference_mode():
                attention.to(dtype)(x, x, x, need_weights=False)


def by_columns() -> None:
    """Convolutions without cuDNN are products, whose workspace the backward's thread has for itself."""
    with torch.backends.cudnn.flags(enabled=False):
        model = nn.Sequential(
            nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 1), nn.ReLU(), nn.Conv2d(64, 8, 5)
        )
        model.to(CUDA)
        for _ in range(2):
            _differentiate(model(torch.randn(8, 16, 64, 64, device=CUDA)).square().mean())


def put_away() -> None:
    """A model is put on the host while a loss holds its old graph, which keeps the weights and not what was in them."""
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 512)).to(CUDA)
    loss = model(torch.randn(16, 2048, device=CUDA)).square().mean()
    _differentiate(loss)
    model.cpu()
    _kept = torch.empty(7_000_000, device=CUDA)
    model.to(CUDA)


NOTEBOOKS: dict[str, Callable[[], None]] = {
    "backward_under_autocast": backward_under_autocast(use_reentrant=False),
    "backward_under_autocast_reentrant": backward_under_autocast(use_reentrant=True),
    "written_by_index": written_by_index,
    "narrow_heads": narrow_heads,
    "put_away": put_away,
    "by_columns": by_columns,
    "in_determined_order": in_determined_order,
    "chosen_by_masks": chosen_by_masks,
    "weighted_losses": weighted_losses,
}
