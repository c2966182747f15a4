"""Measure the programs of test_programs.py and test_loops.py on CUDA: python tests/data/record_programs.py.

It writes programs_truth.json.
With names only those are measured anew, the rest stays.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.programs.derivative_cases import DERIVATIVES
from tests.programs.layout_cases import LAYOUTS
from tests.programs.loop_cases import LOOPS
from tests.programs.notebook_programs import NOTEBOOKS
from tests.programs.program_cases import PROGRAMS as SHORT
from tests.programs.seldom_cases import SELDOM
from tests.programs.sparse_and_graph_cases import SPARSE_AND_GRAPHS

PROGRAMS = SHORT | DERIVATIVES | SPARSE_AND_GRAPHS | LAYOUTS | NOTEBOOKS | LOOPS | SELDOM
TRUTH = Path(__file__).with_name("programs_truth.json")


def measure(name: str) -> list[int]:
    """Peak allocated and peak reserved bytes of one program in a process of its own."""
    PROGRAMS[name]()
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]


def main() -> None:
    """Write the table."""
    names = sys.argv[1:] or list(PROGRAMS)
    found: dict[str, Any] = {"torch": torch.__version__.partition("+")[0]}
    known = json.loads(TRUTH.read_text())["peaks"] if sys.argv[1:] else {}
    with ProcessPoolExecutor(1, max_tasks_per_child=1) as pool:
        found["device"] = pool.submit(torch.cuda.get_device_name).result()
        found["peaks"] = known | {name: pool.submit(measure, name).result() for name in names}
    text = json.dumps(found, indent=1).replace("[\n   ", "[").replace(",\n   ", ", ").replace("\n  ]", "]")
    TRUTH.write_text(text + "\n")


if __name__ == "__main__":
    main()
