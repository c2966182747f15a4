"""The driver's answers and the system check, without a driver."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import oom_magic as om
from oom_magic.measure import host
from oom_magic.measure.advice import advise, recommend
from oom_magic.measure.device import Card
from oom_magic.measure.nvml import CardReading, DeviceProcess, read_card
from oom_magic.memory.report import Device
from oom_magic.units import GIB, MIB

WELL: dict[str, Any] = {
    "platform": "Linux",
    "torch_build": "cuda 13.0",
    "host_available_bytes": 16 * GIB,
    "shared_memory_bytes": 8 * GIB,
    "disk_free_bytes": 100 * GIB,
    "cards": (Card(0, Device("RTX 3060", 12 * GIB, 300 * MIB, 0, (8, 6)), 0, (), "580.0", ""),),
    "settings": (),
}


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
    assert read_card("abc") == CardReading(12 * GIB, 2 * GIB, processes, "580.00")
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


def test_processes_that_may_not_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = fake_nvml(nvmlDeviceGetComputeRunningProcesses=fails, nvmlSystemGetProcessName=fails)
    monkeypatch.setitem(sys.modules, "pynvml", hidden)
    assert read_card("abc").processes == (DeviceProcess(7, "", GIB),)


def test_nothing_to_change_on_a_good_system() -> None:
    assert advise(**WELL) == ()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"cards": ()}, "no GPU"),
        ({"cards": (), "torch_build": "CPU only"}, "CPU build"),
        ({"platform": "WSL"}, "Sysmem Fallback"),
        ({"host_available_bytes": GIB}, "host memory"),
        ({"shared_memory_bytes": 64 * MIB}, "--shm-size"),
        ({"disk_free_bytes": GIB}, "disk"),
        ({"settings": (("CUDA_LAUNCH_BLOCKING", "1"),)}, "CUDA_LAUNCH_BLOCKING"),
        ({"settings": (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)}, "unset"),
        ({"settings": (("PYTORCH_ALLOC_CONF", "a"), ("PYTORCH_CUDA_ALLOC_CONF", "b"))}, "keep one"),
        ({"cards": (Card(0, Device("A", 12 * GIB, 0, GIB), 0, (), "", ""),)}, "Other processes"),
        ({"cards": (Card(0, Device("A", 12 * GIB), 0, (), "", "no library"),)}, "no library"),
    ],
)
def test_advice(change: dict[str, Any], expected: str) -> None:
    (sentence,) = advise(**{**WELL, **change})
    assert expected in sentence


def test_a_recommended_configuration_is_code() -> None:
    for platform, capability in (("Linux", (8, 6)), ("Colab", (7, 5)), ("WSL", (8, 9))):
        code = recommend(platform, [Device("card", 12 * GIB, capability=capability)])
        compile(code, "recommended", "exec")
        assert ("expandable_segments" in code) == (platform != "WSL")
        assert ('bfloat16"' in code or "torch.bfloat16" in code) == (capability >= (8, 0))
    compile(recommend("Linux", []), "recommended", "exec")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({"COLAB_RELEASE_TAG": "x"}, "Colab"), ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "Kaggle")],
)
def test_whose_notebook_it_is(environment: dict[str, str], expected: str) -> None:
    assert host.notebook_platform(environment) == expected


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_meminfo", lambda: {"MemTotal": 64 * GIB, "MemAvailable": 32 * GIB})
    numbers = {host._CGROUP_LIMITS: 12 * GIB, host._CGROUP_USES: 4 * GIB}
    monkeypatch.setattr(host, "_first_number", numbers.get)
    assert host.host_memory() == (12 * GIB, 8 * GIB)
    numbers[host._CGROUP_LIMITS] = None
    assert host.host_memory() == (64 * GIB, 32 * GIB)


def test_doctor_works_anywhere() -> None:
    check = om.doctor()
    assert check.host_total_bytes is None or check.host_total_bytes > GIB
    json.dumps(check.to_dict())
    assert check.torch_version in str(check)
    assert all(len(line) <= 80 for line in str(check).splitlines() if not line.startswith("    "))
