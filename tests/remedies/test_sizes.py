"""What sets a size in the user's code: a number, a setting, or how much a model is given at once."""

from __future__ import annotations

import ast
import copy
import linecache
import textwrap
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.remedies.evaluation import RemedyEvaluator
from oom_magic.explain.remedies.own_code.rows.steps import given_rows
from oom_magic.explain.remedies.own_code.writing import CodeWriter
from oom_magic.explain.remedies.rehearsal import Variation
from oom_magic.explain.remedies.remedy import Situation
from oom_magic.explain.remedies.sizes.inputs import dimensions_of, sizes_of_inputs
from oom_magic.explain.remedies.sizes.parameters import find_rows, find_size_parameters, sizes_called
from oom_magic.predict.setups.gpus import find_gpu
from tests.support.versions import as_since_3_11


def test_sizes_in_settings_within_settings_and_computed_ones_are_found():
    names = {"cfg": {"train": {"batch_size": 8}}, "run": SimpleNamespace(args=SimpleNamespace(bs=8))}
    found = find_size_parameters(ast.parse("batch = 2**3"), names, "batch", 8)
    assert {one.label for one in found} == {"batch", "cfg['train']['batch_size']", "run.args.bs"}


@pytest.mark.parametrize("target", ["cfg.bs", "cfg['batch_size']", "lr, self.batch"])
def test_a_setting_that_the_cell_itself_sets_is_found(target):
    tree = ast.parse(f"{target} = {'0.1, ' * (',' in target)}8")
    (found,) = find_size_parameters(tree, {"cfg": SimpleNamespace(bs=8)}, "batch", 8)[:1]
    with found.override(tree, {}, 2):
        assert found.is_named and ast.unparse(tree).rstrip(")").endswith("2")


def test_a_loop_that_goes_through_its_data_by_a_number_sets_the_batch() -> None:
    tree = ast.parse("for i in range(0, 4096, 256):\n    b = rows[i:i + 256]\n    loss = net(b, labels[i:i + 256])")
    found = find_size_parameters(tree, {}, "batch", 256)[0]
    with found.override(tree, {}, 64):
        assert ast.unparse(tree).count("64") == 3 and "256" not in ast.unparse(tree)


@pytest.mark.parametrize(
    ("cell", "set_to"),
    [
        ("mb = total // parts\nfor i in range(0, total, mb):\n    net(rows[order[i:i + mb]])", "mb = 64"),
        ("step = 256\npicked = [net(rows[i:i + step]) for i in range(0, len(rows), step)]", "step = 64"),
    ],
)
def test_what_a_loop_goes_through_its_data_by_is_the_batch_whatever_it_is_called(cell: str, set_to: str) -> None:
    """Minibatches of a rollout: a shorter rollout would not be the same training."""
    tree = ast.parse(cell)
    found = find_size_parameters(tree, {"total": 1024, "parts": 4}, "batch", 256)[0]
    with found.override(tree, {}, 64):
        assert found.is_named and set_to in ast.unparse(tree)


@pytest.mark.parametrize(
    "body",
    [
        "    for i in range(0, 4096, 256):\n        net(rows[i:i + 256])",
        "    for batch in DataLoader(rows, batch_size=256):\n        net(batch)",
    ],
)
def test_a_number_in_a_function_of_another_cell_is_set_where_the_cell_defines_it(body: str, shell: Any) -> None:
    shell.run_cell(f"def epoch(net):\n{body}")
    tree = ast.parse("epoch(net)")
    (found,) = find_size_parameters(tree, shell.user_ns, "batch", 256)
    with found.override(tree, {}, 64):
        assert ast.unparse(tree) == f"def epoch(net):\n{body}\nepoch(net)".replace("256", "64")
    assert ast.unparse(tree) == "epoch(net)"


@pytest.mark.parametrize("beside", ["", "for i in range(0, 4096, mb):\n    net(rows[i:i + mb])\n"])
def test_a_loader_that_an_object_made_is_found(beside):
    """A trainer of the user's makes it with the batch size of then, which it also keeps: that sets nothing any more."""
    loader = torch.utils.data.DataLoader(torch.zeros(64, 4), batch_size=8)
    names = {"trainer": SimpleNamespace(batch_size=8, loaders={"train": loader})}
    found = find_size_parameters(ast.parse(f"{beside}trainer.fit()"), names, "batch", 8)
    targets = ["trainer.batch_size", "trainer.loaders['train'].batch_sampler.batch_size"]
    assert sorted(one.target for one in found) == targets
    with found[[one.target for one in found].index(targets[1])].override(ast.parse(""), names, 2):
        assert next(iter(loader)).shape == (2, 4)


def fit(net, inputs, goals, losses, steps=2):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        net.train()
        loss = ((net(inputs) - goals) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


CLOSURE = """
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
def closure():
    optimizer.zero_grad()
    loss = ((net(data) - labels) ** 2).mean()
    loss.backward()
    return loss
losses.extend(optimizer.step(closure).item() for _ in range(2))
"""


@pytest.mark.parametrize("cell", ["fit(net, data, labels, losses)", CLOSURE])
def test_a_whole_data_set_is_trained_on_in_parts(cell: str):
    """The code that is shown has the gradients of all parts in each step: its losses are the same."""
    net, data, labels = torch.nn.Linear(4, 2), torch.rand(64, 4), torch.rand(64, 2)
    names = {"torch": torch, "net": net, "data": data, "labels": labels, "losses": [], "fit": fit}
    rehearsal = CellRehearsal(lambda code, seen: exec(compile(code, "<cell>", "exec"), seen), ast.parse(cell), names)
    rehearsal.begin((), 0)
    rehearsal.run(Variation(sizes={"batch": 16}))
    code = rehearsal.own_code("smaller_batch", {"after": 16, "accumulation": 4})
    assert "_part in zip(" in as_since_3_11(code) and names["data"] is data

    def losses(text: str) -> list[float]:
        seen = {**names, "net": copy.deepcopy(net), "losses": []}
        exec(compile(text, "<cell>", "exec"), seen)
        return seen["losses"]

    in_parts = f"{code}\n{cell}" if cell.startswith("fit") else f"{code}\n{CLOSURE.splitlines()[-1]}"
    in_parts = in_parts if cell.startswith("fit") else f"{CLOSURE.splitlines()[1]}\n{in_parts}"
    assert losses(in_parts) == pytest.approx(losses(cell))


STEP = "    loss = net({X}).square().mean()\n    opt.zero_grad()\n    loss.backward()\n    opt.step()\n"


@pytest.mark.parametrize(
    ("cell", "rows"),
    [
        ("for epoch in range(2):\n" + STEP.format(X="data"), ("data",)),
        ("for i in range(0, 64, 8):\n" + STEP.format(X="data[i:i + 8].cuda()"), ()),
        ("for idx in torch.randperm(64).split(8):\n" + STEP.format(X="data[idx]"), ()),
        ("for i in range(4):\n" + STEP.format(X="data[:, i:]"), ("data",)),
        ("def fit(x):\n" + STEP.format(X="x") + "fit(data)", ("data",)),
        ("for b in [data]:\n" + STEP.format(X="b") + "score = net(held).mean()", ("data",)),
        ("for i in range(0, 64, 8):\n" + STEP.format(X="data[i:i + 8]") + "score = net(held).mean()", ()),
    ],
)
def test_what_a_step_reads_piece_by_piece_or_not_at_all_is_no_whole_data_set(cell: str, rows: tuple[str, ...]) -> None:
    """Rows that an evaluation behind the step takes at once are none of its batch."""
    names = {"torch": torch, "data": torch.rand(64, 4), "held": torch.rand(64, 4), "net": torch.nn.Linear(4, 2)}
    assert next((one.rows for one in find_rows(ast.parse(cell), names, 64) if one.rows), ()) == rows


def test_the_place_where_data_are_split_is_no_batch():
    """A smaller one would move rows of the training to the test."""
    cell = ast.parse("train, test = rows[:n].cuda(), rows[n:].cuda()")
    assert not find_size_parameters(cell, {"n": 64}, "batch", 64)
    assert find_size_parameters(ast.parse("train = torch.rand(n, 4)"), {"n": 64}, "batch", 64)


FIT = """
def fit(features, labels, epochs):
    X, y = torch.tensor(features, dtype=torch.float32).cuda(), torch.from_numpy(labels).cuda()
    weights = torch.ones(10).cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(epochs):
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(X), y, weights)
        loss.backward()
        opt.step()
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cell", ["def_in_cell", "of_earlier_cell", "in_the_cell", "one_step"])
def test_a_data_set_that_the_cell_makes_is_taken_in_parts(cell: str) -> None:
    """What an array of an earlier cell becomes has its rows; the weights of classes have not."""
    net = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 10))
    data = {"features": np.zeros((8192, 64)), "labels": np.zeros(8192, dtype="int64")}
    names: dict[str, Any] = {"torch": torch, "net": net, **data}
    lines = textwrap.dedent(FIT.partition(":\n")[2]).replace("epochs", "4")
    step = lines.replace("for epoch in range(4):\n", "").replace("\n    ", "\n")
    code = {"def_in_cell": f"{FIT}\nfit(features, labels, 4)", "of_earlier_cell": "fit(features, labels, 4)"}
    if cell == "of_earlier_cell":
        name = "<ipython-input-7-fit>"
        linecache.cache[name] = (len(FIT), None, FIT.splitlines(keepends=True), name)
        exec(compile(FIT, name, "exec"), names)
    text = "net.cuda()\n" + code.get(cell, step if cell == "one_step" else lines)
    rehearsal = CellRehearsal(lambda tree, seen: exec(compile(tree, "<cell>", "exec"), seen), ast.parse(text), names)
    situation = Situation(200 * 2**20, find_gpu("RTX 3060"), total_bytes=300 * 2**20)
    first = next(one for one in RemedyEvaluator(rehearsal, situation).remedies() if one.key == "smaller_batch")
    after = first.values["after"]
    assert first.fits and first.values["before"] == 8192
    assert f"for X_part, y_part in zip(X.split({after}), y.split({after})):" in first.code
    assert "cross_entropy(net(X_part), y_part, weights)" in first.code
    instead = "# instead of loss = torch.nn.functional.cross_entropy(net(X), y, weights) ... loss.backward()"
    assert (instead in first.code) == (cell == "one_step")


def test_a_state_that_goes_on_to_the_next_batch_is_not_that_of_other_rows():
    """Parts of a text would get each other's state: their code cannot be written, a shorter piece can."""
    cell = """
bptt, state = 32, None
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for t in range(0, text.size(1) - bptt, bptt):
    out, state = net(text[:, t:t + bptt], state)
    state = state.detach()
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    names = {"torch": torch, "net": torch.nn.GRU(8, 16, batch_first=True), "text": torch.rand(64, 256, 8)}
    rehearsal = CellRehearsal(lambda code, seen: exec(compile(code, "<cell>", "exec"), seen), ast.parse(cell), names)
    rehearsal.begin((), 0)
    assert rehearsal.sizes == {"batch": 64, "seq": 32}
    rehearsal.run(Variation(sizes={"batch": 16}))
    assert rehearsal.own_code("smaller_batch", {"after": 16, "accumulation": 4}) == ""
    rehearsal.run(Variation(sizes={"seq": 16}))
    assert rehearsal.own_code("shorter_sequences", {"after": 16}) == "bptt, state = (16, None)"


def test_samples_that_are_taken_one_by_one_are_counted_by_their_name():
    """Under ``vmap`` a model sees one; what a failed call has left alive there is no tensor with memory of its own."""
    cell = """
batch_size = 64
weights = dict(net.named_parameters())
def loss(weights, row):
    return torch.func.functional_call(net, weights, (row[None],)).sum()
net.cuda()
for at in range(0, len(rows), batch_size):
    torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, rows[at : at + batch_size].cuda())
"""
    names = {"torch": torch, "net": torch.nn.Linear(256, 256), "rows": torch.rand(256, 256)}
    left: list[torch.Tensor] = []

    def leaving(row: torch.Tensor) -> torch.Tensor:
        left.append(row * 2)
        return row

    torch.func.vmap(leaving)(torch.rand(4, 4))
    rehearsal = CellRehearsal(lambda code, seen: exec(compile(code, "<cell>", "exec"), seen), ast.parse(cell), names)
    as_it_is = rehearsal.begin((), 0).peak_allocated_bytes
    assert rehearsal.sizes["batch"] == 64 and left
    assert rehearsal.run(Variation(sizes={"batch": 16})).peak_allocated_bytes < as_it_is


def test_smaller_batches_and_no_graph_are_one_change_of_the_cell():
    def encode(rows, batch_size=64):
        return torch.cat([net(rows[at : at + batch_size].float()) for at in range(0, len(rows), batch_size)])

    net = torch.nn.Linear(4, 2)
    cell = "net.eval()\nout = encode(rows, batch_size=32)"
    names = {"torch": torch, "net": net, "rows": torch.zeros(4096, 4), "encode": encode}
    tree = ast.parse(cell)
    rehearsal = CellRehearsal(lambda code, seen: exec(compile(code, "<cell>", "exec"), seen), tree, names)
    rehearsal.begin((), 0)
    rehearsal.run(Variation(sizes={"batch": 16}))
    code = rehearsal.own_code("no_grad", {"after": 16})
    assert code == "with torch.no_grad():\n    net.eval()\n    out = encode(rows, batch_size=16)"
    assert ast.unparse(tree) == cell


def test_rows_are_given_to_functions_of_the_users_by_name():
    """Methods of tensors have no arguments that could be told."""
    names = {"fit": fit, "net": torch.nn.Linear(4, 2), "data": torch.zeros(64, 4), "labels": torch.zeros(64, 2)}
    tree = ast.parse("fit(net, data, goals=labels)\nnet(input=data.cuda()).argmax(-1)\nlen(data)")
    assert given_rows(tree, names, ["data", "labels"]) == {"inputs": "data", "goals": "labels"}


def test_a_whole_data_set_is_evaluated_in_parts():
    """Once all of it is given to the model at once, what sets the size is no number."""
    cell = "net.eval()\nwith torch.no_grad():\n    out = net(data.float())\n    wrong = out != labels"
    names = {"torch": torch, "net": torch.nn.Linear(4, 2), "data": torch.zeros(4096, 4), "labels": torch.zeros(4096, 2)}
    tree = ast.parse(cell)
    rehearsal = CellRehearsal(lambda code, seen: exec(compile(code, "<cell>", "exec"), seen), tree, names)
    rehearsal.begin((), 0)
    rehearsal.run(Variation(sizes={"batch": 1024}))
    code = rehearsal.own_code("smaller_evaluation", {"after": 1024})
    assert "out = torch.cat([net(data[at:at + 1024].float()) for at in range(0, len(data), 1024)])" in code
    assert rehearsal.own_code("mixed_precision", {"dtype": "bf16"}) == "" and ast.unparse(tree) == cell


def test_settings_that_a_class_has_are_found_and_put_back():
    """Neither ``CFG.batch_size`` nor an object's, whose class has it, could be set: the first advice had no code."""

    class CFG:
        batch_size, epochs = 8, 8

    for names, label in (({"CFG": CFG}, "CFG.batch_size"), ({"CFG": CFG, "args": CFG()}, "args.batch_size")):
        tree = ast.parse(f"loader = DataLoader(data, {label})")
        first = find_size_parameters(tree, names, "batch", 8)[0]
        assert (first.label, first.target) == (label, label)
        with first.override(tree, names, 2):
            assert CFG.batch_size == 2
        assert CFG.batch_size == 8 and not vars(names.get("args", SimpleNamespace()))


@pytest.mark.parametrize(
    ("shapes", "sizes"),
    [
        ((((70, 256), True), ((2, 256, 640), False)), {"batch": 256, "seq": 70}),
        ((((70, 256, 64), False), ((1, 256, 640), False)), {"batch": 256, "seq": 70}),
        ((((8, 512), True), ((8, 128, 640), False)), {"batch": 8, "seq": 512}),
        ((((8, 512), True), ((1, 512), True)), {"batch": 8, "seq": 512}),
        ((((64, 128), True), ((2, 64, 768), False)), {"batch": 64, "seq": 128}),
        ((((64, 128), True), ((2, 64, 768), False), ((2, 64, 768), False)), {"batch": 64, "seq": 128}),
        ((((5000, 128), False), ((2, 90000), True)), {}),
    ],
)
def test_samples_are_rows_or_beside_a_recurrent_state_columns(shapes, sizes):
    """A language model trained over a long text in pieces had no size, and a larger card was the first advice."""
    assert sizes_of_inputs(shapes) == sizes
    if "seq" in sizes:
        found = dimensions_of(shapes)
        assert [shapes[0][0][found[what][0]] for what in ("batch", "seq")] == [sizes["batch"], sizes["seq"]]


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("data.batch_size *= 2\nfit(data)", "data.batch_size = 3\n# instead of data.batch_size *= 2"),
        ("batch_size += 4\nfit(batch_size)", "batch_size = 3\n# instead of batch_size += 4"),
        ("batch_size = batch_size * 2\nfit(batch_size)", "batch_size = 3"),
    ],
)
def test_a_size_that_the_cell_computes_from_what_it_was_is_assigned(cell: str, shown: str) -> None:
    names = {"data": SimpleNamespace(batch_size=8), "batch_size": 8, "fit": print}  # as the failed cell left them
    tree = ast.parse(cell)
    first, *_ = find_size_parameters(tree, names, "batch", 8)
    assert CodeWriter(tree, names, []).with_sizes({first: 3}, 1) == shown
    assert ast.unparse(tree) == cell


def test_a_size_that_a_loop_increases_is_not_assigned() -> None:
    """Such a search would not end."""
    for statement in ("batch_size *= 2", "batch_size = batch_size * 2"):
        tree = ast.parse(f"while batch_size < 9:\n    fit(batch_size)\n    {statement}")
        assert not find_size_parameters(tree, {"batch_size": 8}, "batch", 8)


def test_sizes_are_also_known_by_their_names_alone():
    tree = ast.parse(
        "batch_size, epochs = 256, 3\nloader = DataLoader(data, batch_size=64)\nfor xb in rows.split(BS): pass"
    )
    assert sizes_called(tree, {"BS": 32, "epochs": 3}, "batch") == [256, 64, 32]


@dataclass
class Settings:
    steps: int = 3
    batch_size: int = 64


class Fitter:
    def __init__(self, settings, micro_batch=64):
        self.settings, self.micro_batch = settings, micro_batch


@pytest.mark.parametrize(
    ("cell", "code"),
    [
        ("f = Fitter(Settings())", "f = Fitter(Settings(batch_size=8))"),
        ("s = Settings(steps=5)", "s = Settings(steps=5, batch_size=8)"),
        ("f = Fitter(None)", "f = Fitter(None, micro_batch=8)"),
    ],
)
def test_defaults_of_the_users_classes_are_given_where_the_cell_makes_an_object(cell: str, code: str) -> None:
    """What a dataclass has of its own as an attribute, its objects do not read."""
    names = {"Settings": Settings, "Fitter": Fitter}
    tree = ast.parse(cell)
    first, *_ = find_size_parameters(tree, names, "batch", 64)
    assert not first.target
    with first.override(tree, names, 8):
        assert ast.unparse(tree) == code
    assert ast.unparse(tree) == cell
    assert not find_size_parameters(ast.parse("pass"), {"Settings": Settings}, "batch", 64)


def test_a_default_of_another_name_is_given_where_the_cell_calls_the_function():
    """A policy's episodes run in so many environments: nothing there is called a batch, and no code could be written."""

    def run_episode(net, steps=3, envs=64):
        return torch.stack([net(torch.zeros(envs, 8)).sum(1) for _ in range(steps)])

    names = {"torch": torch, "net": torch.nn.Linear(8, 8), "run_episode": run_episode}
    cell = "loss = run_episode(net).mean()\nloss.backward()"
    rehearsal = CellRehearsal(lambda code, seen: exec(compile(code, "<cell>", "exec"), seen), ast.parse(cell), names)
    rehearsal.begin((), 0)
    rehearsal.run(Variation(sizes={"batch": 16}))
    assert rehearsal.own_code("smaller_evaluation", {"after": 16}) == "loss = run_episode(net, envs=16).mean()"
    assert not find_size_parameters(ast.parse("print(net)"), names, "batch", 64)
