"""Naming the tensor behind a request."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oom_magic.explain.evidence.causes import Cause
from oom_magic.explain.evidence.tensors import dims_of_run, name_tensor, requested_window, run_in_text
from oom_magic.explain.explainer import explain
from oom_magic.explain.messages.reading import read
from oom_magic.predict.setups.setup import TrainingSetup
from oom_magic.units import GIB, MIB, format_bytes
from tests.support.oom_templates import Numbers, render

ROBERTA = {"batch": 4, "seq": 1024, "heads": 12, "hidden": 768, "vocab": 50265, "intermediate": 3072}
QWEN = {
    "batch": 2, "seq": 2048, "heads": 32, "hidden": 4096, "vocab": 151936, "intermediate": 11008,
    "dtype": "bfloat16",
}  # fmt: skip


def named(size, dims=None):
    return name_tensor(read(f"CUDA out of memory. Tried to allocate {size}. GPU 0 has")[0], dims)


@pytest.mark.parametrize(
    ("size", "dims", "name", "formula"),
    [
        (
            "192.00 MiB", ROBERTA, "attention_scores",
            "batch 4 x heads 12 x seq 1024 x seq 1024 x float32 = 192.00 MiB",
        ),
        ("2.32 GiB", QWEN, "logits", "batch 2 x seq 2048 x vocab 151936 x float32 = 2.32 GiB"),
        ("1.16 GiB", QWEN, "logits", "batch 2 x seq 2048 x vocab 151936 x bfloat16 = 1.16 GiB"),
        (
            "86.00 MiB", QWEN, "mlp_activation",
            "batch 2 x seq 2048 x intermediate 11008 x bfloat16 = 86.00 MiB",
        ),
        ("32.00 MiB", QWEN, "hidden_states", "batch 2 x seq 2048 x hidden 4096 x bfloat16 = 32.00 MiB"),
        ("58.15 GiB", {"vocab": 76032}, "logits", "batch x seq 205312 x vocab 76032 x float32 = 58.15 GiB"),
    ],
)  # fmt: skip
def test_the_best_candidate(size, dims, name, formula):
    best = named(size, dims).candidates[0]
    assert (best.name, best.formula) == (name, formula)


@pytest.mark.parametrize("size", ["2.00 MiB", "20.00 MiB"])
def test_sizes_that_name_no_tensor(size):
    answer = named(size, QWEN)
    assert (answer.candidates, answer.note) == ((), "tensor_nameless")


def test_nothing_fits():
    assert named("7.77 GiB", QWEN).note == "tensor_none_fits"


def test_nothing_printed():
    assert name_tensor(read("RuntimeError: CUDA error: out of memory")[0]).note == "tensor_not_printed"


def test_without_a_model_candidates_rank_low():
    answer = named("192.00 MiB")
    assert 0 < len(answer.candidates) <= 5
    assert all(candidate.fit < 0.7 for candidate in answer.candidates)


def test_shapes_that_the_message_prints():
    text = "Unable to allocate 94.9 MiB for an array with shape (2160, 3840, 3) and data type float32"
    assert name_tensor(read(text)[0]).candidates[0].formula == "2160 x 3840 x 3 x float32 = 94.90 MiB"


@given(st.integers(10 * MIB, 200 * 2**30))
@example(2**30 + 1)
def test_the_window_holds_every_tensor_that_asks_for_it(num_bytes):
    segment = -(-num_bytes // (2 * MIB)) * 2 * MIB
    if segment == 20 * MIB:
        return
    failure = read(f"CUDA out of memory. Tried to allocate {format_bytes(segment)}.")[0]
    least, most = requested_window(failure)
    assert least <= num_bytes <= most


def test_dimensions_from_a_text():
    models = {
        "Qwen1.5-7B": {"vocab": 151936, "hidden": 4096},
        "Qwen1.5-7B-Chat": {"vocab": 151936, "hidden": 4097},
    }
    text = "--model_name_or_path Qwen/Qwen1.5-7B-Chat --per_device_train_batch_size 2 --max_seq_length 2048"
    assert dims_of_run(run_in_text(text, models), models) == {"vocab": 151936, "hidden": 4097, "batch": 2, "seq": 2048}
    assert run_in_text("nothing", models) == {}


@pytest.mark.parametrize(
    ("text", "seq"),
    [
        ("max_seq_len: int = 192  # 从 256 降到 192", 256),
        ("- `max_length: 1024` (从 2048 减小到 1024)", 2048),
        ("set max_seq_length=512 instead of 1024", 1024),
        ("max_length=512 was fine, 1024 is not", 512),
        ("max_seq_len: int = 192\n从 256 个样本开始", 192),
    ],
)
def test_a_run_has_the_settings_it_failed_with_not_those_proposed(text, seq):
    assert run_in_text(text, {}) == {"seq": seq}


@pytest.mark.parametrize(("limit", "note"), [(512, "tensor_other_length"), (256, "tensor_unknown_model")])
def test_a_size_that_fits_a_length_below_the_texts_limit_is_told(limit, note):
    message = render("T6", Numbers(requested=round(1.23 * GIB), total=20 * GIB, allocated=15 * GIB, stuck=3 * GIB))[0]
    text = f"Training t5-small, batch_size_per_gpu=32, max_seq_len={limit}.\n{message}"
    diagnosis = explain(text, fast=True, lang="en")
    assert diagnosis.tensor_note == note
    fitting = ["seq 320 x batch 32 x vocab 32128 x float32 = 1.23 GiB"] if limit > 320 else []
    assert [one.formula for one in diagnosis.tensors] == fitting
    assert diagnosis.cause is not Cause.LOGITS_OR_LOSS
    assert ("at a shorter length, these do" in str(diagnosis)) == bool(fitting)


def test_a_length_that_is_given_is_not_another():
    message = render("T6", Numbers(requested=round(1.23 * GIB), total=20 * GIB, allocated=15 * GIB, stuck=3 * GIB))[0]
    setup = TrainingSetup("t5-small", microbatch_size=32, seq_len=256)
    assert explain(message, setup=setup, fast=True, lang="en").tensor_note == "tensor_none_fits"
