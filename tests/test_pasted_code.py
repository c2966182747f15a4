"""Every piece of code that is shown for a notebook, pasted by a program, takes what was promised; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "gpu"
SCALAR = 512  # bytes of its block: a name that holds the loss, or the divided one, may be alive at the peak or not


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain loop", "function with defaults"])
def test_code_that_is_pasted_takes_what_was_promised(name: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(HERE / "pasting.py"), name]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900, check=False)
    found = json.loads((done.stdout.splitlines() or ["[]"])[-1])
    assert found, done.stderr[-2000:]
    assert [one for one in found if not _is_kept(one["promised"], one["peak"])] == []


def _is_kept(promised: list[int | None], peak: int) -> bool:
    return any(one is not None and abs(peak - one) <= SCALAR for one in promised)
