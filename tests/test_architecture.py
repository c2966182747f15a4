"""Arrows point one way: which part of the package may import which, and who knows the large libraries."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "oom_magic"
ALLOWED = {
    "errors": set(),
    "collection": set(),
    "units": {"errors"},
    "views": {"units", "memory", "predict", "explain"},
    "memory": {"units", "views"},
    "measure": {"collection", "units", "views", "memory"},
    "predict": {"collection", "errors", "units", "views", "memory"},
    "explain": {"errors", "units", "views", "memory", "measure", "predict"},
    "notebook": {"units", "views", "memory", "measure", "predict", "explain"},
    "__init__": {"memory", "measure", "predict", "explain", "notebook"},  # the public names
}
LIBRARIES = {
    "torch": {"measure", "predict"},
    "IPython": {"notebook", "__init__"},
    "ipywidgets": {"notebook"},
    "matplotlib": {"notebook"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(source: str) -> Iterator[str]:
    """Every module that the code imports, at any depth, for type checkers or not."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def breaches(part: str, source: str) -> list[str]:
    """What the code, being in ``part`` of the package, should not import."""
    found = []
    for module in imported(source):
        root, _, rest = module.partition(".")
        if root == "oom_magic":
            other = rest.partition(".")[0]
            if other != part and other not in ALLOWED[part]:
                found.append(module)
        elif part not in LIBRARIES.get(root, {part}):
            found.append(module)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports(file: Path) -> None:
    part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert breaches(part, file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("memory", "import torch"),
        ("memory", "def late():\n    from torch import nn"),
        ("explain", "if TYPE_CHECKING:\n    from IPython import get_ipython"),
        ("predict", "import matplotlib.pyplot as plt"),
        ("predict", "from oom_magic.measure.device import doctor"),
        ("measure", "from oom_magic.predict import session"),
        ("units", "from oom_magic.views.blocks import Table"),
        ("memory", "from oom_magic import explain"),
    ],
)
def test_the_check_can_fail(part: str, source: str) -> None:
    assert breaches(part, source)
