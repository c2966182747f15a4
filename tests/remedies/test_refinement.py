"""Causes refined by the record of a run: what filled the memory, and what was kept without need."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from oom_magic.explain.evidence.causes import Cause, Confidence, Evidence, Judgement
from oom_magic.explain.explainer import Explainer, explain
from oom_magic.explain.live.growth import Growth
from oom_magic.explain.live.holders import Holder
from oom_magic.explain.live.refinement import (
    refine_with_call,
    refine_with_loop,
    refine_with_remedy,
    refine_with_request,
    settled,
    without_activations,
)
from oom_magic.explain.messages.failure import Failure
from oom_magic.explain.remedies.remedy import Remedy
from oom_magic.measure.device.cards import Card
from oom_magic.measure.device.nvml import DeviceProcess
from oom_magic.memory.report import Device
from oom_magic.notebook.cells.releasing import FakeGPUMemory
from oom_magic.predict.session import DrySession
from oom_magic.units import GIB
from tests.programs.growing_loops import (
    accumulates,
    adam,
    adds_blocks_to_its_argument,
    asks_each_loss,
    asks_its_sum,
    averages_losses_of_parts,
    carries_a_state,
    carries_two,
    collects_and_joins,
    collects_at_once,
    collects_losses_of_a_step,
    collects_numbers,
    compares_all_states,
    compares_what_it_joined,
    draws_from_a_queue,
    extends,
    generates,
    goes_on_from_a_state,
    joins,
    joins_two_and_compares_them,
    joins_what_a_hook_kept,
    keeps_a_replay_buffer,
    keeps_by_a_hook,
    keeps_copies_of_weights,
    keeps_losses,
    keeps_maps,
    keeps_metrics,
    keeps_models,
    keeps_models_of_folds,
    keeps_numbers_and_host_tensors,
    keeps_optimizers,
    keeps_outputs_over_steps,
    keeps_results,
    keeps_rows,
    keeps_runs,
    keeps_tensors,
    keeps_transitions,
    keeps_trials,
    keeps_until_its_hook_is_removed,
    keeps_weights,
    makes_losses_of_a_step,
    only_weights,
    queues,
    recurs_within_a_turn,
    samples_with_its_graph,
    stacks_losses,
    sums_before_a_backward,
    sums_by_name,
    sums_losses,
    sums_losses_of_a_recurrence,
    sums_losses_of_parts,
    validate,
    validates_too_much_at_once,
)
from tests.support.versions import TELLS_WHAT_GRAPHS_SAVED, as_since_3_11, needs_what_graphs_saved

MIB = 2**20


def diagnosed(function, memory):
    session = DrySession("RTX 3060", memory=memory + session_context(), stop_after_steps=None, has_bar=False)
    report = session.run(function)
    assert report.out_of_memory is not None
    return explain(session.exception, report=report, lang="en")


def session_context():
    return DrySession("RTX 3060").gpu.context_bytes


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("function", "key", "name", "fixed"),
    [
        (keeps_losses, "name_grows_with_graphs", "losses", ").sum().item())"),
        (validate, "name_grows_with_graphs", "losses", ").sum().item())"),
        (stacks_losses, "name_grows_with_graphs", "losses", "losses.append(loss.detach())"),
        (asks_its_sum, "name_grows_with_graphs", "total", ".sum().detach()"),
        (asks_each_loss, "name_grows_with_graphs", "losses", ".sum().detach())"),
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
        (keeps_until_its_hook_is_removed, "name_grows_with_graphs", "kept", "kept.append(output.detach().cpu())"),
        (keeps_metrics, "name_grows_with_graphs", "metrics['outputs']", ".append(output.detach().cpu())"),
        (keeps_maps, "name_grows", "maps", "maps.append([one.cpu() for one in both])"),
        (
            keeps_results,
            "name_grows_with_graphs",
            "results",
            '.detach().cpu() if hasattr(value, "detach") else value for key, value in result.items()})',
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
        (
            keeps_runs,
            "name_grows_by_entries",
            "runs",
            "run_of_a_dictionary().items()}); runs[-1]['opt'].load_state_dict(runs[-1]['opt'].state_dict())",
        ),
        (keeps_models_of_folds, "name_grows_by_entries", "models", "models.append(model.cpu())"),
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
        (collects_and_joins, "name_is_put_together", "kept", "device='cuda')).cpu())"),
        (joins_two_and_compares_them, "name_is_put_together", "guessed", "known.append(targets.cpu())"),
        (joins_what_a_hook_kept, "name_is_put_together", "kept", "[]).append(output.cpu())"),
        (compares_what_it_joined, None, None, None),
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
    assert evidence.values["place"].startswith("growing_loops.py:")
    assert f"{fixed}\n# instead of " in as_since_3_11(diagnosis.growth.lines["pairs"])
    assert diagnosis.cause == Cause.LEAK_OR_RETAINED_REFERENCE


@pytest.mark.parametrize(
    ("function", "fixed"),
    [
        (collects_at_once, ".relu().cpu() for _ in range(40)])"),
        (averages_losses_of_parts, None),
        (collects_numbers, None),
    ],
)
def test_what_a_comprehension_collects_is_to_be_rehearsed_in_ram(function, fixed):
    session = DrySession("RTX 3060", memory=600 * MIB + session_context(), stop_after_steps=None, has_bar=False)
    session.run(function)
    diagnosis = Explainer(lang="en", locate=FakeGPUMemory(session).storage).diagnose(session.exception)
    growth = diagnosis.growth
    assert (growth is not None and growth.remedy == "keep_on_host") is (fixed is not None)
    if fixed is not None:
        assert growth.num_tensors == 0 and growth.fixed.endswith(fixed)
        assert diagnosis.cause is not Cause.LEAK_OR_RETAINED_REFERENCE  # before it is rehearsed


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "function",
    [
        recurs_within_a_turn,
        goes_on_from_a_state,
        compares_all_states,
        sums_losses_of_a_recurrence,
        adds_blocks_to_its_argument,
    ],
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


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("function", "memory", "cause", "key"),
    [
        (keeps_losses, 600 * MIB, Cause.LEAK_OR_RETAINED_REFERENCE, "calls_alive"),
        (validates_too_much_at_once, 600 * MIB, Cause.ACTIVATIONS, "phase_evaluation"),
        (samples_with_its_graph, 1200 * MIB, Cause.ACTIVATIONS, "phase_forward"),
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


def test_what_a_backward_asks_for_is_found_in_its_rehearsal():
    """Frames end at ``loss.backward()``: on a real card activations were told, on a pretend card the logits."""

    def step():
        layer, x = nn.Linear(1024, 8192).cuda(), torch.zeros(8192, 1024, device="cuda")
        labels = torch.zeros(8192, dtype=torch.long, device="cuda")
        loss = torch.nn.functional.cross_entropy(layer(x), labels)
        loss.backward()

    session = DrySession("RTX 3060", memory=700 * MIB + session_context(), has_bar=False)
    session.run(step)
    diagnosis = explain(session.exception, lang="en")  # no report, as on a real card
    assert (diagnosis.cause, diagnosis.phase, diagnosis.tensors) == (Cause.ACTIVATIONS, "backward", ())
    found = refine_with_request(diagnosis, DrySession("RTX 3060", has_bar=False).run(step))
    assert (found.cause, found.tensors[0].name) == (Cause.LOGITS_OR_LOSS, "logits_gradient")
    assert found.tensors[0].formula == "_log_softmax_backward_data = 256.00 MiB"
    small = DrySession("RTX 3060", has_bar=False).run(lambda: nn.Linear(8, 8).cuda()(torch.ones(8, 8).cuda()))
    assert refine_with_request(diagnosis, small) is diagnosis


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


@pytest.mark.parametrize(
    ("stuck", "verdict", "is_it"), [(750, "safe", True), (750, "danger", False), (300, "safe", False)]
)
def test_a_run_that_is_safe_without_pieces_of_the_cache_failed_by_them(stuck, verdict, is_it) -> None:
    diagnosis = explain(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 2.00"
        " GiB of which 442.00 MiB is free. Including non-PyTorch memory, this process has 1.57 GiB memory in use. Of the"
        f" allocated memory 472.00 MiB is allocated by PyTorch, and {stuck}.00 MiB is reserved but unallocated."
    )
    diagnosis = replace(diagnosis, cause=Cause.ACTIVATIONS, confidence=Confidence.LIKELY)
    segments = Remedy(
        "expandable_segments", 5, "expandable_segments", {}, fits=True, verdict=verdict, saving_bytes=2**28
    )
    found = refine_with_remedy(diagnosis, segments)
    assert (found.cause is Cause.FRAGMENTATION) is is_it
    assert (found.evidence[0].key == "pieces_in_rehearsal") is is_it


@pytest.mark.parametrize(
    ("kind", "width", "batch", "gib", "cause"),
    [
        (torch.optim.Adam, 4096, 64, 0.4, Cause.OPTIMIZER_STATE),
        (torch.optim.SGD, 4096, 64, 0.2, Cause.WEIGHTS_TOO_BIG),  # which with its gradients does not fit
        (torch.optim.Adam, 1024, 2**14, 0.4, Cause.ACTIVATIONS),
        (torch.optim.Adam, 4096, 2**14, 0.9, Cause.OPTIMIZER_STATE),  # which alone with the weights does not fit
    ],
)
def test_a_step_that_is_little_beside_the_rest_is_not_the_cause(kind, width, batch, gib, cause) -> None:
    def train() -> None:
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).cuda()
        optimizer = kind(net.parameters(), lr=0.1)
        for _ in range(2):
            net(torch.ones(batch, width, device="cuda")).sum().backward()
            optimizer.step()

    session = DrySession("RTX 3060", is_limited=False)
    session.run(train)
    diagnosis = replace(explain("CUDA out of memory"), cause=Cause.ACTIVATIONS, confidence=Confidence.LIKELY)
    assert session.report is not None
    assert without_activations(diagnosis, session.report, int(gib * GIB)).cause == cause
    if gib == 0.4:  # where the rest alone fits, what fills most is the cause of a failure that was left open
        for named in (Cause.UNKNOWN, Cause.ATTENTION_SCORES):  # by what such programs usually run out of
            left_open = replace(diagnosis, cause=named, confidence=Confidence.OPEN)
            found = settled(left_open, session.report)
            assert (found.cause, found.evidence[-1].key) == (cause, "category_fills_rehearsed")
            assert found.confidence is Confidence.LIKELY and settled(found, session.report) is found
