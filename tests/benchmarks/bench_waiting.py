"""What a user waits for, first and the second time: ``python tests/benchmarks/bench_waiting.py [FOLDER]``.

Each row is measured in a process of its own, by the clock and (in brackets) in seconds of computing, its forks' among
them, with a cache folder that is empty the first time. FOLDER is another checkout of this repository, measured by the same code in the same run.

Measured on two idle cores, by the clock (seconds of computing in brackets), beside the first version that was measured:

| what | goal | at first: first, again | now: first | now: again |
|---|---|---|---|---|
| preset: first picture | 10 s; again 1 s | 36.4 s, 2.7 s | 6.5 s (7.2) | 0.3 s |
| preset: exact, with what would fit | 25 s | 77.3 s, 2.8 s | 24.6 s (33.1) | 1.4 s |
| a move, median and worst | 50 ms, 120 ms | 7 ms, 30 ms | 5 ms, 23 ms | 5 ms, 22 ms |
| quick peak | 1 ms | 0.1 ms | 0.1 ms | 0.1 ms |
| another card | 2 s | - | 20 ms | 19 ms |
| another card: exact | | - | 13.3 s (19.7) | 1.3 s |
| another method | 2 s | - | 1.4 s (2.1) | 16 ms |
| another method: exact | | - | 9.7 s (13.3) | 1.2 s |
| function: first picture | 5 s; again 1 s | 13.8 s, 15.2 s | 4.2 s (4.2) | 0.4 s |
| doctor | 20 s; again 1 s | 54.7 s, 7.6 s | 24.8 s (37.5) | 1.1 s |

What is kept is read without PyTorch. Of a preset's first picture 4 to 5 seconds are imports of torch, transformers,
bitsandbytes and peft. A dry run of four layers takes 0.8 to 0.9 seconds of an idle core (0.36 with one layer, 0.11 to
0.18 for each further one; a third of it builds the model). All numbers of the preset are known after 28 of them, which
are shared with a fork on the other core: three structures (one sequence, one of up to 128 tokens, several) with three
numbers of layers where each is first met, one more where it is met next, and 6 to 8 points in each. Fewer points would
let a wrong polynomial pass, and with fewer than four layers what repeats cannot be told from what does not.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.widgets import at_rest, drawn_in, picture

NUM_MOVES = 60
_GOALS = {
    "preset: first picture": "10 s; again 1 s",
    "preset: exact": "25 s",
    "another card": "2 s",
    "another method": "2 s",
    "a move, median": "50 ms",
    "a move, worst": "120 ms",
    "quick peak": "1 ms",
    "function: first picture": "5 s; again 1 s",
    "doctor": "20 s; again 1 s",
}


def train(batch_size: int = 8, seq_len: int = 512) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        tokens = torch.randint(0, 50257, (batch_size, seq_len), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def computed() -> float:
    """Seconds of computing of this process and of those that it began and that have ended."""
    times = os.times()
    return sum(times[:4])


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    wall, before = time.perf_counter(), computed()
    call()
    return time.perf_counter() - wall, computed() - before


async def seen(
    panel: Any, change: Callable[[], Any], began: tuple[float, float]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """From ``began`` to the first picture after a change of the panel, and to the last change of anything shown of it;
    pages to be saved are drawn after that."""
    pictures: list[tuple[float, float]] = []
    changes: list[tuple[float, float]] = []
    shown = [widget for widget in drawn_in(panel) if widget.has_trait("value")]

    def note(change: Any) -> None:
        changes.append((time.perf_counter() - began[0], computed() - began[1]))
        if change["owner"] is picture(panel):
            pictures.append(changes[-1])

    for widget in shown:
        widget.observe(note, names="value")
    change()
    await at_rest()
    for widget in shown:
        widget.unobserve(note, names="value")
    return pictures[0], changes[-1]


async def preset_rows() -> dict[str, tuple[float, float]]:
    """What a front end sees: the rest of a picture comes in slices."""
    import oom_magic as om
    from oom_magic.notebook.sliders import controller
    from oom_magic.notebook.sliders.source import SetupSizer

    controller.has_frontend = lambda: True
    began = time.perf_counter(), computed()
    panel = om.sliders(om.TrainingSetup("qwen2.5-7b", method="qlora", gpu="RTX 3060"))
    rows = {"preset: first picture": (time.perf_counter() - began[0], computed() - began[1])}
    rows["preset: exact"] = (await seen(panel, lambda: None, began))[1]
    lengths = panel.controls["seq_len"]
    moves = [timed(lambda at=at: setattr(lengths, "value", 256 + 32 * at)) for at in range(NUM_MOVES)]
    rows["a move, median"] = tuple(statistics.median(one) for one in zip(*moves, strict=True))  # type: ignore[assignment]
    rows["a move, worst"] = max(moves)
    sizer = SetupSizer(panel.setup, {})
    sizes = sizer.sizes(sizer.starts, panel.card)
    point = sizer.point(sizer.starts)
    rows["quick peak"] = min(timed(lambda: sizes.peak_allocated_bytes(**point)) for _ in range(NUM_MOVES))
    gpu = panel.controls["gpu"]
    other = next(card for name, card in gpu.options if name.startswith("A100 80GB") or "A100" in name)
    method = panel.controls["method"]
    for row, control, value in (("another card", gpu, other), ("another method", method, "lora")):
        change = partial(setattr, control, "value", value)
        rows[row], rows[f"{row}: exact"] = await seen(panel, change, (time.perf_counter(), computed()))
    return rows


def preset() -> dict[str, tuple[float, float]]:
    return asyncio.run(preset_rows())


def function() -> dict[str, tuple[float, float]]:
    import oom_magic as om

    return {"function: first picture": timed(lambda: om.sliders(train, gpu="RTX 3060"))}


def doctor() -> dict[str, tuple[float, float]]:
    import oom_magic as om

    return {"doctor": timed(lambda: om.doctor("qwen2.5-7b", gpu="RTX 3060"))}


CASES: dict[str, Callable[[], dict[str, tuple[float, float]]]] = {
    "preset": preset, "function": function, "doctor": doctor,
}  # fmt: skip


def measured(folder: Path, case: str, cache: str) -> dict[str, tuple[float, float]]:
    """The rows of a case, measured by a process of its own in a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "XDG_CACHE_HOME": cache, "HF_HOME": f"{cache}/hf"}
    command = [sys.executable, __file__, "--case", case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {f"{case}: {done.stderr.strip().splitlines()[-1]}": (float("nan"), float("nan"))}
    rows: dict[str, tuple[float, float]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def shown(seconds: tuple[float, float] | None) -> str:
    if seconds is None:
        return "-"
    wall, computed = seconds
    if wall < 1:
        return f"{1000 * wall:.1f} ms ({1000 * computed:.1f})"
    return f"{wall:.1f} s ({computed:.1f})"


def main(folders: list[Path]) -> None:
    table: dict[str, dict[str, tuple[float, float]]] = {}
    columns = [(folder, times) for folder in folders for times in ("first", "again")]
    for folder in folders:
        for case in CASES:
            with tempfile.TemporaryDirectory() as cache:
                for times in ("first", "again"):
                    for row, seconds in measured(folder, case, cache).items():
                        table.setdefault(row, {})[f"{folder} {times}"] = seconds
    print("| what | goal | " + " | ".join(f"{folder.name}, {times}" for folder, times in columns) + " |")
    print("|---" * (2 + len(columns)) + "|")
    for row, cells in table.items():
        values = " | ".join(shown(cells.get(f"{folder} {times}")) for folder, times in columns)
        print(f"| {row} | {_GOALS.get(row, '')} | {values} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(CASES[sys.argv[2]]()))
    else:
        main([*map(Path, sys.argv[1:]), Path(__file__).parents[2]])
