"""The course: every notebook has the shape that its syllabus promises, and its outputs say what its prose says.

A cell promises in its metadata, where readers do not see it: ``ratios`` (by hand / in the run, with the band that
each must lie in) and ``shows`` (what its output must contain, as regular expressions). The committed outputs are
checked always; ``pytest --notebooks`` runs each notebook from top to bottom and checks the new ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oom_magic.views.text import display_width
from tests.support.folders import ROOT

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
_SECONDS = 600  # for one cell, on a slow and busy machine
_MOST_LINES = 10  # of a code cell
_WIDEST_CODE = 120
_WIDEST_OUTPUT = 110
_WIDGET = "application/vnd.jupyter.widget-view+json"
_WIDGETS = "application/vnd.jupyter.widget-state+json"
_RATIO = re.compile(r"^(.*?\S) {2,}\S.*\s(\d+\.\d{3})$")


def each(*arguments: Any) -> Any:
    """A test for every notebook."""
    return pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem[:2])(*arguments)


def read(path: Path) -> Any:
    import nbformat  # compiles many grammars, which not every run of any test shall wait for

    return nbformat.read(path, as_version=4)


def prose(notebook: Any) -> str:
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell: Any) -> Iterator[str]:
    """What a cell shows, as text."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield output.text
        elif "data" in output:
            yield output.data.get("text/plain", "")


def broken_promises(notebook: Any) -> list[str]:
    """What a cell's metadata promises and its output does not keep."""
    broken = []
    for cell in code_cells(notebook):
        promised = cell.metadata.get("oom_magic", {})
        text = "\n".join(texts(cell))
        found = [match for line in text.splitlines() if (match := _RATIO.match(line))]
        ratios = {match[1].strip(): float(match[2]) for match in found}
        for name, (low, high) in promised.get("ratios", {}).items():
            ratio = ratios.get(name, ratios.get(name.replace("_", " ")))
            if ratio is None or not low <= ratio <= high:
                broken.append(f"{name}: {ratio} is not from {low} to {high}")
        words_shown = " ".join(text.split())
        broken += [f"{words!r} is not in {words_shown[:200]!r}" for words in promised.get("shows", ())
                   if not re.search(words, words_shown)]  # fmt: skip
    return broken


def test_the_course_is_complete() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{number:02}" for number in range(14)]


@each
def test_it_begins_with_its_question_and_ends_with_exercises(path: Path) -> None:
    notebook = read(path)
    first, text = notebook.cells[0].source, prose(notebook)
    assert first.startswith(f"# {path.name[:2]} · ")
    for heading in ("**Question:**", "**You need**", "**Minutes:**"):
        assert heading in first
    assert "%load_ext oom_magic" in code_cells(notebook)[0].source
    learned = text[text.index("## What we learned") : text.index("## Exercises")]
    assert len(re.findall(r"^- ", learned, flags=re.M)) == 3
    exercises = text[text.index("## Exercises") :]
    assert len(re.findall(r"^\*\*\d\.\*\*", exercises, flags=re.M)) == exercises.count("<details>") == 2
    assert exercises.count("</details>") == 2 and "**Next:**" in exercises


@each
def test_its_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", prose(read(path))):
        assert (FOLDER / link).exists(), link


@each
def test_the_syllabus_has_it(path: Path) -> None:
    first = " ".join(read(path).cells[0].source.split())
    syllabus = (FOLDER / "README.md").read_text(encoding="utf-8")
    (row,) = [line for line in syllabus.splitlines() if f"({path.name})" in line]
    title, question, minutes, needs = (part.strip() for part in row.strip("|").split("|"))
    assert title == f"[{first.removeprefix('# ').partition(' **Question')[0]}]({path.name})"
    assert f"**Question:** {question} " in first
    assert f"**Minutes:** {minutes}." in first
    assert all(f"`{name.strip()}`" in first for name in needs.split(",") if needs)


@each
def test_its_code_is_short(path: Path) -> None:
    for cell in code_cells(read(path)):
        lines = [line for line in cell.source.splitlines() if line.strip()]
        assert 0 < len(lines) <= _MOST_LINES, cell.source
        if not lines[0].startswith("%%oom_explain"):  # under it stands a message, as it was
            assert max(map(len, lines)) <= _WIDEST_CODE, cell.source


@each
def test_it_is_kept_as_one_clean_run(path: Path) -> None:
    import nbformat

    notebook = read(path)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        is_intended = "raises-exception" in cell.metadata.get("tags", [])
        for output in cell.outputs:
            assert output.output_type != "error" or is_intended, cell.source
            assert output.get("name") != "stderr", output.text


@each
def test_its_outputs_read_well(path: Path) -> None:
    for cell in code_cells(read(path)):
        prints_code = "code" in cell.source and "print(" in cell.source
        for text in texts(cell):
            assert not re.search(r"<[\w.]+ (object )?at 0x|Warning:|%\|", text), text[:300]
            wrapped = [line for line in text.splitlines() if not line.startswith("    ")]  # code is not wrapped
            assert prints_code or max(map(display_width, wrapped), default=0) <= _WIDEST_OUTPUT, text


@each
def test_it_names_nobodys_machine(path: Path) -> None:
    assert not re.search(r"/(work|root|tmp|home)/", path.read_text(encoding="utf-8"))


@each
def test_widgets_are_kept_with_their_state_and_a_table(path: Path) -> None:
    notebook = read(path)
    for position, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and any(_WIDGET in output.get("data", {}) for output in cell.outputs):
            models = notebook.metadata["widgets"][_WIDGETS]["state"]
            shown = [output.data[_WIDGET]["model_id"] for output in cell.outputs if _WIDGET in output.get("data", {})]
            assert set(shown) <= models.keys()  # else JupyterLab says "model not found"
            assert any("text/html" in output.get("data", {}) for output in cell.outputs)
            following = [after for after in notebook.cells[position + 1 : position + 3] if after.cell_type == "code"]
            assert following and any(texts(following[0]))


@each
def test_its_outputs_keep_what_it_promises(path: Path) -> None:
    notebook = read(path)
    assert any(cell.metadata.get("oom_magic") for cell in code_cells(notebook))
    assert broken_promises(notebook) == []


def test_a_broken_promise_is_noticed() -> None:
    notebook = read(FOLDER / "01_where_does_the_memory_go.ipynb")
    cell = next(cell for cell in code_cells(notebook) if "ratios" in cell.metadata.get("oom_magic", {}))
    name = next(iter(cell.metadata["oom_magic"]["ratios"]))
    cell.metadata["oom_magic"] = {"ratios": {name: [2, 3], "nothing": [0, 1]}, "shows": ["no such words"]}
    assert len(broken_promises(notebook)) == 3


@each
def test_it_runs(path: Path, request: pytest.FixtureRequest) -> None:
    from nbclient import NotebookClient

    if not request.config.getoption("--notebooks"):
        pytest.skip("takes minutes; run with --notebooks")
    notebook = read(path)
    if "`triton`" in notebook.cells[0].source:
        pytest.importorskip("triton", reason="pip install --no-deps triton")
    client = NotebookClient(
        notebook, timeout=_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    assert broken_promises(notebook) == []
