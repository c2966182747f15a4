"""Ask CUDA how the results of test_strides.py lie: python tests/data/record_strides.py.

It writes strides_truth.json beside this file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.programs.stride_cases import strides


def main() -> None:
    """Write the table, a line for each case."""
    rows = ",\n".join(f'  "{name}": {json.dumps(found)}' for name, found in strides().items())
    head = f'"torch": "{torch.__version__.partition("+")[0]}", "device": "{torch.cuda.get_device_name()}"'
    Path(__file__).with_name("strides_truth.json").write_text(f'{{{head}, "strides": {{\n{rows}\n}}}}\n')


if __name__ == "__main__":
    main()
