"""What is computed for each row by itself is taken in parts: the code that is shown gives the same results."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.remedies.evaluation import RemedyEvaluator
from oom_magic.explain.remedies.own_code.rows.calls import in_rows, model_calls
from oom_magic.explain.remedies.own_code.rows.functions import compared_in_parts, compared_rows
from oom_magic.explain.remedies.own_code.rows.statements import computed_in_parts, leading_rows
from oom_magic.explain.remedies.own_code.writing import CodeWriter
from oom_magic.explain.remedies.remedy import Situation, ranked
from oom_magic.explain.remedies.sizes.parameters import find_rows
from oom_magic.predict.setups.gpus import find_gpu
from tests.support.versions import as_since_3_11

SEARCHED = "k = 3\nscores = queries @ corpus.T\ntop, index = scores.topk(k, dim=1)\nprint(index.shape)"


def names() -> dict[str, Any]:
    torch.manual_seed(0)
    rows = {name: torch.randn(number, 8) for name, number in (("queries", 24), ("corpus", 40))}

    def distances(a, b):
        return torch.cdist(a, b).argmin(dim=1)

    def overlap(a, b):
        common = torch.min(a[:, None], b[None]).sum(-1)
        return common / (a.sum(1)[:, None] + b.sum(1)[None, :])

    def matched(rows, others, least=0.1):
        best, index = overlap(rows.abs(), others.abs()).max(dim=1)
        index[best < least] = -1
        return best, index

    def pairs(unit):
        return unit @ unit.T

    def sampled(rays):
        points = rays[:, None] * torch.ones(5, 1)
        return points.reshape(-1, 8).exp().view(len(rays), 5, 8).transpose(1, 2).flatten(1)

    def gaussian(x, y, width=1.0):
        far = x.pow(2).sum(1, keepdim=True) + y.pow(2).sum(-1)[None] - 2 * x @ y.T
        return torch.exp(-far / width)

    functions = {
        "gaussian": gaussian,
        "y": torch.ones(24, 1),
        "pairs": pairs,
        "overlap": overlap,
        "matched": matched,
        "distances": distances,
        "sampled": sampled,
        "print": lambda *_: None,
    }
    return {"torch": torch, **functions, **rows}


@pytest.mark.parametrize(
    ("cell", "results"),
    [
        (SEARCHED, ("top", "index")),
        ("nearest = distances(queries, corpus)", ("nearest",)),
        ("best, at_best = matched(queries, corpus)", ("best", "at_best")),  # in a function of a function
        (
            "with torch.no_grad():\n    a, b = queries, corpus\n    for _ in range(2):\n        a = a * 2\nc = a @ b.T",
            ("c",),
        ),
        ("features = sampled(queries).softmax(-1)", ("features",)),
        ("kept = []\nseen = (queries @ corpus.T).softmax(-1)\nbest = seen.max(-1).values", ("best",)),
        ("alike = queries @ queries.T", ("alike",)),  # some of the rows against all
        ("kernel = torch.exp(-torch.cdist(queries, queries) ** 2)", ("kernel",)),
        ("kernel = gaussian(queries, queries)", ("kernel",)),
        ("far = (queries.unsqueeze(0) - queries.unsqueeze(1)).norm(dim=-1)", ("far",)),
        ("wide = corpus * 2\nscores = queries @ wide.T\nprint(wide)", ("scores", "wide")),
        ("same = torch.ones(40, 8).cos()\nscores = queries @ same.T", ("scores",)),
        ("scores = torch.einsum('id,jd->ij', queries, corpus)", ("scores",)),
        ("unit = queries * 2\nalike = unit @ unit.T", ("alike",)),
        ("unit = queries * 2\nother = unit * 3\nalike = torch.cdist(unit, other)", ("alike",)),
        ("unit = queries * 2\nalike = (unit[:, None] - unit[None]).norm(dim=-1)", ("alike",)),
        ("turned = queries.transpose(0, 1)\nalike = torch.mm(queries, turned)", ("alike",)),
        ("centred = queries - queries.mean(0)\nspread = centred @ centred.t()", ("spread",)),
        (
            "sq = (queries ** 2).sum(1)\nfar = sq[:, None] + sq[None, :] - 2 * queries @ queries.T\n"
            "kernel = torch.exp(-0.5 * far)\nsolved = kernel @ y",
            ("solved",),
        ),
        (
            "scores = queries @ queries.T\nscores.fill_diagonal_(-1)\nbest, at_best = scores.topk(3, dim=1)",
            ("best", "at_best"),
        ),
        ("larger = torch.max(queries[:, None, :2], corpus[None, :, :2]).prod(2)", ("larger",)),
        ("own = queries @ queries.T\nown.diagonal().zero_()\nnear = own.argmax(1)", ("near",)),
    ],
)
def test_rows_in_parts_give_the_same(cell: str, results: tuple[str, ...]) -> None:
    whole, parts = names(), names()
    assert leading_rows(ast.parse(cell), whole) == ("queries", 24)
    tree = computed_in_parts(ast.parse(cell), parts, "queries", 7)
    assert tree is not None
    exec(cell, whole)
    exec(compile(tree, "<cell>", "exec"), parts)
    assert all(torch.allclose(whole[name], parts[name], atol=1e-5) for name in results)
    assert "torch.ones" not in ast.unparse(tree).partition("for ")[2]  # what is the same for all is computed once


@pytest.mark.parametrize(
    ("cell", "instead"),
    [
        ("alike = queries @ queries.T", "alike = queries @ queries.T"),
        ("k = 3\nown = queries @ queries.T\nbest = own.topk(k)", "own = queries @ queries.T ... best = own.topk(k)"),
        ("a = queries @ queries.T\nb = a * 2\nc = b.amax(1)", "a = queries @ queries.T ... c = b.amax(1)"),
    ],
)
def test_it_is_told_what_statements_in_parts_stand_for(cell: str, instead: str) -> None:
    """Pasted beside them, the loop saved nothing: as many statements may be new as are gone."""
    tree, seen = ast.parse(cell), names()
    (rows,) = find_rows(tree, seen, 24, are_free=True)
    code = CodeWriter(tree, seen, []).with_sizes({rows: 8}, 1)
    assert code.splitlines()[-1] == f"# instead of {instead}" and "queries.split(8)" in code


@pytest.mark.parametrize(
    "cell",
    [
        "alike = queries.T @ queries",  # each row meets all others
        "among = torch.cdist(corpus, queries)",
        "scores = corpus @ queries.T",
        "alike = queries @ queries.T - torch.eye(24)",
        "scores = queries @ corpus.T\nscores[torch.arange(24), torch.arange(24)] = 0",
        "turned = torch.einsum('id,jd->ji', queries, corpus)",
        "apart = gaussian(queries, queries).tril()",
        "alike = pairs(queries)",
        "scores = (queries @ corpus.T).softmax(0)",
        "mean = (queries @ corpus.T).mean()",
        "best = torch.cat([queries, corpus])",
        "turned = queries.transpose(0, 1)",
        "turned = queries.permute(1, 0)",
        "pieces = queries.view(8, -1).exp()",
        "line = torch.flatten(queries)",
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


class Field(torch.nn.Module):
    """What is computed at points."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.layer(points).repeat(1, 512).relu()[:, :4].clone()


def rays_of(field: torch.nn.Module) -> dict[str, Any]:
    """A function that has a field computed at points of each ray, another that mixes the rays, and one without it."""

    def render(starts, ways, samples=64):
        depths = torch.linspace(2.0, 6.0, samples, device=starts.device).expand(len(starts), samples)
        points = starts[:, None] + ways[:, None] * depths[..., None]
        return field(points.reshape(-1, 3)).view(len(starts), samples, 4).sum(1)

    def mixed(starts, ways):
        return render(starts, ways).softmax(0)

    def brightest(starts, ways):
        return (starts * ways).amax(1)

    return {"torch": torch, "field": field, "render": render, "mixed": mixed, "brightest": brightest}


def test_a_function_that_runs_a_model_on_each_row_is_called_with_some_rows() -> None:
    """A whole picture is rendered from rays that the cell makes itself, in two tensors."""
    make = "ways = torch.rand(200 * 200, 3).cuda()\nstarts = torch.zeros_like(ways)\n"
    tree = ast.parse(f"field.cuda()\n{make}with torch.no_grad():\n    image = render(starts, ways).view(200, 200, 4)")
    rehearsal = CellRehearsal(
        lambda code, known: exec(compile(code, "<cell>", "exec"), known), tree, rays_of(Field().eval())
    )
    evaluator = RemedyEvaluator(rehearsal, Situation(500 * 2**20, find_gpu("RTX 3060"), total_bytes=600 * 2**20))
    first = ranked(list(evaluator.remedies()))[0]
    size = f"at:at + {first.values['after']}"
    assert first.key == "smaller_evaluation" and first.fits and first.values["before"] == 200 * 200
    assert f"torch.cat([render(starts[{size}], ways[{size}]) for at in range(0, len(starts)" in first.code


def functions_of_texts(net: torch.nn.Module) -> dict[str, Any]:
    """Functions that have a model run on all texts at once, and return rows in several forms."""

    def read(texts):
        return torch.tensor([[float(len(text))] for text in texts])

    def embed(texts):
        with torch.no_grad():
            hidden = net(read(texts))
        return hidden.relu()

    def as_array(texts):
        return embed(texts).numpy()

    def answers(texts):
        ids = net.generate(read(texts))
        return ids.tolist()

    class Reader:
        def predict(self, texts):
            return net(read(texts)).detach().numpy()

    return {"embed": embed, "as_array": as_array, "answers": answers, "reader": Reader()}


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ("embed(texts)", "torch.cat([embed(texts[at:at + 5]) for at in range(0, len(texts), 5)])"),
        ("as_array(texts)", "np.concatenate([as_array(texts[at:at + 5]) for at in range(0, len(texts), 5)])"),
        (
            "reader.predict(texts)",
            "np.concatenate([reader.predict(texts[at:at + 5]) for at in range(0, len(texts), 5)])",
        ),
        ("answers(texts)", "[row for at in range(0, len(texts), 5) for row in answers(texts[at:at + 5])]"),
    ],
)
def test_a_function_that_runs_a_model_on_a_list_is_called_with_parts_of_it(call: str, shown: str) -> None:
    net = torch.nn.Linear(1, 4)
    net.generate = lambda rows: rows.repeat(1, 2)  # type: ignore[assignment]
    seen = {"torch": torch, "np": np, "texts": ["a" * number for number in range(16)], **functions_of_texts(net)}
    (taken,) = (one for _, _, one in model_calls(ast.parse(f"out = {call}"), seen))
    code = in_rows(taken, seen, (), 16, 5)
    assert code == shown
    assert list(map(list, eval(code, seen))) == list(map(list, eval(call, seen)))
    assert in_rows(taken, {**seen, "np": None}, (), 16, 5) == (shown if "np." not in shown else "")


@pytest.mark.parametrize(("function", "is_one"), [("render", True), ("mixed", False), ("brightest", False)])
def test_a_function_is_taken_for_a_model_where_it_runs_one_and_keeps_rows_apart(function: str, is_one: bool) -> None:
    tree = ast.parse(f"image = {function}(starts, ways)")
    assert len(list(model_calls(tree, rays_of(Field())))) == is_one


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


KMEANS = """
def kmeans(x, k, turns=3):
    centers = x[:k].clone()
    for _ in range(turns):
        {distances}
        nearest = distances.argmin(1)
        centers.zero_().index_add_(0, nearest, x)
        centers /= torch.bincount(nearest, minlength=k).clamp(min=1)[:, None]
    return centers, nearest
"""


@pytest.mark.parametrize(
    "distances", ["distances = torch.cdist(x, centers)", "distances = ((x[:, None] - centers[None]) ** 2).sum(-1)"]
)
def test_rows_that_a_function_compares_in_a_loop_are_taken_in_parts(distances: str) -> None:
    tree = ast.parse(KMEANS.format(distances=distances))
    definition: Any = tree.body[0]
    assert list(compared_rows(definition, {"torch": torch})) == ["x"]
    made = compared_in_parts(definition, {"torch": torch}, "x", 7)
    assert made is not None and "x.split(7)" in ast.unparse(made) and ast.unparse(definition) in ast.unparse(tree)
    results = []
    for one in (definition, made):
        seen: dict[str, Any] = {"torch": torch}
        exec(compile(ast.Module([one], []), "<cell>", "exec"), seen)
        torch.manual_seed(0)
        results.append(seen["kmeans"](torch.randn(50, 4), 5))
    assert torch.allclose(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(
    "statement",
    ["distances = torch.cdist(centers, x).T", "distances = torch.cdist(x, centers).softmax(0)",
     "distances = torch.cdist(x[torch.randperm(len(x))], centers)"],
)  # fmt: skip
def test_rows_of_a_function_that_meet_are_not_parted(statement: str) -> None:
    definition: Any = ast.parse(KMEANS.format(distances=statement)).body[0]
    assert not list(compared_rows(definition, {"torch": torch}))


def test_points_in_a_loop_are_advised_in_parts() -> None:
    seen: dict[str, Any] = {"torch": torch, "points": torch.zeros(2**14, 8)}
    cell = KMEANS.format(distances="distances = torch.cdist(x, centers)") + "found = kmeans(points.cuda(), 2**13)"
    rehearsal = CellRehearsal(lambda code, known: exec(compile(code, "<cell>", "exec"), known), ast.parse(cell), seen)
    evaluator = RemedyEvaluator(rehearsal, Situation(300 * 2**20, find_gpu("RTX 3060"), total_bytes=400 * 2**20))
    first = ranked(list(evaluator.remedies()))[0]
    assert first.key == "smaller_evaluation" and first.fits and first.values["before"] == 2**14
    assert first.code.startswith("def kmeans(") and f"x.split({first.values['after']})" in first.code
    assert "_oom_magic_rows" not in seen
