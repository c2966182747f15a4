"""An answer that stays open names first what reports like the text most often were; what is new of rules beside it."""

from __future__ import annotations

import pytest

from oom_magic.explain.evidence.causes import Cause, Confidence
from oom_magic.explain.evidence.clues.traceback import find_clues
from oom_magic.explain.evidence.measured.likeness import likeness, sizes_of
from oom_magic.explain.evidence.measured.precedents import features_of
from oom_magic.explain.explainer import explain
from tests.support.told import as_shown

_FULL = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.15 GiB total capacity;"
    " 77.13 GiB already allocated; 307.31 MiB free; 78.21 GiB reserved in total by PyTorch)"
)


def test_shares_sum_to_one_and_words_move_them():
    def share(text, cause):
        return likeness().shares(features_of(text, None, find_clues(text)))[cause]

    files, pictures = "the corpus is read from csv files into a list", "larger images and a larger batch on this card"
    assert share(files, Cause.HOST_RAM) > share(pictures, Cause.HOST_RAM)
    assert share(pictures, Cause.ACTIVATIONS) > share(files, Cause.ACTIVATIONS)
    assert sum(likeness().shares(()).values()) == pytest.approx(1)


def test_a_word_counts_the_less_the_more_there_are_and_a_sign_always_the_same():
    assert dict(sizes_of(["told grows", "card", "epoch", "loss"])) == {
        "told grows": 0.5, "card": 0.5, "epoch": 0.5, "loss": 0.5,
    }  # fmt: skip
    assert dict(sizes_of(["told grows", *map(str, range(24))]))["3"] == pytest.approx(0.2)


def test_what_similar_reports_were_leaves_an_answer_open():
    diagnosis = explain("Is 12 GB of VRAM not enough for this model? CUDA out of memory", fast=True, lang="en")
    assert diagnosis.confidence is Confidence.OPEN
    assert diagnosis.cause is not Cause.DRIVER_LEVEL


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        pytest.param(
            "ResourceExhaustedError: OOM when allocating tensor with shape[246534,1280] and type float on /job:localhost"
            "/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc [Op:RandomStandardNormal]",
            Cause.WEIGHTS_TOO_BIG, id="a weight's first values",
        ),
        pytest.param(
            "With vllm the model is initialised with every request, leading to a CUDA out of memory error",
            Cause.WEIGHTS_TOO_BIG, id="a model for each request",
        ),
        pytest.param(
            "out of memory error: when the first epoch reaches 99% it fails. I dropped the batch size but it didn't work",
            Cause.ACTIVATIONS, id="an epoch had the optimizer's state",
        ),
    ],
)  # fmt: skip
def test_what_a_text_shows_of_its_run_is_its_cause(text, cause):
    assert explain(text, fast=True).cause is cause


def test_a_small_network_does_not_fill_a_card_with_its_optimizer():
    text = "OOM with EfficientNet B3 on a 16GB GPU while training; I reduced the batch size, it doesn't help"
    assert "optimizer state does not fit" not in as_shown(text)


def test_a_batch_of_thousands_of_sequences_is_no_candidate():
    assert "batch 16384" not in as_shown(f"llama-2-7b, LoRA\n{_FULL}")


def test_a_guess_that_it_is_ram_is_no_heading():
    text = "RuntimeError: CUDA out of memory on PC with RTX3060\nPlatform: Linux-5.15-microsoft-standard-WSL2"
    assert "Out of memory on the host" not in as_shown(text)
