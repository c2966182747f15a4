"""How fast the dry run is: beside PyTorch's MemTracker, on a 7B LoRA step, and with growing depth.

    python tests/benchmarks/bench_dry_run.py

Needs the extra "hf". Prints ratios; compare those, not the seconds, between machines.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable

import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import oom_magic as om
from oom_magic.units import format_bytes


def gpt2_step(device: str, layers: int = 12) -> None:
    """One training step of GPT-2 small's width, 4 x 512 tokens."""
    with torch.device(device):
        model = GPT2LMHeadModel(GPT2Config(n_layer=layers))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        tokens = torch.randint(0, 50257, (4, 512))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def lora_7b_step() -> None:
    """Two LoRA steps of Llama 2 7B's shape with activation checkpointing, 1 x 2048 tokens, bfloat16."""
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(LlamaConfig(), dtype=torch.bfloat16)
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        tokens = torch.randint(0, 32000, (1, 2048))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def mem_tracker_step() -> None:
    """``gpt2_step`` as PyTorch's own tracker follows it, on fake tensors."""
    tracker = MemTracker()
    with FakeTensorMode(), tracker:
        gpt2_step("cpu")


def seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Median wall time, after one run to warm up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Print the comparisons."""
    gpu = "H100"
    ours = seconds(lambda: om.dry_run(gpt2_step, "cuda", gpu=gpu))
    theirs = seconds(mem_tracker_step)
    print(f"GPT-2 small step: dry run {ours:.2f} s, MemTracker {theirs:.2f} s, ratio {ours / theirs:.2f}")
    shallow = seconds(lambda: om.dry_run(gpt2_step, "cuda", 6, gpu=gpu), 3)
    deep = seconds(lambda: om.dry_run(gpt2_step, "cuda", 24, gpu=gpu), 3)
    print(f"depth 24 over depth 6: {deep / shallow:.2f} times as long (4.0 is linear, less has a fixed part)")
    start = time.perf_counter()
    report = om.dry_run(lora_7b_step, gpu=gpu)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"7B LoRA, two steps: {time.perf_counter() - start:.1f} s, peak {format_bytes(report.peak_allocated_bytes)} "
        f"predicted, {report.timeline.num_events} events, host memory of this process {format_bytes(host)}"
    )


if __name__ == "__main__":
    main()
