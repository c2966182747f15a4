"""One notebook in a process of its own: it fails and is explained, or (with ``truth``) it is run plainly.

    python tests/gpu/closed_loop.py NAME [VALUES as JSON] [truth]

The last line of the output is JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from failing_notebooks import NOTEBOOKS, Notebook


def filled(cell: str, values: dict[str, Any]) -> str:
    """A cell with its values."""
    for name, value in values.items():
        cell = cell.replace("{" + name + "}", str(value))
    return cell


def known_values() -> contextlib.AbstractContextManager[Any]:
    """On the stub, device memory reads as zeros, from which transformers makes other masks: its shadow of values.

    The shadow keeps what it has seen, so what a notebook deletes would stay.
    """
    try:
        from values import Values
    except ImportError:  # a real GPU
        return contextlib.nullcontext()
    shadow: contextlib.AbstractContextManager[Any] = Values()
    return shadow


def truth(notebook: Notebook, values: dict[str, Any]) -> dict[str, Any]:
    """Whether the cells run, and what they took at most."""
    import torch

    names: dict[str, Any] = {"__name__": "__main__"}
    fits = True
    try:
        with known_values() if notebook.reads_values else contextlib.nullcontext():
            for cell in notebook.cells:
                torch.cuda.reset_peak_memory_stats()  # the price is that of the last cell
                code = re.sub(r"^%%?(time|gpumem( --\S+)*)\s*", "", filled(cell, values))
                exec(compile(code, "<cell>", "exec"), names)
    except torch.OutOfMemoryError:
        fits = False
    return {"fits": fits, "peak": torch.cuda.max_memory_allocated()}


def explained(notebook: Notebook, values: dict[str, Any]) -> dict[str, Any]:
    """What ``%oom_explain`` says when the last cell has failed."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "oom_magic")
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in notebook.cells:
            result = shell.run_cell(filled(cell, values), store_history=True)
            shown = getattr(sys, "last_value", None)  # by a magic, such as %run, whose cell goes on
            error = result.error_before_exec or result.error_in_exec or shown
            del result, shown
        failed = None if error is None else f"{type(error).__name__}: {error}"[:200]
        del error
        start, start_of_process = time.monotonic(), time.process_time()
        diagnosis = shell.run_line_magic("oom_explain", "")
        seconds = time.monotonic() - start, time.process_time() - start_of_process
    remedies = [
        {
            "key": one.key,
            "after": one.values.get("after"),
            "peak": one.peak_allocated_bytes,
            "needed": one.needed_bytes,
            "fits": one.fits,
            "verdict": one.verdict,
            "code": one.code,
            "note": None if one.note is None else [one.note.key, dict(one.note.values)],
        }
        for one in diagnosis.remedies
    ]
    return {
        "failed": failed,
        "cause": str(diagnosis.cause),
        "seconds": seconds,
        "remedies": remedies,
        "text": str(diagnosis) if os.environ.get("TEXT") else "",
    }


def main(name: str, *more: str) -> None:
    """Print the result of one run."""
    notebook = NOTEBOOKS[name]
    values = next((json.loads(one) for one in more if one.startswith("{")), notebook.values)
    folder = tempfile.mkdtemp()
    for file, text in notebook.files.items():
        Path(folder, file).write_text(text)
    sys.path.insert(0, folder)
    os.chdir(folder)
    warnings.filterwarnings("ignore")
    print(json.dumps(truth(notebook, values) if "truth" in more else explained(notebook, values)))


if __name__ == "__main__":
    main(*sys.argv[1:])
