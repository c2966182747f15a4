"""Libraries' training code on the pretend GPU against what CUDA took: data/libraries_truth.json and its other."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from oom_magic.predict.session import DrySession
from tests.programs import other_library_cases
from tests.programs.library_cases import CASES, write_models
from tests.programs.quantized_loads import tune
from tests.support.folders import DATA
from tests.support.versions import bitsandbytes_or_skip, installed_version

TRUTH = json.loads((DATA / "libraries_truth.json").read_text())
QUANTIZED = json.loads((DATA / "bitsandbytes_truth.json").read_text())
OTHERS = json.loads((DATA / "other_libraries_truth.json").read_text())["cases"]


def other_versions(measured: dict[str, str]) -> str:
    """Which libraries are not those of the measurement; "" if all are."""
    differing = []
    for name, version in measured.items():
        here = installed_version(name)
        if here != version:
            differing.append(f"{name} {here} (recorded with {version})")
    return ", ".join(differing)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    write_models(made, weights=False)
    return made


def steps_of(case: Callable[[Path], None], folder: Path) -> list[list[int]]:
    session = DrySession("A100 80GB")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = session.run(lambda: case(folder))
    return [[step.peak_allocated_bytes, step.peak_reserved_bytes] for step in report.steps]


@pytest.mark.sampled(4)
@pytest.mark.skipif(bool(other_versions(TRUTH["versions"])), reason=other_versions(TRUTH["versions"]))
@pytest.mark.parametrize("name", CASES)
def test_each_step_takes_what_cuda_takes(name: str, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    assert steps_of(CASES[name], folder) == TRUTH["steps"][name]
    assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
def test_a_model_in_4_bits_takes_what_cuda_takes_with_each_version_of_bitsandbytes(tmp_path: Path) -> None:
    """The older two ended every dry run, or failed in this one."""
    version = bitsandbytes_or_skip().__version__
    if version not in QUANTIZED["peaks"] or not torch.__version__.startswith("2.13.0"):
        pytest.skip(f"recorded with torch 2.13.0 and bitsandbytes {', '.join(QUANTIZED['peaks'])}")
    peaks, reserved = QUANTIZED["peaks"][version]
    steps = steps_of(tune, tmp_path)
    assert [peak for peak, _reserved in steps] == peaks
    assert max(reserved for _peak, reserved in steps) == reserved


@pytest.mark.slow
@pytest.mark.parametrize("name", other_library_cases.CASES)
def test_each_step_of_other_libraries_takes_what_cuda_takes(name: str, tmp_path: Path) -> None:
    recorded = OTHERS[name]
    if differing := other_versions(recorded["versions"]):
        pytest.skip(differing)
    assert steps_of(other_library_cases.CASES[name], tmp_path)[: len(recorded["steps"])] == recorded["steps"]
    assert not list(tmp_path.rglob("*"))


@pytest.mark.slow
def test_how_many_boxes_are_left_is_assumed_and_said() -> None:
    """Values decide, also what later operators take."""
    torchvision = pytest.importorskip("torchvision")

    def program() -> None:
        corners = torch.rand(5000, 2, device="cuda")
        boxes, scores = torch.cat([corners, corners + torch.rand_like(corners)], 1), torch.rand(5000, device="cuda")
        left.append(len(torchvision.ops.nms(boxes, scores, 0.5)))

    left: list[int] = []
    report = DrySession("H200").run(program)
    assert left == [5000]
    assert any(one.text.startswith("torchvision::nms: the size") for one in report.assumptions)
