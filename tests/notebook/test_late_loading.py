"""The extension loaded only after a cell has failed, and what a terminal prints."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from oom_magic.notebook.cells.cell_code import newly_assigned_names
from oom_magic.notebook.cells.hints import unwatched_cell
from oom_magic.predict.instrumentation.starting_point import StartingPoint
from oom_magic.predict.isolation.tensor_exchange import Snapshot


@pytest.mark.parametrize(
    "code, made",
    [
        ("model = Net()\nfor step in range(3):\n    loss = model(x)", {"model", "step", "loss"}),
        ("model = wrap(model)\nx = 1", {"x"}),
        (
            "total += 1\nwith open(f) as file:\n    lines = [line for line in file]",
            {"file", "lines", "line"} - {"line"},
        ),
        ("import torch.nn as nn\ndef train():\n    inner = 1\nclass Net: pass", {"nn", "train", "Net"}),
    ],
)
def test_names_that_a_cell_makes_are_those_that_it_has_not_read_before(code: str, made: set[str]) -> None:
    assert newly_assigned_names(ast.parse(code)) == made


def test_what_a_run_began_from_is_what_is_there_without_it() -> None:
    net = torch.nn.Linear(4, 4)
    names = {"net": net, "history": [], "size": 3}

    def use() -> torch.nn.Module:
        return names["net"]

    names["use"] = use
    loss = net(torch.ones(2, 4)).sum()
    loss.backward(retain_graph=True)
    names["history"].append(loss)
    names["made"] = torch.nn.Linear(4, 2)
    start = StartingPoint.inferred(names, {"made"})
    assert start.tensor(net.weight) and not start.had_grad(net.weight)
    assert start.tensor(names["made"].weight) is None and start.tensor(loss) is None
    noted = Snapshot()
    start.restore(noted.add)
    assert names.keys() == {"net", "history", "size", "use"} and start.dropped == {"made"}
    noted.restore()
    assert "made" in names


def test_the_cell_that_failed_is_found_in_the_history(shell: InteractiveShell) -> None:
    cell = "def work():\n    raise RuntimeError('CUDA out of memory. Tried to allocate 1.00 GiB.')\nwork()"
    error = shell.run_cell(cell, store_history=True).error_in_exec
    shell.run_cell("1 + 1", store_history=True)
    found = unwatched_cell(shell, error)
    assert found is not None and found.source == cell
    del error
    gc.collect()


@pytest.mark.slow
def test_a_terminal_prints_the_answer_once(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    card = "%%gpumem --no-plot --gpu 'RTX 3060' --memory 64MiB\nimport torch\n"
    shell.run_cell(f"{card}torch.zeros(2**26, device='cuda')", store_history=True)
    capsys.readouterr()
    diagnosis = shell.run_cell("%oom_explain", store_history=True).result
    printed = capsys.readouterr().out
    assert printed.count("What to change:") == 1 == printed.count("The message"), printed
    assert diagnosis.remedies


def test_an_error_that_a_magic_shows_itself_is_the_cells(shell: InteractiveShell, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise RuntimeError('CUDA out of memory. Tried to allocate 1.00 GiB.')")
    failures = shell.magics_manager.registry["OOMMagics"].failures
    assert shell.run_cell(f"%run {script}", store_history=True).error_in_exec is None
    assert failures.failed_cell.source == f"%run {script}"
    failures.failed_cell = None
    shell.run_cell("1 + 1", store_history=True)
    assert failures.failed_cell is None
