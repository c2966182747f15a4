"""How long ``release`` takes among many objects.

    python tests/benchmarks/bench_release.py

CPU tensors stand for a GPU's, as in tests/measure/test_release.py. Seconds are of this process's CPU time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from oom_magic.measure.device.accelerators import Levels
from oom_magic.measure.history.attribution import Storage, storage_of
from oom_magic.measure.holders.release import release_from

_NUM_TENSORS = 1_000_000


class SmallTensors:
    """Stands for a GPU on which all tensors of one element are."""

    def allocated(self) -> dict[str, int]:
        """Not measured here."""
        return {"host": 0}

    def levels(self) -> dict[str, Levels]:
        """Not measured here."""
        return {"host": Levels(0, 0)}

    def storage(self, tensor: torch.Tensor) -> Storage | None:
        """Where a tensor lies."""
        return storage_of(tensor) if tensor.shape == (1,) else None

    def return_cached(self, allocated_before: Mapping[str, int]) -> None:
        """Nothing is cached."""


def main() -> None:
    """Print the time with a million tensors, and with none."""
    names = {"many": [torch.zeros(1) for _ in range(_NUM_TENSORS)]}
    for text in (f"{_NUM_TENSORS:,} small tensors", "none"):
        start = time.process_time()
        release_from([SmallTensors()], names)
        print(f"{text}: {time.process_time() - start:.2f} s")
        names.clear()


if __name__ == "__main__":
    main()
