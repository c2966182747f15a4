"""Record what sorts take on CUDA, on each card: ``FAKECUDA run --gpu CARD -- python record_sorting.py CARD``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from tests.programs.operator_cases import measure  # noqa: E402
from tests.programs.sorting_cases import SORTING  # noqa: E402

path = HERE / "sorting_truth.json"
record = json.loads(path.read_text()) if path.exists() else {}
record["torch"] = torch.__version__.partition("+")[0]
record[sys.argv[1]] = measure(SORTING)
path.write_text(
    "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items()) + "\n}\n"
)
