"""Notebooks that fail on a physical GPU, are explained, and run again as advised (tests/gpu/notebooks/device_notebooks.py).

    python tests/data/record_device_advice.py FILE [--seconds S] [--at-once N] [--newest | --small] [--only NAME ...]

Each runs in processes of its own, with ``set_per_process_memory_fraction`` at 16 GiB (``--small``: the notebooks of
tests/gpu/test_closed_loop.py, at what their card leaves to PyTorch), several at once. Written for each:
the cause, the first remedies with what they promise, when words and prices came, whether the code that is shown, pasted
into the notebook, ran in the same kernel, and what it took in a new one: within the limit, and within what was promised.
Kept as device_advice_NAME.json beside this file it is read by tests/truth/test_device.py. FILE.text has the explanations as
they were printed. Nothing begins that would not end within S seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from oom_magic.explain.remedies.code import RUN_ONCE
from tests.gpu.closed_loop import filled, without_magics
from tests.gpu.notebooks import NOTEBOOKS
from tests.gpu.notebooks.device_notebooks import LIMIT_GIB
from tests.gpu.notebooks.habit_device_notebooks import DEVICE_NOTEBOOKS, EARLIER
from tests.gpu.notebooks.notebook_cases import CARD_MIB, CONTEXT_MIB, Notebook

HERE = Path(__file__).resolve()
LIMIT = LIMIT_GIB * 2**30
SMALL_LIMIT = (CARD_MIB - CONTEXT_MIB) * 2**20
# Of one card that is all theirs, and without files that their values change.
SMALL = {name: one for name, one in NOTEBOOKS.items() if one.num_cards == 1 and not one.others_mib and not one.files}
WRITTEN = "%%writefile "  # begins a cell that is a file
MOST_SECONDS = 240  # of one process
MOST_APPLIED = 2  # remedies of a notebook
NOT_PASTED = {"raise_limit", "expandable_segments", "larger_card", "fsdp", "close_processes"}


def limited(num_bytes: int) -> None:
    """Let PyTorch reserve so much in this process."""
    import torch

    share = num_bytes / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(share * (1 + 1e-12), 1))  # which is cut down to bytes


def as_the_stub() -> None:
    """On the CUDA build without a GPU, estimates are what the stub answers."""
    if "FAKECUDA_GPU" in os.environ:
        import pytest

        from tests.gpu.closed_loop import generation_ends
        from tests.support.stub_estimates import answer_as_the_stub

        patch = pytest.MonkeyPatch()
        answer_as_the_stub(patch)
        generation_ends(patch)


def in_a_folder_of_its_own() -> None:
    """Files of a notebook are written and imported there."""
    os.chdir(tempfile.mkdtemp())
    sys.path.insert(0, "")


def measured(run: Any) -> dict[str, Any]:
    """What ``run`` takes: whether it ends, the peaks in bytes."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    start, problem = time.monotonic(), run()
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {
        "problem": problem,
        "allocated": peaks[0],
        "reserved": peaks[1],
        "seconds": round(time.monotonic() - start, 1),
    }


def run_again(cells: Sequence[str], limit: int) -> dict[str, Any]:
    """The cells in this process, the peaks those of the last."""
    from tests.gpu.closed_loop import known_values

    limited(limit)
    as_the_stub()
    in_a_folder_of_its_own()
    names: dict[str, Any] = {"__name__": "__main__"}

    def run(code: str) -> str | None:
        file, code = file_and_code(code)
        if file:
            Path(file.split()[1]).write_text(code, "utf-8")
            return None
        try:
            exec(compile(code, "<cell>", "exec"), names)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:300]
        return None

    found: dict[str, Any] = {}
    with known_values():
        for cell in cells:
            found = measured(lambda cell=cell: run(cell))
            if found["problem"] is not None:
                break
    return found


def explained(notebook: Notebook, limit: int) -> dict[str, Any]:
    """The failure, its explanation, the cells with each remedy's code, and the first of them run in the same kernel."""
    from IPython.core.interactiveshell import InteractiveShell

    from oom_magic.notebook.cells import explanations

    limited(limit)
    as_the_stub()
    in_a_folder_of_its_own()
    cells = [without_magics(filled(cell, notebook.values)) for cell in notebook.cells]
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "oom_magic")
    times: list[float] = []
    evaluate, start = explanations.evaluate_remedies, time.monotonic()

    def timed(*arguments: Any) -> Iterator[Any]:
        times.append(time.monotonic() - start)
        for one in evaluate(*arguments):
            times.append(time.monotonic() - start)
            yield one

    with contextlib.redirect_stdout(io.StringIO()):
        for cell in cells:
            result = shell.run_cell(cell, store_history=True)
        error = result.error_in_exec or result.error_before_exec
        if error is None:
            return {"failed": None}
        failed = f"{type(error).__name__}: {error}"[:300]
        del error, result
        explanations.evaluate_remedies, start = timed, time.monotonic()
        cpu = time.process_time()
        diagnosis = shell.run_line_magic("oom_explain", "--lang en")
        seconds = time.monotonic() - start
        cpu = time.process_time() - cpu
    found = {
        "failed": failed,
        "cause": str(diagnosis.cause),
        "seconds": [round(one, 1) for one in (*(times[:2] or [seconds]), seconds, cpu)],
        "as_it_is": None if diagnosis.as_is is None else diagnosis.as_is.needed_bytes,
        "remedies": [described(cells, one) for one in diagnosis.remedies],
        "text": str(diagnosis),
    }
    applied = next((one for one in found["remedies"] if one.get("cells")), None)
    if applied is not None:
        found["same_kernel"] = in_the_same_kernel(shell, cells, applied)
    return found


def file_and_code(cell: str) -> tuple[str, str]:
    """The line of a cell that makes it a file, "" where it is none, and the rest."""
    first, end, code = cell.partition("\n")
    return (first + end, code) if cell.startswith(WRITTEN) else ("", cell)


def described(cells: Sequence[str], remedy: Any) -> dict[str, Any]:
    """A remedy: what it promises, and the notebook's cells with its code."""
    found = {
        "key": remedy.key,
        "after": remedy.values.get("after"),
        "allocated": remedy.peak_allocated_bytes,
        "accumulated": remedy.values.get("accumulated_peak_bytes"),
        "needed": remedy.needed_bytes,
        "fits": remedy.fits,
        "verdict": remedy.verdict,
        "code": remedy.code,
    }
    if (
        remedy.fits
        and remedy.code
        and remedy.language == "python"
        and remedy.key not in NOT_PASTED
        and "pip install" not in remedy.code
    ):
        try:
            found["cells"] = with_code(cells, remedy.code)
        except Exception as error:
            found["not_pasted"] = repr(error)
    return found


def with_code(cells: Sequence[str], code: str) -> list[str]:
    """The cells with what a remedy shows but for magics pasted into them."""
    from tests.gpu.pasting import pasted

    parts = [file_and_code(one) for one in cells]
    lines = [line for line in code.splitlines() if not line.startswith("%")]
    changed = pasted([code for _, code in parts], "\n".join(lines))
    return [first + code for (first, _), code in zip(parts, changed, strict=True)]


def released_and_changed(code: str) -> tuple[str, str]:
    """The lines of a remedy that release memory, which are run once, and those that change what is run."""
    lines = code.splitlines()
    end = next((at + 1 for at, one in enumerate(lines) if one.startswith("%")), 0)
    return "\n".join(lines[:end] or ["%oom_free"]), "\n".join(lines[end:])


def in_the_same_kernel(shell: Any, cells: Sequence[str], remedy: dict[str, Any]) -> dict[str, Any]:
    """What happens where the user releases what the failed run holds and runs the changed cells again."""
    import ast

    release, code = released_and_changed(remedy["code"])
    if code.startswith(f"# {RUN_ONCE}"):
        release, changed = f"{release}\n{code}", list(cells)
    else:
        changed = with_code(cells, code)
    whole = [*cells] if changed == list(cells) else [ast.unparse(ast.parse(file_and_code(one)[1])) for one in cells]
    differs = (at for at, one in enumerate(changed) if file_and_code(one)[1] != whole[at])
    first = next(differs, len(cells) - 1)

    def run(*cells: str) -> str | None:
        for cell in cells:
            result = shell.run_cell(cell, store_history=True)
            error = result.error_before_exec or result.error_in_exec
            if error is not None:
                return f"{type(error).__name__}: {error}"[:300]
        return None

    with contextlib.redirect_stdout(io.StringIO()):
        problem = run(release)
        return {"first_changed": first, "release": problem, **measured(lambda: run(*changed[first:]))}


def process(*arguments: str, seconds: float) -> dict[str, Any]:
    """The JSON that this file prints in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, str(HERE), *arguments], capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"more than {seconds:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"problem": done.stderr[-1500:]}
    return found


def closed(name: str, limit: int, end: float) -> dict[str, Any]:
    """The loop of one notebook within ``limit`` bytes, as far as there is time until ``end``."""

    def left() -> float:
        return min(end - time.monotonic(), MOST_SECONDS)

    if left() < 40:
        return {"problem": "no time"}
    found = process("explain", name, str(limit), seconds=left())
    chosen = [one for one in found.get("remedies", ()) if one.get("cells")][:MOST_APPLIED]
    for number, one in enumerate(chosen):
        limits = [limit, one["needed"]] if number == 0 and one["needed"] else [limit]
        for most, key in zip(limits, ("ran", "ran_in_what_was_promised"), strict=False):
            if left() > 20:
                with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                    json.dump(one["cells"], file)
                    file.flush()
                    one[key] = process("again", file.name, str(most), seconds=left())
    print(name, found.get("cause"), found.get("problem") or found.get("seconds"), flush=True)
    return found


def main() -> None:
    """Write the table; or, in a process of its own, print one result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--only", nargs="*", metavar="NAME")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--small", action="store_true", help="of tests/gpu/test_closed_loop.py")
    which.add_argument(
        "--newest", action="store_true", help="of library_device_notebooks.py and habit_device_notebooks.py"
    )
    options = parser.parse_args()
    table, limit = (SMALL, SMALL_LIMIT) if options.small else (DEVICE_NOTEBOOKS, LIMIT)
    chosen = options.only or [one for one in table if not options.newest or one not in EARLIER]
    end = time.monotonic() + options.seconds
    import torch

    rows: dict[str, Any] = {}
    texts: dict[str, str] = {}
    head = {
        "device": torch.cuda.get_device_name(),
        "total_bytes": torch.cuda.get_device_properties(0).total_memory,
        "limit_bytes": limit,
        "versions": {one: version(one) for one in ("torch", "transformers")},
    }

    def take(name: str) -> None:
        """Add a row, and write all of them: what was found stays if this is cut off."""
        row = closed(name, limit, end)
        texts[name] = row.pop("text", "")
        row["remedies"] = [one for one in row.get("remedies", ()) if "ran" in one]
        rows[name] = row
        parts = [f"  {json.dumps(one)}: {json.dumps(rows[one])}" for one in sorted(rows)]
        text = json.dumps(head, indent=1)[:-2] + ',\n "notebooks": {\n' + ",\n".join(parts) + "\n }\n}\n"
        options.file.write_text(text, "utf-8")
        Path(f"{options.file}.text").write_text("\n\n".join(f"# {one}\n{texts[one]}" for one in sorted(texts)), "utf-8")

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(take, chosen))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["explain", name, limit]:
            notebooks = SMALL if int(limit) == SMALL_LIMIT else DEVICE_NOTEBOOKS
            print(json.dumps(explained(notebooks[name], int(limit))))
        case ["again", file, limit]:
            print(json.dumps(run_again(json.loads(Path(file).read_text("utf-8")), int(limit))))
        case _:
            main()
