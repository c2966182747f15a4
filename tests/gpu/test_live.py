"""The nine failures of ../shared/live on a card of 12 GiB: the cause, the first advice, and its prices beside the truth.

On the stub position ids read as zeros, from which transformers concludes that long sequences are packed: it makes a mask
of 256 MiB that no GPU makes. That truth is run with the stub's shadow of values (which knows no ``torch.device`` contexts).
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
SHARED = Path(__file__).parents[2] / ".." / "shared"
LIVE = SHARED / "live"
CASES: dict[str, dict[str, Any]] = runpy.run_path(str(LIVE / "cases.py"))["CASES"] if LIVE.exists() else {}
QUICK = ("leak",)
SHADOWED = ("checkpointing",)


def run(name: str, *arguments: str, truth: bool = False) -> dict[str, Any]:
    """What one.py prints of a case."""
    if "FAKECUDA_GPU" not in os.environ:
        pytest.skip("needs the CUDA build on the stub (tests/gpu/run_on_stub.sh): a card of 12 GiB")
    stub = os.environ.get("FAKECUDA_SOURCE", str(SHARED / "fakecuda"))
    env = {
        **os.environ,
        "FAKECUDA_GPU": "rtx3060",
        "FAKECUDA_CONTEXT_MIB": "300",
        "FAKECUDA_NDEV": "1",
        "FAKECUDA_COPY_MAX_KIB": "1024",  # as many of the values as the shadow asks for
        **CASES[name]["env"],
        "PYTHONPATH": os.pathsep.join([str(LIVE), str(Path(__file__).parents[2]), stub]),
        **({"TRUTH": "1"} if truth else {}),
    }
    program = ["-m", "values"] if truth and name in SHADOWED else []
    command = [sys.executable, *program, str(LIVE / "one.py"), name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stdout[-500:] + done.stderr[-2000:]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


@pytest.mark.skipif(not CASES, reason="needs ../shared/live")
@pytest.mark.parametrize("name", [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in CASES])
def test_the_first_advice_works_and_prices_are_true(name: str) -> None:
    case = CASES[name]
    said = run(name)
    assert said["oom"]
    assert said["cause"] in case["causes"]
    assert said["remedies"][0]["key"] in case["good"]
    priced = [one for one in said["remedies"] if one["key"] in case["apply"] and one["peak"]]
    for remedy in priced:
        values = case["apply"][remedy["key"]](case["values"], remedy)
        true = run(name, json.dumps(values), truth=True)
        assert true["fits"] == remedy["fits"], remedy["key"]
        if true["fits"]:
            assert remedy["peak"] == pytest.approx(true["peak"], rel=0.001), remedy["key"]
