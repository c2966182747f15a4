"""The table of PyTorch's private names is complete and true here."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from oom_magic.predict import torch_private
from oom_magic.predict.fake_cuda.device_view import DeviceView
from oom_magic.predict.fake_cuda.torch_cuda import Cards
from oom_magic.predict.operators.autocast import Autocast
from oom_magic.predict.session import DrySession
from oom_magic.predict.torch_patches import torch_patches

ROOM = Path(torch_private.__file__).parent
TABLES = (
    torch_private.EVERY_RUN, torch_private.COMPILED, torch_private.DISTRIBUTED, torch_private.SHARDED,
    torch_private.FLEX_ATTENTION, torch_private.FUNCTION_TRANSFORMS, torch_private.MEASURED,
)  # fmt: skip
ACCESSORS = {"getattr", "hasattr", "setattr", "delattr"}
IMPORTERS = {"sys.modules.get", "import_module", "importlib.import_module"}
PATH = re.compile(r"torch(\.\w+)+")
NAME = re.compile(r"_[A-Za-z]\w*")
# Names of other libraries, or of Python, that PyTorch has as well.
OTHERS = {
    "_clear_cache", "_close_pipe_fds", "_config", "_count", "_debug", "_enable", "_fmt", "_get_device_map", "_hashlib", "_is_mine",
    "_kwargs", "_local", "_member_map_", "_registry",
}  # fmt: skip


def is_private(name: str) -> bool:
    return any(NAME.fullmatch(part) for part in name.split("."))


class TorchNames(ast.NodeVisitor):
    """The private names of torch in code: imported, reached by a dotted path, an alias or ``getattr``, or in strings.

    ``loose`` are private attributes of objects, and strings that may be names to be replaced; ``own`` the code's names.
    """

    def __init__(self, source: str) -> None:
        self.paths: set[str] = set()
        self.loose: set[str] = set()
        self.own: set[str] = set()
        self.searched: set[str] = set()  # owners whose names are computed
        self.aliases = {"torch": "torch"}
        tree = ast.parse(source)
        self.docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            self.name(node)
        self.visit(tree)

    def name(self, node: ast.AST) -> None:
        """Notes an import, an alias, or a name of the code's own."""
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "torch":
            for alias in node.names:
                self.note(f"{node.module}.{alias.name}", alias.asname or alias.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            path = self.path(node.value)
            for target in targets:
                if path and isinstance(target, ast.Name):
                    self.aliases[target.id] = path
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.own.add(node.name)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            self.own.add(node.id if isinstance(node, ast.Name) else node.attr)

    def note(self, path: str, name: str = "") -> None:
        if name:
            self.aliases[name] = path
        if is_private(path):
            self.paths.add(path.removesuffix(".__init__"))

    def path(self, node: ast.expr) -> str:
        """The path below torch that an expression leads to; empty for others."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, "")
        if isinstance(node, ast.Attribute):
            owner = self.path(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            text = next((one.value for one in node.args if isinstance(one, ast.Constant)), "")
            if called in ACCESSORS and (owner := self.path(node.args[0])):
                return f"{owner}.{text}" if text else ""
            return text if called in IMPORTERS and PATH.fullmatch(text) else ""
        return ""

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self.path(node)
        if path:
            self.note(path)
        elif NAME.fullmatch(node.attr):
            self.loose.add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        path = self.path(node)
        if path:
            self.note(path)
        is_search = ast.unparse(node.func) in ACCESSORS and not isinstance(node.args[1], ast.Constant | ast.Name)
        if is_search and is_private(self.path(node.args[0])):
            self.searched.add(ast.unparse(node))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and id(node) not in self.docstrings:
            if PATH.fullmatch(node.value) and is_private(node.value):
                self.paths.add(node.value)
            elif NAME.fullmatch(node.value):
                self.loose.add(node.value)


@cache
def used() -> dict[Path, TorchNames]:
    files = [one for one in ROOM.parent.rglob("*.py") if one != Path(torch_private.__file__)]
    return {file: TorchNames(file.read_text(encoding="utf-8")) for file in files}


def paths() -> set[str]:
    return {path for file in used().values() for path in file.paths}


def loose() -> set[str]:
    own = {name for file in used().values() for name in file.own}
    return {name for path, file in used().items() if ROOM in path.parents for name in file.loose} - own


def names_of_torch() -> set[str]:
    """The private names in torch's modules, as far as they are imported, and in their classes."""
    modules = [one for name, one in sys.modules.items() if name.partition(".")[0] == "torch" and one is not None]
    owners = [*modules, *(one for module in modules for one in vars(module).values() if isinstance(one, type))]
    return {name for owner in owners for name in vars(owner) if NAME.fullmatch(name)}


def listed() -> set[str]:
    return {name for table in TABLES for group in table.values() for name in group}


@cache
def is_module(name: str) -> bool:
    return name in sys.modules


def is_listed(path: str) -> bool:
    """Whether a path is listed, leads to what is listed, or begins with what is listed and is no module (but one of settings)."""
    return any(
        one == path
        or one.startswith(f"{path}.")
        or (path.startswith(f"{one}.") and (one.endswith(".config") or not is_module(one)))
        for one in listed()
    )


def test_every_private_name_is_listed() -> None:
    for table in TABLES:
        torch_private.missing(table)  # imports their modules
    assert {name for name in paths() if not is_listed(name)} == set()
    assert {one for file in used().values() for one in file.searched} == set()
    known = {part for name in listed() for part in name.split(".")}
    assert (loose() & names_of_torch()) - known - OTHERS == set()


def test_every_listed_name_is_used() -> None:
    parts = (
        loose()
        | {name.rpartition(".")[2] for name in paths()}
        | {name for file in used().values() for name in file.own}
    )
    unused = {name for name in listed() if name.rpartition(".")[2] not in parts and name not in paths()}
    assert unused == set()
    assert {name for group in torch_private.OPTIONAL.values() for name in group} <= listed()


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from torch._x import y", "torch._x.y"),
        ("from torch.utils import _y as z", "torch.utils._y"),
        ("core = torch._C\ncore._x()", "torch._C._x"),
        ("getattr(torch._C, '_x', None)", "torch._C._x"),
        ("sys.modules.get('torch._x')", "torch._x"),
        ("module = sys.modules.get('torch.x')\nmodule._y", "torch.x._y"),
    ],
)
def test_names_are_found(code: str, name: str) -> None:
    assert name in TorchNames(code).paths


def test_names_without_a_path_are_found() -> None:
    assert TorchNames("tensor._x\npatched(owner, {'_y': 1})").loose == {"_x", "_y"}
    assert TorchNames("getattr(torch._C, f'_{x}')").searched


def test_this_pytorch_has_them_all() -> None:
    assert torch_private.missing(torch_private.EVERY_RUN) == {}
    assert torch_private.missing(torch_private.DISTRIBUTED) == {}
    assert torch_private.missing(torch_private.FLEX_ATTENTION) == {}
    assert torch_private.missing(torch_private.SHARDED) == {}
    assert torch_private.missing(torch_private.MEASURED) == {}
    if torch_private.torch.__version__ >= "2.13" and find_spec("triton"):
        assert torch_private.missing(torch_private.COMPILED) == {}


def test_what_is_missing_is_named() -> None:
    names = {"tensors are told apart": ("torch._C._no_such_name", "torch._no_such_module.thing", "torch.float32")}
    lost = torch_private.missing(names)
    assert set(lost) == {"torch._C._no_such_name", "torch._no_such_module.thing"}
    with pytest.raises(ImportError, match=r"no longer has torch\._C\._no_such_name \(tensors are told apart\)"):
        torch_private.check(names)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["torch.overrides._get_current_function_mode_stack", "torch.library._defs"])
def test_a_pytorch_that_lacks_one_is_told_before_anything_is_imported(name: str) -> None:
    code = f"import oom_magic as om, torch\ndel {name}\nom.dry_run(lambda: torch.ones(3, device='cuda'))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"PyTorchMissingError: PyTorch {torch_private.torch.__version__} no longer has {name} (" in run.stderr


OF_CUDA_BUILDS = {
    "__enter__",  # of streams
    "__exit__",
    "_record_memory_history",
    "_save_segment_usage",
    "_save_memory_usage",
    "_snapshot",
    "_cuda_clearCublasWorkspaces",
    "_host_emptyCache",
}
NOT_IN_2_6 = {
    "instantiate",
    "get_stream_from_external",
    "is_tf32_supported",
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "reset_accumulated_host_memory_stats",
    "reset_peak_host_memory_stats",
}


def test_what_a_dry_run_replaces_is_there() -> None:
    gpu = DrySession("rtx3060").fake_gpu
    gpu.autocast = Autocast(gpu)
    table = torch_patches(Cards(gpu, gpu.card.total_bytes, 0), DeviceView(gpu), print)
    absent = {name for owner, values in table for name in values if not hasattr(owner, name)}
    allowed = OF_CUDA_BUILDS | (NOT_IN_2_6 if torch_private.torch.__version__.startswith("2.6") else set())
    assert absent <= allowed
