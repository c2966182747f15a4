"""An interrupt of a magic, a function or a cell's callbacks ends in one line, and none is lost."""

from __future__ import annotations

import gc
import signal
from typing import Any

import pytest
import torch

from oom_magic.explain import doctor
from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.measure.device import cards
from oom_magic.measure.holders import release
from oom_magic.notebook.cells import hints
from oom_magic.notebook.monitor import Monitor
from oom_magic.predict.isolation.live_objects import heap_set_aside
from oom_magic.predict.session import DrySession


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "line",
    [
        "%%gpumem --no-plot\ninterrupted()",
        "%oom_explain",
        "om.sliders(interrupted_at, rows=(1, 4))",
        "om.size(interrupted_at, rows=(1, 4))",
        "om.dry_run(interrupted)",
        "%oom_doctor",
        "%oom_free",
        "om.release()",
        "%gpumem_watch",
        "%gpumem_watch stop",
    ],
    ids=["gpumem", "explain", "sliders", "size", "dry_run", "doctor", "free", "release", "watch", "stop"],
)
def test_an_interrupt_ends_in_one_line(shell: Any, line: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("oom_magic.notebook.magics.has_gpu", lambda: False)
    shell.run_cell(
        "import torch, oom_magic as om\n"
        "def interrupted():\n    torch.ones(3, device='cuda')\n    raise KeyboardInterrupt\n"
        "def interrupted_at(rows):\n    interrupted()\n",
        store_history=True,
    )

    def at_once(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "check_system", at_once)
    monkeypatch.setattr(release, "make_locate", at_once)
    monkeypatch.setattr(Monitor, "start", at_once)
    if line == "%gpumem_watch stop":
        monitor = shell.magics_manager.registry["OOMMagics"].monitor = Monitor(None, 1.0)
        waits: list[Any] = [list, at_once]  # the second is for the end of this test
        monkeypatch.setattr(monitor, "stop", lambda: waits.pop()())
    if line == "%oom_explain":
        failing = "%%gpumem --no-plot --memory 1GiB\nbatch_size = 2\ntorch.ones(batch_size, 2**30, device='cuda')"
        shell.run_cell(failing, store_history=True)
        monkeypatch.setattr(CellRehearsal, "begin", at_once)
    capsys.readouterr()
    result = shell.run_cell(line, store_history=True)
    shown = capsys.readouterr()
    said = [text for text in (shown.out + shown.err).splitlines() if "nterrupt" in text]
    assert len(said) == 1, shown
    assert "Traceback" not in shown.out + shown.err
    if line != "%oom_explain":
        assert isinstance(result.error_in_exec, KeyboardInterrupt)
        is_release = line in ("%oom_free", "om.release()")
        assert ("run it again for the rest" if is_release else "none of your variables or files changed") in said[0]
        assert "Cell In[1]:4" in said[0] or is_release or line.startswith(("%oom_doctor", "%gpumem_watch"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "line", ["om.size(train, rows=(1, 4))", "om.sliders(train, rows=(1, 4))", "om.dry_run(train, 1)"]
)
def test_an_interrupt_of_what_is_being_shown_ends_in_one_line(
    shell: Any, line: str, capsys: Any, monkeypatch: Any
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    shell.run_cell(
        "import torch, oom_magic as om\ndef train(rows): torch.ones(rows, device='cuda')", store_history=True
    )
    for owner in ("results.Result", "notebook.sliders.controller.Sliders"):
        monkeypatch.setattr(f"oom_magic.{owner}.describe", interrupted)
    monkeypatch.setattr("oom_magic.views.report.describe_report", interrupted)
    result = shell.run_cell(line, store_history=True)
    shown = capsys.readouterr()
    assert isinstance(result.error_in_exec, KeyboardInterrupt) and "Traceback" not in shown.out + shown.err
    assert "KeyboardInterrupt: interrupted; none of your variables or files changed.\n" in shown.out + shown.err


@pytest.mark.parametrize(
    ("owner", "name", "says"),
    [(cards, "is_available", "before the cell began; it did not run"), (hints, "text_of", "after the cell had run")],
)
def test_an_interrupt_in_a_callback_of_cells_waits_for_its_end_and_ends_the_cell(
    shell: Any, capsys: Any, monkeypatch: Any, owner: Any, name: str, says: str
) -> None:
    done: list[str] = []

    def interrupts(*_: Any) -> str:
        signal.raise_signal(signal.SIGINT)
        done.append(name)
        return ""

    monkeypatch.setattr(hints, "is_out_of_memory", lambda _error: True)
    shell.run_cell("import torch")
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(owner, name, interrupts)
    try:
        capsys.readouterr()
        result = shell.run_cell("kept = 1\nraise MemoryError", store_history=True)
    finally:
        signal.signal(signal.SIGINT, usual)
    monkeypatch.undo()
    shown = capsys.readouterr().out
    assert done == [name] and not result.success
    assert shown.count(f"KeyboardInterrupt: interrupted {says}.\n") == 1 and "Error in callback" not in shown
    assert "oom_magic/" not in shown and shown.count("Traceback") == ("after" in says)  # the cell's
    assert ("kept" in shell.user_ns) == ("after" in says)
    assert shell.run_cell("kept = 2").success and shell.user_ns["kept"] == 2


class _Interrupting:
    """Interrupts when the collector takes it away: what a finalizer raises is lost."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("begins", ["what is asked about many sizes", "a card with something on it"])
def test_an_interrupt_is_not_lost_in_a_finalizer(begins: str) -> None:
    session, kept = DrySession(has_bar=False), []
    session.run(lambda: kept.append(torch.ones(3, device="cuda")))
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    gc.disable()
    try:
        _Interrupting()
        with pytest.raises(KeyboardInterrupt):
            if "sizes" in begins:
                with heap_set_aside():
                    pass
            else:
                session.run(lambda: None)
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, usual)
