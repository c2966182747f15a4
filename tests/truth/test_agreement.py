"""The dry run equals what PyTorch's CUDA build counted, to the byte, for a selection of recorded training runs."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest

pytest.importorskip("transformers")

from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from tests.truth import agreement

_SELECTED = (
    "llama-fp32", "llama-amp-fp16-clip", "llama-h100-bf16", "llama-t4-bf16", "llama-freeze", "gpt2-reentrant",
    "gpt2-adagrad", "mixtral-amp", "gemma2", "bert-qa", "albert", "mt5", "deberta-amp", "lora-bf16-drop-ckpt",
    "convnext", "hubert", "patchtst", "qwen3next", "expandable", "oom-opt-step", "oom-gpt2-rtx3060-1800", "gpt2-clip-loop", "gpt2-oom-3060",
)  # fmt: skip
_TRUTHS = {truth.name: truth for truth in agreement.truths()}


def comparable_truth(name: str) -> agreement.Truth:
    """A recorded case; the test is skipped where it, or what it needs, is missing."""
    truth = _TRUTHS.get(name)
    if truth is None:
        pytest.skip(f"{name} is recorded in {agreement.SHARED_FILE}, which is not here")
    if truth.case.get("lora"):
        pytest.importorskip("peft")
    if not agreement.is_comparable(truth):
        pytest.skip(f"recorded with {truth.versions}, here are {agreement.installed_versions(truth)}")
    return truth


_REST = [pytest.param(name, marks=pytest.mark.slow) for name in _TRUTHS if name not in _SELECTED]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [*_SELECTED, *_REST])
def test_dry_run_equals_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The forwards were recorded under a dispatch mode, in which plain attention does not add its mask in place.
    monkeypatch.setattr(FakeGPU, "writing_in_place", lambda gpu, func: nullcontext())
    truth = comparable_truth(name)
    prediction = agreement.predict(truth.case)
    whole = [step for step in truth.steps if truth.oom is None]
    assert [{key: step[key] for key in true} for step, true in zip(prediction.steps, whole, strict=False)] == whole
    assert prediction.peak("peak_allocated") == truth.peak("peak_allocated")
    assert prediction.peak("peak_reserved") == truth.peak("peak_reserved")
    if truth.oom is None:
        assert prediction.report.out_of_memory is None
        return
    failure = prediction.report.out_of_memory
    assert failure is not None
    assert (prediction.stage, len(prediction.steps)) == (truth.oom["stage"], truth.oom["step"])
    assert sizes_of(failure.message) == sizes_of(truth.oom["message"])


def sizes_of(message: str) -> list[str]:
    """Requested, allocated and reserved sizes of a message; the rest depends on the driver's context."""
    size = r"([\d.]+ \w+)"
    found = re.search(
        rf"Tried to allocate {size}\..* {size} is allocated by PyTorch, and {size} is reserved", message, re.DOTALL
    )
    assert found is not None, message
    return list(found.groups())


@pytest.mark.slow
def test_least_memory_is_that_of_the_bisection() -> None:
    truth = comparable_truth("t5-small-fp32")
    predicted = agreement.predict(truth.case).report.minimum_device_bytes
    assert predicted is not None
    assert truth.smallest_mib is not None
    assert abs(predicted / agreement.MIB - truth.smallest_mib) <= 8  # the grain of the bisection
