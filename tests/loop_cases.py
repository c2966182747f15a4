"""Programs whose peak lies behind their first steps: in an evaluation, in a later epoch, in the next model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CUDA = "cuda"


def network(width: int = 256) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)).to(CUDA)


def data(number: int, batch_size: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.zeros(number, 256)), batch_size=batch_size)


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[list[torch.Tensor]]) -> float:
    total = 0.0
    for (batch,) in batches:
        loss = model(batch.to(CUDA)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total


def epochs_with_evaluation() -> None:
    """Each epoch in a function of its own; the evaluation has a larger batch and keeps its outputs' sum."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    training, validation = data(640, 16), data(6000, 2000)
    best = None
    for _ in range(5):
        train_epoch(model, optimizer, training)
        with torch.no_grad():
            for (batch,) in validation:
                model(batch.to(CUDA)).square().mean()
        best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert best is not None


def models_in_turn() -> None:
    """A search: small models first."""
    for width in (64, 128, 64, 128, 512):
        model = network(width)
        optimizer = torch.optim.Adam(model.parameters())
        for _step in range(40):
            model(torch.randn(32, width, device=CUDA)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def until_break() -> None:
    """A ``while`` that counts for itself, then a larger batch."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = 0
    while True:
        model(torch.randn(32, 256, device=CUDA)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 60:
            break
    with torch.inference_mode():
        model(torch.randn(20000, 256, device=CUDA))


def two_optimizers() -> None:
    """Loops over optimizers inside the step are parts of it; gradients are accumulated."""
    parts = [network(), network()]
    optimizers = [torch.optim.Adam(part.parameters()) for part in parts]
    for _epoch in range(3):
        for _batch in range(12):
            for _ in range(4):
                parts[1](parts[0](torch.randn(64, 256, device=CUDA))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    kept = [torch.zeros(1000, 1000, device=CUDA) for _ in range(3)]
    assert len(kept) == 3


def outputs_kept() -> None:
    """An evaluation that collects what it computes grows with every turn: it is followed to its end."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    train_epoch(model, optimizer, data(160, 16))
    kept = []
    with torch.no_grad():
        for (batch,) in data(20000, 1000):
            kept.append(model(batch.to(CUDA)))
    torch.cat(kept)


LOOPS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (epochs_with_evaluation, models_in_turn, until_break, two_optimizers, outputs_kept)
}
