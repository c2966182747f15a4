"""Measure device_programs and cuDNN on a physical GPU: python tests/data/record_device.py; writes device_NAME.json.

Of each program: the peaks of PyTorch's counters in bytes, and the MiB that its process had in use beside them (NVML).
device_h200.json was put together from the figures of a longer script, which ran the dry runs beside them.
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pynvml
import torch
from record_cudnn import convolutions, recurrent_layers

from tests.programs.device_programs import PROGRAMS

LIBRARIES = (
    "torch",
    "transformers",
    "peft",
    "timm",
    "torchvision",
    "lightning",
    "torch_geometric",
    "gpytorch",
    "bitsandbytes",
)
MIB = 2**20
AT_ONCE = 6  # of the programs


def outside_mib() -> int:
    """What this process has on the card beside what PyTorch reserved."""
    pynvml.nvmlInit()
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    used = next((one.usedGpuMemory for one in processes if one.pid == os.getpid()), None) or 0
    return int(max(used - torch.cuda.memory_reserved(), 0) // MIB)


def context() -> int:
    """What a process has outside that ran nothing."""
    torch.zeros(1, device="cuda")
    return outside_mib()


def measure(name: str) -> list[int]:
    """Peak allocated, peak reserved, outside."""
    PROGRAMS[name](lambda: None)
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), outside_mib()]


def result(future: Future[list[int]]) -> list[int] | str:
    """The figures, or what was raised."""
    return future.result() if future.exception() is None else repr(future.exception())


def main() -> None:
    """Write the table, each program in a process of its own, a row on a line."""
    with ProcessPoolExecutor(AT_ONCE, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        empty, running = pool.submit(context), {name: pool.submit(measure, name) for name in PROGRAMS}
        programs = {name: result(future) for name, future in running.items()}
    device = torch.cuda.get_device_name()
    versions: dict[str, Any] = {library: importlib.metadata.version(library) for library in LIBRARIES}
    head = {
        "device": device,
        "versions": {**versions, "cudnn": torch.backends.cudnn.version()},
        "context_mib": empty.result(),
    }
    tables = {"convolutions": list(convolutions()), "recurrent": list(recurrent_layers())}
    parts = [json.dumps(head, indent=1)[:-2]]
    parts.append(
        ' "programs": {\n' + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in programs.items()) + "\n }"
    )
    parts += [
        f' "{name}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]" for name, rows in tables.items()
    ]
    file = f"device_{device.removeprefix('NVIDIA ').split()[0].lower()}.json"
    Path(__file__).with_name(file).write_text(",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
