"""One notebook in a process of its own: it fails and is explained, or (with ``truth``) it is run plainly.

    python tests/gpu/closed_loop.py NAME [VALUES as JSON] [truth | pretend]

``pretend`` runs each cell under ``%%gpumem`` on a pretend card of the same size: where there is no device.

The last line of the output is JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.notebooks import NOTEBOOKS, unlike_notebooks
from tests.gpu.notebooks.notebook_cases import CARD_MIB, Notebook


def filled(cell: str, values: dict[str, Any]) -> str:
    """A cell with its values."""
    for name, value in values.items():
        cell = cell.replace("{" + name + "}", str(value))
    return cell


def on_a_pretend_card(cell: str, num_cards: int) -> str:
    """The cell under ``%%gpumem``, or its line magic with the card."""
    card = f'--no-plot --gpu "RTX 3060" --num-gpus {num_cards} --memory {CARD_MIB}MiB --steps all'
    if cell.startswith("%gpumem"):
        return cell.replace("--no-plot", card)
    return f"%%gpumem {card}\n{cell}"


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


def generation_ends(patch: pytest.MonkeyPatch) -> None:
    """Let ``generate`` end at its length on the stub, where what it computes to know that reads as zero."""
    from transformers import GenerationMixin, MaxLengthCriteria

    call, ended = MaxLengthCriteria.__call__, [False]

    def noting(criterion: MaxLengthCriteria, ids: Any, *rest: Any, **more: Any) -> Any:
        ended[0] = ids.shape[-1] >= criterion.max_length
        return call(criterion, ids, *rest, **more)

    def has_unfinished(*_unused: Any, **_more: Any) -> bool:
        is_over, ended[0] = ended[0], False
        return not is_over

    patch.setattr(MaxLengthCriteria, "__call__", noting)
    patch.setattr(GenerationMixin, "_has_unfinished_sequences", has_unfinished)


def without_magics(cell: str) -> str:
    """A cell without those magics that change nothing in what it runs."""
    code = re.sub(r"^%%?(time|gpumem( --\S+)*)\s*", "", cell)
    return re.sub(r"^%(load_ext|autoreload) .*$", "", code, flags=re.MULTILINE)


def run_plainly(cell: str, names: dict[str, Any]) -> None:
    """What a cell runs, without IPython."""
    code = without_magics(cell)
    if code.startswith("%run "):
        sys.argv = shlex.split(code)[1:]
        code, names = Path(sys.argv[0]).read_text(), {"__name__": "__main__"}
    exec(compile(code, "<cell>", "exec"), names)


def truth(notebook: Notebook, values: dict[str, Any]) -> dict[str, Any]:
    """Whether the cells run, and what they took at most."""
    import torch

    names: dict[str, Any] = {"__name__": "__main__"}
    fits = True
    torch.cuda.init()
    try:
        with known_values() if notebook.reads_values else contextlib.nullcontext():
            for cell in notebook.cells:
                for card in range(torch.cuda.device_count()):
                    torch.cuda.reset_peak_memory_stats(card)  # the price is that of the last cell
                run_plainly(filled(cell, values), names)
    except torch.OutOfMemoryError:
        fits = False
    return {"fits": fits, "peak": max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))}


def explained(notebook: Notebook, values: dict[str, Any], is_fake: bool) -> dict[str, Any]:
    """What ``%oom_explain`` says when the last cell has failed."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "oom_magic")
    with contextlib.redirect_stdout(io.StringIO()):
        for number, cell in enumerate(notebook.cells):
            code = filled(cell, values)
            is_plain = not is_fake or number < notebook.num_writing
            code = code if is_plain else on_a_pretend_card(code, notebook.num_cards)
            result = shell.run_cell(code, store_history=True)
            shown = getattr(sys, "last_value", None)  # by a magic, such as %run, whose cell goes on
            error = result.error_before_exec or result.error_in_exec or shown
            del result, shown
        failed = None if error is None else f"{type(error).__name__}: {error}"[:200]
        del error
        if failed is None:
            return {"failed": None, "cause": "", "seconds": (0, 0), "remedies": [], "text": ""}
        start, start_of_process = time.monotonic(), time.process_time()
        diagnosis = shell.run_line_magic("oom_explain", "")
        seconds = time.monotonic() - start, time.process_time() - start_of_process
    remedies = [
        {
            "key": one.key,
            "after": one.values.get("after"),
            "peak": one.peak_allocated_bytes,
            "accumulated": one.values.get("accumulated_peak_bytes"),
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
    notebook = unlike_notebooks.LIGHTNING if name == "lightning" else NOTEBOOKS[name]
    values = next((json.loads(one) for one in more if one.startswith("{")), notebook.values)
    folder = tempfile.mkdtemp()
    for file, text in notebook.files.items():
        Path(folder, file).parent.mkdir(exist_ok=True)
        Path(folder, file).write_text(filled(text, values))
    sys.path.insert(0, folder)
    os.chdir(folder)
    warnings.filterwarnings("ignore")
    is_fake = "pretend" in more
    if "FAKECUDA_GPU" in os.environ:
        from tests.support.stub_estimates import answer_as_the_stub

        patch = pytest.MonkeyPatch()
        answer_as_the_stub(patch)
        generation_ends(patch)
    print(json.dumps(truth(notebook, values) if "truth" in more else explained(notebook, values, is_fake)))


if __name__ == "__main__":
    main(*sys.argv[1:])
