"""The dry run as its users see it: what it answers, what it refuses, and that it leaves no trace."""

from __future__ import annotations

import copy
import gc
import os
import random
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oom_magic as om
from oom_magic.memory.timeline import Phase
from oom_magic.predict.instrumentation import recorder
from oom_magic.predict.isolation.live_objects import find_live_objects, heap_set_aside
from oom_magic.predict.session import DrySession
from oom_magic.units import GIB, MIB
from oom_magic.views.text import to_text
from tests.support.put_back import observed
from tests.support.versions import recorded_with

counters: list[float] = []


def train(width: int = 256, batch_size: int = 32, steps: int = 4) -> None:
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 10)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        batch = torch.randn(batch_size, width).to("cuda")
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_breakdown_lines_and_modules_each_sum_to_the_peak() -> None:
    report = om.dry_run(train, gpu="A100 80GB")
    peak = report.peak_allocated_bytes
    assert report.breakdown.total_bytes == peak
    assert sum(usage.live_bytes for usage in report.lines) == peak
    assert report.modules.total_bytes == peak
    assert peak <= report.peak_reserved_bytes <= report.device_total_bytes
    assert report.minimum_device_bytes <= report.peak_reserved_bytes
    weights = 4 * (256 * 1024 + 1024 + 1024 * 10 + 10)
    assert weights <= report.breakdown["parameter"] <= weights + 4 * 512
    assert 2 * weights <= report.breakdown["optimizer_state"] <= 2 * weights + 8 * 512


def test_it_stops_after_the_steps_asked_for() -> None:
    assert len(om.dry_run(train, stop_after_steps=2).steps) == 2
    report = om.dry_run(train, steps=1, stop_after_steps=5)
    assert [step.step for step in report.steps] == [1]
    assert not report.timeline.was_left and "is not counted" not in to_text(report.describe())
    assert report.steps[0].peak_phase in (Phase.BACKWARD, Phase.OPTIMIZER)


@recorded_with("2.13")
def test_what_comes_after_the_last_step_is_said_to_be_missing() -> None:
    def train_and_evaluate() -> None:
        train()
        with torch.no_grad():
            torch.empty(256 * MIB, device="cuda", dtype=torch.uint8)

    partial, whole = (om.dry_run(train_and_evaluate, stop_after_steps=number) for number in (3, None))
    assert partial.peak_allocated_bytes < 256 * MIB < whole.peak_allocated_bytes
    assert "after 3 optimizer steps" in " ".join(to_text(partial.describe()).split())
    assert "is not counted" not in to_text(whole.describe())


def test_a_card_too_small_ends_the_run_with_pytorchs_message() -> None:
    report = om.dry_run(train, width=4096, batch_size=4096, gpu="RTX 3060", memory="1GiB")
    failure = report.out_of_memory
    assert failure is not None
    assert failure.line.text in Path(__file__).read_text()
    (read,) = om.explain(failure.message).failures
    assert read.requested_bytes == pytest.approx(failure.requested_bytes, abs=MIB / 100)
    assert read.total_bytes == GIB
    assert report.verdict == "out of memory"


def test_a_memory_fraction_limits_the_process() -> None:
    def take() -> None:
        torch.cuda.set_per_process_memory_fraction(0.25)
        torch.empty(5 * GIB, dtype=torch.uint8, device="cuda")

    failure = om.dry_run(take, memory="16GiB").out_of_memory
    assert failure is not None and "4.00 GiB allowed; Of the allocated" in failure.message
    assert om.explain(failure.message).cause.value == "memory_fraction_limit"


def test_the_exception_of_the_users_code_passes_unchanged() -> None:
    def broken() -> None:
        torch.ones(1000, device="cuda")
        raise LookupError("mine")

    session = DrySession()
    with pytest.raises(LookupError, match="mine") as caught:
        session.run(broken)
    assert type(caught.value) is LookupError
    assert session.report is not None and session.report.error == "LookupError: mine"
    assert session.report.timeline.num_allocations == 1


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, RuntimeError])
def test_everything_is_as_before(error: type[BaseException] | None) -> None:
    model = nn.Sequential(nn.Linear(700, 900), nn.BatchNorm1d(900), nn.Linear(900, 10)).eval()
    optimizer = torch.optim.Adam(model.parameters())
    inputs, labels = torch.randn(16, 700), torch.randint(0, 10, (16,))
    nn.functional.cross_entropy(model(inputs), labels).backward()
    parameters = list(model.parameters())
    state, grads = copy.deepcopy(model.state_dict()), [parameter.grad.clone() for parameter in parameters]
    generators = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    answers = (torch.cuda.is_available(), torch.get_default_dtype(), dict(os.environ), vars(nn.Module)["__call__"])
    counters[:] = [1.5]

    def step() -> None:
        model.train().to("cuda")
        torch.set_default_dtype(torch.float64)
        os.environ["OOM_MAGIC_TEST"] = "1"
        random.random(), np.random.rand(), torch.rand(3)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs.float().cuda()), labels.cuda()).backward()
        optimizer.step()
        counters.append(0.0)
        if error is not None:
            raise error

    if error is None:
        report = om.dry_run(step)
        assert report.breakdown["parameter"] > 0
    else:
        with pytest.raises(error):
            om.dry_run(step)
    assert counters == [1.5]
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(parameters, grads, strict=True))
    assert not model.training and not optimizer.state
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert np.random.get_state()[1].tolist() == generators[2]
    now = (torch.cuda.is_available(), torch.get_default_dtype(), dict(os.environ), vars(nn.Module)["__call__"])
    assert now == answers
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


def test_a_session_keeps_its_world_between_runs() -> None:
    model, inputs = nn.Linear(512, 512), torch.randn(8, 512)
    session = DrySession()
    session.run(lambda: model.to("cuda"))
    assert model.weight.device.type == "cpu"
    report = session.run(lambda: model(inputs.cuda()).sum().backward())
    assert report.breakdown["parameter"] >= 4 * 512 * 512
    assert model.weight.device.type == "cpu" and model.weight.grad is None


def test_a_tensor_that_only_a_view_keeps_alive_dies_with_it() -> None:
    table = torch.arange(12.0).view(3, 4)
    assert table._base is not None
    base = weakref.ref(table._base)
    om.dry_run(train)
    assert table.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    del table
    assert base() is None


def test_an_address_is_that_of_the_block_and_goes_to_the_next_tensor_in_it() -> None:
    """Libraries find by it what shares memory, also where it is no longer the same (TRL's activation_offloading)."""

    def program() -> None:
        first, second = torch.empty(600, device="cuda"), torch.empty(3 << 20, dtype=torch.uint8, device="cuda:1")
        before, part = first.data_ptr(), first.view(-1)[100:]
        assert part.data_ptr() == before + 400 and part.untyped_storage().data_ptr() == before
        following = torch.empty(8, device="cuda")
        assert following.data_ptr() == before + 2560  # blocks are multiples of 512 bytes
        del first, part
        again = torch.empty(600, dtype=torch.int32, device="cuda")
        assert again.data_ptr() == before and second.data_ptr() % 512 == 0
        told.append({again.data_ptr(), second.data_ptr(), torch.empty(600).data_ptr(), following.data_ptr()})

    told: list[set[int]] = []
    DrySession("A100 80GB", num_gpus=2).run(program)
    assert len(told[0]) == 4


def test_sessions_beside_each_other_do_not_copy_each_others_copies() -> None:
    table = torch.arange(1 << 16)
    sessions = [DrySession() for _ in range(4)]
    counts = []
    for session in sessions:
        session.run(lambda: table.cuda().sum())
        alike = [tensor for tensor in find_live_objects().tensors if type(tensor) is torch.Tensor]
        counts.append(sum(tensor.shape == table.shape for tensor in alike))
    assert counts == [1] * 4


REFUSED: list[tuple[str, Callable[[], Any], type[Exception]]] = [
    ("needs a function, not int 3", lambda: om.dry_run(3), TypeError),
    ("missing a required argument: 'size'", lambda: om.dry_run(lambda size: size), TypeError),
    ("A dry run is already running", lambda: om.dry_run(lambda: om.dry_run(train)), RuntimeError),
    ("RTX 3060", lambda: om.dry_run(train, gpu="RTX 3060x"), ValueError),
    ("12GiB", lambda: om.dry_run(train, memory="12"), ValueError),
    (
        "same device.*cuda:0 and cpu",
        lambda: om.dry_run(lambda: torch.ones(3, device="cuda") + torch.ones(3)),
        RuntimeError,
    ),
    ("invalid device ordinal", lambda: om.dry_run(lambda: torch.ones(3, device="cuda:1")), RuntimeError),
]


@pytest.mark.parametrize(("text", "call", "error"), REFUSED, ids=[text for text, _, _ in REFUSED])
def test_what_is_refused_is_said_in_words(text: str, call: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=text):
        call()
    assert om.dry_run(train).steps  # the next run is as always


def test_what_the_code_leaves_on_ends_with_the_run() -> None:
    hooks = torch.nn.modules.module._global_forward_hooks
    before = dict(hooks)

    def leave_on() -> None:
        torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
        torch.set_default_device("cuda")
        assert torch.ones(3).is_cuda

    om.dry_run(leave_on)
    assert torch.ones(3).device.type == torch.get_default_device().type == "cpu"
    assert dict(hooks) == before


def test_a_checkpointed_forward_that_runs_out_leaves_no_hooks() -> None:
    def fill() -> None:
        weight = torch.ones(2**20, device="cuda", requires_grad=True)
        torch.utils.checkpoint.checkpoint(lambda x: x.expand(2**14, -1) * 2, weight, use_reentrant=False)

    session = DrySession("RTX 3060", has_bar=False)
    assert session.run(fill).out_of_memory is not None
    assert session.exception is not None and session.exception.__traceback__ is not None
    weight = torch.ones(3, requires_grad=True)
    weight.exp().sum().backward()
    assert weight.grad is not None


def test_what_cuda_would_refuse_is_refused() -> None:
    with pytest.raises(RuntimeError, match="same dtype, but got: float != c10::Half"):
        om.dry_run(lambda: torch.rand(3, 3, device="cuda") @ torch.rand(3, 3, device="cuda").half())


def test_a_generator_on_the_gpu_draws_there() -> None:
    generator = torch.Generator("cpu")

    def draw() -> None:
        drawn = torch.rand(8, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1))
        assert drawn.normal_(generator=torch.Generator("cuda")).is_cuda

    om.dry_run(draw)
    assert type(generator) is torch.Generator


def test_what_the_user_froze_stays_frozen() -> None:
    with heap_set_aside():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        with heap_set_aside():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_threads_of_the_run_see_the_pretend_gpu() -> None:
    def start() -> None:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()

    report, alone = om.dry_run(start), om.dry_run(train)
    assert report.peak_allocated_bytes == alone.peak_allocated_bytes and len(report.steps) == len(alone.steps) == 3


def test_a_loop_without_steps_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "STEP_LIMIT_SECONDS", -1)
    with pytest.raises(TimeoutError, match="No optimizer step within"):
        om.dry_run(train)


def test_torch_cuda_answers_for_the_pretend_card() -> None:
    seen: dict[str, Any] = {}

    def ask() -> None:
        block = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
        seen["allocated"] = torch.cuda.memory_allocated()
        seen["free"], seen["total"] = torch.cuda.mem_get_info()
        del block
        torch.cuda.empty_cache()
        seen["after"] = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        seen["peak"] = torch.cuda.max_memory_allocated()
        seen["capability"], seen["name"] = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.synchronize()
        seen["device"] = torch.zeros(2, device="cuda").device, torch.zeros(2).cuda().is_cuda

    observed(ask, gpu="RTX 3060")
    assert seen["allocated"] == 50 * MIB and seen["after"] == (0, 0) and seen["peak"] == 0
    assert seen["total"] - seen["free"] > 50 * MIB
    assert seen["capability"] == (8, 6) and "3060" in seen["name"]
    assert seen["device"] == (torch.device("cuda", 0), True)


def test_known_values_decide_and_unknown_ones_are_stated() -> None:
    seen: dict[str, Any] = {}

    def read() -> None:
        mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).cuda()
        seen["lengths"] = mask.sum(1).tolist()
        seen["all"] = bool(mask.all())
        seen["picked"] = torch.randn(2, 3, device="cuda")[mask.bool()].shape
        seen["loss"] = torch.randn(4, device="cuda").mean().item()

    report = observed(read)
    assert seen["lengths"] == [2, 3] and seen["all"] is False and seen["picked"] == (5,)
    (assumption,) = report.assumptions
    assert "assumed: " in assumption.text
    assert assumption.line is not None and 'seen["loss"]' in assumption.line.text


@torch.library.custom_op("oom_magic_tests::keep_best", mutates_args=())
def keep_best(boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.nonzero().flatten()


@keep_best.register_fake
def _(boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return boxes.new_empty(torch.library.get_ctx().new_dynamic_size(max=300), dtype=torch.long)


@torch.library.custom_op("oom_magic_tests::sharpen", mutates_args=())
def sharpen(boxes: torch.Tensor) -> torch.Tensor:
    return boxes * 2


@torch.library.custom_op("oom_magic_tests::blur", mutates_args=())
def blur(images: torch.Tensor) -> torch.Tensor:
    return images + 1


@blur.register_fake
def _(images: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(images)


def test_a_library_s_kernel_that_nobody_has_read_is_said_once_to_take_more_perhaps():
    def blurred() -> None:
        for _ in range(2):
            blur(torch.rand(4, 4, device="cuda"))

    (said,) = om.dry_run(blurred).assumptions
    assert said.text == ("oom_magic_tests::blur: its results are counted, but not what its kernel allocates internally")


def test_operators_of_libraries_that_do_not_tell_their_shapes_are_guessed_and_said() -> None:
    seen: list[torch.Size] = []

    def detect() -> None:
        for count in (200, 500):
            boxes = torch.rand(count, 4, device="cuda")
            seen.append(boxes[keep_best(boxes, boxes[:, 0])].shape)
        seen.append(sharpen(boxes).shape)

    by_values, like_first = observed(detect).assumptions
    assert seen == [(200, 4), (300, 4), (500, 4)]
    assert by_values.text.startswith("oom_magic_tests::keep_best: the size of its result depends on values")
    assert like_first.text.startswith("oom_magic_tests::sharpen has no fake kernel")


def test_autocast_follows_cudas_rules_in_every_mode() -> None:
    seen: list[torch.dtype] = []

    def cast() -> None:
        layer, inputs = nn.Linear(8, 8).cuda(), torch.ones(2, 8, device="cuda")
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode(), torch.autocast("cuda", torch.bfloat16):
                product = layer(inputs)
                seen.extend([product.dtype, product.softmax(-1).dtype, nn.functional.layer_norm(product, (8,)).dtype])

    observed(cast)
    assert seen == [torch.bfloat16, torch.float32, torch.float32] * 3


def test_attention_without_a_fused_kernel_is_said():
    def train(dtype: torch.dtype) -> None:
        rows = torch.randn(2, 8, 256, 64, device="cuda", dtype=dtype, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True).sum().backward()

    said = " ".join(str(om.dry_run(train, torch.bfloat16, gpu="T4")).split())
    assert "used no fused kernel (dry_run/test_session.py:" in said and "of tokens, 4.00 MiB, which grow" in said
    assert "fused" not in str(om.dry_run(train, torch.bfloat16, gpu="A100 80GB"))
    assert "fused" not in str(om.dry_run(train, torch.half, gpu="T4"))


def test_what_a_model_computes_without_a_graph_is_saved_for_no_backward() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 8192))

    def shares(grad: bool) -> tuple[int, int]:
        def program() -> None:
            with torch.set_grad_enabled(grad):
                net.cuda()(torch.zeros(2**16, 512, device="cuda"))

        parts = DrySession("RTX 3060", memory="2 GiB").run(program).breakdown
        return parts["activation"], parts["temporary"]

    (of_evaluation, temporary), (saved, _rest) = shares(grad=False), shares(grad=True)
    assert of_evaluation == 0 and temporary > 2**28 < saved


def test_a_module_may_return_its_parameters_as_a_list() -> None:
    """As learners of MAML do: the dry run asked for the next one of it."""

    class Learner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(8, 8))])

        def parameters(self, recurse: bool = True) -> Any:
            return self.kept

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.kept[0]

    def program() -> None:
        learner = Learner().cuda()
        learner(torch.ones(2, 8, device="cuda")).sum().backward()

    assert om.dry_run(program, gpu="T4").peak_allocated_bytes
