"""What measuring costs: steps of a small transformer with and without, in turn.

    python tests/benchmarks/bench_gpumem.py [ROUNDS]

Needs a CUDA device. Prints the median time of a step each way and the ratio, and what a block takes once
(looking for owners of memory, working out the report). On a stub of a GPU kernels take no time, so the ratio
is the worst that can be: it is that of a model whose operators the GPU finishes at once.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import nn

import oom_magic as om

STEPS = 20


def training(layers: int = 6, width: int = 256) -> tuple[nn.Module, torch.optim.Optimizer]:
    blocks = [nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(layers)]
    model = nn.Sequential(*blocks).to("cuda")
    return model, torch.optim.AdamW(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Seconds of each step."""
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        batch = torch.randn(8, 128, 256, device="cuda")
        model(batch).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times


def main(rounds: int) -> None:
    model, optimizer = training()
    train(model, optimizer)
    plain, measured, once = [], [], []
    for _ in range(rounds):
        plain += train(model, optimizer)
        start = time.perf_counter()
        with om.measure() as measurement:
            times = train(model, optimizer)
        measured += times
        once.append(time.perf_counter() - start - statistics.median(times) * STEPS)
        assert len(measurement.report.steps) == STEPS
    without, with_measuring = statistics.median(plain), statistics.median(measured)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {rounds} rounds of {STEPS} steps")
    print(f"step without measuring {without * 1e3:8.2f} ms")
    print(f"step with measuring    {with_measuring * 1e3:8.2f} ms")
    print(f"ratio                  {with_measuring / without:8.2f}")
    print(f"once per block         {statistics.median(once) * 1e3:8.0f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
