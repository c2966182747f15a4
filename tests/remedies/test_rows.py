"""What is computed for each row by itself is taken in parts: the code that is shown gives the same results."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.remedies.evaluation import RemedyEvaluator
from oom_magic.explain.remedies.own_code.rows import computed_in_parts, in_rows, leading_rows, model_calls
from oom_magic.explain.remedies.remedy import Situation, ranked
from oom_magic.predict.setups.gpus import find_gpu
from tests.support.versions import as_since_3_11

SEARCHED = "k = 3\nscores = queries @ corpus.T\ntop, index = scores.topk(k, dim=1)\nprint(index.shape)"


def names() -> dict[str, Any]:
    torch.manual_seed(0)
    rows = {name: torch.randn(number, 8) for name, number in (("queries", 24), ("corpus", 40))}

    def distances(a, b):
        return torch.cdist(a, b).argmin(dim=1)

    def pairs(unit):
        return unit @ unit.T

    return {"torch": torch, "pairs": pairs, "print": lambda *_: None, "distances": distances, **rows}


@pytest.mark.parametrize(
    ("cell", "results"),
    [
        (SEARCHED, ("top", "index")),
        ("nearest = distances(queries, corpus)", ("nearest",)),
        (
            "with torch.no_grad():\n    a, b = queries, corpus\n    for _ in range(2):\n        a = a * 2\nc = a @ b.T",
            ("c",),
        ),
        ("kept = []\nseen = (queries @ corpus.T).softmax(-1)\nbest = seen.max(-1).values", ("best",)),
    ],
)
def test_rows_in_parts_give_the_same(cell: str, results: tuple[str, ...]) -> None:
    whole, parts = names(), names()
    assert leading_rows(ast.parse(cell), whole) == ("queries", 24)
    tree = computed_in_parts(ast.parse(cell), parts, "queries", 7)
    assert tree is not None
    exec(cell, whole)
    exec(compile(tree, "<cell>", "exec"), parts)
    assert all(torch.allclose(whole[name], parts[name]) for name in results)


@pytest.mark.parametrize(
    "cell",
    [
        "alike = queries @ queries.T",  # each row meets all others
        "unit = queries * 2\nalike = unit @ unit.T",
        "unit = queries * 2\nother = unit * 3\nalike = torch.cdist(unit, other)",
        "unit = queries * 2\nalike = (unit[:, None] - unit[None]).norm(dim=-1)",
        "alike = pairs(queries)",
        "scores = (queries @ corpus.T).softmax(0)",
        "mean = (queries @ corpus.T).mean()",
        "best = torch.cat([queries, corpus])",
        "total = total + queries @ corpus.T",
        "for query in queries:\n    total += query",
    ],
)
def test_rows_that_meet_are_not_parted(cell: str) -> None:
    assert computed_in_parts(ast.parse(cell), {**names(), "total": 0}, "queries", 4) is None


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        (
            "ids = net.generate(input_ids=rows.cuda(), attention_mask=torch.ones_like(rows), pad_token_id=2)",
            "torch.nn.utils.rnn.pad_sequence([row for at in range(0, len(rows), 4) for row in net.generate("
            "input_ids=rows[at:at + 4].cuda(), attention_mask=torch.ones_like(rows[at:at + 4]), pad_token_id=2)],"
            " batch_first=True, padding_value=2)",
        ),
        (
            "ids = net.generate(rows, **settings)",
            "torch.nn.utils.rnn.pad_sequence([row for at in range(0, len(rows), 4) for row in net.generate("
            "rows[at:at + 4], **settings)], batch_first=True, padding_value=settings['pad_token_id'])",
        ),
        (
            "ids = net.generate(rows)",
            "torch.nn.utils.rnn.pad_sequence([row for at in range(0, len(rows), 4) for row in net.generate("
            "rows[at:at + 4])], batch_first=True, padding_value=net.generation_config.eos_token_id)",
        ),
        (
            "first = net(**inputs).last[:, 0]",
            "torch.cat([net(**{name: value[at:at + 4] for name, value in inputs.items()}).last[:, 0]"
            " for at in range(0, len(next(iter(inputs.values()))), 4)])",
        ),
        (
            "best = net(rows.cuda()).softmax(-1).argmax(1)",
            "torch.cat([net(rows[at:at + 4].cuda()).softmax(-1).argmax(1) for at in range(0, len(rows), 4)])",
        ),
        (
            "mean = net(rows).mean()",  # of all rows: only what it is made of is parted
            "torch.cat([net(rows[at:at + 4]) for at in range(0, len(rows), 4)])",
        ),
        ("out = net(3)", ""),
    ],
)
def test_a_model_is_called_with_some_rows(cell: str, shown: str) -> None:
    tree = ast.parse(cell)
    seen = {"net": torch.nn.Linear(1, 1), "rows": torch.zeros(16, 3), "torch": torch, "settings": {"pad_token_id": 5}}
    seen["net"].generation_config = SimpleNamespace(pad_token_id=None, eos_token_id=7)
    (call,) = (taken for _, _, taken in model_calls(tree, seen))
    assert as_since_3_11(in_rows(call, seen, (), 16, 4)) == shown


@pytest.mark.parametrize(("corpus", "around"), [("corpus", ""), ("X_train", "with torch.no_grad():\n    ")])
def test_a_search_that_does_not_fit_is_advised_in_parts(corpus: str, around: str) -> None:
    """No model is called there, so what sets the size is the number of rows."""
    seen = {"torch": torch, "queries": torch.zeros(2**13, 64), corpus: torch.zeros(2**14, 64)}
    search = f"scores = queries.cuda() @ {corpus}.cuda().T; best = scores.max(dim=1).indices"
    tree = ast.parse(f"{around}{search}")
    rehearsal = CellRehearsal(lambda code, known: exec(compile(code, "<cell>", "exec"), known), tree, seen)
    evaluator = RemedyEvaluator(rehearsal, Situation(300 * 2**20, find_gpu("RTX 3060"), total_bytes=400 * 2**20))
    first = ranked(list(evaluator.remedies()))[0]
    assert first.key == "smaller_evaluation" and first.fits
    head = f"parts = []\nfor queries_part in queries.split({first.values['after']}):\n"
    instead = f"# instead of {(around or search).split(';')[0].splitlines()[0]}"
    assert first.code.startswith(head) and instead in first.code and "del scores" in first.code


def test_several_answers_to_each_prompt_are_advised_for_some_prompts_at_a_time() -> None:
    """The model is called with more rows than the user has prompts."""

    class Answering(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4096, 4096)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.layer(rows).relu()

        @torch.no_grad()
        def generate(self, rows: torch.Tensor, answers: int) -> torch.Tensor:
            return self(rows.repeat_interleave(answers, 0))[:, :8].clone()

    seen = {"torch": torch, "net": Answering().eval(), "prompts": torch.zeros(1024, 4096)}
    tree = ast.parse("net.cuda()\nout = net.generate(prompts.cuda(), 8)")
    rehearsal = CellRehearsal(lambda code, known: exec(compile(code, "<cell>", "exec"), known), tree, seen)
    evaluator = RemedyEvaluator(rehearsal, Situation(300 * 2**20, find_gpu("RTX 3060"), total_bytes=400 * 2**20))
    first = ranked(list(evaluator.remedies()))[0]
    assert first.key == "smaller_evaluation" and first.fits and first.values["before"] == 1024
    assert f"net.generate(prompts[at:at + {first.values['after']}].cuda(), 8)" in first.code
