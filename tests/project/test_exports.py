"""The public names: sorted, complete, and nothing heavy imported before it is needed."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import oom_magic

HEAVY = ("torch", "numpy", "IPython", "ipywidgets", "matplotlib", "transformers", "pandas")


def test_all_is_sorted() -> None:
    assert oom_magic.__all__ == sorted(oom_magic.__all__)
    assert dir(oom_magic) == oom_magic.__all__


def test_type_checkers_see_the_same_homes() -> None:
    tree = ast.parse(Path(oom_magic.__file__).read_text(encoding="utf-8"))
    seen = {
        name.name: node.module.removeprefix("oom_magic.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("oom_magic.")
        for name in node.names
        if name.name in oom_magic.__all__
    }
    extension = {"load_ipython_extension", "unload_ipython_extension"}
    assert set(oom_magic.__all__) == extension | set(seen)
    for name, home in seen.items():
        assert getattr(oom_magic, name) is getattr(importlib.import_module(f"oom_magic.{home}"), name)


@pytest.mark.parametrize("name", oom_magic.__all__)
def test_every_name_is_there(name: str) -> None:
    assert callable(getattr(oom_magic, name))


def test_parts_of_the_package_do_not_replace_functions_of_the_same_name() -> None:
    from oom_magic.measure.device import cards as device  # noqa: F401

    assert not isinstance(oom_magic.measure, ModuleType)
    assert not isinstance(oom_magic.explain, ModuleType)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = oom_magic.nonsense


def loaded_after(code: str) -> set[str]:
    """Heavy libraries in a fresh interpreter after running ``code``."""
    probe = f"import sys\n{code}\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


LOAD = """
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
shell.run_line_magic("load_ext", "oom_magic")
"""


def test_import_loads_nothing_heavy() -> None:
    assert loaded_after("import oom_magic") == set()


def test_loading_the_extension_imports_neither_torch_nor_matplotlib() -> None:
    assert loaded_after(LOAD) == {"IPython"}


def test_the_check_can_fail() -> None:
    assert "matplotlib" in loaded_after(f"{LOAD}\nimport oom_magic.notebook.figures")


WITHOUT_TORCH = """
class Missing:
    def find_spec(self, name, *_):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)
sys.meta_path.insert(0, Missing())
"""
NEED_TORCH = (
    "1 / 0",  # for what follows
    "%oom_explain",
    "%oom_explain {log} --model gpt2 --batch 1",
    "%%gpumem\n1",
    "%oom_free",
    "%oom_doctor",
    "%gpumem_watch",
    "om.dry_run(print)",
    "om.size(print, sep=(1, 4))",
    "om.sliders(print, sep=(1, 4))",
    "om.load_snapshot('recorded.pickle')",
)


def test_what_needs_pytorch_says_so_in_one_line_where_it_is_missing(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    cells = ["import oom_magic as om", *(cell.replace("{log}", str(log)) for cell in NEED_TORCH)]
    run = f"{LOAD}{WITHOUT_TORCH}for cell in {cells!r}:\n    print('In:')\n    shell.run_cell(cell)"
    shown = subprocess.run([sys.executable, "-c", f"import sys\n{run}"], capture_output=True, text=True, check=True)
    said = [part.splitlines()[-1] for part in shown.stdout.split("In:\n")[3:]]
    sentence = (
        "ImportError: PyTorch is not installed; without it, only pasted texts can be explained: pip install torch."
    )
    assert said == [sentence] * (len(NEED_TORCH) - 1) and "ModuleNotFoundError" not in shown.stdout
