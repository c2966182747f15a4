"""How long a megabyte of text takes to read: ``python tests/benchmarks/bench_messages.py`` (goal: under a second)."""

from __future__ import annotations

import time

from oom_magic.explain.messages.reading import read

PIECES = (
    "1234567890",
    "Tried to allocate 2.00 GiB ",
    "CUDA out of memory. ",
    "[rank0]: a\n[rank1]: b\n",
    "RuntimeError: CUDA error: out of memory\n",
    "Killed\n",
    "\n",
    "1 2 3 ",
    "\u0130",
    '  File "/a/b.py", line 3, in f\n    x = y(z)\n',
    "\x1b[31mx\x1b[0m",
)


def main() -> None:
    """Print the CPU time per kind of text."""
    for piece in PIECES:
        start = time.process_time()
        read(piece * (2**20 // len(piece)))
        print(f"{time.process_time() - start:6.2f} s  {piece!r}")


if __name__ == "__main__":
    main()
