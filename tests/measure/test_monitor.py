"""The live monitor without a GPU and on a fake one: what it shows, and that nothing is left of it."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from oom_magic.measure.device import cards as device_memory
from oom_magic.measure.device.cards import MemorySample
from oom_magic.notebook.monitor import Monitor, Record
from oom_magic.units import GIB, MIB
from tests.measure.test_measure_device import fails, fake_nvml

CARD = SimpleNamespace(
    name="RTX 3060", uuid="abc", pci_domain_id=0, pci_bus_id=1, pci_device_id=0, total_memory=12 * GIB
)


def shown(shell: InteractiveShell) -> list[str]:
    return [output["data"]["text/plain"] for output in shell.display_pub.outputs]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gpumem_watch"]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A card whose driver counts how often it is opened and closed; ``used`` can be changed."""
    state: dict[str, Any] = {"open": 0, "used": 2 * GIB}

    def opened(change: int) -> Any:
        return lambda: state.update(open=state["open"] + change)

    def memory(_: Any) -> Any:
        return SimpleNamespace(total=12 * GIB, used=state["used"]) if state["used"] else fails()

    driver = fake_nvml(nvmlInit=opened(1), nvmlShutdown=opened(-1), nvmlDeviceGetMemoryInfo=memory)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: CARD)
    monkeypatch.setattr(device_memory, "allocator_counters", lambda _: (500 * MIB, GIB))
    return state


def test_without_a_gpu_the_host_is_watched(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oom_magic.notebook.magics.has_gpu", lambda: False)
    shell.run_cell("%gpumem_watch --every 0.1")
    time.sleep(0.35)
    shell.run_cell("%gpumem_watch stop")
    assert "host's memory" in shown(shell)[0]
    assert len(shown(shell)) >= 2
    assert not threads()
    count = len(shown(shell))
    time.sleep(0.25)
    assert len(shown(shell)) == count


def test_a_card_is_watched_by_its_driver_and_torchs_counters(card: dict[str, Any], shell: InteractiveShell) -> None:
    monitor = Monitor(0, 0.05)
    monitor.start()
    card["used"] = 11 * GIB
    time.sleep(0.3)
    card["used"] = 0  # it fell off the bus
    time.sleep(0.3)
    monitor.stop()
    first, *_, last = shown(shell)
    for text in ("allocated", "500.00 MiB", "other processes", "1024.00 MiB", "free", "10.00 GiB"):
        assert text in first
    assert "Passed" not in first
    assert "Passed 90 %" in last and "11.00 GiB" in last and "Driver Not Loaded" in " ".join(last.split())
    assert card["open"] == 0


def test_a_lost_card_ends_the_monitor_in_words(
    card: dict[str, Any], shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = Monitor(0, 0.05)
    monitor.start()
    monkeypatch.setattr(device_memory, "allocator_counters", fails)
    (thread,) = threads()
    thread.join(10)
    last = shown(shell)[-1]
    assert "✗ The monitor stopped; this is its last sample: FakeError: Driver Not Loaded." in last
    assert "500.00 MiB" in last
    assert card["open"] == 0


def test_a_terminal_is_told_of_a_full_card_only(
    card: dict[str, Any], shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = Monitor(0, 0.05, can_update=False)
    monitor.start()
    assert "Shown once" in capsys.readouterr().out
    time.sleep(0.3)
    assert len(shown(shell)) == 1
    card["used"] = 11 * GIB
    time.sleep(0.3)
    monitor.stop()
    _, full = shown(shell)
    assert "Passed 90 %" in full


def test_nothing_is_left_after_fifty_starts_and_stops(card: dict[str, Any], shell: InteractiveShell) -> None:
    ghosts = []
    for _ in range(50):
        monitor = Monitor(0, 0.1)
        monitor.start()
        assert card["open"] == len(threads()) == 1
        monitor.stop()
        ghosts.append(weakref.ref(monitor))
    del monitor
    gc.collect()
    assert card["open"] == 0
    assert not threads()
    assert [ghost() for ghost in ghosts] == [None] * 50


def test_a_card_is_said_to_be_nearly_full_once() -> None:
    record = Record("card")
    levels = [5, 11.5, 5, 11.5]
    assert [record.add(MemorySample(12 * GIB, other_bytes=int(level * GIB))) for level in levels] == [
        False,
        True,
        False,
        False,
    ]
    description = record.describe()
    text = str(description)
    assert text.count("Passed 90 %") == 1
    assert "▄█▄█" in text or "▄▇▄▇" in text or "▄█" in text
    assert max(map(len, text.splitlines())) <= 80
    html = description._repr_mimebundle_()["text/html"]
    assert "Passed 90 %" in html and "peak in use" in html
    for _ in range(500):
        record.add(MemorySample(12 * GIB))
    assert max(map(len, str(record.describe()).splitlines())) <= 80


def test_the_extension_ends_its_monitor(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oom_magic.notebook.magics.has_gpu", lambda: False)
    shell.run_cell("%gpumem_watch")
    shell.run_cell("%gpumem_watch")
    assert len(threads()) == 1
    assert threads()[0].daemon
    shell.run_line_magic("unload_ext", "oom_magic")
    assert not threads()


@pytest.mark.parametrize(
    ("line", "says"),
    [("--every 0.01", "use 0.1 or more"), ("now", "invalid choice"), ("--device 3", "no CUDA device 3")],
)
def test_bad_options(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, line: str, says: str) -> None:
    monkeypatch.setattr("oom_magic.notebook.magics.has_gpu", lambda: False)
    assert says in str(shell.run_cell(f"%gpumem_watch {line}").error_in_exec)
    assert not threads()
