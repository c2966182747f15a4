"""The driver's answers, and failures of it, without a driver; whose notebook it is."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from oom_magic.measure.device import cards, host
from oom_magic.measure.device.nvml import CardReading, DeviceProcess, name_cards, read_card
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
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": fails,
        "nvmlDeviceGetIndex": lambda _: 1,
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
    assert read_card("abc") == CardReading(12 * GIB, 2 * GIB, processes, "580.00", 61, 170, False, number=1)
    assert name_cards() == ("RTX 3060",)
    assert read_card("unknown", "00000000:01:00.0").total_bytes == 12 * GIB


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetMemoryInfo", "nvmlSystemGetDriverVersion"])
def test_a_failing_driver_is_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**{name: fails}))
    reading = read_card("abc")
    assert reading.total_bytes is None
    assert "Driver Not Loaded" in reading.problem


def test_processes_whose_names_cannot_be_read_are_listed_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def name(pid: int) -> str:
        if pid == 7:  # it ended meanwhile
            fails()
        return b"caf\xe9".decode()

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlSystemGetProcessName=name))
    reading = read_card("abc")
    assert [(one.pid, one.name, one.num_bytes) for one in reading.processes] == [(7, "", GIB), (8, "", None)]
    assert not reading.problem


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


@pytest.mark.parametrize(
    ("visible", "uuid", "expected_gib"),
    [
        ("", "card", 5),  # torch says the card's UUID: CUDA uses the first instance
        ("0", "card", 5),
        ("MIG-two", "card", 10),
        ("MIG-tw", "card", 10),
        ("MIG-two,MIG-one", "card", 10),
        ("", "two", 10),  # torch says the instance's
        ("MIG-two", "unknown", 10),  # found by its PCI address
    ],
)
def test_of_a_divided_card_the_instance_in_use_is_read(
    monkeypatch: pytest.MonkeyPatch, visible: str, uuid: str, expected_gib: int
) -> None:
    sizes = {"GPU-card": 80, "MIG-one": 5, "MIG-two": 10}

    def by_uuid(asked: bytes) -> str:
        return asked.decode() if asked.decode() in sizes else fails()

    def on_card(answer: Any) -> Any:
        return lambda handle, *_: answer if handle == "GPU-card" else fails()

    def instance(card: str, place: int) -> str:
        return {0: "MIG-one", 3: "MIG-two"}[place] if place in (0, 3) else fails()

    answers = {
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetHandleByPciBusId": lambda _: "GPU-card",
        "nvmlDeviceGetMigMode": on_card([1, 1]),
        "nvmlDeviceGetMaxMigDeviceCount": on_card(7),
        "nvmlDeviceGetMigDeviceHandleByIndex": instance,
        "nvmlDeviceGetUUID": lambda handle: handle,
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda one: "GPU-card" if one[:3] == "MIG" else fails(),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=sizes[handle] * GIB, used=GIB),
        "nvmlDeviceGetTemperature": on_card(50),
        "nvmlDeviceGetEnforcedPowerLimit": on_card(300_000),
        "nvmlDeviceGetEccMode": on_card([1, 1]),
    }
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**answers))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    reading = read_card(uuid, "00000000:01:00.0")
    assert (reading.total_bytes, reading.is_instance) == (expected_gib * GIB, True)
    assert (reading.temperature, reading.power_limit_watts, reading.has_ecc) == (50, 300, True)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**{**answers, "nvmlDeviceGetMaxMigDeviceCount": fails}))
    assert read_card("card").total_bytes == 80 * GIB  # no instance may be seen: the card is better than nothing


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
    monkeypatch.setattr(host, "control_groups", lambda: [inner, inner.parent, tmp_path])
    assert host.host_memory() == (64 * GIB, 32 * GIB)
    assert host.num_oom_kills() == 0
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text(f"{12 * GIB}\n")
    (inner.parent / "memory.current").write_text(f"{4 * GIB}\n")
    (inner / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert host.host_memory() == (12 * GIB, 8 * GIB)
    (inner.parent / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\nactive_file 7\n")
    assert host.host_memory() == (12 * GIB, 9 * GIB)  # files that were read give way
    (inner.parent / "memory.max").unlink()
    (inner.parent / "memory.current").unlink()
    (inner.parent / "memory.limit_in_bytes").write_text(f"{10 * GIB}\n")  # version 1
    (inner.parent / "memory.usage_in_bytes").write_text(f"{4 * GIB}\n")
    (inner.parent / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {2 * GIB}\n")
    assert host.host_memory() == (10 * GIB, 8 * GIB)
    assert host.num_oom_kills() == 2


def test_control_groups_are_those_of_the_process() -> None:
    for folder in host.control_groups():
        assert folder == host.CGROUPS or host.CGROUPS in folder.parents


@pytest.mark.parametrize(("used", "others"), [(11 * GIB, 11 * GIB), (None, 12 * GIB)])
def test_a_card_without_room_for_a_context_is_read_from_its_driver(
    used: int | None, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's own reading fails where other processes have filled the card, which is what is to be explained."""
    properties = SimpleNamespace(name="RTX 3060", total_memory=12 * GIB, major=8, minor=6)

    def mem_get_info(index: int) -> tuple[int, int]:
        raise RuntimeError("CUDA error: out of memory")

    reading = CardReading(12 * GIB, used, (DeviceProcess(7, "train", others),))
    monkeypatch.setattr(cards, "driver_reading", lambda index: reading)
    answers = {"get_device_properties": lambda index: properties, "mem_get_info": mem_get_info}
    for name, answer in {**answers, "memory_reserved": lambda index: 0}.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    device = cards.current_device(0)
    assert (device.total_bytes, device.context_bytes, device.other_bytes) == (12 * GIB, 0, others)
