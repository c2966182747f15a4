"""Code to paste in the user's own words: what it is made of, and that it runs."""

from __future__ import annotations

import ast
import linecache
import sys
import warnings
from itertools import cycle

import pytest
import torch
from versions import as_since_3_11

from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.remedies.code import STYLES, code_for
from oom_magic.explain.remedies.own_code.accumulation import accumulating
from oom_magic.explain.remedies.own_code.loops import copied, own_arguments, shown
from oom_magic.explain.remedies.own_code.models import own_names
from oom_magic.explain.remedies.own_code.writing import own_code
from oom_magic.explain.remedies.rehearsal import NotEvaluatedError, Variation
from oom_magic.explain.remedies.size_parameters import find_size_parameters
from oom_magic.predict.session import DrySession
from oom_magic.predict.what_if.model_changes import MixedPrecision

LOOP = """\
net = make()
opt = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.9, 0.99))
losses = []
for images, labels in loader:
    opt.zero_grad()
    out = net(images)
    loss = torch.nn.functional.mse_loss(out, labels)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    losses.append(loss.item())
"""
VALUES = {"name": "batch_size", "after": 2, "accumulation": 3, "dtype": "bf16"}


def make():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)


def trained(code, batches):
    names = {"torch": torch, "make": make, "loader": batches, "drawn": cycle(batches), "net": make()}
    exec(code, names)
    return names["net"].weight.detach(), names["losses"]


def execute(tree, names):
    exec(compile(tree, "<cell>", "exec"), names)


def rewritten(key, source=LOOP, **names):
    tree = ast.parse(source)
    if key != "smaller_batch":
        return own_code(tree, {"net": make(), **names}, key, VALUES)
    made = accumulating(tree, VALUES["accumulation"])
    return "" if made is None else "\n".join(shown(made, set(map(ast.unparse, tree.body))))


def test_an_accumulating_loop_trains_the_same():
    data = [(torch.randn(2, 4), torch.randn(2, 2)) for _ in range(6)]
    whole = [tuple(map(torch.cat, zip(*data[at : at + 3], strict=True))) for at in (0, 3)]
    head = LOOP[: LOOP.index("for ")]
    code = as_since_3_11(rewritten("smaller_batch"))
    assert code.startswith("accumulation = 3\nfor number, (images, labels) in enumerate(loader, 1):")
    weight, losses = trained(head + code, data)
    assert torch.allclose(weight, trained(LOOP, whole)[0], atol=1e-6) and len(losses) == 6


@pytest.mark.parametrize(
    ("loop", "first", "last"),
    [
        ("for i, (images, labels) in enumerate(loader):", "", "if i == 1: break"),
        ("for i, (images, labels) in enumerate(loader):", "if i >= 2: print(i); break", ""),
        ("for images, labels in itertools.islice(loader, 2):", "", ""),
        ("for images, labels in loader:", "", "step += 1\n    if step == 2: break"),
        ("for images, labels in loader:", "if step == 2: break", "step += 1"),
        ("for i, (images, labels) in enumerate(loader, 1):", "if i > 2: break", ""),
        ("for i, (images, labels) in enumerate(loader, start=1):", "", "if i == 2: break"),
        ("for i, (images, labels) in zip(range(2), loader):", "", ""),
        ("for step in range(9):", "if step == 2: break\n    images, labels = next(batches)", ""),
        ("for step in range(9):", "images, labels = next(batches)", "if step == 1: break"),
        ("while step < 2:", "images, labels = next(batches)", "step += 1"),
        ("while True:", "images, labels = next(batches)", "step += 1\n    if step == 2: break"),
    ],
)
def test_a_loop_that_ends_after_a_number_of_batches_makes_as_many_steps(loop, first, last):
    data = [(torch.randn(2, 4), torch.randn(2, 2)) for _ in range(9)]
    whole = [tuple(map(torch.cat, zip(*data[at : at + 3], strict=True))) for at in (0, 3)]
    source = LOOP.replace(
        "for images, labels in loader:", f"import itertools; step, batches = 0, iter(loader)\n{loop}\n    {first}"
    )
    head = source[: source.index(loop)]
    code = as_since_3_11(rewritten("smaller_batch", f"{source}    {last}\n"))
    weight, losses = trained(head + code, data)
    assert torch.allclose(weight, trained(LOOP, whole)[0], atol=1e-6) and len(losses) == 6


def test_the_statement_that_sets_the_batch_is_shown_as_it_then_is():
    tree = ast.parse("loader = DataLoader(data, shuffle=True, batch_size=6)\n" + LOOP)
    rehearsal = CellRehearsal(exec, tree, {"net": make()})
    rehearsal.parameters["batch"] = find_size_parameters(tree, {}, "batch", 6)[0]
    code = as_since_3_11(rehearsal.own_code("smaller_batch", VALUES))
    assert code.startswith("loader = DataLoader(data, shuffle=True, batch_size=2)\naccumulation = 3\nfor number, ")
    assert "batch_size=6" in ast.unparse(tree)


@pytest.mark.parametrize("loop", ["while (batch := next(batches, None)):", "while step < len(next(batches)):"])
def test_a_loop_whose_condition_gets_the_batch_is_not_rewritten(loop):
    assert rewritten("smaller_batch", LOOP.replace("for images, labels in loader:", loop)) == ""


@pytest.mark.parametrize("head", ["batch_size={}", "size=({}, 4)"])
def test_a_size_that_a_function_takes_is_shown_with_its_loop(head):
    tree = ast.parse(f"def train({head.format(6)}):\n" + "".join(f"    {line}\n" for line in LOOP.splitlines()))
    rehearsal = CellRehearsal(execute, tree, {"net": make()})
    rehearsal.parameters["batch"] = find_size_parameters(tree, {}, "batch", 6)[0]
    code = as_since_3_11(rehearsal.own_code("smaller_batch", VALUES))
    assert code.startswith(f"def train({head.format(2)}):\n")
    assert "    accumulation = 3\n    for number, (images, labels) in enumerate(loader, 1):" in code


CLOSURE = """\
for step in range(10):
    def closure():
        optimizer.zero_grad()
        loss = net(image).square().sum()
        loss.backward()
        return loss
    optimizer.step(closure)
"""
TWO = """\
for it in range(3):
    for images in loader:
        loss = other(net(images)).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    loss = -other(net(noise)).mean()
    loss.backward()
"""
STEP = """\
def step(model, images):
    loss = model(images).mean()
    loss.backward()
    optimizer.step()
"""
INSIDE = """\
def main():
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    for images in loader:
        loss = model(images).mean()
        loss.backward()
"""


WHILE = """\
while step < steps:
    loss = net(next(batches)).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    step += 1
"""


@pytest.mark.parametrize(("source", "number"), [(CLOSURE, 1), (TWO, 2), (STEP, 1), (INSIDE, 1), (WHILE, 1)])
def test_every_backward_stands_outside_of_autocast(source, number):
    tree = ast.parse(source)
    tree = tree.body[0] if isinstance(tree.body[0], ast.FunctionDef) else tree
    code = own_code(tree, {"net": make(), "other": make()}, "mixed_precision", {"dtype": "bf16"})
    covered = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.With)]
    assert len(covered) == number and all("loss =" in ast.unparse(one) for one in covered)
    assert not any("backward" in ast.unparse(one) or "zero_grad" in ast.unparse(one) for one in covered)


def test_losses_in_float16_are_scaled_and_gradients_clipped_unscaled():
    data = [(torch.randn(2, 4), torch.randn(2, 2)) for _ in range(3)]
    code = own_code(ast.parse(LOOP), {"net": make()}, "mixed_precision", {"dtype": "fp16"})
    lines = list(map(str.strip, code.splitlines()))
    assert lines[0].startswith('scaler = torch.amp.GradScaler("cuda")') and "dtype=torch.float16" in code
    assert lines[-6:] == [
        "scaler.scale(loss).backward()",
        "scaler.unscale_(opt)",
        "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)",
        "scaler.step(opt)",
        "scaler.update()",
        "losses.append(loss.item())",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a GPU both are off
        weight, _ = trained(LOOP[: LOOP.index("for ")] + code, data)
    assert torch.equal(weight, trained(LOOP, data)[0])


@pytest.mark.parametrize(
    "source", [CLOSURE, LOOP.replace("opt.step()", "update(opt)"), LOOP.replace("losses", "p.grad.add_(1); losses")]
)
def test_steps_that_a_scaler_cannot_take_get_no_code_in_float16(source):
    assert own_code(ast.parse(source), {"net": make()}, "mixed_precision", {"dtype": "fp16"}) == ""


TWO_LOOPS = """\
BATCH = 6
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for at in range(0, len(data), BATCH):
    net(data[at:at + BATCH]).sum().backward(); opt.step(); opt.zero_grad()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=BATCH)
for x in loader:
    net(x).square().sum().backward(); opt.step(); opt.zero_grad()
for x in others:
    net(x).sum().backward(); opt.step(); opt.zero_grad()
"""


def test_of_several_loops_those_accumulate_whose_batches_are_made_smaller():
    tree = ast.parse(TWO_LOOPS)
    rehearsal = CellRehearsal(execute, tree, {"net": make()})
    rehearsal.parameters["batch"] = find_size_parameters(tree, {}, "batch", 6)[0]
    code = str(rehearsal.own_code("smaller_batch", VALUES))
    assert as_since_3_11(code).startswith("BATCH = 2\naccumulation = 3\nfor number, at in enumerate(")
    assert code.count("(net(") == 2 and "in others" not in code and "opt = torch.optim.SGD" in code


def test_a_loader_with_the_old_batch_is_made_anew_before_the_loop_that_accumulates():
    tree = ast.parse("BATCH = 6\nloader = DataLoader(data, batch_size=BATCH)\nother = 1\n" + LOOP)
    rehearsal = CellRehearsal(execute, tree, {"net": make()})
    rehearsal.parameters["batch"] = find_size_parameters(tree, {}, "batch", 6)[0]
    code = str(rehearsal.own_code("smaller_batch", VALUES))
    head = "BATCH = 2\nloader = DataLoader(data, batch_size=BATCH)\naccumulation = 3\nfor number, "
    assert as_since_3_11(code).startswith(head)


MADE_INSIDE = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
    def forward(self, x):
        return self.linear(x).relu()
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
def fit(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.rand(4, 8, device="cuda")).sum().backward()
        optimizer.step()
def main():
    net = Net().cuda()
    fit(net)
"""


def test_code_for_a_model_that_a_function_makes_is_told_where_it_belongs():
    names = {"torch": torch}
    exec(compile(MADE_INSIDE, "<ipython-input-1-0>", "exec"), names)
    rehearsal = CellRehearsal(execute, ast.parse("main()"), names)
    rehearsal.begin([], 0)
    code, _ = code_for("checkpointing_blocks", "plain", rehearsal.names)
    assert code.startswith("# in main, after the line that makes net:\nfrom functools")
    assert "for block in net.blocks:" in code


MADE_AROUND = """
def made():
    one, two = Net().cuda(), Net().cuda()
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    def fit():
        for _ in range(2):
            (one(torch.rand(4, 8, device="cuda")) * two(torch.rand(4, 8, device="cuda"))).sum().backward()
            optimizer.step()
    return fit
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code does not tell what it is inside of before Python 3.11")
def test_code_for_models_of_a_closure_belongs_where_they_are_made():
    names = {"torch": torch}
    exec(compile(MADE_INSIDE + MADE_AROUND, "<ipython-input-1-0>", "exec"), names)
    rehearsal = CellRehearsal(execute, ast.parse("fit = made()\nfit()"), names)
    rehearsal.begin([], 0)
    code, _ = code_for("checkpointing_blocks", "plain", rehearsal.names)
    assert code.startswith("# in made, after the line that makes one, two:\nfrom functools")
    assert code.count("import") == 2 and code.count("for block in ") == 2


EPOCHS = """
EPOCHS, BATCH = 2, 6
def validate():
    with torch.no_grad():
        return net(torch.ones(6, 4)).mean().item()
for epoch in range(EPOCHS):
    meter.reset()
    for at in range(0, len(data), BATCH):
        images, labels = data[at:at + BATCH], targets[at:at + BATCH]
        loss = torch.nn.functional.mse_loss(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        if True:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        meter.update(loss, images)
        if at % 4 == 0: print(epoch, at, f"{loss.item():.2f}")
    print(validate())
"""


def test_loops_in_loops_with_metrics_train_the_same(capsys):
    """Data by its place is not drawn twice; metrics see each batch; the statement is shown whole."""
    tree = ast.parse(EPOCHS)
    rehearsal = CellRehearsal(execute, tree, {})
    rehearsal.parameters["batch"] = find_size_parameters(tree, {}, "batch", 6)[0]
    code = rehearsal.own_code("smaller_batch", VALUES)
    assert "2, 2)\naccumulation = 3\nfor epoch in " in code

    class Meter(list):
        def update(self, *given):
            self.append(given)

        def reset(self):
            pass

    data, targets, found = torch.randn(12, 4), torch.randn(12, 2), []
    for source in (EPOCHS, EPOCHS[: EPOCHS.index("for epoch")] + code):
        net, meter = make(), Meter()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        exec(
            source,
            {"torch": torch, "net": net, "data": data, "targets": targets, "optimizer": optimizer, "meter": meter},
        )
        found.append((net.weight.detach(), len(meter)))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-6)
    assert (found[0][1], found[1][1]) == (4, 12)


def test_a_function_of_an_earlier_cell_is_shown_whole_unless_it_is_long():
    loop = "".join(f"    {line}\n" for line in LOOP.splitlines())
    for lines, head in ((0, "def train(loader):"), (80, "# in train:\naccumulation = 3\nfor ")):
        source = "def train(loader):\n" + "    pass\n" * lines + loop
        name = f"<ipython-input-{lines}-abc>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        names = {"net": make(), "BATCH": 6}
        exec(compile(source, name, "exec"), names)
        tree = ast.parse("train(loader_of(BATCH))")
        rehearsal = CellRehearsal(execute, tree, names)
        rehearsal.parameters["batch"] = find_size_parameters(tree, names, "batch", 6)[0]
        code = as_since_3_11(rehearsal.own_code("smaller_batch", VALUES))
        assert code.startswith(f"BATCH = 2\n\n{head}")


def test_the_loop_that_a_function_of_the_users_runs_is_shown_under_its_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    body = "".join(f"        {line}\n" for line in LOOP.splitlines()[3:]).replace("loader", "self.loader")
    tmp_path.joinpath("fitting.py").write_text(
        "class Fit:\n    def epoch(self):\n" + body + "    def run(self): self.epoch()"
    )
    tree = ast.parse("BATCH = 6\nfit.run()")
    names = {"fit": __import__("fitting").Fit()}
    rehearsal = CellRehearsal(execute, tree, names)
    rehearsal.parameters["batch"] = find_size_parameters(tree, names, "batch", 6)[0]
    code = as_since_3_11(rehearsal.own_code("smaller_batch", VALUES))
    head = "# in epoch:\naccumulation = 3\nfor number, (images, labels) in enumerate(self.loader, 1):"
    assert code.startswith(f"BATCH = 2\n\n{head}") and "/ accumulation).backward()" in code


ACCUMULATING = """
for step, (images, labels) in enumerate(loader):
    loss = F.mse_loss(net(images), labels) / {ACCUM}
    loss.backward()
    if (step + 1) % {ACCUM} == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("accumulation", "names"), [("4", {}), ("ACCUM", {"ACCUM": 4}), ("k", {"k": 4, "other": 4})])
def test_a_run_that_accumulates_already_accumulates_more(accumulation, names):
    tree = ast.parse(ACCUMULATING.replace("{ACCUM}", accumulation))
    held = {"net": make(), "BATCH": 6, **names}
    rehearsal = CellRehearsal(exec, tree, held)
    rehearsal.accumulation = 4
    rehearsal.parameters["batch"] = find_size_parameters(tree, held, "batch", 6)[0]
    code = rehearsal.own_code("smaller_batch", {**VALUES, "accumulation": 12})
    assert code.startswith("BATCH = 2")
    assert code.count("12") == (1 if names else 2) and ("other" in code) is False
    assert f"{accumulation} = 12" in code if names else "% 12 == 0" in code


@pytest.mark.parametrize(
    ("name", "setting", "batch", "code"),
    [("eval_batch_size", "eval_batch_size", 6, "eval_batch_size = 2"), ("num_batches", "3 * 2", 18, "")],
)
def test_several_rows_of_a_sample_are_one_where_a_number_shows_it(name, setting, batch, code):
    inputs = f"torch.zeros({setting}, 4, device='cuda').repeat_interleave(3, 0)"
    tree = ast.parse(f"{name} = 6\nnet.cuda()\nnet({inputs})")
    rehearsal = CellRehearsal(execute, tree, {"net": make(), "torch": torch})
    rehearsal.begin((), 0)
    assert rehearsal.sizes["batch"] == batch
    assert rehearsal.own_code("smaller_evaluation", {"after": 2}) == code


@pytest.mark.parametrize("given", ["4 * BATCH", "16", "batch_size=BATCH * 4"])
def test_what_a_call_gives_a_batch_is_the_batch_whatever_it_is_made_of(given):
    names = {"net": make(), "BATCH": 4, "torch": torch}
    function = "def train(batch_size):\n    net.cuda()\n    net(torch.zeros(batch_size, 4, device='cuda'))"
    execute(ast.parse(function), names)
    rehearsal = CellRehearsal(execute, ast.parse(f"train({given})"), names)
    rehearsal.begin((), 0)
    assert rehearsal.sizes["batch"] == 16
    rehearsal.run(Variation(sizes={"batch": 8}))
    assert rehearsal.label("batch") == "batch_size"
    assert rehearsal.own_code("smaller_evaluation", {"after": 8}) == f"train({'batch_size=' * ('=' in given)}8)"


@pytest.mark.parametrize("option", ["--train-batch-size {}", "--batch={}"])
def test_the_size_on_a_command_line(option):
    words = ["train.py", "--epochs", "1", *option.format(6).split()]
    tree, names = ast.parse("main()"), {"steps": 6}
    rehearsal = CellRehearsal(exec, tree, names, arguments=words)
    rehearsal.parameters["batch"] = find_size_parameters(tree, names, "batch", 6, words)[0]
    assert rehearsal.own_code("smaller_batch", VALUES) == f"%run train.py --epochs 1 {option.format(2)}"
    assert words[3:] == option.format(6).split()


def test_the_loss_that_an_accelerator_is_given_is_divided():
    code = rewritten("smaller_batch", LOOP.replace("loss.backward()", "accelerator.backward(loss)"))
    assert "accelerator.backward(loss / accumulation)" in code


def test_the_default_of_an_option():
    tree = ast.parse("parser.add_argument('--batch-size', type=int, default=6)")
    first = find_size_parameters(tree, {}, "batch", 6)[0]
    assert (first.label, first.is_named) == ("--batch-size", True)


def test_a_loop_that_counts_keeps_its_counter():
    turns = "for i, (images, labels) in enumerate(loader):"
    code = as_since_3_11(rewritten("smaller_batch", LOOP.replace("for images, labels in loader:", turns)))
    assert turns in code and "if (i + 1) % " in code


def test_a_loop_that_makes_its_batches_makes_as_many_steps():
    drawn = LOOP.replace("for images, labels in loader:", "for i in range(3):\n    images, labels = next(drawn)")
    code = rewritten("smaller_batch", drawn)
    data = [(torch.randn(2, 4), torch.randn(2, 2)) for _ in range(3)]
    weight, losses = trained(LOOP[: LOOP.index("for ")] + code, data)
    assert code.count("for _ in range(accumulation):") == 1 and len(losses) == 9
    whole = [tuple(map(torch.cat, zip(*data, strict=True)))]
    assert torch.allclose(weight, trained(LOOP, whole * 3)[0], atol=1e-6)


def test_the_forward_and_the_loss_go_under_autocast():
    code = rewritten("mixed_precision")
    block = "    with torch.autocast('cuda', dtype=torch.bfloat16):\n        out = net(images)\n        loss = "
    assert block in code and "\n    loss.backward()" in code
    cleared = rewritten(
        "mixed_precision", LOOP.replace("    loss.backward()", "    opt.zero_grad()\n    loss.backward()")
    )
    assert ", labels)\n    opt.zero_grad()\n    loss.backward()" in cleared
    short = rewritten("mixed_precision", "for x in loader:\n    net(x).sum().backward()\n    opt.step()")
    assert "        loss = net(x).sum()\n    loss.backward()" in short
    off = "for x in loader:\n    with torch.autocast('cuda', enabled=use_amp):\n        loss = net(x).sum()\n"
    switched = rewritten("mixed_precision", f"{off}    loss.backward()\n    opt.step()")
    assert "        loss = net(x).sum()\n    loss.backward()" in switched and "enabled" not in switched


@pytest.mark.parametrize("change", [MixedPrecision("bf16", with_loss=True), None])
def test_autocast_is_rehearsed_as_its_code_has_it(change):
    cell = """
net = torch.nn.Linear(512, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    one = net(torch.randn(4096, 512, device="cuda"))
    loss = torch.nn.functional.cross_entropy(one @ net(torch.randn(4096, 512, device="cuda")).T, torch.arange(4096).cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    names = {"torch": torch, "net": torch.nn.Linear(1, 1)}
    written = cell[: cell.index("for ")] + own_code(ast.parse(cell), names, "mixed_precision", VALUES)
    changes = [change] if change else []
    reports = [
        DrySession("RTX 3060", has_bar=False, is_lasting=False, changes=made).run(lambda: exec(code, {"torch": torch}))  # noqa: B023
        for code, made in ((written, []), (cell, changes))
    ]
    assert (reports[0].peak_allocated_bytes == reports[1].peak_allocated_bytes) is bool(change)
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("optimizer_8bit", "opt = bnb.optim.AdamW8bit(net.parameters(), lr=0.001)"),
        ("foreach", "opt = torch.optim.Adam(net.parameters(), lr=0.001, betas=(0.9, 0.99), foreach=False)"),
        ("sgd", "opt = torch.optim.SGD(net.parameters(), lr=0.001)"),
        ("offload_optimizer", "opt = CPUOffloadOptimizer(net.parameters(), torch.optim.Adam, lr=0.001)"),
    ],
)
def test_another_optimizer_takes_the_place_of_the_users(key, line):
    assert rewritten(key).splitlines()[-1] == line


def test_outputs_are_deleted_where_only_the_loss_is_used():
    code = rewritten("dropped_outputs", "for x in loader:\n    out = net(x)\n    out.loss.backward()\n    opt.step()")
    assert "    out = net(x)\n    loss = out.loss\n    del out\n    loss.backward()\n" in code
    named = "for x in loader:\n    out = net(x)\n    total = out.loss / 2\n    total.backward()"
    assert "    total = out.loss / 2\n    del out\n    total.backward()" in rewritten("dropped_outputs", named)
    assert rewritten("dropped_outputs", named + "\n    print(out.logits)") == ""


def test_what_evaluates_goes_under_no_grad():
    code = rewritten("no_grad", "import torch\ndef score(x):\n    return net(x)\nresult = score(data)")
    assert code == "with torch.no_grad():\n    result = score(data)"


@pytest.mark.parametrize("place", ["", ".net"])
def test_a_loss_in_chunks_is_the_same_loss(place):
    """Whatever calls the model, also when the code is run again, and in an evaluation, which gets its logits."""
    transformers = pytest.importorskip("transformers")
    options = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64, **options)
    made = transformers.GPT2LMHeadModel(config)
    model = torch.nn.ModuleDict({"net": made}) if place else made
    ids = torch.randint(0, 64, (3, 20))
    labels = ids.masked_fill(ids < 9, -100)
    before = made(input_ids=ids, labels=labels).loss
    code, _ = code_for("chunked_loss", "plain", own_names(ast.parse("fit(model)"), {"model": model}))
    assert f"language_model = model{place}\n" in code
    for _ in range(2):
        exec(code.replace("1024", "16"), {"torch": torch, "model": model})
    after = made(input_ids=ids, labels=labels)
    assert after.loss.item() == pytest.approx(before.item(), rel=1e-5) and after.logits.shape[-1] == 16
    with torch.no_grad():
        assert made(input_ids=ids, labels=labels).logits.shape[-1] == 64


def test_code_of_the_model_is_shown_only_where_the_cell_shows_the_model():
    tree = ast.parse("fit()")
    hidden = CellRehearsal(lambda *_: None, tree, {})
    seen = CellRehearsal(lambda *_: None, ast.parse("fit(net)"), {"net": make()})
    assert hidden.own_code("checkpointing", VALUES) == "" and seen.own_code("checkpointing", VALUES) is None
    assert hidden.own_code("chunked_loss", VALUES) == seen.own_code("chunked_loss", VALUES) == ""
    assert hidden.own_code("expandable_segments", VALUES) is None


@pytest.mark.parametrize(
    ("key", "source"),
    [
        ("smaller_batch", "train()"),
        ("smaller_batch", "for x in y:\n    a.backward()\n    b.backward()\n    o.step()"),
        ("smaller_batch", "for x in y:\n    a.backward()"),
        ("mixed_precision", "for x in y:\n    loss = unknown(x)\n    loss.backward()"),
        ("sgd", "net.cuda()"),
        ("checkpointing", LOOP),
    ],
)
def test_what_the_cell_does_not_show_is_not_rewritten(key, source):
    assert rewritten(key, source) == ""


def test_the_names_of_a_load():
    tree = ast.parse("tok = AutoTokenizer.from_pretrained('a')\nlm = hf.AutoModel.from_pretrained(NAME).to('cuda')")
    assert own_names(tree, {}) == {"model": "lm", "loader": "hf.AutoModel", "source": "NAME"}


def test_the_batch_size_of_a_loader_is_not_assigned_to_it():
    """DataLoader refuses another ``batch_size`` once it is made."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 4)), batch_size=8)
    labels = {parameter.label for parameter in find_size_parameters(ast.parse(LOOP), {"loader": loader}, "batch", 8)}
    assert labels == {"batch_size"}


def test_the_model_is_called_as_the_user_calls_it():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = torch.nn.Linear(4, 4)
            stages = (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) for _ in range(3))
            self.stages = torch.nn.ModuleList(stages)

    wrapped = type("DistributedDataParallel", (torch.nn.Module,), {})()
    wrapped.module = Net()
    tree = ast.parse("loss = criterion(net(x), y)")
    names = {"net": Net(), "criterion": torch.nn.MSELoss(), "other": Net()}
    found = own_names(tree, names)
    assert (found["model"], found["inner"], found["layers"]) == ("net", "net", "net.stages")
    assert "for block in net.stages:" in found["recomputed"]
    assert own_names(tree, {**names, "net": wrapped})["layers"] == "net.module.stages"
    both = own_names(tree, {**names, "criterion": Net()})  # which of the two is not seen
    assert "for block in (*criterion.stages, *net.stages):" in both["recomputed"] and len(both) == 1


TRAINER = """\
args = TrainingArguments(output_dir="out", per_device_train_batch_size=8, gradient_accumulation_steps=2, optim="sgd")
trainer = Trainer(model, args)
"""


def test_the_users_own_arguments_are_rewritten():
    tree = ast.parse(TRAINER)
    smaller = code_for("smaller_batch", "trainer", {"after": 1, "accumulation": 16, "name": "b"})[0]
    recomputed = code_for("checkpointing", "trainer", {})[0]
    first = own_arguments(tree, recomputed)
    assert first.startswith("args = TrainingArguments(\n    output_dir='out',\n    per_device_train_batch_size=8,")
    both = own_arguments(tree, first + "\n\n" + own_arguments(tree, smaller))
    made = {}
    exec(both, {"TrainingArguments": lambda **given: made.update(given)})
    assert made == {
        "output_dir": "out", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, "optim": "sgd",
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }  # fmt: skip
    assert own_arguments(tree, f"{smaller}\n\nmodel = wrap(model)").endswith("\n)\n\nmodel = wrap(model)")
    assert own_arguments(ast.parse("trainer = Trainer(model)"), smaller) == ""
    assert own_arguments(tree, "accelerate launch --use_fsdp train.py") == ""


@pytest.mark.parametrize("key", sorted({key for codes in STYLES.values() for key in codes}))
def test_all_code_to_paste_is_python(key):
    values = {"rank": 8, "dtype": "fp16", "after": 2, "accumulation": 4, "name": "b", "gpus": 2, "names": "old",
              "pairs": "a\n# instead of b", "map": {"": 0}, "plugin": "fsdp_version=2", "config": {"version": 2}}  # fmt: skip
    for style in ("plain", "trainer", "accelerate"):
        code, _ = code_for(key, style, values)
        lines = [line for line in code.splitlines() if not line.startswith(("%", "accelerate launch"))]
        ast.parse("\n".join(lines))
        assert max(map(len, code.splitlines()), default=0) <= 72  # the text view puts eight columns before it


def test_a_copy_leaves_behind_what_tools_hang_on_nodes():
    """IPython's tracebacks (executing) give nodes a ``parent``; copying with it took seconds."""

    class Uncopied:
        def __deepcopy__(self, memo):
            raise AssertionError

    loop = ast.parse("for x in f(a):\n    g(x)").body[0]
    loop.parent = Uncopied()
    made = copied(loop)
    assert ast.unparse(made) == ast.unparse(loop) and not hasattr(made, "parent")


def test_one_batch_in_several_shapes_is_turned_together():
    tree = ast.parse("x = torch.randint(0, 9, (24, 500))\ny = torch.ones(24, 8)\nn = net(layers=24)")
    (parameter,) = [one for one in find_size_parameters(tree, {}, "batch", 24) if one.label == "24"][-1:]
    with parameter.override(tree, {}, 12):
        assert ast.unparse(tree).count("12") == 2 and "layers=24" in ast.unparse(tree)
    assert "12" not in ast.unparse(tree)


def test_what_cannot_be_cut_like_a_sequence_has_no_length():
    cell = "net = torch.nn.Conv1d(16, 4, 3).cuda(); net(torch.zeros(2, 16, 64, device='cuda')).sum().backward()"
    rehearsal = CellRehearsal(execute, ast.parse(cell), {"torch": torch})
    rehearsal.begin([], 0)
    with pytest.raises(NotEvaluatedError) as error:
        rehearsal.run(Variation(sizes={"seq": 8}))
    assert not error.value.applies


def test_nodes_and_edges_are_neither_batch_nor_length():
    class Graph(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.make = torch.nn.Linear(8, 4)

        def forward(self, nodes, edges):
            return torch.zeros(len(nodes), 4, device="cuda").index_add(0, edges[1], self.make(nodes)[edges[0]])

    cell = """
nodes, edges = torch.randn(64, 8, device="cuda"), torch.randint(0, 64, (2, 500), device="cuda")
net.cuda()(nodes, edges).sum().backward()
"""
    rehearsal = CellRehearsal(execute, ast.parse(cell), {"torch": torch, "net": Graph()})
    rehearsal.begin([], 0)
    assert rehearsal.sizes == {}


@pytest.mark.parametrize(("lengths", "num_steps", "differ"), [("[2] * 9", 2, False), ("[1, 3, 2, 9, 1, 1]", 5, True)])
def test_steps_are_followed_until_they_bring_nothing_new(lengths, num_steps, differ):
    cell = f"""
net = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for length in {lengths}:
    net(torch.zeros(batch_size * length, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    rehearsal = CellRehearsal(execute, ast.parse(cell), {"torch": torch, "batch_size": 64})
    report = rehearsal.begin([], 1)
    assert (report.timeline.num_steps(), rehearsal.steps_differ) == (num_steps, differ)
    assert rehearsal.run(Variation()).peak_allocated_bytes == report.peak_allocated_bytes


def test_an_optimizer_that_steps_seldom_is_waited_for():
    cell = """
critic, maker = (torch.nn.Linear(512, 512).cuda() for _ in range(2))
of_critic, of_maker = (torch.optim.Adam(one.parameters()) for one in (critic, maker))
for step in range(40):
    noise = torch.zeros(4096, 512, device="cuda")
    critic(maker(noise).detach()).sum().backward()
    of_critic.step()
    if step % 5 == 4:
        critic(maker(noise)).sum().backward()
        of_maker.step()
"""
    rehearsal = CellRehearsal(execute, ast.parse(cell), {"torch": torch})
    whole = DrySession("RTX 3060", is_lasting=False, has_bar=False, stop_after_steps=None)
    peak = whole.run(lambda: exec(cell, {"torch": torch})).peak_allocated_bytes
    report = rehearsal.begin([], 1)
    assert (report.timeline.num_steps(), report.peak_allocated_bytes) == (11, peak)
    assert rehearsal.run(Variation()).peak_allocated_bytes == peak


def test_shards_are_written_without_the_wrapper_that_they_replace() -> None:
    blocks = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
    wrapped = torch.nn.DataParallel(torch.nn.ModuleDict({"blocks": blocks}))
    names = own_names(ast.parse("net(x)"), {"net": wrapped})
    assert (names["layers"], names["bare_layers"]) == ("net.module.blocks", "net.blocks")
    assert "for block in net.blocks:" in code_for("fully_sharded", "plain", names)[0]
