"""Libraries' training code on the pretend GPU against what CUDA took: data/libraries_truth.json."""

from __future__ import annotations

import importlib.metadata
import json
import warnings
from pathlib import Path

import pytest
from library_cases import CASES, write_models

from oom_magic.predict.session import DrySession

TRUTH = json.loads((Path(__file__).parent / "data" / "libraries_truth.json").read_text())


def other_versions() -> str:
    """Which libraries are not those of the measurement; "" if all are."""
    differing = []
    for name, measured in TRUTH["versions"].items():
        try:
            here = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            here = "not installed"
        if here != measured:
            differing.append(f"{name} {here} (recorded with {measured})")
    return ", ".join(differing)


pytestmark = pytest.mark.skipif(bool(other_versions()), reason=other_versions())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    write_models(made, weights=False)
    return made


@pytest.mark.parametrize("name", CASES)
def test_each_step_takes_what_cuda_takes(name: str, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    session = DrySession("A100 80GB")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = session.run(lambda: CASES[name](folder))
    found = [[step.peak_allocated_bytes, step.peak_reserved_bytes] for step in report.steps]
    assert found == TRUTH["steps"][name]
    assert sorted(folder.rglob("*")) == before
