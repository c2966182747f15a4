"""Arrows point one way: which part of the package may import which, and who knows the large libraries."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.support.folders import ROOT, TESTS

PACKAGE = ROOT / "oom_magic"
BELOW = {
    "computing_time",
    "errors",
    "inputs",
    "half_built",
    "interrupts",
    "one_line_errors",
    "language",
    "results",
    "units",
    "user_code",
    "memory",
    "measure",
    "predict",
}
ALLOWED = {
    "units": set(),
    "language": {"units"},
    "errors": {"language"},
    "inputs": {"errors", "units"},
    "computing_time": set(),
    "garbage_collector": set(),
    "half_built": set(),
    "interrupts": set(),
    "results": {"one_line_errors"},  # is given the views, so that data know none
    "user_code": set(),
    "one_line_errors": {"language", "user_code"},
    "memory": {"language", "results", "units"},
    "measure": {
        "garbage_collector",
        "half_built",
        "interrupts",
        "errors",
        "inputs",
        "one_line_errors",
        "language",
        "results",
        "units",
        "user_code",
        "memory",
    },
    "predict": {
        "computing_time",
        "garbage_collector",
        "half_built",
        "interrupts",
        "errors",
        "inputs",
        "one_line_errors",
        "language",
        "results",
        "units",
        "user_code",
        "memory",
    },
    "explain": BELOW,
    "views": {"language", "results", "units", "memory", "measure", "predict", "explain"},
    "notebook": BELOW | {"explain", "views"},
    "__main__": {"explain", "one_line_errors", "language", "memory", "notebook", "predict", "views"},
    "__init__": {
        "one_line_errors",
        "results",
        "memory",
        "measure",
        "predict",
        "explain",
        "notebook",
    },  # the public names
}
LIBRARIES = {
    "torch": {"measure", "predict"},
    "IPython": {"notebook", "__init__", "__main__"},
    "ipywidgets": {"notebook"},
    "matplotlib": {"notebook"},
}
MOST_FILES = 12  # __init__.py apart
MOST_LINES = 40  # of a function, its docstring, comments and empty lines apart
FILES = sorted(PACKAGE.rglob("*.py"))
parse = functools.lru_cache(maxsize=1)(ast.parse)  # for the several questions about one file; all of them are large


@functools.cache
def imported(source: str) -> frozenset[str]:
    """Every module that the code imports, at any depth, for type checkers or not."""
    found: set[str] = set()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.update(f"{node.module}.{name.name}" for name in node.names)
    return frozenset(found)


def breaches(part: str, source: str) -> list[str]:
    """What the code, being in ``part`` of the package, should not import."""
    found = []
    for module in sorted(imported(source)):
        root, _, rest = module.partition(".")
        if root == "oom_magic":
            other = rest.partition(".")[0]
            if other != part and other not in ALLOWED[part]:
                found.append(module)
        elif part not in LIBRARIES.get(root, {part}):
            found.append(module)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_file_keeps_the_rules(file: Path) -> None:
    """Its imports; functions are short; what is public says what it returns."""
    part, source = file.relative_to(PACKAGE).parts[0].removesuffix(".py"), file.read_text(encoding="utf-8")
    assert (breaches(part, source), long_functions(source), undocumented(source)) == ([], [], [])


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
        ("memory", "from oom_magic.views import report"),
        ("memory", "from oom_magic import explain"),
    ],
)
def test_the_check_can_fail(part: str, source: str) -> None:
    assert breaches(part, source)


def graph_of_files() -> dict[str, set[str]]:
    """Which file of the package imports which, at any depth."""
    names = {}
    for file in FILES:
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph = {}
    for name, file in names.items():
        found = {
            module if module in names else module.rpartition(".")[0] for module in imported(file.read_text("utf-8"))
        }
        graph[name] = (found & names.keys()) - {name, "oom_magic"}
    return graph


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of files each of which leads to every other."""
    reached = {name: set(others) for name, others in graph.items()}
    for middle in graph:
        for name in graph:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return [set(group) for group in found if group]


def test_files_make_no_circle() -> None:
    assert circles(graph_of_files()) == []


def test_the_search_for_circles_can_fail() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_no_folder_is_too_full() -> None:
    folders = {file.parent for file in FILES}
    full = {str(folder) for folder in folders if len({*folder.glob("*.py")} - {folder / "__init__.py"}) > MOST_FILES}
    assert not full, "a newcomer finds nothing among so many files: make a room of what belongs together"


def long_functions(source: str) -> list[str]:
    """The names of functions with more lines of code than ``MOST_LINES``."""
    lines = source.splitlines()
    found = []
    for node in ast.walk(parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        docstring = node.body[0] if ast.get_docstring(node) is not None else None
        inside = range(0) if docstring is None else range(docstring.lineno, (docstring.end_lineno or 0) + 1)
        numbers = [number for number in range(node.lineno, (node.end_lineno or 0) + 1) if number not in inside]
        code = [line for number in numbers if (line := lines[number - 1].strip()) and not line.startswith("#")]
        if len(code) > MOST_LINES:
            found.append(node.name)
    return found


def test_the_search_for_long_functions_can_fail() -> None:
    line = "    x = 1\n"
    assert long_functions("def long():\n" + MOST_LINES * line) == ["long"]
    assert not long_functions('def short():\n    """Says\n    much."""\n    # why\n' + (MOST_LINES - 1) * line)


def undocumented(source: str) -> list[str]:
    """The public functions, classes and methods without docstring; of a protocol its own is enough."""
    found = []

    def look(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
                continue
            names = {ast.unparse(name) for name in [*node.decorator_list, *getattr(node, "bases", [])]}
            if ast.get_docstring(node) is None and not any(name.endswith((".setter", "overload")) for name in names):
                found.append(node.name)
            if isinstance(node, ast.ClassDef) and "Protocol" not in names:
                look(node.body)

    look(parse(source).body)
    return found


def test_the_search_for_docstrings_can_fail() -> None:
    assert undocumented('class A:\n    """One."""\n    def f(self): ...\n    def _g(self): ...') == ["f"]


def public_classes() -> dict[str, list[str]]:
    """The files of each public class."""
    found: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(file.relative_to(PACKAGE)))
    return found


def test_no_two_public_classes_have_one_name() -> None:
    assert {name: files for name, files in public_classes().items() if len(files) > 1} == {}


def drawn_folders() -> set[str]:
    """The folders in CONTRIBUTING's picture of the package, by the depth that each is indented to."""
    page = (PACKAGE.parent / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    picture = page.partition("oom_magic/\n")[2].partition("```")[0]
    path: list[str] = []
    found = set()
    for line in picture.splitlines():
        name = line.split()[0] if line.split() else ""
        if name.endswith("/"):
            path[(len(line) - len(line.lstrip())) // 4 - 1 :] = [name.rstrip("/")]
            found.add("/".join(path))
    return found


def test_contributing_draws_the_folders_that_there_are() -> None:
    folders = {str(file.parent.relative_to(PACKAGE)) for file in FILES} - {"."}
    assert drawn_folders() == folders | {"locale"}


def private_names() -> set[str]:
    """What the package defines for itself: functions, classes, module's names and attributes with a leading underscore."""
    found = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.endswith("_")} - OF_OTHERS


OF_OTHERS = {"_parameters", "_buffers", "_modules", "_value"}  # of PyTorch's modules and Python's semaphores, too


def private_uses(source: str, private: set[str]) -> list[str]:
    """What is private to the package and imported, read or replaced by the code; ``self`` is the code's own."""
    found = []
    tree = parse(source)
    others = {"self", *(module.partition(".")[0] for module in imported(source))} - {"oom_magic"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("oom_magic"):
            found += [name.name for name in node.names if name.name.startswith("_")]
        elif isinstance(node, ast.Attribute) and node.attr in private:
            root = ast.unparse(node.value).partition(".")[0]
            found += [ast.unparse(node)] if root not in others else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            words = [str(word.value) for word in node.args if isinstance(word, ast.Constant)]
            owner = ast.unparse(node.args[0]).partition(".")[0]
            found += [word for word in words if word.rpartition(".")[2] in private and owner not in others]
    return found


def test_tests_go_through_what_is_public() -> None:
    private, tests = private_names(), sorted(TESTS.rglob("*.py"))
    uses = {str(file): private_uses(file.read_text(encoding="utf-8"), private) for file in tests}
    assert {file: names for file, names in uses.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from oom_magic.units import _hidden",
        "from oom_magic import units\nassert units._hidden",
        "import oom_magic as om\npanel = om.sliders(f)\npanel.part._hidden.value",
        "import oom_magic\ndef test(monkeypatch):\n    monkeypatch.setattr('oom_magic.units._hidden', 1)",
        "from oom_magic import units\ndef test(monkeypatch):\n    monkeypatch.setattr(units, '_hidden', 1)",
    ],
)
def test_the_search_for_private_names_can_fail(source: str) -> None:
    assert private_uses(source, {"_hidden"})
    assert not private_uses("import os\nclass A:\n    def f(self): return self._hidden, os._hidden", {"_hidden"})


def test_tests_lie_in_rooms():
    assert {file.name for file in TESTS.glob("*.py")} == {"__init__.py", "conftest.py"}


def test_what_runs_before_a_commit_exists() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    named = re.findall(r"tests/\S+\.py", hooks)
    assert named and [one for one in named if not (ROOT / one).exists()] == []
