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


def every_n() -> None:
    """What a condition on the counter guards comes late: an evaluation, an average of weights at the end."""
    model, average = network(), None
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for step, (batch,) in enumerate(data(1600, 16), start=1):
        loss = model(batch.to(CUDA)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            with torch.no_grad():
                model(torch.randn(20000, 256, device=CUDA))
        if step >= 90:
            average = average or torch.optim.swa_utils.AveragedModel(model)


def thawed() -> None:
    """A part of the model that is trained from a later epoch on."""
    first, second = network(), network(1024)
    model = nn.Sequential(first, nn.Linear(256, 1024).to(CUDA), second)
    second.requires_grad_(False)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    for epoch in range(10):
        if epoch == 5:
            second.requires_grad_(True)
            optimizer.add_param_group({"params": list(second.parameters())})
        for _ in range(6):
            model(torch.randn(64, 256, device=CUDA)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def best_kept() -> None:
    """Early stopping: the best weights are copied, and losses are kept as numbers."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    best, waited, losses, weights = float("inf"), 0, [], model.state_dict()
    for _epoch in range(50):
        losses.append(train_epoch(model, optimizer, data(160, 16)))
        with torch.no_grad():
            found = model(torch.randn(4000, 256, device=CUDA)).square().mean().item()
        if found < best:
            best, weights = found, {name: tensor.clone() for name, tensor in model.state_dict().items()}
        else:
            waited += 1
            if waited >= 5:
                break
    model.load_state_dict(weights)


def sizes_in_turn() -> None:
    """A short list of sizes, the largest last."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    for batch_size in (64, 64, 64, 128, 4096):
        model(torch.randn(batch_size, 256, device=CUDA)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluated_only() -> None:
    """Like batches are left out, one of another size among them is not; then what the outputs were kept for."""
    model, right, losses = network(), 0.0, []
    with torch.no_grad():
        for number, (batch,) in enumerate(data(20_100, 100)):
            out = model(batch.to(CUDA))
            right += (out.argmax(-1) == 1).sum().item()
            losses.append(out.mean().item())
            if number % 50 == 0:
                print(number, right)
        sizes = [64] * 30 + [4096] + [64] * 30
        for batch in [torch.zeros(size, 256) for size in sizes]:
            model(batch.to(CUDA))


def features_kept_on_the_host() -> None:
    """What an evaluation collects in RAM goes to the GPU at its end: none of its turns is left out."""
    model, found = network(), {"features": []}
    with torch.inference_mode():
        for (batch,) in data(10_000, 100):
            found["features"].append(model(batch.to(CUDA)).cpu())
        features = torch.cat(found["features"]).to(CUDA)
        assert (features @ features.T).shape[0] == 10_000


def now_and_then_kept() -> None:
    """Each tenth output is kept on the GPU."""
    model, kept = network(), []
    with torch.no_grad():
        for number in range(100):
            out = model(torch.randn(1000, 256, device=CUDA))
            if number % 10 == 0:
                kept.append(out)


def steps_that_differ() -> None:
    """No two steps are like: lengths vary, and outputs are kept. They are followed to their end."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lengths, kept = torch.Generator().manual_seed(0), []
    for _ in range(30):
        length = int(torch.randint(8, 4096, (1,), generator=lengths))
        output = model(torch.randn(length, 256, device=CUDA))
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(output.detach())


ALL = (
    epochs_with_evaluation, models_in_turn, until_break, two_optimizers, outputs_kept, every_n, thawed, best_kept,
    sizes_in_turn, steps_that_differ,
)  # fmt: skip
EVALUATIONS = {evaluated_only: 2, features_kept_on_the_host: 0, now_and_then_kept: 0, outputs_kept: 1}
LOOPS: dict[str, Callable[[], None]] = {function.__name__: function for function in ALL}
