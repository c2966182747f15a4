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
