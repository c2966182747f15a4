"""What a dry run of nothing costs in a kernel with 100,000 objects and a 7B model: setting up, and giving back.

    python tests/benchmarks/bench_isolation.py

Needs the extra "hf". The model's weights take no memory here: they are never written.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import oom_magic as om

LIMIT_SECONDS = 0.2
_REPEATS = 7


kernel: dict[str, Any] = {}  # what the user's names lead to


def nothing() -> None:
    """What is run."""


def main() -> None:
    """Print the median of some runs, and fail above the limit."""
    objects = kernel["objects"] = [
        {"number": number, "items": [number]} for number in range(50_000)
    ]  # two containers each
    with torch.device("meta"):
        model = kernel["model"] = LlamaForCausalLM(LlamaConfig()).to(torch.bfloat16)
    model.to_empty(device="cpu")
    om.dry_run(nothing)
    times = []
    for _ in range(_REPEATS):
        start = time.process_time()
        om.dry_run(nothing)
        times.append(time.process_time() - start)
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    print(
        f"{len(objects) * 2:,} objects, {billions:.1f} billion parameters: a dry run of nothing takes "
        f"{statistics.median(times):.3f} s of CPU time ({min(times):.3f} to {max(times):.3f}); limit {LIMIT_SECONDS} s"
    )
    assert statistics.median(times) < LIMIT_SECONDS


if __name__ == "__main__":
    main()
