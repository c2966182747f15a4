"""Measure the cases of test_operators.py and test_optimizers.py on CUDA: python tests/data/record_truth.py.

What PyTorch's counters say of each goes to ops_truth_VERSION.json beside this file.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.programs.module_cases import MODULES
from tests.programs.operator_cases import OPERATORS, measure
from tests.programs.optimizer_cases import OPTIMIZERS

TABLES = {"operators": OPERATORS, "modules": MODULES, "optimizers": OPTIMIZERS}


def measure_kind(kind: str) -> dict[str, list[int]]:
    """All cases of one kind."""
    return measure(OPERATORS, turned=True) if kind == "turned" else measure(TABLES[kind])


def main() -> None:
    """Write the table; a process for each kind, so that one begins with an empty device."""
    found: dict[str, object] = {}
    for kind in (*TABLES, "turned"):
        with ProcessPoolExecutor(1) as pool:
            found[kind] = pool.submit(measure_kind, kind).result()
    found |= {"torch": torch.__version__.partition("+")[0], "device": torch.cuda.get_device_name()}
    text = json.dumps(found, sort_keys=True, indent=1)
    for spread, joined in ((",\n   ", ", "), ("[\n   ", "["), ("\n  ]", "]")):
        text = text.replace(spread, joined)
    Path(__file__).with_name(f"ops_truth_{found['torch']}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
