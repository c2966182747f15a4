"""``%%gpumem`` on a CUDA device, real or stub: peaks as torch counts them, errors after the report."""

from __future__ import annotations

import signal

import pytest

pytestmark = pytest.mark.gpu

TRAIN = """%%gpumem --no-plot -o report
import torch
torch.cuda.reset_peak_memory_stats()
model = torch.nn.Linear(4096, 4096, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
def train(rows):
    model(torch.randn(rows, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
train(64)
"""


def test_peaks_are_those_of_torchs_counters(shell) -> None:
    import torch

    assert shell.run_cell(TRAIN, store_history=True).success
    report = shell.user_ns["report"]
    assert report.source == "measured"
    assert report.peak_allocated_bytes == torch.cuda.max_memory_allocated()
    assert {"model", "optimizer"} <= {holder.name for holder in report.holders}
    assert not {"exit", "quit"} & {holder.name for holder in report.holders}


def test_failure_comes_after_the_report_and_once(shell, capsys) -> None:
    import torch

    shell.run_cell(TRAIN, store_history=True)
    capsys.readouterr()
    result = shell.run_cell("%gpumem --no-plot train(10**9)", store_history=True)
    assert isinstance(result.error_in_exec, torch.OutOfMemoryError)
    assert "Out of memory" in shell.display_pub.outputs[-1]["data"]["text/plain"]
    assert capsys.readouterr().out.count("OutOfMemoryError: CUDA out of memory. Tried") == 1


def test_an_interrupt_of_the_set_up_is_one_line(shell, capsys, monkeypatch) -> None:
    from oom_magic.measure import measurement

    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(measurement, "find_owners", interrupted)
    result = shell.run_cell(TRAIN, store_history=True)
    signal.signal(signal.SIGINT, usual)
    shown = capsys.readouterr().out
    assert isinstance(result.error_in_exec, KeyboardInterrupt) and "Traceback" not in shown
    assert "KeyboardInterrupt: interrupted at the beginning." in shown and "report" not in shell.user_ns


def test_repeated_cells_do_not_grow_memory(shell) -> None:
    import torch

    shell.run_cell(TRAIN, store_history=True)
    levels = []
    for _ in range(4):
        shell.run_cell("%gpumem --no-plot train(64)", store_history=True)
        levels.append(torch.cuda.memory_allocated())
    assert len(set(levels[1:])) == 1


def test_tensors_with_a_class_of_their_own_are_not_asked(shell, capsys) -> None:
    """Code of the user's would run at every cell, and parameters without a size yet refuse."""
    shell.run_cell(_OWN_CLASSES, store_history=True)
    capsys.readouterr()
    assert shell.run_cell("%%gpumem --no-plot\n" + "step()", store_history=True).success
    assert len(shell.user_ns["mode"].asked) == shell.user_ns["mode"].of_a_step()
    shell.run_cell("mode.__exit__(None, None, None)")
    assert shell.run_cell("torch.empty(1 << 40, device='cuda')", store_history=True).error_in_exec is not None
    assert shell.run_cell("%oom_explain --fast", store_history=True).success
    shown = capsys.readouterr()
    assert "Error in callback" not in shown.out + shown.err and shell.user_ns["asked"] == []


_OWN_CLASSES = """
import torch
asked = []
class Asking(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        asked.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})
own = torch.ones(4, device="cuda").as_subclass(Asking)
waiting = torch.nn.LazyLinear(4).cuda()
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
def step():
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
class Mode(torch.overrides.TorchFunctionMode):
    asked = []
    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.asked.append(function)
        return function(*args, **(kwargs or {}))
    def of_a_step(self):
        self.asked.clear()
        step()
        return len(self.asked)
mode = Mode()
mode.__enter__()
step(), asked.clear(), mode.asked.clear()
"""


def test_watching(shell) -> None:
    shell.run_cell("%gpumem_watch --every 0.1")
    shell.run_cell("import time; time.sleep(0.35)")
    shell.run_cell("%gpumem_watch stop")
    assert "now" in shell.display_pub.outputs[0]["data"]["text/plain"]
    assert len(shell.display_pub.outputs) >= 2
