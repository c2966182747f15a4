"""Compiled training in a dry run equals what PyTorch's CUDA build counted, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiled_cases import train
from torch import nn

import oom_magic as om
from oom_magic.predict.compiled import calls
from oom_magic.predict.isolation.patching import patched, resumed, suspended
from oom_magic.predict.operators.overloads import TORCH

DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "compile"
CASES = {case["name"]: case for case in json.loads((DATA / "compiled_cases.json").read_text())}
TRUTH = json.loads((DATA / "compiled_truth.json").read_text())
SHARED_TRUTH = json.loads((SHARED / "truth.json").read_text()) if SHARED.exists() else []
needs_triton = pytest.mark.skipif(
    TORCH < (2, 13) or importlib.util.find_spec("triton") is None, reason="needs torch 2.13 and triton"
)


def steps_of(program: Any, case: dict[str, Any]) -> list[list[int]]:
    """Peak allocated, peak reserved and allocated bytes after each step of a dry run."""
    sys.modules["compiled_steps"] = found = SimpleNamespace(steps=[])  # type: ignore[assignment] # survives the run

    def on_step(_: int) -> None:
        cuda = torch.cuda
        after = [cuda.max_memory_allocated(), cuda.max_memory_reserved(), cuda.memory_allocated()]
        sys.modules["compiled_steps"].steps.append(after)
        cuda.reset_peak_memory_stats()

    om.dry_run(lambda: program(case, on_step), gpu="A100 80GB", stop_after_steps=None)
    return found.steps


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(TORCH[:2] != (2, 13), reason="recorded with torch 2.13")
@pytest.mark.parametrize("name", list(TRUTH["steps"]))
def test_compiled_training_equals_cuda(name: str) -> None:
    if CASES[name]["model"] != "transformer":
        pytest.importorskip("transformers")
    assert steps_of(train, CASES[name]) == TRUTH["steps"][name]


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(TORCH[:2] != (2, 13), reason="recorded with torch 2.13")
@pytest.mark.skipif(not SHARED_TRUTH, reason="../shared/compile is not here")
@pytest.mark.parametrize("truth", SHARED_TRUTH, ids=lambda truth: truth["name"])
def test_shared_programs_are_near(truth: dict[str, Any]) -> None:
    spec = importlib.util.spec_from_file_location("shared_programs", SHARED / "programs.py")
    assert spec is not None and spec.loader is not None
    programs = importlib.util.module_from_spec(spec)
    sys.modules["shared_programs"] = programs
    spec.loader.exec_module(programs)
    allocated, reserved, _ = steps_of(programs.train, truth["case"])[-1]
    assert allocated == pytest.approx(truth["peak_allocated"], rel=0.005)
    assert reserved == pytest.approx(truth["peak_reserved"], rel=0.03)


@needs_triton
@pytest.mark.slow
def test_nothing_of_the_compiler_is_left() -> None:
    import torch._dynamo
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    def loss_of(weight: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(data @ weight)
        torch._dynamo.graph_break()
        return (hidden @ weight).sum()

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    data = torch.randn(2, 8)
    before = compiled(data).detach()
    names, configs = set(globals()), (config.get_config_copy(), functorch_config.get_config_copy())

    def step() -> None:
        model.cuda()
        weight = torch.randn(8, 8, device="cuda", requires_grad=True)
        (torch.compile(loss_of)(weight, torch.randn(2, 8, device="cuda")) + compiled(data.cuda()).sum()).backward()

    report = om.dry_run(step)
    assert report.peak_allocated_bytes > 0
    assert not report.is_upper_bound, report.assumptions
    assert not _debug_get_cache_entry_list(loss_of.__code__)
    assert set(globals()) == names
    assert (config.get_config_copy(), functorch_config.get_config_copy()) == configs
    assert torch.equal(compiled(data), before)
    assert report.breakdown.total_bytes == report.peak_allocated_bytes


def _training_step() -> None:
    model = torch.compile(nn.Linear(8, 8).cuda())
    model(torch.randn(2, 8, device="cuda")).sum().backward()


def test_without_compiling_the_figures_are_marked_as_upper_bounds() -> None:
    report = om.dry_run(_training_step, follow_compile=False)
    assert report.is_upper_bound
    assert calls.why_not_followed(False) in {assumption.text for assumption in report.assumptions}
    assert "at most" in str(report) and "upper bounds" in str(report)
    assert type(report).from_dict(report.to_dict()).is_upper_bound


def test_without_triton_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    monkeypatch.setattr(calls, "TORCH", (2, 13))
    assert "pip install" in calls.why_not_followed(True)
    monkeypatch.setattr(calls, "TORCH", (2, 11))
    assert "2.13" in calls.why_not_followed(True)


def test_replacements_are_suspended_and_resumed() -> None:
    place = SimpleNamespace(name="original")
    with patched(place, {"name": "replaced", "other": 1}):
        with suspended([place]):
            assert place.name == "original" and not hasattr(place, "other")
            with resumed():
                assert place.name == "replaced" and place.other == 1
            assert place.name == "original"
        assert place.name == "replaced"
    assert vars(place) == {"name": "original"}
