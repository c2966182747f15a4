"""Texts that ask how much memory a run needs, and tell of nothing that failed."""

from __future__ import annotations

import pytest

from tests.support.told import as_shown

_QUESTION = "A question about how much memory a run needs"


@pytest.mark.parametrize(
    "text",
    [
        "How much VRAM do I need to run this?",
        "What GPU do I need to train the model? Is 8GB enough?",
        "I would like to know how much GPU memory (VRAM) is typically required to train the model.",
        "最低显存要求是多少，12G够不够？",
        "12G显存够用吗",
    ],
)
def test_a_question_is_no_failure(text):
    said = as_shown(text)
    assert said.startswith(_QUESTION)
    assert "ran out" not in said


def test_the_weights_that_are_asked_about_are_told():
    said = as_shown("How much VRAM do I need to finetune llama-2-13b?")
    assert "24.21 GiB with 16 bits each; 193.72 GiB with gradients and Adam's state" in said


@pytest.mark.parametrize(
    "text",
    [
        "How much VRAM is required to finetune the model? I encountered an OOM error.",
        "显存多大才够用？我这12G显存不够吗？一跑就爆显存",
        "I was wondering what GPU memory is needed to run your code because it seems that even 32GB is not enough.",
    ],
)
def test_a_failure_is_none_of_these_questions(text):
    assert not as_shown(text).startswith(_QUESTION)
