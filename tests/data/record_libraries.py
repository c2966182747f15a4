"""Measure library_cases.py and other_library_cases.py on CUDA: python tests/data/record_libraries.py, where torch sees a device.

Each case runs three steps in a process of its own; each step's peaks go to libraries_truth.json or, of the other cases,
to other_libraries_truth.json beside this file; what is not installed keeps what was recorded before. On
stub libraries that compute nothing, a module ``values`` on PYTHONPATH keeps the values of masks (see its README).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.programs import other_library_cases
from tests.programs.library_cases import CASES, write_models
from tests.support.versions import installed_version

DRAWN = 7  # of other_library_cases.tokenizer's words
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
        {**CASES, **other_library_cases.CASES}[name](folder)
    return steps


def known_values() -> Any:
    """The stub's shadows of small tensors, outside the backward; nothing on a real GPU.

    What is drawn is known, too, as a word that ends nothing: else no text that a model writes would ever end; and no
    number is none.
    """
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

    class Known(values.Values):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = super().__torch_dispatch__(func, types, args, kwargs)
            for operator, value in ((torch.ops.aten.multinomial, DRAWN), (torch.ops.aten.isnan, False)):
                if func.overloadpacket is operator and found.is_cuda:
                    self.put(found, torch.full(found.shape, value))
            return found

    usual, torch.autograd.backward = torch.autograd.backward, backward
    torch.get_default_device = get_default_device  # it asks torch.tensor, which the shadows replace
    return Known()


def run(name: str, folder: str) -> list[list[int]]:
    """``measure`` in a process of its own. Ends this one, with what was said, where that fails."""
    environment = {**os.environ, "HF_DEACTIVATE_ASYNC_LOAD": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, name, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")
    steps: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return steps


def write(table: str, found: dict[str, Any], key: str) -> None:
    """The table, a line for each case."""
    rows = [f'  "{name}": {json.dumps(row)}' for name, row in found.pop(key).items()]
    text = f'{json.dumps(found)[:-1]}, "{key}": {{\n' + ",\n".join(rows) + "\n}}\n"
    Path(__file__).with_name(table).write_text(text)


def main() -> None:
    """Write both tables."""
    device = torch.cuda.get_device_name()
    versions = {name: installed_version(name) for name in LIBRARIES}
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), weights=True)
        steps = {name: run(name, folder) for name in CASES}
    write("libraries_truth.json", {"versions": versions, "device": device, "steps": steps}, "steps")
    table = Path(__file__).with_name("other_libraries_truth.json")
    cases = json.loads(table.read_text())["cases"] if table.exists() else {}
    for case, needs in other_library_cases.NEEDS.items():
        versions = {name: installed_version(name) for name in ("torch", *needs)}
        if "not installed" not in {versions[name] for name in needs if name != "triton"}:
            with tempfile.TemporaryDirectory() as folder:
                cases[case.__name__] = {"versions": versions, "steps": run(case.__name__, folder)}
    write(table.name, {"device": device, "cases": cases}, "cases")


def recorded() -> list[str]:
    """The other libraries as pip is asked for them, but those that need a CUDA build of torchvision."""
    cases = json.loads(Path(__file__).with_name("other_libraries_truth.json").read_text())["cases"].values()
    found = {
        name: made for case in cases if "torchvision" not in case["versions"] for name, made in case["versions"].items()
    }
    return sorted(f"{name}=={made}" for name, made in found.items() if made != "not installed")


if __name__ == "__main__":
    if sys.argv[1:] == ["--versions"]:
        print(*recorded())
    elif len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
    else:
        main()
