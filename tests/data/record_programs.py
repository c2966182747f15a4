"""Measure the programs of test_programs.py on CUDA: python tests/data/record_programs.py, which writes programs_truth.json."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from program_cases import PROGRAMS


def measure(name: str) -> list[int]:
    """Peak allocated and peak reserved bytes of one program in a process of its own."""
    PROGRAMS[name]()
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]


def main() -> None:
    """Write the table."""
    found: dict[str, object] = {"torch": torch.__version__.partition("+")[0]}
    with ProcessPoolExecutor(1, max_tasks_per_child=1) as pool:
        found["device"] = pool.submit(torch.cuda.get_device_name).result()
        found["peaks"] = {name: pool.submit(measure, name).result() for name in PROGRAMS}
    text = json.dumps(found, indent=1).replace("[\n   ", "[").replace(",\n   ", ", ").replace("\n  ]", "]")
    Path(__file__).with_name("programs_truth.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
