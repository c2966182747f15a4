"""How fast the simulated allocator replays training: ``python tests/benchmarks/bench_allocator.py``."""

from __future__ import annotations

import time

import numpy as np

from oom_magic.memory.allocator.replay import minimum_device_bytes, replay
from oom_magic.memory.allocator.settings import AllocatorSettings
from oom_magic.memory.timeline import Timeline
from oom_magic.units import format_bytes


def training_timeline(num_layers: int = 48, num_steps: int = 20, num_tokens: int = 4096) -> Timeline:
    """A transformer's training: saved activations, short-lived temporaries, gradients, Adam's state."""
    order: list[int] = []
    requested: list[int] = []

    def new(num_bytes: int) -> int:
        order.append(len(requested))
        requested.append(num_bytes)
        return order[-1]

    weights = [4 * size for size in (768 * 2304, 768 * 768, 768 * 3072, 3072 * 768, 3072, 768)] * num_layers
    for size in weights:
        new(size)
    for step in range(num_steps):
        saved: list[int] = []
        gradients: list[int] = []
        for _ in range(num_layers):
            for width in (768, 2304, 768, 768, 3072, 3072, 768, 768, 768, 1536):
                saved.append(new(2 * num_tokens * width))
                order += [~new(2 * num_tokens * 768), ~new(4096)]
        for layer in reversed(range(num_layers)):
            for _ in range(10):
                gradient, scratch = new(2 * num_tokens * 768), new(4 * num_tokens * 768)
                order += [~scratch, ~saved.pop(), ~gradient]
            gradients += [new(size) for size in weights[6 * layer : 6 * layer + 6]]
        if step == 0:
            for size in weights:
                new(size), new(size)
        order += [~gradient for gradient in gradients]
    none = np.zeros(len(requested), dtype=np.int64)
    columns = dict.fromkeys(("category", "phase", "step", "operator", "line", "module", "stream"), none)
    return Timeline(np.array(order), np.array(requested, dtype=np.int64), **columns)


def main() -> None:
    timeline = training_timeline()
    for text in ("", "expandable_segments:True", "max_split_size_mb:128"):
        settings = AllocatorSettings.parse(text)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            replayed = replay(timeline, settings=settings)
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        least = minimum_device_bytes(timeline, settings)
        print(
            f"{text or 'default settings'}: {timeline.num_events} events, "
            f"{timeline.num_events / min(times):,.0f} events/s, "
            f"peak reserved {format_bytes(replayed.peak_reserved_bytes)}, "
            f"least device {format_bytes(least)} found in {time.perf_counter() - start:.2f} s"
        )


if __name__ == "__main__":
    main()
