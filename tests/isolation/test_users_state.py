"""Nothing of the user's is ever touched by a dry run, whatever is raised and whenever."""

from __future__ import annotations

import _thread
import contextlib
import copy
import gc
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import oom_magic as om
from oom_magic.interrupts import Interrupts
from oom_magic.predict.instrumentation.starting_point import StartingPoint
from oom_magic.predict.isolation import exchanged_pair, live_objects, snapshot, tensor_exchange
from oom_magic.predict.isolation.patching import Journal
from oom_magic.predict.isolation.process import process_state
from oom_magic.predict.operators.gradients import reference_counts_in_autograd
from oom_magic.predict.session import DrySession
from tests.support.faults import InjectedError, inject

log: list[float] = []


class Users:
    """A kernel with three days of work in it, and all of it by value."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(60, 50), nn.BatchNorm1d(50), nn.Linear(50, 3)).train()
        self.model[0].register_forward_hook(lambda *_: None)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.inputs = torch.randn(8, 60)
        self.view = self.inputs[2:4]
        self.names = {"model": self.model, "log": log}
        log[:] = [1.5]
        self.model(self.inputs).sum().backward()
        self.optimizer.step()
        self.before = self.values()
        self.objects = [id(one) for one in (*self.model.parameters(), *self.optimizer.state)]

    def values(self) -> dict[str, Any]:
        """Everything, compared by value."""
        hooks = torch.nn.modules.module
        return {
            "weights": {name: tensor.tolist() for name, tensor in self.model.state_dict().items()},
            "gradients": [None if one.grad is None else one.grad.tolist() for one in self.model.parameters()],
            "is_trained": [(one.requires_grad, one.device, one.dtype, type(one)) for one in self.model.parameters()],
            "optimizer": str(self.optimizer.state_dict()),
            "scheduler": str(self.scheduler.state_dict()),
            "inputs": (self.inputs.tolist(), self.view.tolist(), self.view._base is self.inputs),
            "modes": [one.training for one in self.model.modules()],
            "hooks": [list(one._forward_hooks) for one in self.model.modules()],
            "global hooks": [str(value) for name, value in vars(hooks).items() if name.startswith("_global_")],
            "random": (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),
            "torch": (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cuda")),
            "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
            "patched": (nn.Module.__call__, torch.cuda.is_available, threading.Thread.start, torch.Generator),
            "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
            "threads": {thread.name for thread in threading.enumerate()} - {"interrupter"},
            "log": list(log),
            "modes of torch": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        }

    def train(self) -> None:
        """Changes all of it."""
        self.model.eval().to("cuda")
        torch.set_default_dtype(torch.float64)
        os.environ["OOM_MAGIC_TEST"] = "1"
        self.optimizer.state.clear()
        self.optimizer.zero_grad()
        random.random(), np.random.rand()
        log.append(2.5)
        for _ in range(3):
            self.model(self.inputs.float().cuda()).sum().backward()
            self.optimizer.step()
            self.scheduler.step()
        self.inputs.zero_()

    def check(self) -> None:
        """All is as it was."""
        now = self.values()
        assert [name for name in now if now[name] != self.before[name]] == []
        assert [id(one) for one in (*self.model.parameters(), *self.optimizer.state)] == self.objects


@pytest.fixture
def users() -> Iterator[Users]:
    om.dry_run(lambda: None)  # what is imported then stays
    made = Users()
    yield made
    made.check()
    made.model(made.inputs).sum().backward()  # autograd goes on with the same tensors
    made.optimizer.step()


def run(users: Users) -> None:
    DrySession(has_bar=False, is_lasting=False).run(users.train, [users.names])


# -- faults at every step of setting up and tearing down ------------------------


_STEPS: list[tuple[Any, str]] = [
    (torch._C, "_swap_tensor_impl"),
    (Journal, "record"),
    (Journal, "undo"),
    (snapshot.Snapshot, "add"),
    (snapshot.Snapshot, "apply"),
    (snapshot.Snapshot, "restore"),
    (snapshot.Snapshot, "changes"),
    (tensor_exchange.FakeCopies, "make"),
    (exchanged_pair.ExchangedPair, "swap_back"),
    (snapshot, "fill"),
    (tensor_exchange, "find_live_objects"),
    (process_state, "restore_environment"),
    (torch, "set_rng_state"),
    (random, "setstate"),
    (live_objects.gc, "get_objects"),
    (Interrupts, "deliver"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("owner", "name"), _STEPS, ids=lambda step: step if isinstance(step, str) else "")
@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (InjectedError, RuntimeError, MemoryError)),
    ],
)
def test_a_fault_at_any_step_changes_nothing(
    users: Users, owner: Any, name: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = inject(monkeypatch, owner, name, error)
    run(users)
    total = faults.calls
    users.check()
    for call in sorted({1, 2, total // 3, total // 2, total - 1, total} - {0, -1}):
        faults.begin(call)
        with contextlib.suppress(error):
            run(users)
        users.check()
    monkeypatch.undo()


def test_what_was_undone_in_part_is_undone_again() -> None:
    done: list[int] = []
    fails = [2, 1]

    def undo(number: int) -> None:
        if number in fails:
            fails.remove(number)
            raise KeyboardInterrupt
        done.append(number)

    journal = Journal()
    for number in range(4):
        journal.record(lambda number=number: undo(number))
    with pytest.raises(KeyboardInterrupt), journal:
        pass
    assert done == [3, 2, 1, 0]


# -- interrupts -------------------------------------------------------------------


def interrupted_at(users: Users, delay: float) -> bool:
    """Whether a real interrupt after so many seconds ended a dry run; it comes anywhere."""
    timer = threading.Timer(delay, _thread.interrupt_main)
    timer.name = "interrupter"
    try:
        timer.start()
        run(users)
        timer.join()
        time.sleep(0)  # where it comes if it came too late
    except KeyboardInterrupt:
        timer.join()
        return True
    return False


def interrupt_often(users: Users, times: int) -> None:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    before, users.before = users.before, users.values()
    try:
        _interrupt_often(users, times)
    finally:
        signal.signal(signal.SIGINT, usual)
        users.before = before


def _interrupt_often(users: Users, times: int) -> None:
    run(users)  # the first in a process imports what later ones do not
    begin = time.monotonic()
    run(users)
    length = time.monotonic() - begin
    moments = random.Random(times)
    ended = 0
    for _ in range(times):
        ended += interrupted_at(users, moments.uniform(0, 1.1 * length))
        users.check()
    assert ended > times // 3


def test_interrupts_at_random_moments_change_nothing(users: Users) -> None:
    interrupt_often(users, 8)


@pytest.mark.slow
def test_500_interrupts_at_random_moments_change_nothing(users: Users) -> None:
    interrupt_often(users, 500)


def test_an_interrupt_while_signals_are_exchanged_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, calls, total = signal.signal, 0, 0

    def faulty(number: int, handler: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == comes_at:
            signal.raise_signal(signal.SIGINT)
        return exchange(number, handler)

    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in sorted(signal.valid_signals())]

    monkeypatch.setattr(signal, "signal", faulty)
    usual = exchange(signal.SIGINT, signal.default_int_handler)
    before = handlers()
    try:
        for comes_at in itertools.count():
            calls = 0
            with contextlib.suppress(KeyboardInterrupt), Interrupts().waiting():
                pass
            assert handlers() == before
            total = total or calls
            if comes_at > total:
                break
    finally:
        exchange(signal.SIGINT, usual)
    assert total >= 2


def test_an_alarm_of_the_users_waits_for_the_users_code(users: Users) -> None:
    seen: list[str] = []

    def ring(_number: int, frame: Any) -> None:
        names = []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        seen.append("users_code" if "users_code" in names or "waiting" in names else names[0])

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
        run(users)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert "users_code" in seen


def test_a_model_goes_to_the_host_and_back_with_its_gradients(users: Users) -> None:
    def run() -> None:
        for device in ("cuda", "cpu", "cuda"):
            users.model.to(device)
            users.model(users.inputs.to(device)).sum().backward()
            assert {one.grad.device.type for one in users.model.parameters()} == {device}

    DrySession(has_bar=False).run(run, [users.names])


# -- what cannot be exchanged -------------------------------------------------------


def test_weights_that_pytorch_watches_stay_real_and_are_named(users: Users) -> None:
    watches = torch._C._WeakTensorRef(users.model[0].weight)  # type: ignore[attr-defined]
    session = DrySession(has_bar=False)
    report = session.run(lambda: torch.ones(8, device="cuda").sum(), [users.names])
    assert any("`model.0.weight` stays real" in one.text for one in report.assumptions)
    with pytest.raises(RuntimeError, match=r"model\.0\.weight is the real tensor.*copy"):
        run(users)
    assert not watches.expired()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_of_other_kinds_do_no_harm(users: Users) -> None:
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    kinds = {
        "nested": torch.nested.nested_tensor(parts),
        "jagged": torch.nested.nested_tensor(parts, layout=torch.jagged),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    }
    report = DrySession(has_bar=False).run(users.train, [users.names, kinds])
    told = {one.text.split("`")[1] for one in report.assumptions}
    assert told >= set(kinds)  # other tests may have left tensors of their own
    assert kinds["sparse"].to_dense().equal(torch.eye(3))


def test_an_open_autocast_block_does_no_harm(users: Users) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        users.model.eval()(users.inputs)
        users.model.train()
        report = om.dry_run(users.train)
        assert torch.is_autocast_enabled("cpu")
    assert report.breakdown["parameter"]


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False])
def test_what_the_user_froze_is_exchanged_and_stays_frozen(users: Users, is_first: bool) -> None:
    """No list of objects shows what ``gc.freeze`` was called for."""
    session, kept = DrySession(has_bar=False), []
    session.run(lambda: None if is_first else kept.append(torch.ones(3, device="cuda")), [{"kept": kept}])
    gc.freeze()
    try:
        session.run(users.train, [users.names, {"kept": kept}])
        users.check()
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
    session.run(gc.freeze)
    assert gc.get_freeze_count() == 0


def test_what_holds_a_weak_reference_made_in_the_run_does_no_harm(users: Users) -> None:
    seen: list[Any] = []

    def watch() -> None:
        users.model.cuda()
        seen.append(torch._C._WeakTensorRef(users.model[0].weight))  # type: ignore[attr-defined]

    DrySession(has_bar=False).run(watch, [users.names])
    assert len(seen) == 1
    users.check()


# -- leftovers ------------------------------------------------------------------------


@pytest.mark.slow
def test_what_died_between_runs_is_not_charged_to_the_next(shell: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("oom_magic.notebook.magics.has_gpu", lambda: False)
    shell.run_cell(
        "import torch\nfrom torch import nn\n"
        "def train(rows):\n"
        "    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()\n"
        "    optimizer = torch.optim.AdamW(model.parameters())\n"
        "    model.itself = [model]\n"  # a circle
        "    for _ in range(3):\n"
        "        model(torch.randn(rows, 1024).cuda()).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "        if rows == 9: raise KeyboardInterrupt\n",
        store_history=True,
    )
    shell.run_cell("%%gpumem --no-plot --memory 1GiB\ntrain(2**18)", store_history=True)
    shell.run_cell("%oom_explain --fast", store_history=True)
    shell.run_cell("%%gpumem --no-plot --memory 1GiB\ntrain(9)", store_history=True)
    shell.run_cell("%%gpumem --no-plot --memory 1GiB -o report\ntrain(8)", store_history=True)
    report = shell.user_ns["report"]
    fresh = om.dry_run(shell.user_ns["train"], 8, memory="1GiB")
    assert report.breakdown["parameter"] == fresh.breakdown["parameter"]
    assert 0 <= report.kept_bytes <= fresh.kept_bytes
    assert report.peak_allocated_bytes <= fresh.peak_allocated_bytes + 2**25


def test_the_language_asked_for_is_the_sessions_and_not_the_environments(shell: Any, capsys: Any) -> None:
    before = dict(os.environ)
    shell.run_cell("%%oom_explain --lang zh\nCUDA out of memory. Tried to allocate 2.00 GiB", store_history=True)
    assert dict(os.environ) == before
    capsys.readouterr()
    shell.run_cell("%oom_explain none.log", store_history=True)
    assert "既不是文件" in capsys.readouterr().err
    shell.run_line_magic("reload_ext", "oom_magic")
    monkeypatched = copy.copy(os.environ.get("OOM_MAGIC_LANG"))
    assert monkeypatched == before.get("OOM_MAGIC_LANG")


class Asking(torch.Tensor):
    """Notes what is asked of it."""

    asked: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_code_of_a_tensors_own_class_runs_in_the_run_only() -> None:
    own = torch.ones(4, 4).as_subclass(Asking)
    during: list[type] = []

    def work() -> None:
        asked = len(Asking.asked)
        during.extend([type(torch.ones(4, 4, device="cuda") @ own.cuda())] * (len(Asking.asked) > asked))

    names = {"own": own, "waiting": nn.LazyLinear(3), "during": during}
    Asking.asked.clear()
    session = DrySession(has_bar=False, is_lasting=False, start=StartingPoint([names]))
    report = session.run(lambda: [work(), session.assume(str(during))], [names])
    assert Asking.asked == [] and "Asking" in report.assumptions[-1].text
    assert type(own) is Asking and torch.equal(own.as_subclass(torch.Tensor), torch.ones(4, 4))


def test_what_a_session_measures_of_autograd_is_not_seen_by_the_users_modes_and_hooks() -> None:
    reference_counts_in_autograd.cache_clear()
    packed: list[Any] = []
    kept = torch.autograd.graph.saved_tensors_hooks(lambda one: [packed.append(one), one][1], lambda one: one)
    with torch.autograd.set_detect_anomaly(True), kept, torch.device("meta"):
        session = DrySession(has_bar=False, is_lasting=False)
        assert not packed
        report = session.run(lambda: nn.Linear(8, 8, device="cuda")(torch.ones(2, 8, device="cuda")).sum().backward())
    assert report.breakdown["parameter"] == 1024
