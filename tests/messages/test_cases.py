"""Five users' reports: the message decoded, the cause named, their options with predicted figures beside theirs."""

from __future__ import annotations

import json

import pytest

from oom_magic.explain.evidence.causes import Cause
from oom_magic.explain.explainer import explain
from oom_magic.predict.setups.models import find_model
from oom_magic.predict.setups.setup import TrainingSetup
from oom_magic.units import GIB, MIB
from tests.support.folders import DATA

MESSAGES = {case["name"]: case["text"] for case in json.loads((DATA / "cases.json").read_text())}


def roberta(**fields) -> TrainingSetup:
    """RoBERTa-base with positions for 1,024 tokens, on an RTX 3080."""
    config = find_model("roberta-base").config(max_position_embeddings=1026)
    defaults = {"microbatch_size": 4, "seq_len": 1024, "precision": "fp32", "attention": "eager", "gpu": "RTX 3080"}
    return TrainingSetup(config, **{**defaults, **fields})


def qwen(**fields) -> TrainingSetup:
    """Qwen1.5-7B with QLoRA on 16 GB, checkpointed as the report has it."""
    defaults = {"microbatch_size": 2, "seq_len": 2048, "rank": 64, "activation_checkpointing": True, "gpu": "RTX 4080"}
    return TrainingSetup("Qwen/Qwen1.5-7B-Chat", method="qlora", **{**defaults, **fields})


def peak(setup: TrainingSetup) -> float:
    return setup.dry_run(stop_after_steps=2).peak_reserved_bytes / GIB


def test_roberta_the_scores_are_named():
    diagnosis = explain(MESSAGES["vulberta"], roberta(), fast=True, lang="en")
    assert (diagnosis.main_failure.allocated_bytes, diagnosis.main_failure.free_bytes) == (8697308774, 56423875)
    assert diagnosis.cause == Cause.ATTENTION_SCORES
    assert diagnosis.tensors[0].formula == "batch 4 x heads 12 x seq 1024 x seq 1024 x float32 = 192.00 MiB"
    assert diagnosis.tip is None  # their text has no tip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fields", "theirs"),
    [({"microbatch_size": 4}, (9, 10)), ({"microbatch_size": 2}, (5, 6)), ({"microbatch_size": 1}, (3, 4))],
)
def test_roberta_their_table(fields, theirs):
    """Their estimates in GB hold for eager attention in float32."""
    assert theirs[0] <= peak(roberta(**fields)) <= theirs[1]


def test_roberta_what_their_list_lacks():
    """Fused attention saves more than halving the batch, and keeps it."""
    assert peak(roberta(attention="sdpa")) < peak(roberta(microbatch_size=2))


def test_t5_is_fragmented_rather_than_too_big():
    diagnosis = explain(MESSAGES["t5"], lang="en")
    assert diagnosis.cause == Cause.FRAGMENTATION
    assert diagnosis.tip is None  # their text has no tip
    assert diagnosis.remedies[0].key == "expandable_segments"
    assert diagnosis.budget.capacity_bytes == sum(row.num_bytes for row in diagnosis.budget.rows)


@pytest.mark.slow
def test_t5_accumulation_does_not_multiply_the_memory():
    """Their formula divides by the accumulation steps: twice the steps, half the batch."""
    setup = TrainingSetup("t5-small", microbatch_size=24, seq_len=256, precision="fp32", gpu="RTX 3090")
    plain, twice = (peak(setup.replace(gradient_accumulation_steps=steps)) for steps in (1, 2))
    assert twice < 1.1 * plain
    assert plain < 14.94 / 1.5  # a T5-small of this size would not have filled their card


def test_qwen_the_logits_in_float32_are_named():
    diagnosis = explain(MESSAGES["qwen"], qwen(), fast=True, lang="en")
    assert diagnosis.cause == Cause.LOGITS_OR_LOSS
    assert diagnosis.tensors[0].formula == "batch 2 x seq 2048 x vocab 151936 x float32 = 2.32 GiB"


def test_what_a_described_run_does_already_is_not_advised():
    """Named without a price, too, a change is one that the run has not made."""
    offered = {one.key for one in explain(MESSAGES["qwen"], qwen(), fast=True).remedies}
    assert "chunked_loss" in offered and "checkpointing" not in offered
    done = qwen(loss="chunked", microbatch_size=1, activation_checkpointing=False)
    offered = {one.key for one in explain(MESSAGES["qwen"], done, fast=True).remedies}
    assert "checkpointing" in offered and not offered & {"chunked_loss", "smaller_batch_any"}


@pytest.mark.slow
def test_qwen_fails_in_the_dry_run_where_it_failed():
    failure = qwen().dry_run(stop_after_steps=1).out_of_memory
    assert failure.operator == "aten::_log_softmax"
    assert failure.requested_bytes == 2374 * MIB


@pytest.mark.slow
def test_qwen_their_settings_fit():
    assert 9 <= peak(qwen(microbatch_size=1, seq_len=1024, rank=32)) <= 12


def test_classifiers_without_numbers_there_is_no_guess():
    diagnosis = explain(MESSAGES["classifiers"], lang="en")
    assert (diagnosis.is_oom, diagnosis.cause) == (True, Cause.UNKNOWN)


def test_classifiers_the_smallest_script_is_mostly_not_batch():
    setup = TrainingSetup("bert-base-chinese", microbatch_size=1, seq_len=128, precision="amp-fp16", gpu="RTX 3060")
    report = setup.dry_run(stop_after_steps=2)
    assert report.peak_reserved_bytes < 4 * GIB
    assert report.breakdown["activation"] < report.breakdown["parameter"] / 10


def test_25_gib_on_a_card_of_12_is_the_drivers_fallback():
    diagnosis = explain(MESSAGES["rtx3060"], lang="zh")
    assert diagnosis.cause == Cause.SYSMEM_FALLBACK
    assert {"held_bytes": 27745488732, "total_bytes": 12 * GIB} in [dict(item.values) for item in diagnosis.evidence]
    assert "25.84 GiB" in str(diagnosis) and "12.00 GiB" in str(diagnosis)


def test_what_an_author_makes_of_it_is_judged():
    """Causes confirmed or not, ways out that help, change nothing, or are missing; a log of settings proposes none."""
    settings = "gradient_checkpointing=True, max_grad_norm=1.0, num_workers=4"
    message = "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 15.89 GiB of which 1.2 GiB is free"
    guide = f"""logits.float() needs memory
Causes: logits in float32 need room; fragmentation. {message}
## Solutions
Reduce the batch size, {settings}, call torch.cuda.empty_cache()"""
    text = str(explain(guide, lang="en", fast=True))
    judged = " ".join(text[text.index("What the text says about it") : text.index("The message")].split())
    for said in (
        "what it shows agrees: The logits or the loss",
        "nothing in it supports: ",
        "it helps: A smaller microbatch",
        "it helps: Activation checkpointing",
        "num_workers and pin_memory affect host memory",
        "(empty_cache) makes no room",
        "max_grad_norm keeps training stable",
        "It does not mention this, which helps: Compute the loss in chunks",
    ):
        assert said in judged
    assert "What the text says about it" not in str(explain(f"{settings}\n{message}", lang="en", fast=True))
    assert "对文中说法的判断" in str(explain(guide, lang="zh", fast=True))
