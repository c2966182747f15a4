"""However a measured block ends, the recording ends with it: after faults and interrupts at any moment."""

from __future__ import annotations

import _thread
import contextlib
import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from oom_magic.measure.history import recording as history
from oom_magic.measure.history.assembly import Assembler
from oom_magic.measure.measurement import Measurement, measure
from oom_magic.memory.report import MemoryReport
from tests.support.faults import InjectedError, inject, interrupted_at_each_function

pytestmark = pytest.mark.gpu

_STEPS: list[tuple[Any, str]] = [
    (history, "read_settings"),
    (history.History, "subscribe"),
    (history.History, "drain"),
    (Assembler, "observe_owners"),
    (Measurement, "_build"),
    (torch.cuda, "memory_stats"),
]


@pytest.fixture(autouse=True)
def _usual_handler_and_few_objects() -> Iterator[None]:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # a block looks at each object that is not frozen
    yield
    gc.unfreeze()
    signal.signal(signal.SIGINT, usual)
    torch.cuda.memory._record_memory_history(None)


def train_once() -> None:
    model = nn.Linear(64, 64, device="cuda")
    model(torch.ones(2, 64, device="cuda")).sum().backward()
    torch.optim.SGD(model.parameters()).step()


def measured() -> MemoryReport:
    with measure(namespace={}) as measurement:
        train_once()
    return measurement.report


def is_as_before(hooks: dict[int, Any]) -> bool:
    """Whether nothing records, PyTorch's hooks are these, and interrupts reach their usual handler."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return not history.is_recording() and hooks == _global_optimizer_post_hooks and is_usual


@pytest.mark.parametrize("owner_and_name", _STEPS, ids=lambda one: one[1])
@pytest.mark.parametrize("error", [InjectedError, KeyboardInterrupt])
def test_a_fault_at_any_step_leaves_no_recording(
    owner_and_name: tuple[Any, str], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = inject(monkeypatch, *owner_and_name, error)
    measured()
    hooks = dict(_global_optimizer_post_hooks)
    for call in range(1, faults.calls + 1):
        faults.begin(call)
        with contextlib.suppress(error):
            measured()
        assert is_as_before(hooks)


def test_interrupts_at_random_moments_leave_no_recording() -> None:
    measured()
    hooks, moments, ended, begin = dict(_global_optimizer_post_hooks), random.Random(3), 0, time.monotonic()
    measured()
    length = time.monotonic() - begin
    for _ in range(40):
        timer = threading.Timer(moments.uniform(0, 1.2 * length), _thread.interrupt_main)
        try:
            timer.start()
            measured()
            timer.join()
        except KeyboardInterrupt:
            ended += 1
        timer.join()
        assert is_as_before(hooks)
    assert ended > 10


def test_interrupts_before_the_first_instruction_of_any_function_leave_no_recording() -> None:
    measured()
    hooks = dict(_global_optimizer_post_hooks)
    names = []
    for name in interrupted_at_each_function(measured):
        names.append(name)
        torch.set_grad_enabled(True)  # PyTorch's own decorators leave it off
        assert is_as_before(hooks), name
    assert {"Measurement.__enter__", "Measurement.__exit__", "Interrupts.waiting"} <= set(names)


def test_an_interrupt_at_the_end_of_a_block_reaches_the_block_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignore(*which: Any, usual: Callable[..., None] = history.ignore) -> None:
        signal.raise_signal(signal.SIGINT)
        usual(*which)

    with measure(namespace={}) as outer:
        monkeypatch.setattr(history, "ignore", ignore)
        with pytest.raises(KeyboardInterrupt), measure(namespace={}):
            train_once()
        assert history.is_recording()
    assert not outer.report.error and is_as_before({})


def test_an_optimizer_that_was_never_built_does_not_end_the_cell() -> None:
    with pytest.raises(ValueError, match="learning rate") as kept:  # its traceback holds the optimizer
        torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=-1.0)
    assert measured().peak_allocated_bytes > 0
    assert kept.value.__traceback__ is not None
