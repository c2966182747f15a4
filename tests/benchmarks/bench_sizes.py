"""How fast and how exact sizes are: ``python tests/benchmarks/bench_sizes.py [gpt2] [lora-7b]``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from oom_magic.predict.dry_run import dry_run
from oom_magic.predict.sizing.sizes import Sizes, size
from oom_magic.units import GIB, MIB

GPU = "A100 80GB"
NUM_POINTS = 5  # dry-run, to compare
NUM_REPLAYS = 60  # to compare the quick peak with


def train_gpt2(batch_size: int, seq_len: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_positions=4096)
    train(GPT2LMHeadModel(config).cuda(), config.vocab_size, batch_size, seq_len)


def train_lora_7b(batch_size: int, seq_len: int, rank: int) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(dtype=torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=rank, target_modules=["q_proj", "v_proj"])).cuda()
    train(adapted, config.vocab_size, batch_size, seq_len)


def train(model: torch.nn.Module, vocab_size: int, batch_size: int, seq_len: int) -> None:
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    for _ in range(3):
        tokens = torch.randint(0, vocab_size, (batch_size, seq_len), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


CASES: dict[str, tuple[Callable[..., None], dict[str, tuple[int, int]]]] = {
    "gpt2": (train_gpt2, {"batch_size": (1, 64), "seq_len": (128, 4096)}),
    "lora-7b": (train_lora_7b, {"batch_size": (1, 64), "seq_len": (128, 4096), "rank": (4, 128)}),
}


def median_ms(function: Callable[..., Any], points: list[dict[str, int]], repeats: int) -> float:
    times = []
    for point in points * repeats:
        start = time.perf_counter()
        function(**point)
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def print_exactness(sizes: Sizes, function: Callable[..., None], points: list[dict[str, int]]) -> None:
    for point in points:
        run, report = dry_run(function, gpu=GPU, **point), sizes.report(**point)
        allocated = report.peak_allocated_bytes / run.peak_allocated_bytes
        reserved = report.peak_reserved_bytes / run.peak_reserved_bytes
        quick = sizes.peak_allocated_bytes(**point) / run.peak_allocated_bytes
        print(f"  {point}: allocated {allocated:.6f}, reserved {reserved:.6f}, quick {quick:.4f} of the dry run's")


def print_quick_errors(sizes: Sizes, points: list[dict[str, int]]) -> None:
    reports = [sizes.report(**point).peak_allocated_bytes for point in points]
    errors = [
        abs(sizes.peak_allocated_bytes(**point) / exact - 1) for point, exact in zip(points, reports, strict=True)
    ]
    print(f"  quick peak against the replayed one: median {np.median(errors):.5%}, worst {max(errors):.5%}")


def print_border(sizes: Sizes, function: Callable[..., None], rest: dict[str, int]) -> None:
    """The largest batch, and what a dry run of it and of one more says."""
    memory = sizes.report(batch_size=9, **rest).minimum_device_bytes + sizes.device.context_bytes + 100 * MIB
    largest = sizes.largest("batch_size", memory=memory, **rest)
    runs = [dry_run(function, gpu=GPU, memory=memory, batch_size=batch, **rest) for batch in (largest, largest + 1)]
    said = ["fails" if run.out_of_memory else "passes" for run in runs]
    print(f"  largest batch in {memory / GIB:.2f} GiB: {largest} {said[0]}, {largest + 1} {said[1]}")


def print_card(sizes: Sizes) -> None:
    start = time.perf_counter()
    other = sizes.on("RTX 3060", "1000GiB")
    other.peak_allocated_bytes(**sizes.ends()["highest"])
    print(f"  another card: {other.num_traces} dry runs in {time.perf_counter() - start:.0f} s")


def print_case(name: str) -> None:
    function, ranges = CASES[name]
    start = time.perf_counter()
    sizes = size(function, gpu=GPU, memory="1000GiB", **ranges)
    print(f"{name}: {sizes.num_traces} dry runs in {time.perf_counter() - start:.0f} s; {len(sizes.borders)} borders")
    for assumption in sizes.assumptions:
        print(f"  {assumption.text}")
    random = np.random.default_rng(3)
    many = [
        {argument: int(low * (high / low) ** random.random()) for argument, (low, high) in ranges.items()}
        for _ in range(NUM_REPLAYS)
    ]
    points = many[:NUM_POINTS]
    print(f"  peak allocated {median_ms(sizes.peak_allocated_bytes, many, 5):.3f} ms")
    print(f"  peak reserved {median_ms(sizes.peak_reserved_bytes, points, 2):.1f} ms")
    print(f"  report {median_ms(sizes.report, points, 2):.1f} ms")
    grid = {argument: np.linspace(*ranges[argument], 32, dtype=int) for argument in ("batch_size", "seq_len")}
    rest = {argument: low for argument, (low, _) in ranges.items() if argument not in grid}
    start = time.perf_counter()
    sizes.map(**grid, **rest)
    print(f"  map of 32 x 32 {1e3 * (time.perf_counter() - start):.1f} ms")
    print_quick_errors(sizes, many)
    print_exactness(sizes, function, points)
    print_border(sizes, function, {**rest, "seq_len": 512})
    print_card(sizes)


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        print_case(case)
