"""Each notebook runs from top to bottom without a GPU (``pytest --notebooks``), and is kept with its outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
_SECONDS = 600  # for one cell, on a slow and busy machine


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_kept_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    shown = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.outputs]
    assert shown, "run the notebook and save it with its outputs"
    errors = [
        cell.source
        for cell in shown
        if any(output.output_type == "error" for output in cell.outputs)
        and "raises-exception" not in cell.metadata.get("tags", [])
    ]
    assert not errors


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--notebooks"):
        pytest.skip("takes minutes; run with --notebooks")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code" and cell.source)
