"""Record what torch's memory history says of small cells, for tests without a GPU.

Run with a CUDA device, real or stub, from the root: ``python tests/data/record_snapshots.py``. It writes
tests/data/snapshots/<cell>.json: the snapshots that ``measure`` read, what it noted about owners and steps,
torch's counters, and the versions. Folders of libraries are written as ``<libraries>`` and ``<python>``.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from oom_magic.measure import measurement
from oom_magic.measure.history import recording as history
from oom_magic.measure.history.assembly import Assembler
from oom_magic.measure.history.attribution import Owner
from oom_magic.measure.history.recording import AllocatorState
from oom_magic.memory.allocator.settings import AllocatorSettings

OUT = Path(__file__).parent / "snapshots"
CELL_FILE = "/tmp/ipykernel_7/1234567.py"
CELLS = {
    "training": """\
model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    batch = torch.randn(1024, 512).to("cuda")
    output = model(batch)
    loss = output.float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "checkpointing": """\
from torch.utils.checkpoint import checkpoint
part = nn.Sequential(nn.Linear(256, 4096), nn.GELU(), nn.Linear(4096, 256)).to("cuda")
x = torch.randn(512, 256, device="cuda", requires_grad=True)
y = checkpoint(part, x, use_reentrant=False)
y.sum().backward()
""",
    "out_of_memory": """\
held = [torch.empty(2**28, device="cuda") for _ in range(3)]
held.pop(1)
torch.cuda.empty_cache()
half = torch.empty(2**27 + 1000, device="cuda")
more = torch.empty(2**38, device="cuda")
""",
    "unsplit_blocks": """\
for mebibytes in (12, 30, 21):
    x = torch.empty(mebibytes * 2**20, dtype=torch.uint8, device="cuda")
    del x
y = [torch.empty(n * 2**20 + 2**19, dtype=torch.uint8, device="cuda") for n in (11, 20, 29, 5, 3)]
""",
}


class _Recorder(Assembler):
    """An assembler that keeps what it was given."""

    given: dict[str, Any]

    def __init__(self, state: AllocatorState, count: int, settings: AllocatorSettings) -> None:
        type(self).given = {"state": asdict(state), "count": count, "notes": [], "settings": asdict(settings)}
        super().__init__(state, count, settings)

    def note(self, at_event: int, owners: Mapping[int, Owner], *, ends_step: bool = False) -> None:
        plain = [[address, category.value, path] for address, (category, path) in owners.items()]
        self.given["notes"].append([at_event, plain, ends_step])
        super().note(at_event, owners, ends_step=ends_step)


def record(cell: str) -> dict[str, Any]:
    """Measure one cell; returns what is to be written."""
    taken: list[dict[str, Any]] = []
    names = {"torch": torch, "nn": torch.nn}  # alive until the counters are read
    snapshot = torch.cuda.memory._snapshot

    def keep(device: int) -> dict[str, Any]:
        taken.append(snapshot(device))
        return taken[-1]

    linecache.cache[CELL_FILE] = (len(cell), None, cell.splitlines(keepends=True), CELL_FILE)
    torch.cuda.memory._snapshot = keep
    measurement.Assembler = _Recorder
    with contextlib.suppress(torch.OutOfMemoryError), measurement.measure() as measured:
        exec(compile(cell, CELL_FILE, "exec"), names)
    torch.cuda.memory._snapshot = snapshot
    frames, segments, trace = _pack(taken[-1])
    return {
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(),
        "cell": cell,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "num_events": history.count_events(0) - _Recorder.given["count"],
        "breakdown": measured.report.breakdown.to_dict(),
        "given": _Recorder.given,
        "frames": frames,
        "segments": segments,
        "trace": trace,
    }


def _pack(snapshot: dict[str, Any]) -> tuple[list[list[Any]], list[dict[str, Any]], list[list[Any]]]:
    """Frames once each, segments and trace entries (action, address, bytes, stream, numbers of frames)."""
    frames: dict[tuple[Any, ...], int] = {}
    trace = []
    for entry in snapshot["device_traces"][0]:
        stack = []
        for frame in entry["frames"]:
            key = (_portable(frame["filename"]), frame["line"], frame["name"])
            stack.append(frames.setdefault(key, len(frames)))
        trace.append([entry["action"], entry.get("addr", 0), entry["size"], entry["stream"], stack])
    kept, of_block = ("device", "address", "total_size", "stream"), ("size", "requested_size", "state")
    segments = [
        {
            **{name: segment[name] for name in kept},
            "blocks": [{name: block[name] for name in of_block} for block in segment["blocks"]],
        }
        for segment in snapshot["segments"]
    ]
    return [list(key) for key in frames], segments, trace


def _portable(file: str) -> str:
    for name, kind in (("<libraries>", "purelib"), ("<python>", "stdlib")):
        folder = sysconfig.get_path(kind)
        if file.startswith(folder + "/"):
            return name + file[len(folder) :]
    return file if file == CELL_FILE else Path(file).name


if __name__ == "__main__":
    import os
    import subprocess
    import sys

    if len(sys.argv) == 2:
        OUT.mkdir(exist_ok=True)
        recorded = record(CELLS[sys.argv[1]])
        (OUT / f"{sys.argv[1]}.json").write_text(json.dumps(recorded, separators=(",", ":")) + "\n")
    else:  # a fresh process for each, so that nothing is cached before it
        for name in CELLS:
            subprocess.run([sys.executable, __file__, name], check=True, env=os.environ)
