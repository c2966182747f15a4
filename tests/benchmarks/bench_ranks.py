"""How long a rank of a job, or several cards, take to follow: beside the same steps on one card.

    python tests/benchmarks/bench_ranks.py

Prints the processor time of each and how many times that of one card it is; the goals are 1.5 for a rank and the number
of cards for one process with several.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

import oom_magic as om

_REPEATS = 3


def train(spread: Callable[[nn.Module], nn.Module], batch: int = 4) -> None:
    """Three steps of GPT-2 small, spread over what there is."""
    model = spread(GPT2LMHeadModel(GPT2Config()).cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        tokens = torch.randint(0, 50257, (batch, 512), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def alone(model: nn.Module) -> nn.Module:
    """On one card."""
    return model


def replicated(model: nn.Module) -> nn.Module:
    """DistributedDataParallel."""
    dist.init_process_group("nccl")
    return nn.parallel.DistributedDataParallel(model)


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2, block by block."""
    dist.init_process_group("nccl")
    for block in model.transformer.h:  # type: ignore[union-attr]
        fully_shard(block)
    return fully_shard(model)


def seconds(run: Callable[[], object]) -> float:
    """Median processor time, after one run to warm up."""
    run()
    times = []
    for _ in range(_REPEATS):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    one = seconds(partial(om.dry_run, train, alone, gpu="H100"))
    print(f"one card                 {one:5.2f} s")
    rows = {
        "DDP, one rank of 8": partial(om.dry_run, train, replicated, gpu="H100", num_processes=8),
        "FSDP2, one rank of 8": partial(om.dry_run, train, sharded, gpu="H100", num_processes=8),
        "DataParallel, 2 cards": partial(om.dry_run, train, nn.DataParallel, gpu="2x H100"),
        "DataParallel, 4 cards": partial(om.dry_run, train, nn.DataParallel, gpu="4x H100"),
    }
    for name, run in rows.items():
        took = seconds(run)
        print(f"{name:24} {took:5.2f} s  {took / one:.2f} x")


if __name__ == "__main__":
    main()
