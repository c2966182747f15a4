"""The driver's answers, and failures of it, without a driver; whose notebook it is."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from oom_magic.measure import host
from oom_magic.measure.nvml import CardReading, DeviceProcess, name_cards, read_card
from oom_magic.units import GIB


class FakeError(Exception):
    """Stands for pynvml.NVMLError."""


def fake_nvml(**functions: Any) -> ModuleType:
    """A pynvml with one card, two processes (one without a size) and no MIG."""
    module = ModuleType("pynvml")

    def by_uuid(uuid: bytes) -> str:
        if uuid != b"GPU-abc":
            raise FakeError("not found")
        return "card"

    answers: dict[str, Any] = {
        "NVMLError": FakeError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetHandleByPciBusId": lambda address: address,
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=12 * GIB, used=2 * GIB),
        "nvmlSystemGetDriverVersion": lambda: b"580.00",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda _: b"RTX 3060",
        "nvmlDeviceGetTemperature": lambda *_: 61,
        "nvmlDeviceGetEnforcedPowerLimit": lambda _: 170_000,
        "nvmlDeviceGetEccMode": lambda _: [0, 1],
        "nvmlDeviceGetMigMode": fails,
        "nvmlSystemGetProcessName": lambda pid: f"python-{pid}",
        "nvmlDeviceGetComputeRunningProcesses": lambda _: [
            SimpleNamespace(pid=7, usedGpuMemory=GIB),
            SimpleNamespace(pid=8, usedGpuMemory=None),
        ],
        "nvmlDeviceGetGraphicsRunningProcesses": lambda _: [SimpleNamespace(pid=7, usedGpuMemory=GIB)],
        **functions,
    }
    vars(module).update(answers)
    return module


def fails(*_: Any) -> Any:
    raise FakeError("Driver Not Loaded")


def test_a_card_by_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    processes = (DeviceProcess(7, "python-7", GIB), DeviceProcess(8, "python-8", None))
    assert read_card("abc") == CardReading(12 * GIB, 2 * GIB, processes, "580.00", 61, 170, False)
    assert name_cards() == ("RTX 3060",)
    assert read_card("unknown", "00000000:01:00.0").total_bytes == 12 * GIB


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetMemoryInfo", "nvmlSystemGetDriverVersion"])
def test_a_failing_driver_is_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**{name: fails}))
    reading = read_card("abc")
    assert reading.total_bytes is None
    assert "Driver Not Loaded" in reading.problem


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install" in read_card("abc").problem


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("nvmlDeviceGetTemperature", "temperature"),
        ("nvmlDeviceGetEnforcedPowerLimit", "power_limit_watts"),
        ("nvmlDeviceGetEccMode", "has_ecc"),
    ],
)
def test_what_a_card_does_not_know_costs_nothing_else(monkeypatch: pytest.MonkeyPatch, name: str, field: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**{name: fails}))
    reading = read_card("abc")
    assert getattr(reading, field) is None
    assert reading.total_bytes == 12 * GIB


def test_processes_that_may_not_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = fake_nvml(nvmlDeviceGetComputeRunningProcesses=fails, nvmlSystemGetProcessName=fails)
    monkeypatch.setitem(sys.modules, "pynvml", hidden)
    assert read_card("abc").processes == (DeviceProcess(7, "", GIB),)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({"COLAB_RELEASE_TAG": "x"}, "Colab"), ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "Kaggle")],
)
def test_whose_notebook_it_is(environment: dict[str, str], expected: str) -> None:
    assert host.notebook_platform(environment) == expected


def test_limits_of_the_control_groups_around_this_process_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inner = tmp_path / "slice" / "job"
    inner.mkdir(parents=True)
    monkeypatch.setattr(host, "meminfo", lambda: {"MemTotal": 64 * GIB, "MemAvailable": 32 * GIB})
    monkeypatch.setattr(host, "_control_groups", lambda: [inner, inner.parent, tmp_path])
    assert host.host_memory() == (64 * GIB, 32 * GIB)
    assert host.num_oom_kills() == 0
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text(f"{12 * GIB}\n")
    (inner.parent / "memory.current").write_text(f"{4 * GIB}\n")
    (inner / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert host.host_memory() == (12 * GIB, 8 * GIB)
    assert host.num_oom_kills() == 2


def test_control_groups_are_those_of_the_process() -> None:
    for folder in host._control_groups():
        assert folder == host._CGROUPS or host._CGROUPS in folder.parents
