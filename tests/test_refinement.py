"""Causes refined by the record of a run: what filled the memory, and what was kept without need."""

from __future__ import annotations

import collections
import copy
import random

import pytest
import torch
from torch import nn
from versions import TELLS_WHAT_GRAPHS_SAVED, as_since_3_11, needs_what_graphs_saved

from oom_magic.explain.evidence.causes import Cause, Confidence, Evidence, Judgement
from oom_magic.explain.explainer import Explainer, explain
from oom_magic.explain.live.growth import Growth
from oom_magic.explain.live.holders import Holder
from oom_magic.explain.live.refinement import refine_with_call, refine_with_loop, refine_with_remedy
from oom_magic.explain.messages.failure import Failure
from oom_magic.explain.remedies.remedy import Remedy
from oom_magic.measure.device.cards import Card
from oom_magic.measure.device.nvml import DeviceProcess
from oom_magic.memory.report import Device
from oom_magic.notebook.cells.releasing import FakeGPUMemory
from oom_magic.predict.session import DrySession
from oom_magic.units import GIB

MIB = 2**20


def network(width=1024, depth=4):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))).cuda()


def diagnosed(function, memory):
    session = DrySession("RTX 3060", memory=memory + session_context(), stop_after_steps=None, has_bar=False)
    report = session.run(function)
    assert report.out_of_memory is not None
    return explain(session.exception, report=report, lang="en")


def session_context():
    return DrySession("RTX 3060").gpu.context_bytes


def keeps_losses():
    model, losses = network(), []
    while True:
        losses.append(model(torch.zeros(2048, 1024, device="cuda")).sum())


def validate(batch_size=2048):
    model, losses = network().eval(), []
    while True:
        losses.append(model(torch.zeros(batch_size, 1024, device="cuda")).sum())


def validates_too_much_at_once():
    validate(batch_size=8192)


def keeps_outputs_over_steps():
    model, kept = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        outputs = model(torch.zeros(8192, 1024, device="cuda"))
        kept.append(outputs.detach())
        outputs.sum().backward()
        optimizer.step()


def accumulates():
    model = network()
    for _ in range(8):
        model(torch.zeros(2048, 1024, device="cuda")).sum().backward()
    model(torch.zeros(16384, 1024, device="cuda")).sum().backward()


def only_weights():
    return network(depth=40)


def adam():
    model = network(depth=20)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(8, 1024, device="cuda")).sum().backward()
    optimizer.step()


def sums_losses():
    model, total = network(), 0
    while True:
        total += model(torch.zeros(2048, 1024, device="cuda")).sum()


def sums_before_a_backward():
    model, total = network(), 0
    for step in range(100):
        loss = model(torch.zeros(2048, 1024, device="cuda")).sum()
        total = total + loss
        if step == 64:
            total.backward()


def keeps_tensors():
    history = {}
    for step in range(1000):
        history[step] = torch.empty(16, 1024, 1024, device="cuda")


def keeps_weights():
    model, best = network(), []
    while True:
        best.append({key: value.clone() for key, value in model.state_dict().items()})


def keeps_copies_of_weights():
    model, best = network(), []
    while True:
        best.append(copy.deepcopy(model.state_dict()))


def keeps_a_replay_buffer():
    model, buffer = network(), []
    while True:
        states = torch.rand(2048, 1024, device="cuda")
        values = model(states)
        buffer.append((states, values, 0.5))


class Probe:
    """What a module holds, as its hook does, that is none of its weights."""

    def __init__(self, model):
        self.kept = []
        model.register_forward_hook(self.keep)

    def keep(self, module, inputs, output):
        self.kept.append(output.detach())


def keeps_by_a_hook():
    model = network()
    Probe(model)
    while True:
        model(torch.zeros(8192, 1024, device="cuda"))


class Residual(nn.Module):
    """Blocks in a loop of its forward, each added to what the forward was given."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(40))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def adds_blocks_to_its_argument():
    model = Residual().cuda()
    while True:
        model(torch.rand(2048, 1024, device="cuda")).sum().backward()


Transition = collections.namedtuple("Transition", "state next_state")


def keeps_transitions():
    buffer, state = collections.deque(maxlen=10_000), torch.zeros(2048, 1024, device="cuda")
    while True:
        following = state + 1
        buffer.append(Transition(state, following))
        state = following


def keeps_metrics():
    model, metrics = network(), {"loss": [], "last": None, "outputs": []}
    while True:
        output = model(torch.zeros(2048, 1024, device="cuda"))
        metrics["loss"].append(0.5)
        metrics["last"] = output
        metrics["outputs"].append(output)


def keeps_maps():
    maps = []
    while True:
        both = tuple(torch.empty(16, 1024, 1024, device="cuda") for _ in range(2))
        maps.append(both)


def keeps_results():
    model, results = network(), []
    while True:
        result = {"output": model(torch.zeros(2048, 1024, device="cuda")), "number": 1}
        results.append(result)


def keeps_rows():
    model, rows = network(), []
    while True:
        rows.append({"output": model(torch.zeros(2048, 1024, device="cuda")), "number": 1})


def extends():
    model, kept = network(), []
    while True:
        kept.extend(model(torch.zeros(2048, 1024, device="cuda")).chunk(2))


def sums_by_name():
    model, totals = network(), {"number": 0, "loss": 0}
    while True:
        totals["number"] += 1
        totals["loss"] = totals["loss"] + model(torch.zeros(2048, 1024, device="cuda")).sum()


def trial():
    return network(depth=40), 0.5


def keeps_optimizers():
    results = {}
    for rate in range(1000):
        model = network(depth=40)
        optimizer = torch.optim.Adam(model.parameters())
        results[rate] = {"model": model, "optimizer": optimizer}


def keeps_trials():
    results = {}
    for rate in range(1000):
        model = network(depth=40)
        optimizer = torch.optim.Adam(model.parameters())
        loss = model(torch.zeros(512, 1024, device="cuda")).sum()
        results[rate] = (model, optimizer, loss)


def draws_from_a_queue():
    queue = collections.deque(maxlen=1000)
    while True:
        queue.append((torch.empty(16, 1024, 1024, device="cuda"), 0.5))
        torch.stack([one[0] for one in random.sample(queue, 1)])


def keeps_models():
    results = {}
    for rate in range(1000):
        results[rate] = trial()


def joins():
    cache = torch.empty(1, 1024, 1024, device="cuda")
    while True:
        cache = torch.cat([cache, torch.empty(8, 1024, 1024, device="cuda")])


def generates():
    cache = torch.empty(8, 1024, 1024, device="cuda")
    while True:
        following = torch.relu(cache[-8:])
        cache = torch.cat([cache, following])


def queues():
    """A queue that each step compares with, whose similarities take most: 4.5 of its own bytes in all."""
    net, queue = torch.nn.Linear(64, 64).cuda(), torch.zeros(1024, 64, device="cuda")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    while True:
        keys = net(torch.rand(1024, 64, device="cuda"))
        (keys @ queue.t()).logsumexp(1).mean().backward()
        optimizer.step()
        queue = torch.cat([queue, keys.detach()])


def keeps_numbers_and_host_tensors():
    model, losses, outputs = network(), [], []
    while len(losses) < 1000:
        output = model(torch.zeros(128 << len(losses), 1024, device="cuda"))
        outputs.append(output.detach().cpu())
        loss = output.sum()
        loss.backward()
        losses.append(loss)


def carries_a_state():
    model, state = nn.GRU(256, 1024).cuda(), None
    while True:
        out, state = model(torch.zeros(64, 64, 256, device="cuda"), state)
        out.sum().backward(retain_graph=True)


def carries_two():
    model, state = nn.LSTM(256, 1024).cuda(), None
    while True:
        out, state = model(torch.zeros(64, 64, 256, device="cuda"), state)
        out.sum().backward(retain_graph=True)


def recurs_within_a_turn():
    cell = nn.GRUCell(256, 1024).cuda()
    for turn in range(10):
        state = torch.zeros(2048, 1024, device="cuda")
        for _ in range(10 * 2**turn):
            state = cell(torch.zeros(2048, 256, device="cuda"), state)
        state.sum().backward()


def compares_all_states():
    cell = nn.GRUCell(256, 1024).cuda()
    for turn in range(10):
        state, states = torch.zeros(2048, 1024, device="cuda"), []
        for _ in range(10 * 2**turn):
            state = cell(torch.zeros(2048, 256, device="cuda"), state)
            states.append(state)
        loss = torch.stack(states).sum()
        loss.backward()


def sums_losses_of_a_recurrence():
    cell = nn.GRUCell(256, 1024).cuda()
    for turn in range(10):
        state, total = torch.zeros(2048, 1024, device="cuda"), 0
        for _ in range(10 * 2**turn):
            state = cell(torch.zeros(2048, 256, device="cuda"), state)
            total = total + state.sum()
        total = total / 10
        total.backward()


def loss_of_parts(model, num_parts):
    total = 0
    for _ in range(num_parts):
        total += model(torch.zeros(2048, 1024, device="cuda")).sum()
    return total


def sums_losses_of_parts():
    model = network()
    for turn in range(10):
        loss = loss_of_parts(model, 2**turn)
        (loss / 4).backward()


def collects_losses_of_a_step():
    model = network()
    losses = []
    for _ in range(1000):
        losses.append(model(torch.zeros(2048, 1024, device="cuda")).sum())  # noqa: PERF401
    torch.stack(losses).mean().backward()


def makes_losses_of_a_step():
    model = network()
    losses = [model(torch.zeros(2048, 1024, device="cuda")).sum() for _ in range(1000)]
    torch.stack(losses).mean().backward()


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("function", "key", "name", "fixed"),
    [
        (keeps_losses, "name_grows_with_graphs", "losses", ").sum().item())"),
        (validate, "name_grows_with_graphs", "losses", ").sum().item())"),
        (keeps_outputs_over_steps, "name_grows", "kept", "kept.append(outputs.detach().cpu())"),
        (sums_losses, "name_grows_with_graphs", "total", ".sum().item()"),
        (sums_before_a_backward, "name_grows_with_graphs", "total", "loss.backward()"),
        (keeps_tensors, "name_grows", "history", "device='cuda').cpu()"),
        (
            keeps_weights,
            "name_grows",
            "best",
            "{key: value.clone().cpu() for key, value in model.state_dict().items()})",
        ),
        (
            keeps_copies_of_weights,
            "name_grows",
            "best",
            "{key: value.cpu() for key, value in model.state_dict().items()})",
        ),
        (
            keeps_a_replay_buffer,
            "name_grows_with_graphs",
            "buffer",
            "((states.detach().cpu(), values.detach().cpu(), 0.5))",
        ),
        (
            keeps_transitions,
            "name_grows",
            "buffer",
            "buffer.append(Transition._make(one.cpu() for one in Transition(state, following)))",
        ),
        (keeps_by_a_hook, "name_grows", "self.kept", "self.kept.append(output.detach().cpu())"),
        (keeps_metrics, "name_grows_with_graphs", "metrics['outputs']", ".append(output.detach().cpu())"),
        (keeps_maps, "name_grows", "maps", "maps.append([one.cpu() for one in both])"),
        (
            keeps_results,
            "name_grows_with_graphs",
            "results",
            '.detach().cpu() for key, value in result.items() if hasattr(value, "cpu")})',
        ),
        (keeps_rows, "name_grows_with_graphs", "rows", ".detach().cpu(), 'number': 1})"),
        (
            extends,
            "name_grows_with_graphs",
            "kept",
            "for one in model(torch.zeros(2048, 1024, device='cuda')).chunk(2)])",
        ),
        (sums_by_name, "name_grows_with_graphs", "totals['loss']", ".sum().item()"),
        (
            keeps_models,
            "name_grows_by_entries",
            "results",
            '[one.cpu() if hasattr(one, "cpu") else one for one in trial()]',
        ),
        (carries_a_state, "name_grows_with_graphs", "state", "state if state is None else state.detach())"),
        (
            carries_two,
            "name_grows_with_graphs",
            "state",
            "state if state is None else [one.detach() for one in state])",
        ),
        (
            keeps_trials,
            "name_grows_with_graphs",
            "results",
            "(model.cpu(), optimizer, loss.item()); optimizer.load_state_dict(optimizer.state_dict())",
        ),
        (keeps_optimizers, "name_grows_by_entries", "results", "; optimizer.load_state_dict(optimizer.state_dict())"),
        (
            draws_from_a_queue,
            "name_grows",
            "queue",
            "in [[part.cuda() if hasattr(part, 'cuda') else part for part in one] for one in random.sample(queue, 1)]])",
        ),
        (joins, "name_is_joined", "cache", "device='cuda').cpu()])"),
        (keeps_numbers_and_host_tensors, None, None, None),
    ],
)
def test_what_grows_in_the_loop_is_named_with_its_line(function, key, name, fixed):
    if key == "name_grows_with_graphs" and not TELLS_WHAT_GRAPHS_SAVED:
        pytest.skip("this PyTorch does not tell what a graph saved")
    session = DrySession("RTX 3060", memory=600 * MIB + session_context(), stop_after_steps=None, has_bar=False)
    report = session.run(function)
    explainer = Explainer(lang="en", report=report, locate=FakeGPUMemory(session).storage)
    diagnosis = explainer.diagnose(session.exception)
    growing = [one for one in diagnosis.evidence if one.key.startswith("name_")]
    if key is None:
        assert not growing and diagnosis.cause == Cause.ACTIVATIONS
        return
    (evidence,) = growing
    assert (evidence.key, evidence.values["name"]) == (key, name)
    assert evidence.values["kept_bytes"] > 150 * MIB
    assert evidence.values["place"].startswith("test_refinement.py:")
    assert f"{fixed}\n# instead of " in as_since_3_11(diagnosis.growth.lines["pairs"])
    assert diagnosis.cause == Cause.LEAK_OR_RETAINED_REFERENCE


def test_what_each_turn_reads_again_is_no_leak_as_in_generation():
    session = DrySession("RTX 3060", memory=600 * MIB + session_context(), stop_after_steps=None, has_bar=False)
    report = session.run(generates)
    diagnosis = Explainer(lang="en", report=report, locate=FakeGPUMemory(session).storage).diagnose(session.exception)
    assert diagnosis.growth.is_inherent and diagnosis.cause is not Cause.LEAK_OR_RETAINED_REFERENCE


@pytest.mark.parametrize(("rows", "is_cause"), [(1024, True), (16384, False), (0, False)])
def test_a_queue_with_a_multiple_of_its_first_rows_is_the_cause_whatever_its_share(rows, is_cause):
    session = DrySession("RTX 3060", memory=300 * MIB + session_context(), stop_after_steps=None, has_bar=False)
    session.run(queues)
    found = {"locate": FakeGPUMemory(session).storage, "find_rows": lambda _: rows}
    diagnosis = Explainer(lang="en", **found).diagnose(session.exception)
    assert (diagnosis.cause is Cause.LEAK_OR_RETAINED_REFERENCE) is is_cause
    if is_cause:
        assert diagnosis.growth.fixed == "queue = torch.cat([queue, keys.detach()])[-1024:]"
        assert diagnosis.growth.num_bytes < 0.1 * diagnosis.main_failure.pytorch_bytes


@pytest.mark.parametrize(
    "function",
    [recurs_within_a_turn, compares_all_states, sums_losses_of_a_recurrence, adds_blocks_to_its_argument],
)
def test_what_a_backward_after_the_loop_needs_is_no_leak(function):
    session = DrySession("RTX 3060", memory=600 * MIB + session_context(), stop_after_steps=None, has_bar=False)
    report = session.run(function)
    explainer = Explainer(lang="en", report=report, locate=FakeGPUMemory(session).storage)
    diagnosis = explainer.diagnose(session.exception)
    assert diagnosis.growth is None and diagnosis.cause is Cause.ACTIVATIONS


@needs_what_graphs_saved
def test_losses_of_parts_are_not_cut_off_but_walked_back_each():
    session = DrySession("RTX 3060", memory=600 * MIB + session_context(), stop_after_steps=None, has_bar=False)
    report = session.run(sums_losses_of_parts)
    explainer = Explainer(lang="en", report=report, locate=FakeGPUMemory(session).storage)
    diagnosis = explainer.diagnose(session.exception)
    growth = diagnosis.growth
    assert growth.name == "total" and (growth.remedy, growth.fixed) == ("backward_each", "")
    assert diagnosis.cause is Cause.ACTIVATIONS  # of one step: no leak
    assert "name_sums_a_step" in [one.key for one in diagnosis.evidence]


@needs_what_graphs_saved
@pytest.mark.parametrize("function", [collects_losses_of_a_step, makes_losses_of_a_step])
def test_losses_of_a_step_in_a_list_are_walked_back_in_their_turns(function):
    session = DrySession("RTX 3060", memory=600 * MIB + session_context(), stop_after_steps=None, has_bar=False)
    report = session.run(function)
    diagnosis = Explainer(lang="en", report=report, locate=FakeGPUMemory(session).storage).diagnose(session.exception)
    growth = diagnosis.growth
    assert (growth.name, growth.remedy, growth.turn) == ("losses", "backward_each", "(loss / 1000).backward()")
    assert diagnosis.cause is Cause.ACTIVATIONS
    assert "The graphs of all parts of a step are alive together" in str(diagnosis).replace("\n", " ")


@pytest.mark.parametrize(
    ("function", "memory", "cause", "key"),
    [
        (keeps_losses, 600 * MIB, Cause.LEAK_OR_RETAINED_REFERENCE, "calls_alive"),
        (validates_too_much_at_once, 600 * MIB, Cause.ACTIVATIONS, "phase_evaluation"),
        (keeps_outputs_over_steps, 600 * MIB, Cause.LEAK_OR_RETAINED_REFERENCE, "earlier_steps_alive"),
        (accumulates, 300 * MIB, Cause.ACTIVATIONS, "category_fills"),
        (only_weights, 100 * MIB, Cause.WEIGHTS_TOO_BIG, None),
        (adam, 200 * MIB, Cause.OPTIMIZER_STATE, None),
    ],
)
def test_the_record_settles_the_cause(function, memory, cause, key):
    diagnosis = diagnosed(function, memory)
    assert (diagnosis.cause, diagnosis.confidence) == (cause, Confidence.LIKELY)
    keys = [one.key for one in diagnosis.evidence]
    assert key is None or key in keys
    assert "whose_not_said" not in keys


def test_the_result_under_autocast_is_named():
    def halved():
        layer = nn.Linear(1024, 65536).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            layer(torch.zeros(4096, 1024, device="cuda"))

    tensor = diagnosed(halved, 500 * MIB).tensors[0]
    assert tensor.formula == "4096 x 65536 x bfloat16 = 512.00 MiB"


def test_the_users_own_line_is_quoted():
    text = str(diagnosed(adam, 200 * MIB))
    assert "optimizer.step()" in text and "_init_group" not in text.split("Evidence")[1].split("How to")[0]


@pytest.mark.parametrize(
    ("kind", "phase", "cause"),
    [
        ("own_frames", "forward", Cause.ACTIVATIONS),
        ("frames", "forward", Cause.UNKNOWN),
        ("own_frames", None, Cause.UNKNOWN),
    ],
)
def test_what_only_the_failed_call_holds_are_its_activations(kind, phase, cause):
    failure = Failure("cuda_v2.2+", "cuda", allocated_bytes=1000 * MIB)
    open_ = Judgement(Cause.UNKNOWN, (Evidence("whose_not_said"),), Confidence.OPEN)
    settled = refine_with_call(open_, phase, (Holder(kind, "OutOfMemoryError in f", 600 * MIB),), failure)
    assert settled.cause == cause
    assert (settled is open_) is (cause is Cause.UNKNOWN)


@pytest.mark.parametrize(
    ("certain", "cause"),
    [
        (Cause.MEMORY_FRACTION_LIMIT, Cause.LEAK_OR_RETAINED_REFERENCE),
        (Cause.REQUEST_ALONE_TOO_BIG, Cause.REQUEST_ALONE_TOO_BIG),
    ],
)
def test_what_grows_fills_any_limit_too(certain: Cause, cause: Cause) -> None:
    failure = Failure(
        "cuda", backend="cuda", allocated_bytes=100 * MIB, reserved_bytes=100 * MIB, limit_bytes=100 * MIB
    )
    growth = Growth("kept", "kept.append(out)", "cell:3", 8, 64 * MIB, True)
    judgement = Judgement(certain, (Evidence("limit_binds"),), Confidence.CERTAIN)
    found = refine_with_loop(judgement, growth, failure)
    assert found.cause is cause
    assert {one.key for one in found.evidence} >= {"limit_binds", "name_grows_with_graphs"}


@pytest.mark.parametrize(("others", "cause"), [(9 * GIB, Cause.OTHER_PROCESS), (GIB, Cause.DRIVER_LEVEL)])
def test_a_message_without_numbers_is_read_beside_the_card_that_others_have_filled(others, cause):
    """CUDA cannot make a context on a full card, and says no more."""
    device = Device("RTX 3060", 12 * GIB, 0, others)
    card = Card(0, device, 0, (DeviceProcess(4242, "python", others),), "580.00", "")
    error = RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable assertions.")
    diagnosis = Explainer(lang="en", read_card=lambda _: card).diagnose(error)
    assert diagnosis.cause is cause
    assert ("Process 4242 held 9.00 GiB of 12.00 GiB." in str(diagnosis)) is (cause is Cause.OTHER_PROCESS)


def test_an_older_model_is_the_cause_also_where_its_release_only_fits_together_with_another_change() -> None:
    diagnosis = explain(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 24.00 MiB. GPU 0 has a total capacity of 2.00 GiB"
        " of which 8.00 MiB is free. Including non-PyTorch memory, this process has 1.99 GiB memory in use. Of the"
        " allocated memory 1.60 GiB is allocated by PyTorch, and 19.00 MiB is reserved by PyTorch but unallocated."
    )
    values = {"names": "old", "freed_bytes": 2**30, "keys": ("drop_copy", "smaller_batch")}
    found = refine_with_remedy(diagnosis, Remedy("combination", 31, "combination", values, fits=True))
    assert found.cause is Cause.LEAK_OR_RETAINED_REFERENCE and found.evidence[0].key == "held_for_nothing"
    small = Remedy("combination", 31, "combination", {**values, "freed_bytes": 2**20}, fits=True)
    assert refine_with_remedy(diagnosis, small) is diagnosis
