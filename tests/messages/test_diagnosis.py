"""explain(): texts, files and exceptions in; plain data out."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oom_magic.explain.evidence.causes import Cause
from oom_magic.explain.explainer import explain
from tests.support.folders import SHARED
from tests.support.oom_templates import GIB, Numbers, render

CASES = SHARED / "cases"
MESSAGE = render("T6", Numbers(requested=2 * GIB, allocated=4 * GIB, stuck=3 * GIB))[0]


def test_text_path_and_exception_agree(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(f"step 1\nstep 2\n{MESSAGE}\n")
    diagnoses = [explain(MESSAGE), explain(log), explain(str(log)), explain(RuntimeError(MESSAGE))]
    assert {diagnosis.cause for diagnosis in diagnoses} == {Cause.FRAGMENTATION}
    assert {diagnosis.main_failure.requested_bytes for diagnosis in diagnoses} == {2 * GIB}
    assert all(diagnosis.is_oom for diagnosis in diagnoses)


def test_only_the_end_of_a_long_log_is_read(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("x" * 5_000_000 + "\n" + MESSAGE)
    assert explain(log).cause == Cause.FRAGMENTATION


def test_missing_file_is_an_error_and_missing_text_is_not(tmp_path):
    with pytest.raises(FileNotFoundError):
        explain(tmp_path / "absent.log")
    assert explain("absent.log").is_oom is None


def test_last_failure_of_the_session(monkeypatch):
    monkeypatch.setattr(sys, "last_value", RuntimeError(MESSAGE), raising=False)
    assert explain().cause == Cause.FRAGMENTATION
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    with pytest.raises(ValueError, match="Nothing has failed"):
        explain()


def test_no_exception_or_frame_is_kept():
    class Tensor:
        pass

    def fail():
        tensor = Tensor()
        references.append(weakref.ref(tensor))
        raise RuntimeError(MESSAGE)

    references = []
    try:
        fail()
    except RuntimeError as error:
        diagnosis = explain(error)
    gc.collect()
    assert references[0]() is None
    assert diagnosis.cause == Cause.FRAGMENTATION


def test_the_traceback_of_an_exception_tells_the_phase():
    class Optimizer:
        def step(self):
            raise RuntimeError(MESSAGE.replace("3.00 GiB is reserved", "1.00 MiB is reserved"))

    optimizer = Optimizer()
    try:
        optimizer.step()
    except RuntimeError as error:
        diagnosis = explain(error)
    assert (diagnosis.phase, diagnosis.cause) == ("optimizer_step", Cause.OPTIMIZER_STATE)


def test_an_evaluation_whose_gradients_are_off_is_not_told_to_switch_them_off():
    def fail():
        raise RuntimeError(MESSAGE.replace("3.00 GiB is reserved", "1.00 MiB is reserved"))

    def evaluate():
        fail()

    @torch.no_grad()
    def evaluate_decorated():
        fail()

    def evaluate_in_a_block():
        with torch.no_grad():
            fail()

    phases = []
    for function in (evaluate, evaluate_decorated, evaluate_in_a_block):
        with pytest.raises(RuntimeError) as caught:
            function()
        phases.append(explain(caught.value).phase)
    assert phases == ["evaluation", None, None]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (MESSAGE, "tip_applies"),
        (MESSAGE.replace("3.00 GiB is reserved", "1.00 GiB is reserved"), "tip_does_not_apply"),
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n" + MESSAGE, "tip_already_followed"),
        ("PS C:\\train> python train.py\n" + MESSAGE, "tip_unsupported"),
        ("On Windows 11 I set ALLOC_CONF=expandable_segments:True, yet:\n" + MESSAGE, "tip_unsupported"),
        ("CUDA error: out of memory", None),
    ],
)
def test_the_tip_is_judged(text, key):
    tip = explain(text + "\n").tip
    assert (tip.key if tip else None) == key


@pytest.mark.parametrize(
    ("before", "first"),
    [
        ("", "Use expandable segments"),
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n", "A smaller microbatch"),
        ("On Windows 11 I set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, in vain:\n", "Set max_split_size_mb"),
    ],
)
def test_what_is_set_already_is_not_proposed_against_fragmentation(before, first):
    sizes = "8.00 GiB is allocated by PyTorch, and 3.00 GiB is reserved by PyTorch but unallocated"
    message = (
        "CUDA out of memory. Tried to allocate 900.00 MiB. GPU 0 has a total capacity of 12.00 GiB of which 0 bytes"
        f" is free. Of the allocated memory {sizes}."
    )
    diagnosis = explain(f"{before}Training stops:\ntorch.OutOfMemoryError: {message}\n")
    assert diagnosis.cause is Cause.FRAGMENTATION
    assert f"What to try: {first}" in " ".join(str(diagnosis).split())


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (render("T6", Numbers(process=None, others=((77, 7 * GIB),)))[0], "fact_own_pid"),
        (render("T6", Numbers(process=2**64, others=((77, 2**64),)))[0], "fact_process_size_unknown"),
        (render("T6", Numbers(pool=GIB))[0], "fact_private_pools"),
        (render("T1", Numbers())[0], "fact_cached_excludes_allocated"),
        (render("hip", Numbers(free=99 * GIB))[0], "fact_free_above_capacity"),
        (f"I use gradient accumulation.\n{MESSAGE}", "fact_accumulation"),
        (f"batch 32, 梯度累积 4 步\n{MESSAGE}", "fact_accumulation"),
    ],
)
def test_facts_about_the_numbers(text, key):
    assert [fact.key for fact in explain(text).facts] == [key]


def test_setup_names_the_tensor():
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB."
    diagnosis = explain(text, {"batch": 2, "seq": 2048, "vocab": 151936})
    assert diagnosis.tensors[0].name == "logits"
    assert explain(f"Qwen1.5-7B batch_size=2 max_length=2048 {text}").tensors[0].fit > 0.7


ROBERTA_BASE = {"heads": 12, "hidden": 768, "vocab": 50265, "intermediate": 3072, "batch": 4, "seq": 1024}
QWEN_7B = {"heads": 32, "hidden": 4096, "vocab": 151936, "intermediate": 11008, "batch": 2, "seq": 2048}


@pytest.mark.parametrize(
    ("name", "setup", "cause", "tensor"),
    [
        ("1-vulberta-rtx3080.md", ROBERTA_BASE, "attention_scores", "attention_scores"),
        ("2-t5-small-3x20gb.md", None, "activations", None),
        ("3-qwen1.5-7b-qlora-16gb.md", QWEN_7B, "logits_or_loss", "logits"),
        ("4-classification-small-machines.md", None, "activations", None),
        ("5-rtx3060-12gb.md", None, "sysmem_fallback", None),
    ],
)
def test_the_reported_cases(name, setup, cause, tensor):
    path = CASES / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    diagnosis = explain(path, setup)
    assert diagnosis.is_oom
    assert diagnosis.cause == cause
    assert tensor is None or diagnosis.tensors[0].name == tensor


def test_not_oom():
    diagnosis = explain("RuntimeError: CUDA error: device-side assert triggered")
    assert (diagnosis.is_oom, diagnosis.cause) == (False, Cause.NOT_OOM)


@given(st.text(max_size=300))
def test_any_text_becomes_json(text):
    diagnosis = explain(text + "\n")
    assert json.loads(json.dumps(diagnosis.to_dict()))["cause"] == diagnosis.cause


def test_full_message_becomes_json():
    plain = json.loads(json.dumps(explain(MESSAGE).to_dict()))
    assert plain["cause"] == "fragmentation"
    assert plain["failures"][0]["requested_bytes"] == 2 * GIB


def test_nothing_heavy_is_imported():
    code = (
        "import sys, oom_magic.explain.explainer\n"
        "print([name for name in ('torch', 'IPython', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 4294967296.00 GiB (GPU 0; 79.15 GiB total capacity; 1.00 GiB already"
        " allocated; 77.00 GiB free; 1.10 GiB reserved in total by PyTorch)",
        "CUDA out of memory. Tried to allocate 17179869183.98 GiB. GPU 0 has a total capacity of 79.15 GiB.",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 18446744065119617024 bytes.",
        "Unable to allocate 3.73 EiB for an array with shape (536870912, 1000000000) and data type int64",
    ],
)
def test_a_size_that_overflowed_asks_for_what_was_multiplied(text):
    diagnosis = explain(text, lang="en")
    assert diagnosis.cause == Cause.REQUEST_ALONE_TOO_BIG
    assert "Print the sizes that are multiplied" in str(diagnosis)
    assert "smaller batches" not in str(diagnosis)


def test_a_batch_of_none_is_explained():
    text = "CUDA out of memory. Tried to allocate 40.00 MiB, batch_size=0"
    assert explain(text).is_oom
    assert explain(text, {"batch": 0}).is_oom


def test_a_library_that_finds_no_room_beside_tensorflow():
    text = (
        "tensorflow.python.framework.errors_impl.UnknownError: Could not create cudnn handle: CUDNN_STATUS_ALLOC_FAILED"
    )
    assert explain(text).cause == Cause.MEMORY_FRACTION_LIMIT


@pytest.mark.parametrize(
    ("version", "backend", "variable"),
    [
        ("mps", "mps", ""),
        ("npu", "npu", "PYTORCH_NPU_ALLOC_CONF"),
        ("hip", "cuda", "PYTORCH_HIP_ALLOC_CONF"),
        ("xpu", "xpu", "PYTORCH_ALLOC_CONF"),
        ("T6", "cuda", "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_code_is_that_of_the_device_that_ran_out(version, backend, variable):
    in_pieces = render(version, Numbers(requested=2 * GIB, allocated=4 * GIB, stuck=3 * GIB))[0]
    limit = 21 * GIB if version == "mps" else None
    sizes = {"allocated": 20 * GIB, "stuck": GIB // 8, "total": 22 * GIB, "process": 21 * GIB, "others": ()}
    full = render(version, Numbers(requested=2 * GIB, limit=limit, **sizes))[0]
    texts = (
        in_pieces,
        f"Training with batch 8 fails:\nloss = model(inputs)\nloss.backward()\n{full}",
        f"Memory grows in training. {full}",
        f"Loading it: {full}",
    )
    whole = "\n".join(remedy.code for text in texts for remedy in explain(text, fast=True).remedies if remedy.code)
    devices = {"cuda", "mps", "npu", "xpu"} - {backend}
    assert not [device for device in devices if f'"{device}"' in whole or f"torch.{device}." in whole]
    assert f'torch.autocast("{backend}"' in whole
    if variable:
        assert f"export {variable}=expandable_segments:True" in whole
    else:
        assert "expandable_segments" not in whole


def test_what_a_macs_message_proposes_is_said_first():
    for text in ("", "Generating pictures with diffusers. ", "Training with batch 8 fails. "):
        message = render("mps", Numbers(requested=GIB, allocated=15 * GIB, stuck=2 * GIB))[0]
        diagnosis = explain(text + message, fast=True, lang="en")
        assert diagnosis.remedies[0].key == "mps_watermark"
        assert "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0" in str(diagnosis).split("What to change")[1][:160]
        assert "freeze" in str(diagnosis).split("What to change")[1][:200]
