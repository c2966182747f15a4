"""How long a megabyte of text (goal: under a second) and every collected message (goal: 50 ms) take to explain:

``python tests/benchmarks/bench_messages.py``
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from oom_magic.explain.explainer import explain

DATA = Path(__file__).resolve().parents[1] / "data"

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
    "the memory grows and memory increases ",
    "image size 1024 ",
)


def main() -> None:
    """Print the CPU time per kind of text, then of the slowest message."""
    explain("CUDA out of memory", fast=True)
    for piece in PIECES:
        print(f"{_seconds(piece * (2**20 // len(piece))):6.2f} s  {piece!r}")
    reports = [json.loads(line) for path in DATA.glob("*reports.jsonl") for line in path.read_text().splitlines()]
    slowest = max((_seconds(report["text"]), report["id"]) for report in reports)
    print(f"{slowest[0]:6.3f} s  the slowest of {len(reports)} reports: {slowest[1]}")


def _seconds(text: str) -> float:
    start = time.process_time()
    explain(text, fast=True)
    return time.process_time() - start


if __name__ == "__main__":
    main()
