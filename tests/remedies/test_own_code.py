"""Code to paste in the user's own words: what it is made of, and that it runs."""

from __future__ import annotations

import ast

import pytest
import torch
from torch import nn

from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.remedies.code import STYLES, code_for
from oom_magic.explain.remedies.own_code.loops import copied, own_arguments
from oom_magic.explain.remedies.own_code.models import MadeInside, own_names
from oom_magic.explain.remedies.own_code.writing import own_code
from oom_magic.explain.remedies.rehearsal import NotEvaluatedError, Variation
from oom_magic.explain.remedies.sizes.parameters import find_size_parameters
from oom_magic.predict.session import DrySession
from oom_magic.predict.what_if.model_changes import MixedPrecision
from tests.support.written_code import LOOP, VALUES, execute, make, rewritten


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


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_step_outside_any_loop_goes_under_autocast(dtype):
    """It had no code: only loops and functions were looked at."""
    step = "net.train()\nout = net(images)\nloss = out.sum()\nloss.backward()\nopt.step()\nopt.zero_grad()"
    code = own_code(ast.parse(step), {"net": torch.nn.Linear(1, 1)}, "mixed_precision", {"dtype": dtype})
    block = "    out = net(images)\n    loss = out.sum()\n"
    assert block in code and "net.train()" not in code and "zero_grad" not in code
    scaled = ["scaler.scale(loss).backward()", "scaler.step(opt)", "scaler.update()", "# instead of out = net(images)"]
    assert [one in code for one in scaled] == [dtype == "fp16"] * 3 + [True]


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
        ("optimizer_8bit", "opt = bnb.optim.Adam8bit(net.parameters(), lr=0.001, betas=(0.9, 0.99))"),
        ("foreach", "opt = torch.optim.Adam(net.parameters(), lr=0.001, betas=(0.9, 0.99), foreach=False)"),
        ("sgd", "opt = torch.optim.SGD(net.parameters(), lr=0.001)"),
        (
            "offload_optimizer",
            "opt = CPUOffloadOptimizer(net.parameters(), torch.optim.Adam, lr=0.001, betas=(0.9, 0.99))",
        ),
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


def test_of_two_models_the_one_that_trains_is_recomputed():
    """A frozen reference beside it keeps no graph: checkpointing had no code there."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64)
    policy, reference = (transformers.GPT2LMHeadModel(config) for _ in range(2))
    names = {"policy": policy.train(), "ref": reference.eval()}
    rehearsal = CellRehearsal(lambda *_: None, ast.parse("loss = fit(policy, ref)"), names)
    assert rehearsal.own_code("checkpointing", VALUES) is None  # its template applies
    code = code_for("checkpointing", "plain", rehearsal.names)[0]
    exec(code, names)
    assert policy.is_gradient_checkpointing and not reference.is_gradient_checkpointing
    assert rehearsal.own_code("half_weights", VALUES) == ""


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


def test_arguments_that_a_trainer_is_given_as_they_are_made_are_rewritten_with_it():
    tree = ast.parse("trainer = Trainer(model, args=TrainingArguments('out', bf16=False), data=rows)\ntrainer.train()")
    code = own_arguments(tree, "TrainingArguments(..., bf16=True)")
    assert ast.unparse(ast.parse(code)) == ast.unparse(tree.body[0]).replace("False", "True")
    assert own_arguments(ast.parse(code), "TrainingArguments(..., fp16=True)").count("TrainingArguments(") == 1


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


def test_a_model_is_not_made_in_its_own_methods() -> None:
    """Lightning runs a model that only its methods see: code was to stand behind the line that makes ``self``."""
    made = MadeInside()

    class Lit(torch.nn.Linear):
        def training_step(self) -> None:
            made.note(self)

    def train() -> None:
        made.note(torch.nn.Linear(1, 1))
        Lit(1, 1).training_step()

    train()
    assert dict(made.names) == {}

    def trains() -> None:
        net = Lit(1, 1)
        net.training_step()

    trains()
    assert made.names["function"] == "trains" and made.names["made"] == "net"


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(8, 8),
        nn.ModuleDict({"enc": nn.Linear(8, 8), "dec": nn.Linear(8, 8)}),
        nn.ModuleList([nn.ModuleList([nn.Linear(8, 8)]), nn.Linear(8, 8)]),
    ],
)
def test_inputs_are_narrowed_where_modules_are_called_though_the_model_is_a_mere_container(model) -> None:
    names = {"model": model, "torch": torch}
    code, _ = code_for("half_weights_inputs", "plain", {"dtype": "bf16", **own_names(ast.parse("fit(model)"), names)})
    exec(code, names)
    called = [one for one in model.modules() if isinstance(one, nn.Linear)]
    assert {one(torch.ones(2, 8)).dtype for one in called} == {torch.bfloat16}
