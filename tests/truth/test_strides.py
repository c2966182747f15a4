"""Results lie as they do on CUDA (tests/data/record_strides.py): what is copied after them follows from it."""

from __future__ import annotations

import json

import pytest
import torch

from oom_magic.predict.session import DrySession
from tests.programs.stride_cases import CASES, strides
from tests.support.folders import DATA

TRUTH = json.loads((DATA / "strides_truth.json").read_text())
VERSION = torch.__version__.partition("+")[0]
recorded_here = pytest.mark.skipif(
    TRUTH["torch"] != VERSION, reason=f"the truth was recorded with torch {TRUTH['torch']}, this is {VERSION}"
)


@pytest.fixture(scope="module")
def found() -> dict[str, list[tuple[int, ...]]]:
    known: dict[str, list[tuple[int, ...]]] = {}
    DrySession("A100 80GB", stop_after_steps=None, has_bar=False).run(lambda: known.update(strides()))
    return known


@recorded_here
@pytest.mark.parametrize("name", CASES)
def test_a_result_lies_as_on_cuda(name: str, found: dict[str, list[tuple[int, ...]]]) -> None:
    assert [list(one) for one in found[name]] == TRUTH["strides"][name]
