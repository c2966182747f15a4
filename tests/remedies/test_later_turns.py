"""A loop that grows, such as a generator's with a cache, is followed for some turns: the others are told from them."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from oom_magic.explain.diagnosis import Diagnosis
from oom_magic.explain.evidence.causes import Cause, Confidence
from oom_magic.explain.live.refinement import refine_with_turns
from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.remedies.evaluation import RemedyEvaluator
from oom_magic.explain.remedies.remedy import Situation, ranked
from oom_magic.explain.sentences.causes import cause_in_words
from oom_magic.memory.allocator.replay import minimum_device_bytes
from oom_magic.memory.report import MemoryReport
from oom_magic.predict.instrumentation import stop_rule
from oom_magic.predict.instrumentation.loop_code import compiled_with_loops
from oom_magic.predict.session import DrySession
from oom_magic.predict.setups.gpus import find_gpu
from oom_magic.views.remedies import best_remedy

MODEL = """
import torch.nn.functional as F
class Cached(torch.nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.embed = torch.nn.Embedding(8192, width)
        self.qkv, self.out, self.head = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width), torch.nn.Linear(width, 8192)
    def forward(self, tokens, cache):
        x = self.embed(tokens)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2))), (k, v)
model, tokens, cache, rows = Cached().cuda().eval(), torch.zeros(64, 1, dtype=torch.long, device="cuda"), None, []
"""
CACHED = """
with torch.no_grad():
    for turn in {turns}:
        logits, cache = model(tokens, cache)
        tokens = logits[:, -1:].argmax(-1)
        {kept}
"""
ANEW = """
sequence = tokens
for turn in range(150):
    with torch.no_grad():
        scores = model(sequence, None)[0]
        sequence = torch.cat([sequence, scores[:, -1:].argmax(-1)], dim=1)
"""
LOOPS = {
    "a cache": CACHED.format(turns="range(150)", kept=""),
    "what is kept": CACHED.format(turns="zip(range(170), range(150))", kept="rows.append(logits)"),
    "the sequence anew": ANEW,
    "a name that says nothing": "f = model\n" + CACHED.format(turns="range(150)", kept="").replace("model", "f"),
}
AT_AN_END = CACHED.format(turns="iter(lambda: len(rows), 150)", kept="rows.append(logits)")


def rehearsed(cell: str) -> CellRehearsal:
    return CellRehearsal(
        lambda tree, names: exec(compiled_with_loops(tree, "<cell>"), names),
        ast.parse(MODEL + cell),
        {"torch": torch},
        gpu="RTX 3060",
    )


def sizes(report: MemoryReport) -> tuple[int, int, int]:
    need = minimum_device_bytes(report.timeline, report.settings)
    return report.peak_allocated_bytes, report.peak_reserved_bytes, need


def followed_whole(cell: str) -> MemoryReport:
    names: dict[str, Any] = {"torch": torch}
    session = DrySession("RTX 3060", is_limited=False, has_bar=False, stop_after_steps=None)
    return session.run(lambda: exec(compile(MODEL + cell, "<cell>", "exec"), names))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cell", LOOPS.values(), ids=LOOPS)
def test_turns_that_were_not_followed_take_what_they_would(cell: str) -> None:
    rehearsal = rehearsed(cell)
    report = rehearsal.begin([], 2**24)
    assert rehearsal.calls_followed == stop_rule.CALLS_COMPARED and report.timeline.was_continued
    assert not report.is_lower_bound
    assert sizes(report) == sizes(followed_whole(cell))


def test_what_each_turn_keeps_is_the_cause_in_words() -> None:
    rehearsal = rehearsed(LOOPS["a cache"])
    rehearsal.begin([], 2**24)
    token_bytes = 2 * 64 * 256 * 4  # a key and a value of each of 64 rows
    assert rehearsal.kept_by_turns == (150, token_bytes)
    failed = Diagnosis(failures=(), cause=Cause.ATTENTION_SCORES, evidence=(), confidence=Confidence.LIKELY, lang="en")
    told = refine_with_turns(failed, 150, token_bytes, needed_bytes=200 * token_bytes)
    words = cause_in_words(told.cause, told)
    assert told.cause is Cause.ACTIVATIONS and "128.00 KiB more with every one, 18.75 MiB with all 150" in words
    assert refine_with_turns(failed, 150, token_bytes, needed_bytes=2000 * token_bytes) == failed


def test_of_many_turns_each_that_is_added_stands_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oom_magic.memory.later_turns.MOST_EVENTS", 1_000)
    cell = LOOPS["what is kept"]
    found, true = sizes(rehearsed(cell).begin([], 2**24)), sizes(followed_whole(cell))
    assert abs(found[0] - true[0]) <= 0.01 * true[0] and abs(found[2] - true[2]) <= 0.05 * true[2]


@pytest.mark.slow
def test_where_the_end_is_not_known_prices_are_lower_bounds_and_nothing_is_called_safe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stop_rule, "SECONDS_WITHOUT_STEPS", 0)
    gpu = find_gpu("RTX 3060")
    evaluator = RemedyEvaluator(rehearsed(AT_AN_END), Situation(usable_bytes=160 * 2**20, gpu=gpu), ())
    assert evaluator.baseline.is_lower_bound
    remedies = ranked(list(evaluator.remedies()))
    assert remedies and not any(one.fits for one in remedies)
    assert {one.verdict for one in remedies} == {None}
    assert "at least" in best_remedy(remedies, None, "en")


@pytest.mark.slow
def test_a_library_says_how_often_it_will_call_its_model() -> None:
    pytest.importorskip("transformers")
    generating = (
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "gpt = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=128, n_head=4)).cuda().eval()\n"
        "prompt = torch.zeros(64, 8, dtype=torch.long, device='cuda')\n"
        "out = gpt.generate(prompt, max_new_tokens=120, pad_token_id=0)"
    )
    report = rehearsed(generating).begin([], 2**24)
    assert report.timeline.was_continued and not report.is_lower_bound
    assert sizes(report) == sizes(followed_whole(generating))
