"""Measure library_cases.py on CUDA: python tests/data/record_libraries.py, where torch sees a device.

Each case runs three steps in a process of its own; each step's peaks go to libraries_truth.json beside this file. On
stub libraries that compute nothing, a module ``values`` on PYTHONPATH keeps the values of masks (see its README).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from library_cases import CASES, write_models
from torch.optim.optimizer import register_optimizer_step_post_hook

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")


class Finished(BaseException):
    """Three steps are done."""


def measure(name: str, folder: Path) -> list[list[int]]:
    """Peak allocated and reserved bytes of each step; a step ends when an optimizer has stepped more often than any."""
    steps: list[list[int]] = []
    counts: dict[int, int] = {}

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        counts[id(optimizer)] = counts.get(id(optimizer), 0) + 1
        if counts[id(optimizer)] > len(steps):
            steps.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
            torch.cuda.reset_peak_memory_stats()
            if len(steps) == 3:
                raise Finished

    register_optimizer_step_post_hook(after)
    with contextlib.suppress(Finished), known_values():
        CASES[name](folder)
    return steps


def known_values() -> Any:
    """The stub's shadows of small tensors, outside the backward; nothing on a real GPU."""
    try:
        import values
    except ImportError:
        return contextlib.nullcontext()
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    def get_default_device() -> torch.device:
        modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
        return modes[-1].device if modes else torch.device("cpu")

    def backward(*args: Any, **kwargs: Any) -> None:
        with values.off():
            usual(*args, **kwargs)

    usual, torch.autograd.backward = torch.autograd.backward, backward
    torch.get_default_device = get_default_device  # it asks torch.tensor, which the shadows replace
    return values.Values()


def main() -> None:
    """Write the table."""
    versions = {name: importlib.metadata.version(name).partition("+")[0] for name in LIBRARIES}
    found: dict[str, Any] = {"versions": versions, "device": torch.cuda.get_device_name(), "steps": {}}
    environment = {**os.environ, "HF_DEACTIVATE_ASYNC_LOAD": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), weights=True)
        for name in CASES:
            command = [sys.executable, __file__, name, folder]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{name}: {done.stderr}")
            found["steps"][name] = json.loads(done.stdout.splitlines()[-1])
    rows = [f'  "{name}": {json.dumps(steps)}' for name, steps in found.pop("steps").items()]
    head = json.dumps(found)[:-1]
    text = f'{head}, "steps": {{\n' + ",\n".join(rows) + "\n}}\n"
    Path(__file__).with_name("libraries_truth.json").write_text(text)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
    else:
        main()
