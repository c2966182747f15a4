"""The system check: every probe alone, all together, and the setups that dry runs find for a card."""

from __future__ import annotations

import itertools
import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import oom_magic as om
from oom_magic.explain import doctor as checkup
from oom_magic.explain import doctor as recommendation
from oom_magic.explain.doctor import GLOBAL_BATCH_SIZE, Checkup, Recommendation, recommend
from oom_magic.measure import probes
from oom_magic.measure import system_check as check
from oom_magic.measure.device import host
from oom_magic.measure.device.cards import Card
from oom_magic.measure.device.nvml import CardReading, DeviceProcess
from oom_magic.measure.probes import ProbeResult
from oom_magic.memory.report import Device
from oom_magic.predict.setups.gpus import find_gpu
from oom_magic.predict.setups.hardware import Hardware
from oom_magic.predict.setups.training_code import checkpointing_name
from oom_magic.units import GIB, MIB
from tests.measure.test_measure_device import fails, fake_nvml

SILENT = CardReading()
CARD = Device("RTX 3060", 12 * GIB, 300 * MIB, 0, (8, 6))


def seen_on(device: Device = CARD, reading: CardReading = SILENT, **card: Any) -> ProbeResult:
    known: dict[str, Any] = {"reserved_bytes": 0, "processes": (), "driver_version": "580", "problem": "", **card}
    return probes.probe_card(Card(0, device, **known), reading)


def whats(seen: ProbeResult) -> list[str]:
    return [finding.what for finding in seen.findings]


def test_a_good_card_has_no_findings() -> None:
    seen = seen_on(reading=CardReading(12 * GIB, 300 * MIB, (), "580.00", 61, 170, False, True))
    assert not seen.findings
    rows = dict(seen.rows)
    assert (rows["GPU 0, temperature"], rows["GPU 0, power limit"], rows["GPU 0, ECC"]) == ("61 °C", "170 W", "off")
    assert "one instance" in rows["GPU 0, MIG"]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (lambda: seen_on(Device("A", 12 * GIB, 0, 2 * GIB)), "Other processes hold 2.00 GiB"),
        (lambda: seen_on(problem="nvidia-ml-py is not installed"), "not installed"),
        (lambda: seen_on(reading=CardReading(used_bytes=9 * GIB)), "does not list here"),
        (lambda: seen_on(reading=CardReading(temperature=91)), "91 °C"),
        (lambda: seen_on(reading=CardReading(has_ecc=True)), "error-correcting"),
    ],
)
def test_findings_about_a_card(seen: Any, expected: str) -> None:
    (what,) = whats(seen())
    assert expected in what


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ((), 1.5),  # a container: not even this process is listed; its 6 GiB and its context are known
        ((DeviceProcess(os.getpid(), "python", 6 * GIB),), 2.0),
        ((DeviceProcess(7, "", 1 * GIB),), 0.5),
        ((DeviceProcess(7, "python", None),), 0),  # WSL names them without their sizes
        ((DeviceProcess(os.getpid(), "python", 7 * GIB), DeviceProcess(9, "", GIB)), 0),
    ],
)
def test_only_others_memory_is_hidden(processes: tuple[DeviceProcess, ...], expected: float) -> None:
    reading = CardReading(12 * GIB, 8 * GIB, processes)
    found = whats(seen_on(reading=reading, reserved_bytes=6 * GIB, processes=processes))
    assert found == (
        [f"GPU 0: {expected:.2f} GiB are held by processes that the driver does not list here."] * (expected > 0.5)
    )


def test_memory_of_others_is_named_or_hidden_and_not_both() -> None:
    listed = (DeviceProcess(os.getpid(), "python", 3 * GIB), DeviceProcess(9, "python", GIB))
    reading = CardReading(12 * GIB, 8 * GIB, listed)
    found = whats(seen_on(Device("A", 12 * GIB, 0, 5 * GIB), reading, reserved_bytes=3 * GIB, processes=listed))
    assert found == [
        "Other processes hold 1024.00 MiB of GPU 0.",
        "GPU 0: 4.00 GiB are held by processes that the driver does not list here.",
    ]


@pytest.mark.parametrize(
    ("visible", "order", "numbers", "expected"),
    [
        (None, "", (0, 1), []),
        (None, "", (1, 0), ["torch's GPU 0 (RTX 3060) is nvidia-smi's GPU 1, not 0."]),
        ("1", "PCI_BUS_ID", (1,), []),
        ("1,0", "PCI_BUS_ID", (1, 0), []),
        ("1", "", (0,), ["torch's GPU 0 (RTX 3060) is nvidia-smi's GPU 0, not 1."]),
        ("GPU-8932f937,GPU-aa", "", (1, 0), []),
        ("MIG-8932f937", "", (3,), []),
        ("0,7,1", "", (0,), ["CUDA_VISIBLE_DEVICES lists 3 GPUs; torch sees 1."]),
        (None, "", (None, None), []),
        ("0,0", "", (), []),  # probe_torch says why there is none
    ],
)
def test_numbers_of_the_cards(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, order: str, numbers: tuple[int | None, ...], expected: Any
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    monkeypatch.setattr(probes, "driver_reading", lambda index: CardReading(number=numbers[index]))
    cards = tuple(Card(at, CARD, 0, (), "580", "") for at in range(len(numbers)))
    seen = probes.probe_order(cards)
    assert whats(seen) == expected
    assert len(seen.rows) == sum(number not in (at, None) for at, number in enumerate(numbers))


def test_a_cpu_build_beside_a_card_is_said_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(probes, "torch_build", lambda: "CPU only")
    monkeypatch.setitem(__import__("sys").modules, "pynvml", fake_nvml())
    (finding,) = probes.probe_torch().findings
    assert finding.tone == "bad"
    assert "CPU-only build, although this machine has RTX 3060" in finding.what
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    monkeypatch.setattr(probes, "has_driver", lambda: False)
    (finding,) = probes.probe_torch().findings
    assert "No GPU" in finding.what


def test_why_a_cuda_build_sees_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nUpdate it.")

    def none_left() -> None:
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(probes, "torch_build", lambda: "cuda 13.0")
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert whats(probes.probe_torch()) == [
        "torch sees no GPU: The NVIDIA driver on your system is too old (found version 11040)."
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hides all" in whats(probes.probe_torch())[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    assert "too old" in whats(probes.probe_torch())[0]
    monkeypatch.setattr(torch.cuda, "init", none_left)
    assert whats(probes.probe_torch()) == ['torch sees no GPU: CUDA_VISIBLE_DEVICES="0,0" hides all GPUs.']


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, ["CUDA_LAUNCH_BLOCKING=1"]),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, ["PYTORCH_NO_CUDA_MEMORY_CACHING"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, []),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segment:True"}, ["is not an option"]),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64"},
            ["expandable_segments and max_split_size_mb"],
        ),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, []),
    ],
)
def test_settings(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: list[str]) -> None:
    monkeypatch.setattr(probes, "was_set_at_start", lambda _: True)
    seen = probes.probe_settings(environment)
    assert dict(seen.rows) == environment
    assert len(seen.findings) == len(expected)
    assert all(text in what for text, what in zip(expected, whats(seen), strict=True))


def test_settings_that_contradict_or_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    monkeypatch.setattr(probes, "was_set_at_start", lambda _: True)
    assert "Both" in whats(probes.probe_settings(both))[0]
    monkeypatch.undo()
    late = probes.probe_settings({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert ("after this kernel started" in str(whats(late))) == probes.Path("/proc/self/environ").exists()


def test_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "host_memory", lambda: (8 * GIB, GIB))
    monkeypatch.setattr(host, "meminfo", lambda: {"MemTotal": 64 * GIB, "SwapTotal": 0, "SwapFree": 0})
    monkeypatch.setattr(host, "shared_memory_bytes", lambda: 64 * MIB)
    monkeypatch.setattr(host, "disk_free_bytes", lambda: GIB)
    monkeypatch.setattr(host, "num_oom_kills", lambda: 2)
    memory = probes.probe_memory()
    assert ("container limit", "8.00 GiB of the machine's 64.00 GiB") in memory.rows
    findings = [*whats(memory), *whats(probes.probe_shared_memory()), *whats(probes.probe_disk())]
    findings += whats(probes.probe_kills())
    assert [text.split()[0] for text in findings] == ["Only", "/dev/shm", "Only", "The"]


def test_versions_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"transformers": "4.57.1", "peft": "0.17.0", "accelerate": "1.2", "bitsandbytes": "0.45.0.dev0"}
    monkeypatch.setattr(probes, "version", versions.__getitem__)
    assert whats(probes.probe_packages()) == [
        "transformers 4.57.1 is older than 5.0.",
        "bitsandbytes 0.45.0.dev0 is older than 0.46.1.",
    ]


def test_every_probe_may_fail_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = om.doctor()
    assert not whole.failed
    names = [name for name in vars(check) if name.startswith("probe_")]
    for name in names:
        with monkeypatch.context() as patched:
            patched.setattr(check, name, fails)
            one_less = om.doctor()
        if name != "probe_card":
            assert [reason for _, reason in one_less.failed] == ["FakeError: Driver Not Loaded"]
        assert dict(one_less.facts).keys() <= dict(whole.facts).keys()
        assert "Not checked" in str(one_less) or name == "probe_card"


def test_doctor_works_anywhere() -> None:
    found = om.doctor()
    json.dumps(found.to_dict())
    text = str(found)
    assert found.torch_version in text
    assert all(len(line) <= 80 for line in text.splitlines())
    html = found._repr_mimebundle_()["text/html"]
    assert all(name in html for name, _ in found.facts)


def fake_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Dry runs by arithmetic: the search is tested, not the engine."""
    runs: list[tuple[Any, ...]] = []

    def untraced_sizes(setup: om.TrainingSetup, **_: Any) -> Any:
        checkpointing, total = setup.activation_checkpointing, Hardware.of(setup.gpu, setup.memory).total_bytes

        def report_of_run(microbatch_size: int, seq_len: int) -> Any:
            runs.append((seq_len, setup.method, microbatch_size, checkpointing))
            weights = {"full": 30, "lora": 15, "qlora": 6}[setup.method] * GIB
            needed = weights + seq_len * microbatch_size * (MIB if checkpointing else 4 * MIB)
            return SimpleNamespace(verdict="tight" if needed > 0.8 * total else "safe", peak_reserved_bytes=GIB)

        parallel = SimpleNamespace(in_parallel=lambda **_: nullcontext())
        return SimpleNamespace(report_of_run=report_of_run, expect=list, runs=parallel)

    monkeypatch.setattr(om.TrainingSetup, "untraced_sizes", untraced_sizes)
    return runs


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("GTX 1650", None),
        ("RTX 3080", (1024, "qlora", 1, True)),
        ("RTX 3060", (1024, "qlora", 2, True)),
        ("RTX 3090", (1024, "lora", 2, True)),
        ("A100 40GB", (1024, "full", 1, True)),
        ("A100 80GB", (1024, "full", 8, False)),
    ],
)
def test_the_search_keeps_length_then_method_then_activations(
    monkeypatch: pytest.MonkeyPatch, gpu: str, expected: Any
) -> None:
    runs = fake_runs(monkeypatch)
    found = recommend("gpt2", gpu).setup
    if expected is None:
        assert found is None
    else:
        assert found is not None
        found_is = (found.seq_len, found.method, found.microbatch_size, found.activation_checkpointing)
        assert found_is == expected
        assert found.global_batch_size == GLOBAL_BATCH_SIZE
    assert len(runs) == len(set(runs)) <= 12


def test_part_of_a_card_gets_setups_of_its_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch)
    part = Device("NVIDIA T4 MIG 1g.40gb", 40 * GIB, 0, 0, (7, 5))
    here = check.SystemCheck((("torch", "2.13"),), (Card(0, part, 0, (), "580", ""),), (), (), "2.13", "cuda 13")
    monkeypatch.setattr(checkup, "check_system", lambda: here)
    found = om.doctor("gpt2")
    assert found.card == part.name
    (setup,) = (one.setup for one in found.recommended)
    assert setup is not None
    assert find_gpu(setup.gpu).capability == part.capability and setup.memory == part.total_bytes
    assert f"Recommended for {part.name}" in str(found)


def test_a_larger_card_never_gets_a_worse_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch)
    found = [recommend("gpt2", "RTX 3060", num_gib * GIB).setup for num_gib in range(4, 97)]
    methods = ("qlora", "lora", "full")
    ranks = [(0, -1) if one is None else (one.seq_len, methods.index(one.method)) for one in found]
    assert ranks == sorted(ranks)
    for smaller, larger in itertools.pairwise(found):
        if smaller is not None and larger is not None and smaller.method == larger.method:
            alike = smaller.activation_checkpointing == larger.activation_checkpointing
            assert larger.microbatch_size >= smaller.microbatch_size or not alike
            assert smaller.activation_checkpointing or not larger.activation_checkpointing


@pytest.mark.slow
def test_setups_found_by_dry_runs_grow_with_the_card() -> None:
    found = [recommend("distilbert-base-uncased", "RTX 3060", memory) for memory in ("1GiB", "4GiB")]
    small, large = (one.setup for one in found)
    assert small is not None and large is not None
    assert (small.method, large.method) == ("lora", "full")
    assert all(one.peak_reserved_bytes + find_gpu("RTX 3060").context_bytes < 0.85 * 4 * GIB for one in found)
    assert large.dry_run(stop_after_steps=2).verdict == "safe"


def test_options_to_paste_name_all_that_the_dry_runs_did() -> None:
    setup = om.TrainingSetup("qwen2.5-7b", method="qlora", precision="amp-bf16", activation_checkpointing=True)
    text = recommendation.training_arguments(setup)
    compile(text, "options", "exec")
    for option in ("bnb_4bit_use_double_quant=True", "dtype=torch.bfloat16", f"{checkpointing_name()}=True", "r=16"):
        assert option in text
    assert setup.code().startswith(text.partition("from transformers import TrainingArguments")[0].rstrip())
    nothing = Checkup(
        (("torch", "2.13.0"),), (), (), (), "", "", recommended=(Recommendation("x", None, 0, 3),), card="T4"
    )
    assert "x: even QLoRA" in str(nothing)


@pytest.mark.slow
def test_what_is_pasted_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    setup = om.TrainingSetup("distilbert-base-uncased", method="lora", microbatch_size=2, seq_len=128)
    setup = setup.replace(precision="amp-bf16", activation_checkpointing=True)

    def pasted() -> None:
        names: dict[str, Any] = {}
        exec(recommendation.training_arguments(setup), names)  # as the user would
        row = {"input_ids": [5] * 128, "attention_mask": [1] * 128, "labels": 0}
        transformers.Trainer(names["model"], names["args"], train_dataset=[row] * 8).train()

    report = om.dry_run(pasted, stop_after_steps=2)
    assert report.verdict == "safe" and len(report.steps) >= 2
    assert report.peak_allocated_bytes == pytest.approx(setup.dry_run().peak_allocated_bytes, rel=0.02)


def test_processes_are_listed() -> None:
    own = DeviceProcess(os.getpid(), "python", GIB)
    card = Card(0, CARD, 0, (DeviceProcess(7, "python", GIB), DeviceProcess(8, "", None), own), "580", "")
    found = check.SystemCheck((("what", "value"),), (card,), (), (("the disk", "no"),), "2.13", "cuda 13")
    assert "Processes on GPU 0" in str(found) and "unknown" in str(found)
    assert "python, this kernel" in str(found)
