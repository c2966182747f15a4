"""``%oom_explain`` closed into a loop: each notebook runs out of memory, is explained, and is run again as advised.

Each run is a process of its own, on a card of 2 GiB of the CUDA build without a GPU (../shared/fakecuda).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.notebooks import NOTEBOOKS
from tests.gpu.notebooks.compiled_notebooks import COMPILED
from tests.gpu.notebooks.notebook_cases import CARD_MIB, CONTEXT_MIB

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent
# One of each kind; each notebook takes a minute, --slow runs all.
QUICK = (
    "leak",
    "collected outputs",
    "two models",
    "class that trains",
    "queue of keys",
    "arguments inside a trainer",
    "compiled method",
)
# What a pretend card cannot show: another program, an empty cell, how a cache that grows divides what earlier cells left.
REAL = ("another process", "two models", "generation in one call", "several answers to each prompt")


def _notebooks(quick: Collection[str], but: Collection[str] = ()) -> list[Any]:
    """The names, all but ``quick`` marked slow."""
    return [pytest.param(one, marks=[] if one in quick else pytest.mark.slow) for one in NOTEBOOKS if one not in but]


@cache
def run(name: str, *more: str) -> dict[str, Any]:
    """What closed_loop.py prints of a notebook."""
    if name in COMPILED and importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton (tests/gpu/run_on_stub.sh)")
    if "FAKECUDA_GPU" not in os.environ:
        pytest.skip("needs the CUDA build on the stub (tests/gpu/run_on_stub.sh): a card of another size")
    stub = os.environ.get("FAKECUDA_SOURCE", str(HERE.parents[1] / ".." / "shared" / "fakecuda"))
    beside = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []  # where triton is
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), stub, *beside]),
        "FAKECUDA_MEM_MIB": str(CARD_MIB),
        "FAKECUDA_CONTEXT_MIB": str(CONTEXT_MIB),
        **({"CUDA_VISIBLE_DEVICES": ""} if "pretend" in more else {}),
        "FAKECUDA_OTHER_MIB": str(NOTEBOOKS[name].others_mib),
        "FAKECUDA_NDEV": str(NOTEBOOKS[name].num_cards),
        "FAKECUDA_COPY_MAX_KIB": str(NOTEBOOKS[name].copied_kib),
    }
    command = [sys.executable, str(HERE / "closed_loop.py"), name, *more]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stdout[-500:] + done.stderr[-2000:]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


@pytest.mark.parametrize("name", _notebooks(QUICK))
def test_the_headline_applied_fits_at_its_price(name: str) -> None:
    notebook = NOTEBOOKS[name]
    said = run(name)
    assert "out of memory" in str(said["failed"])
    assert said["cause"] in notebook.causes
    first, *_ = said["remedies"]
    assert first["key"] in notebook.first and first["fits"]
    for remedy in said["remedies"]:
        if remedy["key"] not in notebook.apply or remedy["peak"] is None:
            continue
        values = notebook.apply[remedy["key"]](notebook.values, remedy)
        true = run(name, json.dumps(values), "truth")
        assert true["fits"] == remedy["fits"], remedy["key"]
        if true["fits"]:
            assert remedy["peak"] == pytest.approx(true["peak"], rel=0.01), remedy["key"]


@pytest.mark.parametrize("name", _notebooks(("class that trains",), but=REAL))
def test_a_pretend_card_gives_the_same_answers(name: str) -> None:
    real, pretended = run(name), run(name, "pretend")
    assert pretended["cause"] == real["cause"]
    assert _answers(pretended) == _answers(real)
    assert _first_price(pretended) == pytest.approx(_first_price(real), rel=0.001)


def _answers(said: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The remedies that fit, in their order."""
    return [(one["key"], one["after"], one["verdict"]) for one in said["remedies"] if one["fits"] and one["peak"]]


def _first_price(said: dict[str, Any]) -> int:
    price: int = said["remedies"][0]["peak"]
    return price
