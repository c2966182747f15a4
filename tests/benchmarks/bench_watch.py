"""What the live monitor costs: one look, one picture of it, and its share of a second.

    python tests/benchmarks/bench_watch.py

With a CUDA device it is watched, else the host's memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from oom_magic.measure.device.cards import default_device, is_available, open_sampler, sample_host
from oom_magic.notebook.monitor import Record

_REPEATS = 200


def milliseconds(run: Callable[[], object]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    for _ in range(_REPEATS):
        run()
    return (time.process_time() - start) / _REPEATS * 1000


def measure(look: Callable[[], object], record: Record) -> None:
    """Print what a look and its picture take."""
    one = milliseconds(look)
    picture = milliseconds(lambda: record.describe()._repr_mimebundle_())
    print(f"a look {one:.2f} ms, its text and HTML {picture:.2f} ms: {(one + picture) / 10:.2f} % of a core at 1 Hz")


def main() -> None:
    """Print the costs."""
    if not is_available():
        record = Record("This machine", is_host=True)
        record.add(sample_host())
        measure(sample_host, record)
        return
    with open_sampler(default_device()) as (name, look):
        record = Record(name)
        for _ in range(120):
            record.add(look())
        measure(look, record)


if __name__ == "__main__":
    main()
