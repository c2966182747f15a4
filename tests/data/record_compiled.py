"""Measure compiled_cases.json on CUDA (A100 80GB): python tests/data/record_compiled.py; it writes compiled_truth.json.

Every case runs in a process of its own with empty caches: what Inductor has timed before takes no memory again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))


def measure(case: dict[str, object]) -> list[list[int]]:
    """Peak allocated, peak reserved and allocated bytes after each step."""
    import torch

    from tests.programs.compiled_cases import train
    from tests.programs.compiled_models import PROGRAMS

    steps: list[list[int]] = []

    def on_step(_: int) -> None:
        cuda = torch.cuda
        steps.append([cuda.max_memory_allocated(), cuda.max_memory_reserved(), cuda.memory_allocated()])
        cuda.reset_peak_memory_stats()

    if case.get("processes"):
        _as_first_of(int(str(case["processes"])))
    if case.get("program"):
        PROGRAMS[str(case["name"])](on_step)
    else:
        train(case, on_step)
    return steps


def _as_first_of(processes: int) -> None:
    """This process is rank 0 of so many; what the others would send has no effect on memory (FAKECUDA_COPY_MAX_KIB=64)."""
    import torch.distributed as dist

    begin = dist.init_process_group
    begin("nccl", store=dist.HashStore(), rank=0, world_size=processes)
    dist.init_process_group = lambda *_: None
    dist._verify_params_across_processes = lambda *_, **__: None


def main() -> None:
    """Write the table; cases named on the command line only, if any are."""
    path = HERE / "compiled_truth.json"
    found = json.loads(path.read_text()) if path.exists() else {"steps": {}}
    for case in json.loads((HERE / "compiled_cases.json").read_text()):
        if sys.argv[1:] and case["name"] not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as caches:
            environment = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
            done = subprocess.run(
                [sys.executable, __file__, "--one", json.dumps(case)],
                env={**os.environ, **environment}, capture_output=True, text=True,
            )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("@@")]
        if not lines:
            print(case["name"], "failed:", done.stderr[-300:])
            continue
        found["torch"], found["steps"][case["name"]] = json.loads(lines[-1][2:])
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(case["name"], found["steps"][case["name"]], flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        import torch

        print("@@" + json.dumps([torch.__version__.partition("+")[0], measure(json.loads(sys.argv[2]))]), flush=True)
        os._exit(0)  # Triton's threads and a stub driver end badly
    main()
