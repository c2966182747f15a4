"""Record what PyTorch's own CUDA allocator does: the histories that tests/memory/test_allocator.py replays.

    python record_histories.py FOLDER [NAME ...] [--seed N]

writes FOLDER/NAME.npz for each case below. It needs a CUDA build of PyTorch on a device whose memory can be
chosen with FAKECUDA_MEM_BYTES (a stub of the driver without a GPU behind it does: kernels need not compute).

Each file has one row per event: ``kind`` (0 allocation, 1 free, 2 empty_cache, 3 out of memory), ``value``
(bytes requested, or for a free the number of the allocation), ``stream``, and as counted by PyTorch after the
event ``allocated`` and ``reserved``; ``meta`` is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

MIB = 2**20
ALLOCATION, FREE, EMPTY_CACHE, OUT_OF_MEMORY = range(4)
KINDS = {"alloc": ALLOCATION, "free_requested": FREE, "snapshot": EMPTY_CACHE, "oom": OUT_OF_MEMORY}


def empty_cache() -> None:
    torch.cuda.memory._snapshot()  # leaves a mark in the history, which empty_cache() does not
    torch.cuda.empty_cache()


def stress(num_events: int, num_streams: int = 1) -> None:
    """Allocate and free at random, half of the sizes from a small palette; go on after running out."""
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(num_streams - 1))]
    largest = torch.cuda.get_device_properties(0).total_memory // 6

    def size() -> int:
        return min(int(2 ** random.uniform(0, random.choice([12, 20, 24, 28]))), largest)

    palette = [size() for _ in range(30)]
    live: list[torch.Tensor] = []
    target = 50
    for _ in range(num_events):
        if random.random() < 0.01:
            target = random.randint(0, 300)
        if random.random() < 0.003:
            empty_cache()
        if live and random.random() < (0.25 if len(live) < target else 0.75):
            live.pop(random.randrange(len(live)))
            continue
        num_bytes = random.choice(palette) if random.random() < 0.5 else size()
        with torch.cuda.stream(random.choice(streams)):
            try:
                live.append(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                del live[::2]


def train(model: torch.nn.Module, batches: list[torch.Tensor], *, empties: bool = False) -> None:
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches:
        loss = model(batch.cuda()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if empties:
            empty_cache()


def perceptron() -> None:
    layers = [layer for width in (3000, 5000, 700) for layer in (torch.nn.LazyLinear(width), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    model(torch.zeros(1, 800))
    train(model, [torch.zeros(rows, 800) for rows in (256, 300, 256, 17, 512)], empties=True)


def convolutions() -> None:
    layers = []
    for inputs, outputs in ((3, 64), (64, 64), (64, 128), (128, 256)):
        layers += [torch.nn.Conv2d(inputs, outputs, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    train(torch.nn.Sequential(*layers), [torch.zeros(rows, 3, 96, 96) for rows in (16, 24, 16, 9)])


def transformer() -> None:
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 4), torch.nn.Linear(512, 30000))
    train(model, [torch.zeros(2, length, 512) for length in (128, 384, 200, 512, 511)])


CASES: dict[str, tuple[Callable[..., None], dict[str, Any], str, int]] = {
    # name: what runs, with what, PYTORCH_CUDA_ALLOC_CONF, MiB of the device
    "stress": (stress, {"num_events": 1500}, "", 80_000),
    "stress_streams": (stress, {"num_events": 1500, "num_streams": 3}, "", 450),
    "stress_scarce": (stress, {"num_events": 1500}, "", 400),
    "stress_expandable": (stress, {"num_events": 1500}, "expandable_segments:True", 80_000),
    "stress_expandable_scarce": (
        stress,
        {"num_events": 1500, "num_streams": 2},
        "expandable_segments:True",
        350,
    ),
    "stress_max_split": (stress, {"num_events": 1500}, "max_split_size_mb:32", 400),
    "stress_rounded": (stress, {"num_events": 800}, "roundup_power2_divisions:[1:2,16:8,64:1,>:4]", 80_000),
    "stress_collected": (
        stress,
        {"num_events": 1500},
        "garbage_collection_threshold:0.6,per_process_memory_fraction:0.8",
        600,
    ),
    "stress_segments": (stress, {"num_events": 800}, "large_segment_size_mb:25,max_split_size_mb:64", 500),
    "stress_mixed": (
        stress,
        {"num_events": 800, "num_streams": 2},
        "expandable_segments:True,large_segment_size_mb:32,roundup_power2_divisions:4,per_process_memory_fraction:0.7",
        600,
    ),
    "perceptron": (perceptron, {}, "", 80_000),
    "convolutions": (convolutions, {}, "", 80_000),
    "transformer": (transformer, {}, "", 80_000),
    "transformer_scarce": (transformer, {}, "", 860),
    "transformer_expandable": (transformer, {}, "expandable_segments:True", 860),
}


def counted_by_profiler(profiler: torch.profiler.profile) -> list[tuple[int, int]]:
    """(allocated, reserved) bytes after each allocation, free and failure, as the allocator reports them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = [
        event
        for event in events
        if event.get("name") in ("[memory]", "[OutOfMemory]") and event["args"]["Device Type"] == 1
    ]
    memory.sort(key=lambda event: event["ts"])
    return [(event["args"]["Total Allocated"], event["args"]["Total Reserved"]) for event in memory]


def record(name: str, seed: int, path: Path) -> None:
    run, arguments, settings, mib = CASES[name]
    random.seed(seed)
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(stacks="python", context=None)
    with (
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler,
        contextlib.suppress(torch.OutOfMemoryError),
    ):
        run(**arguments)
    history = torch.cuda.memory._snapshot()["device_traces"][0]
    counts = iter(counted_by_profiler(profiler))
    rows: list[tuple[int, ...]] = []
    live: dict[int, int] = {}
    num_allocations, last = 0, (0, 0)
    for event in history[:-1]:  # the last one is the snapshot just taken
        kind = {
            "alloc": ALLOCATION,
            "free_requested": FREE,
            "snapshot": EMPTY_CACHE,
            "oom": OUT_OF_MEMORY,
        }.get(event["action"])
        if kind is None:
            continue
        value = event["size"]
        if kind == ALLOCATION:
            live[event["addr"]] = num_allocations
            num_allocations += 1
        elif kind == FREE:
            value = live.pop(event["addr"])
        if kind != EMPTY_CACHE:
            last = next(counts)
        rows.append((kind, value, event["stream"], *last))
    assert next(counts, None) is None
    meta = {
        "torch": torch.__version__,
        "settings": settings,
        "capacity_bytes": mib * MIB,
        "num_retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    columns = np.array(rows, dtype=np.int64).T
    names = ("kind", "value", "stream", "allocated", "reserved")
    np.savez_compressed(path, meta=np.array(json.dumps(meta)), **dict(zip(names, columns, strict=True)))
    print(name, len(rows), "events", path.stat().st_size, "bytes", meta)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in options.names or CASES:
        if options.child:
            record(name, options.seed, options.folder / f"{name}.npz")
            continue
        environment = {
            **os.environ,
            "PYTORCH_CUDA_ALLOC_CONF": CASES[name][2],
            "FAKECUDA_MEM_BYTES": str(CASES[name][3] * MIB),
            "FAKECUDA_CONTEXT_MIB": "0",
        }
        command = [
            sys.executable,
            __file__,
            str(options.folder),
            name,
            "--seed",
            str(options.seed),
            "--child",
        ]
        subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
