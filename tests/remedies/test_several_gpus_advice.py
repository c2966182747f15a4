"""Code that is shown for a run on several GPUs, written into it, executes and takes what was promised."""

from __future__ import annotations

import ast
import linecache
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.remedies.code import code_for
from oom_magic.explain.remedies.own_code.gradients_off import frozen_without_gradients
from oom_magic.explain.remedies.own_code.models import own_names
from oom_magic.explain.remedies.own_code.writing import CodeWriter
from oom_magic.explain.remedies.rehearsal import NotEvaluatedError, Variation
from oom_magic.predict.what_if import placement_changes
from oom_magic.predict.what_if.change import Change
from oom_magic.predict.what_if.model_changes import HalfWeights, NoGradients
from tests.support.versions import needs_fsdp2, needs_what_graphs_saved

NAMES: dict[str, Any] = {"torch": torch, "nn": torch.nn, "dist": dist}
MAKES = """
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("nccl")
layers = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)]
net = nn.Sequential(nn.Linear(64, 512), nn.Sequential(*layers)).cuda()
"""
STEPS = """
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.randn(64, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WRAPPED = "model = DDP(net, device_ids=[0])"
SHARDED = """\
for layer in net[1]:
    fully_shard(layer, reshard_after_forward=False)
model = fully_shard(net, reshard_after_forward=False)"""
HALF = "model = model.to(torch.bfloat16)"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_function", [False, True])
@pytest.mark.parametrize(
    ("key", "change", "spreads"),
    [
        pytest.param("fully_sharded", placement_changes.FullySharded, WRAPPED, marks=needs_fsdp2),
        ("gradients_in_buckets", placement_changes.GradientsInBuckets, WRAPPED),
        pytest.param("resharded", placement_changes.Resharded, SHARDED, marks=needs_fsdp2),
        pytest.param("shards_on_host", placement_changes.ShardsOnHost, SHARDED, marks=needs_fsdp2),
    ],
)
def test_the_users_own_statements_take_what_was_promised(
    key: str, change: type[Change], spreads: str, is_function: bool
) -> None:
    cell, names = f"{MAKES}{spreads}{STEPS}", dict(NAMES)
    if is_function:
        cell = "def train():" + cell.replace("\n", "\n    ") + "\ntrain()"
    made = change()
    rehearsal = _rehearsal(cell, names)
    before = rehearsal.begin([made], 0).peak_allocated_bytes
    promised = rehearsal.run(Variation(((made, {}),))).peak_allocated_bytes
    code = rehearsal.own_code(key, made.values)
    assert code is not None
    indented = code.replace("\n", "\n    ") if is_function else code
    old = spreads.replace("\n", "\n    ") if is_function else spreads
    pasted = _rehearsal(cell.replace(old, indented), names)
    assert pasted.begin([], 0).peak_allocated_bytes == promised < before


@pytest.mark.slow
@needs_fsdp2
@pytest.mark.parametrize("condition", ["", " if micro < 2 else nullcontext()"])
def test_gradients_that_accumulate_are_not_reduced_under_fsdp2_either(condition: str) -> None:
    loop = f"""
for step in range(2):
    for micro in range(3):
        with model.no_sync(){condition}, nullcontext():
            model(torch.randn(64, 64, device="cuda")).square().mean().backward()
    optimizer.step()"""
    cell = (
        f"{MAKES}from contextlib import nullcontext\n{WRAPPED}\noptimizer = torch.optim.AdamW(model.parameters()){loop}"
    )
    change = placement_changes.FullySharded()
    rehearsal = _rehearsal(cell, dict(NAMES))
    rehearsal.begin([change], 0)
    promised = rehearsal.run(Variation(((change, {}),))).peak_allocated_bytes
    setup, steps = str(rehearsal.own_code("fully_sharded", change.values)).split("\n\n")
    assert "no_sync" not in steps and "with nullcontext():" in steps
    pasted = _rehearsal(cell.replace(WRAPPED, setup).replace(loop, f"\n{steps}"), dict(NAMES))
    assert pasted.begin([], 0).peak_allocated_bytes == promised


ACCELERATED = """
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="bf16")
net = nn.Sequential(*[nn.TransformerEncoderLayer(256, 4, batch_first=True) for _ in range(4)])
model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
for step in range(2):
    accelerator.backward(model(torch.randn(2, 64, 256, device="cuda")).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""
TRAINED = """
from tempfile import mkdtemp
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
args = TrainingArguments(mkdtemp(), max_steps=2, report_to=[], save_strategy="no", disable_tqdm=True)
rows = [{name: torch.zeros(64, dtype=torch.long) for name in ("input_ids", "labels")} for _ in range(64)]
model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=1000))
Trainer(model, args, train_dataset=rows).train()
"""


@pytest.mark.slow
@needs_fsdp2
@pytest.mark.parametrize(
    ("cell", "variant", "start"),
    [(ACCELERATED, "accelerate", "accelerator = "), (TRAINED, "trainer", "args = ")],
)
def test_libraries_that_make_ddp_are_set_up_to_shard(cell: str, variant: str, start: str) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    change = placement_changes.FullySharded()
    rehearsal = _rehearsal(cell, dict(NAMES))
    before = rehearsal.begin([change], 0).peak_allocated_bytes
    promised = rehearsal.run(Variation(((change, {}),))).peak_allocated_bytes
    assert change.variant == variant
    key = f"fully_sharded_{variant}"
    template = code_for(key, "trainer", change.values)[0]
    code = rehearsal.own_arguments(template) or rehearsal.own_code(key, change.values)
    line = next(line for line in cell.splitlines() if line.startswith(start))
    pasted = _rehearsal(cell.replace(line, str(code)), dict(NAMES))
    again = placement_changes.FullySharded()
    assert pasted.begin([again], 0).peak_allocated_bytes == promised < before
    with pytest.raises(NotEvaluatedError):  # it is so already
        pasted.check(Variation(((again, {}),)))


@pytest.mark.slow
def test_balanced_layers_are_written_into_the_users_own_dispatch() -> None:
    pytest.importorskip("accelerate")
    cell = """
from accelerate import dispatch_model
from transformers import GPT2Config, GPT2LMHeadModel
blocks = {f"transformer.h.{i}": int(i > 4) for i in range(6)}
ends = {"transformer.wte": 0, "transformer.wpe": 0, "transformer.drop": 0, "transformer.ln_f": 1, "lm_head": 0}
made = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=256, n_head=4, vocab_size=1000))
model = dispatch_model(made, {**ends, **blocks}, main_device=0)
x = torch.zeros(8, 256, dtype=torch.long, device="cuda")
model(input_ids=x, labels=x).loss.backward()
"""
    change, line = placement_changes.BalancedLayers(), "model = dispatch_model(made, {**ends, **blocks}, main_device=0)"
    rehearsal = _rehearsal(cell, dict(NAMES), num_gpus=2)
    before = rehearsal.begin([change], 0).peak_allocated_bytes
    promised = rehearsal.run(Variation(((change, {}),))).peak_allocated_bytes
    code = rehearsal.own_code("balanced_layers", change.values)
    assert code is not None
    assert code.endswith("\nmodel = dispatch_model(made, main_device=0, device_map=device_map)")
    pasted = _rehearsal(cell.replace(line, code), dict(NAMES), num_gpus=2)
    assert pasted.begin([], 0).peak_allocated_bytes == promised < before


LAYERS = "*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range({})]"
HALVES = """
optimizer = torch.optim.AdamW([*a.parameters(), *b.parameters()])
for step in range(2):
    x = torch.randn(64, 512).to("cuda:0")
    b(a(x).to("cuda:1")).sum().backward()
    optimizer.step()
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "placing",
    [
        "a = nn.Sequential({most}).cuda()\nb = nn.Sequential({few}, nn.Linear(512, 8)).to(torch.device('cuda', 1))",
        "a, c = nn.Sequential({most}), nn.Sequential({few})\na.to('cuda:0')\nb = c.to('cuda:1')",
    ],
)
def test_layers_split_by_hand_are_moved_in_the_users_own_statements(placing: str) -> None:
    cell = placing.format(most=LAYERS.format(9), few=LAYERS.format(3))
    change = placement_changes.BalancedLayers()
    rehearsal = _rehearsal(cell + HALVES, dict(NAMES), num_gpus=2)
    before = rehearsal.begin([change], 0).peak_allocated_bytes
    variation = Variation(((change, {}),))
    rehearsal.check(variation)
    promised = rehearsal.run(variation).peak_allocated_bytes
    code = str(rehearsal.own_code("balanced_layers", change.values))
    assert "a = type(a)(*layers[0:6]).cuda()" in code or code.startswith("b = c\nlayers = [*a, *b]\n")
    makes = cell.splitlines()[0] if ")\na.to" in cell else ""
    pasted = _rehearsal("\n".join([makes, code, HALVES]), dict(NAMES), num_gpus=2)
    assert pasted.begin([], 0).peak_allocated_bytes == promised < 0.8 * before


def _rehearsal(cell: str, names: dict[str, Any], **machine: int) -> CellRehearsal:
    def execute(tree: ast.Module, names: dict[str, Any]) -> None:
        exec(compile(tree, "<ipython-input-1-x>", "exec"), names)

    return CellRehearsal(execute, ast.parse(cell), names, gpu="T4", machine=machine or {"num_processes": 4})


def test_inputs_that_weights_of_16_bits_need_are_named() -> None:
    change = HalfWeights("bf16")
    rehearsal = _rehearsal(f"{MAKES}{WRAPPED}{STEPS}", dict(NAMES))
    rehearsal.begin([change], 0)
    assert change.variant == ""
    rehearsal.run(Variation(((change, {}),)))
    assert change.variant == "inputs"


def test_parts_of_a_model_are_no_other_models() -> None:
    blocks = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
    names = {"net": torch.nn.ModuleDict({"blocks": blocks}), "block": blocks[2]}
    assert own_names(ast.parse("for block in net: block"), names)["layers"] == "net.blocks"


def test_a_model_trained_in_evaluation_mode_is_no_evaluation() -> None:
    names = dict(NAMES)
    trained = _rehearsal(f"{MAKES}model = net.eval(){STEPS}", names)
    trained.begin([], 0)
    assert not trained.is_evaluation
    evaluated = _rehearsal(f"{MAKES}net.eval()\nnet(torch.randn(64, 64, device='cuda'))", names)
    evaluated.begin([], 0)
    assert evaluated.is_evaluation


@needs_what_graphs_saved
def test_a_frozen_teacher_in_a_training_step_is_no_evaluation_and_needs_no_graph() -> None:
    step = """
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(2):
    x = torch.randn(64, 64, device="cuda")
    made = net(x)
    known = teacher(x)
    seen = teacher(made)
    (made - known + seen).sum().backward()
    optimizer.step()
"""
    names = {"net": torch.nn.Linear(64, 64), "teacher": torch.nn.Linear(64, 64).eval()}
    rehearsal = _rehearsal(f"net.cuda()\nteacher.cuda(){step}", {**NAMES, **names}, num_gpus=1)
    rehearsal.begin([], 0)
    assert rehearsal.runs_frozen and not rehearsal.is_evaluation
    code = frozen_without_gradients(ast.parse(step), names)
    assert "    with torch.no_grad():\n        known = teacher(x)\n    seen = teacher(made)\n" in code


@pytest.mark.parametrize("mode", [False, True])
def test_several_teachers_in_one_expression_need_no_graph(mode: bool) -> None:
    step = """
for x in data:
    known = sum(one(x).softmax(-1) for one in teachers) / len(teachers)
    loss = (net(x) - known).square().mean()
    loss.backward()
    optimizer.step()
"""
    several = [torch.nn.Linear(8, 8).train(mode) for _ in range(2)]
    for teachers in (several, tuple(several), torch.nn.ModuleList(several).train(mode)):
        names = {"net": torch.nn.Linear(8, 8), "teachers": teachers}
        code = frozen_without_gradients(ast.parse(step), names)
        covered = [ast.unparse(one.body) for one in ast.walk(ast.parse(code)) if isinstance(one, ast.With)]
        assert covered == ([] if mode else ["known = sum((one(x).softmax(-1) for one in teachers)) / len(teachers)"])


@needs_what_graphs_saved
def test_losses_that_are_modules_do_not_end_the_training_early() -> None:
    """What calls are counted up to the last step decides which of them evaluate: each loss counts, or none does."""
    step = """
optimizer = torch.optim.SGD(net.parameters(), 0.1)
mse = torch.nn.MSELoss()
for _ in range(2):
    x = torch.randn(64, 64, device="cuda")
    known = teacher(x)
    sum(mse(net(x), known) for _ in range(4)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    names = {"net": torch.nn.Linear(64, 4096), "teacher": torch.nn.Linear(64, 4096).eval()}
    change, peaks = NoGradients(), []
    for code in (step, step.replace("known = teacher(x)", "with torch.no_grad(): known = teacher(x)")):
        rehearsal = _rehearsal(f"net.cuda()\nteacher.cuda(){code}", {**NAMES, **names}, num_gpus=1)
        report = rehearsal.begin([change], 0)
        peaks.append(rehearsal.run(Variation(((change, {}),))) if code is step else report)
    assert {one.timeline.num_steps() for one in peaks} == {2}
    assert peaks[0].peak_allocated_bytes == peaks[1].peak_allocated_bytes
    assert peaks[0].timeline.num_allocations == peaks[1].timeline.num_allocations


DISTILLED = """
def together(x, made):
    known = teacher(x)
    seen = teacher(made)
    return (net(x) - known).square().sum() + seen.sum()
"""


@pytest.mark.parametrize(
    ("made", "known"),
    [("torch.ones(4, 8)", True), ("net(x)", True), ("made_by(x)", True), ("torch.ones(4, 8)", False)],
)
def test_a_teacher_in_a_function_of_the_step_needs_no_graph_but_for_what_is_trained(made: str, known: bool) -> None:
    """Its headline was a sentence without code; with it, a network that compares what is trained keeps its graph."""
    names = {"net": torch.nn.Linear(8, 8), "teacher": torch.nn.Linear(8, 8).eval(), "torch": torch}
    source = f"{DISTILLED}\ndef made_by(x):\n    return net(x)\n"
    linecache.cache["<ipython-input-9-b>"] = (
        len(source),
        None,
        source.splitlines(keepends=True),
        "<ipython-input-9-b>",
    )
    exec(compile(source, "<ipython-input-9-b>", "exec"), names)
    given = "x, made" if known else "*batch"
    step = (
        f"for x in data:\n    made = {made}\n    loss = together({given})\n    loss.backward()\n    optimizer.step()\n"
    )
    code = frozen_without_gradients(ast.parse(step), names)
    covered = [ast.unparse(one.body) for one in ast.walk(ast.parse(code)) if isinstance(one, ast.With)]
    alone = ["known = teacher(x)"] if known else []
    assert covered == [*alone, *(["seen = teacher(made)"] if known and made.startswith("torch") else [])]
    names["teacher"].train()  # as a dry cell leaves it that puts it into evaluation mode
    assert frozen_without_gradients(ast.parse(f"teacher.eval()\nnet.train()\n{step}"), names) == code


class _Library(threading.Thread):
    """Stands for a trainer: its class's ``start`` is not the user's."""


def test_a_teacher_in_a_loss_that_a_trainer_calls_gets_its_no_grad_there() -> None:
    """Its code were settings of the trainer's evaluation, which the step never reads."""
    source = """
class Distilled(_Library):
    def compute_loss(self, model, inputs):
        out = model(inputs)
        known = self.teacher(inputs)
        seen = self.teacher(out)
        return (out - known).square().sum() + seen.sum()
"""
    names: dict[str, Any] = {"_Library": _Library}
    lines = source.splitlines(keepends=True)
    linecache.cache["<ipython-input-9-t>"] = (len(source), None, lines, "<ipython-input-9-t>")
    exec(compile(source, "<ipython-input-9-t>", "exec"), names)
    names["trainer"] = names["Distilled"]()
    names["trainer"].teacher = torch.nn.Linear(8, 8).eval()
    code = CodeWriter(ast.parse("trainer.start()"), names, []).no_grad(True, True, None)
    assert code is not None and code.startswith("# in compute_loss:\ndef compute_loss(self, model, inputs):")
    covered = [ast.unparse(one.body) for one in ast.walk(ast.parse(code)) if isinstance(one, ast.With)]
    assert covered == ["known = self.teacher(inputs)"]
