"""What a Diagnosis shows: golden text and HTML, the same rows in both languages and both encodings."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oom_magic.explain.diagnosis import Diagnosis
from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.explainer import explain
from oom_magic.explain.live.holders import Holder
from oom_magic.explain.remedies.remedy import AsItIs, Remedy
from oom_magic.views import to_html
from oom_magic.views.blocks import Bars, Code, Description, Details, Parts, Sentence, Table
from oom_magic.views.remedies import best_remedy
from oom_magic.views.text import display_width, to_text
from tests.support.oom_templates import GIB, MIB, VERSIONS, Numbers, render, shuffled_numbers
from tests.support.pages import Page, assert_text_and_html_agree

LOG = """(train) $ python train.py --model t5-small --batch_size 32 --max_length 256
Traceback (most recent call last):
  File "/home/ada/train.py", line 41, in train
    loss = F.cross_entropy(logits.view(-1, 32128), labels.view(-1))
{message}
"""
NUMBERS = Numbers(
    requested=1004 * MIB, total=20 * GIB, free=900 * MIB, allocated=18 * GIB, stuck=300 * MIB,
    process=19 * GIB, others=(),
)  # fmt: skip
REMEDIES = (
    Remedy(
        "smaller_batch", 30, "accumulation", {"before": 32, "after": 24, "accumulation": 3},
        14 * GIB, 15 * GIB, 5 * GIB, True, 64, 72, code="batch_size = 24\naccumulation = 3",
        verdict="safe",
    ),
    Remedy(
        "checkpointing", 40, "checkpointing", {}, 16 * GIB, 17 * GIB, 3 * GIB, True, 64, 64,
        code="model.gradient_checkpointing_enable()", verdict="tight",
    ),
    Remedy("combination", 50, "combination", {"keys": ("checkpointing", "lora")}, 2 * GIB, 3 * GIB, GIB, False),
    Remedy("lora", 70, "faster", {"rank": 16}, note=Evidence("reason_failed", {"error": "<not> possible"})),
)  # fmt: skip


@cache
def sample(lang: str) -> Diagnosis:
    """A diagnosis with everything in it."""
    log = LOG.format(message=render("T6", NUMBERS)[0])
    holders = (
        Holder("name", "model", 900 * MIB, Evidence("held_as_gradients")),
        Holder("category", "activation", 9 * GIB),
        Holder("line", "a.py:3", GIB),
    )
    as_is = AsItIs(20 * GIB, 19 * GIB, GIB)
    return replace(explain(log, lang=lang), remedies=REMEDIES, holders=holders, as_is=as_is)


def flat(description: Description):
    """Every block, those in details too."""
    pending = list(description.blocks)
    while pending:
        block = pending.pop(0)
        if isinstance(block, Details):
            pending[:0] = block.blocks
        yield block


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_golden(lang, golden):
    golden(f"diagnosis_{lang}.txt", str(sample(lang)))
    golden(f"diagnosis_{lang}.html", to_html(sample(lang).describe()))


def test_prices_of_compiled_code_that_was_rehearsed_as_eager_code_are_marked():
    as_is = replace(sample("en").as_is, is_upper_bound=True)
    texts = str(replace(sample("en"), as_is=as_is)), str(replace(sample("en"), remedies=REMEDIES[2:], as_is=as_is))
    for text in map(" ".join, map(str.split, texts)):
        assert "upper bound" in text and "Memory needed at most" in text and "needs at" in text
        assert "may not fit" in text and "does not fit" not in text
    assert "it needs at most 15.00 GiB" in texts[0].replace("\n", " ") and "as eager code no single" in texts[1]


def test_workspaces_that_no_price_has_are_named_as_far_as_there_is_room():
    for workspace_bytes, said in ((0, ""), (256 * MIB, "256.00 MiB"), (9 * GIB, "4.00 GiB")):
        remedies = (replace(REMEDIES[0], workspace_bytes=workspace_bytes), *REMEDIES[1:])
        text = " ".join(str(replace(sample("en"), remedies=remedies)).split())
        assert f"may take up to {said} more for a moment" in text if said else "workspaces" not in text


def test_a_run_of_which_a_part_was_followed_is_not_said_to_fit():
    as_is = replace(sample("en").as_is, needed_bytes=GIB, is_lower_bound=True)
    text = str(replace(sample("en"), as_is=as_is))
    (row,) = [line for line in text.splitlines() if line.startswith("the run as it is")]
    assert row.split()[5:8] == ["1024.00", "MiB", "?"]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_text_and_html_agree(lang):
    assert_text_and_html_agree(sample(lang).describe())
    bundle = sample(lang)._repr_mimebundle_()
    assert bundle["text/plain"] == str(sample(lang))
    assert "<not>" not in bundle["text/html"] and "&lt;not&gt;" in bundle["text/html"]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_eighty_columns_unless_code(lang):
    code = {
        line for block in flat(sample(lang).describe()) if isinstance(block, Code) for line in block.text.split("\n")
    }
    lines = [line for line in str(sample(lang)).split("\n") if line.strip() not in code]
    assert max(map(display_width, lines)) <= 80


def shape(description: Description):
    """Kinds of blocks, rows of tables and all numbers, without words."""
    for block in flat(description):
        match block:
            case Table():
                yield (
                    "table",
                    len(block.columns),
                    [[cell for cell in row if isinstance(cell, int)] for row in block.rows],
                )
            case Parts():
                yield "parts", [part.num_bytes for part in block.parts]
            case Sentence():
                yield "sentence", block.tone, sorted(re.findall(r"\d+(?:\.\d+)?", block.text))
            case _:
                yield (type(block).__name__,)


def test_both_languages_show_the_same_rows_and_numbers():
    assert list(shape(sample("en").describe())) == list(shape(sample("zh").describe()))


@pytest.mark.parametrize("seed", range(40))
def test_both_languages_agree_on_every_message(seed):
    message, _ = render(VERSIONS[seed % len(VERSIONS)], shuffled_numbers(seed))
    shown = [list(shape(explain(message, lang=lang).describe())) for lang in ("en", "zh")]
    assert shown[0] == shown[1]


def test_three_lines_come_first():
    first = [block for block in sample("en").describe().blocks[:3] if isinstance(block, Sentence)]
    assert [block.text.split(":")[0] for block in first] == ["What happened", "Why", "What to change"]
    chart, budget, *rest = sample("en").describe().blocks[3:]
    assert isinstance(chart, Bars) and isinstance(budget, Parts)
    assert all(isinstance(block, Details) for block in rest[1:])  # after how the budget is rounded
    assert "Microbatch 24 instead of 32" in first[2].text and "15.00 GiB" in first[2].text
    assert chart.bars[0].parts[0].num_bytes == 20 * GIB and chart.bars[1].note == "safe"


@pytest.mark.parametrize("seed", range(60))
def test_budget_rows_sum_to_the_capacity(seed):
    message, _ = render(VERSIONS[seed % len(VERSIONS)], shuffled_numbers(seed))
    diagnosis = explain(message)
    for parts in (block for block in flat(diagnosis.describe()) if isinstance(block, Parts)):
        assert parts.total_bytes == parts.capacity_bytes == diagnosis.budget.capacity_bytes


def test_a_combination_names_its_parts():
    text = to_text(sample("en").describe(), width=10_000)
    assert "recompute activations in the backward pass + LoRA of rank 16" in text


def test_short_repr_and_language_are_kept():
    assert repr(sample("en")) == "<Diagnosis: Out of memory: 1004.00 MiB did not fit>"
    assert sample("zh").lang == "zh" and "显存不足" in repr(sample("zh"))
    assert sample("zh").to_dict()["lang"] == "zh"


@pytest.mark.parametrize("lang", ["en", "zh"])
@given(text=st.text(max_size=200))
def test_any_text_can_be_shown(lang, text):
    diagnosis = explain(f"{text}\nMemoryError", lang=lang)
    Page(to_html(diagnosis.describe()))
    assert str(diagnosis)


@pytest.mark.parametrize(
    "text",
    ["hello", "CUDA error: device-side assert triggered", "DataLoader worker (pid 1) is killed by signal: Bus error.",
     "CUBLAS_STATUS_EXECUTION_FAILED", "MemoryError", "CUDA driver error: out of memory"],
)  # fmt: skip
def test_failures_of_other_kinds_are_shown(text):
    for lang in ("en", "zh"):
        assert_text_and_html_agree(explain(f"{text}\n", lang=lang).describe())


@pytest.mark.parametrize(
    "text",
    [
        "AssertionError: Torch not compiled with CUDA enabled",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        "RuntimeError: No CUDA GPUs are available",
    ],
)
def test_a_machine_without_a_gpu_is_told_of_the_pretend_one(text):
    diagnosis = explain(text)
    assert diagnosis.is_oom is False
    assert "PyTorch cannot use a GPU here" in str(diagnosis) and "%%gpumem" in str(diagnosis)


def test_a_text_without_an_error_has_no_cause():
    assert "Why:" not in str(explain("ZeroDivisionError: division by zero"))


def test_what_makes_room_for_a_part_of_a_loop_saves_nothing_of_it():
    raised = Remedy("raise_limit", 4, "same", needed_bytes=3 * GIB, saving_bytes=0, is_lower_bound=True)
    said = best_remedy([raised], None, "en")
    assert "at least 3.00 GiB of the card; what later" in said
    assert " 0 bytes" not in said
