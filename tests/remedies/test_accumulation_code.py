"""Code to paste that makes the batch smaller and accumulates: it trains the same as the loop that it replaces."""

from __future__ import annotations

import ast
import linecache
import sys
import warnings

import pytest
import torch

from oom_magic.explain.live.called import Called
from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.remedies.code import code_for
from oom_magic.explain.remedies.own_code.accumulation import accumulating, accumulating_step
from oom_magic.explain.remedies.own_code.writing import own_code
from oom_magic.explain.remedies.rehearsal import Variation
from oom_magic.explain.remedies.sizes.parameters import find_size_parameters
from tests.support.versions import as_since_3_11
from tests.support.written_code import LOOP, VALUES, execute, make, rewritten, trained


def test_an_accumulating_loop_trains_the_same():
    data = [(torch.randn(2, 4), torch.randn(2, 2)) for _ in range(6)]
    whole = [tuple(map(torch.cat, zip(*data[at : at + 3], strict=True))) for at in (0, 3)]
    head = LOOP[: LOOP.index("for ")]
    code = as_since_3_11(rewritten("smaller_batch"))
    assert code.startswith("accumulation = 3\nfor number, (images, labels) in enumerate(loader, 1):")
    weight, losses = trained(head + code, data)
    assert torch.allclose(weight, trained(LOOP, whole)[0], atol=1e-6) and len(losses) == 6


def test_an_object_around_the_optimizer_steps_as_the_optimizer_does():
    """One that sets the learning rate with each step: the code was a comment."""
    data = [(torch.randn(2, 4), torch.randn(2, 2)) for _ in range(6)]
    whole = [tuple(map(torch.cat, zip(*data[at : at + 3], strict=True))) for at in (0, 3)]
    around = "class Around:\n    def __init__(self, one): self.one = one\n"
    around += "    def zero_grad(self): self.one.zero_grad()\n    def step_and_update_lr(self): self.one.step()\n"
    source = LOOP.replace("opt.step()", "opt.step_and_update_lr()").replace(
        "for images", "opt = Around(opt)\nfor images"
    )
    assert source.count("Around") == source.count("step_and_update_lr") == 1
    code = as_since_3_11(rewritten("smaller_batch", source))
    head = around + source[: source.index("for ")]
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


def test_gradients_whose_norm_is_kept_are_clipped_before_the_step():
    """It came behind the step, where the gradients were gone; with float16 they were clipped as they are scaled."""
    source = LOOP.replace("torch.nn.utils.clip_grad_norm_", "norm = torch.nn.utils.clip_grad_norm_")
    assert source != LOOP
    lines = [*map(str.strip, rewritten("smaller_batch", source).splitlines())]
    at = next(at for at, line in enumerate(lines) if line.startswith("norm = "))
    assert at < lines.index("opt.step()") and lines[at - 1].startswith("if number % accumulation")
    scaled = own_code(ast.parse(source), {"net": make()}, "mixed_precision", {"dtype": "fp16"})
    assert scaled.index("scaler.unscale_(opt)") < scaled.index("norm = ") < scaled.index("scaler.step(opt)")


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


GAN = """\
for real in loader:
    fake = net(noise)
    optimizer.zero_grad()
    loss = other(real).mean() - other(fake.detach()).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = other(fake).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("source", "number"), [(CLOSURE, 1), (TWO, 2), (STEP, 1), (INSIDE, 1), (WHILE, 1), (GAN, 2)])
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


FITTING = """
class Fit:
    def __init__(self, net, loader): self.net, self.loader = net, loader
    def batches(self, number=2):
        batches = iter(self.loader)
        for _ in range(number):
            yield next(batches)
    def fit(self, steps=2):
        opt = torch.optim.Adam(self.net.parameters(), lr=1e-3, betas=(0.9, 0.99))
        for images, labels in {batches}:
            opt.zero_grad()
            torch.nn.functional.mse_loss(self.net(images), labels).backward()
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            opt.step()
"""


@pytest.mark.parametrize(
    "batches", ["self.batches(steps)", "self.batches(number=2)", "self.batches()", "tqdm(self.batches(steps))"]
)
def test_a_generator_that_counts_its_batches_gets_as_many_more(batches, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    tmp_path.joinpath("fits.py").write_text(f"import torch\ntqdm = iter\n{FITTING.replace('{batches}', batches)}")
    monkeypatch.delitem(sys.modules, "fits", raising=False)
    linecache.clearcache()
    module = __import__("fits")
    data = [(torch.randn(2, 4), torch.randn(2, 2)) for _ in range(9)]
    fit = module.Fit(make(), data)
    tree = ast.parse("BATCH = 6\nfit.fit()")
    rehearsal = CellRehearsal(execute, tree, {"fit": fit})
    rehearsal.parameters["batch"] = find_size_parameters(tree, {"fit": fit}, "batch", 6)[0]
    code = as_since_3_11(rehearsal.own_code("smaller_batch", VALUES)).split("# in fit:\n")[1]
    names = {"torch": torch, "tqdm": iter, "self": fit, "steps": 2}
    exec("opt = torch.optim.Adam(self.net.parameters(), lr=1e-3, betas=(0.9, 0.99))\n" + code, names)
    whole = [tuple(map(torch.cat, zip(*data[at : at + 3], strict=True))) for at in (0, 3)]
    assert torch.allclose(fit.net.weight, trained(LOOP, whole)[0], atol=1e-6)


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


def test_what_follows_a_step_is_done_once_a_step_where_the_loop_makes_its_batches():
    """A diffusion model drew its samples as often as gradients were accumulated, before the step."""
    drawn = LOOP.replace("for images, labels in loader:", "for i in range(3):\n    images, labels = next(drawn)")
    code = rewritten("smaller_batch", f"{drawn}    samples = draw(net)\n    log(loss)\n    print(loss, samples)\n")
    loop = next(one for one in ast.parse(code).body if isinstance(one, ast.For))
    inside, *behind = map(ast.unparse, (loop.body[0], *loop.body[-2:]))
    assert "log(loss)" in inside and "draw(net)" not in inside and "samples = draw(net)" in behind[-2]
    assert "print(loss, samples)" in behind[-1]  # behind what it reads


def test_a_loop_that_trains_another_model_inside_is_told_in_words():
    """A critic's steps came as often as the generator's batches, with batches that were smaller."""
    inner = "    for _ in range(2):\n        critic(images).sum().backward()\n        critic_optimizer.step()\n"
    head, turn, rest = LOOP.partition("for images, labels in loader:\n")
    tree = ast.parse(head + turn + inner + rest)
    assert accumulating(tree, {}, 3) is None and accumulating(ast.parse(LOOP), {}, 3) is not None


def test_an_accelerator_of_an_earlier_cell_accumulates_more_batches(fresh_accelerate):
    accelerator = fresh_accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    tree = ast.parse("for images in loader:\n    with accelerator.accumulate(net):\n        net(images)\n")
    names = {"accelerator": accelerator, "batch": 6}
    rehearsal = CellRehearsal(exec, tree, names)
    rehearsal.parameters["batch"], rehearsal.accumulation = find_size_parameters(tree, names, "batch", 6)[0], 2
    code = rehearsal.own_code("smaller_batch", {**VALUES, "accumulation": 6})
    assert code == "batch = 2\naccelerator.gradient_accumulation_steps = 6"
    assert accelerator.gradient_accumulation_steps == 2


def test_where_nothing_sets_how_many_batches_are_accumulated_it_is_said():
    tree = ast.parse("fit(net, loader)")
    rehearsal = CellRehearsal(exec, tree, {"batch": 6})
    rehearsal.parameters["batch"], rehearsal.accumulation = find_size_parameters(tree, {"batch": 6}, "batch", 6)[0], 2
    code = rehearsal.own_code("smaller_batch", {**VALUES, "accumulation": 6})
    assert code.startswith("batch = 2\n") and "every 6 batches" in code


_STEP = """\
def step(batch_size, scale=1.0):
    {doc}
    optimizer.zero_grad()
    x = next(batches)[:batch_size]
    loss = (net(x) * scale).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()
"""


@pytest.mark.parametrize("doc", ['"""Train once."""', "pass"])
def test_a_function_that_makes_its_batch_and_steps_accumulates(doc: str) -> None:
    data = torch.randn(6, 4)
    weights = []
    for number, rows in ((1, 3), (3, 1)):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 2)
        names = {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "found": 1, "torch": torch,
                 "batches": iter(data.split(rows))}  # fmt: skip
        tree = ast.parse(_STEP.format(doc=doc))
        cell = ast.parse(f"for _ in range(2):\n    losses.append(step(found * {rows}))")
        called = Called(make, tree.body[0], "<ipython-input-1>", names)
        made = tree if number == 1 else accumulating_step(called, cell, number, {"batch_size"})
        assert made is not None and (doc == "pass") is (ast.get_docstring(made.body[0]) is None)
        names["losses"] = []
        exec(f"{ast.unparse(made)}\n{ast.unparse(cell)}", names)
        weights.append(net.weight)
        assert len(names["losses"]) == 2
    assert torch.allclose(*weights, atol=1e-6)


@pytest.mark.parametrize("cell", ["step(rows)", "step(batch_size=found)", "for x in data:\n    step(x)"])
def test_a_function_that_may_be_given_its_batch_does_not(cell: str) -> None:
    names = {"rows": torch.zeros(4, 4)}
    called = Called(make, ast.parse(_STEP.format(doc="pass")).body[0], "<ipython-input-1>", names)
    assert accumulating_step(called, ast.parse(cell), 2, {"batch_size"}) is None
