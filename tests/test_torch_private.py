"""The table of PyTorch's private names is complete and true here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
TABLES = (torch_private.EVERY_RUN, torch_private.COMPILED, torch_private.DISTRIBUTED)


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.expr) -> list[str]:
    """The names of ``a.b.c``; the first is empty where it begins with something else than a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *parts]


def used_in(source: str) -> Iterator[str]:
    """The private names of torch that code imports or reaches by a dotted path, up to the last private part."""
    tree = ast.parse(source)
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "torch":
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if is_private(f"{node.module}.{alias.name}"):
                    yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root, *rest = dotted(node)
            if root in known:
                yield ".".join([known[root], *rest])


@cache
def used() -> set[str]:
    return {name for file in ROOM.rglob("*.py") for name in used_in(file.read_text(encoding="utf-8"))}


def listed() -> set[str]:
    return {name for table in TABLES for group in table.values() for name in group}


def leads(name: str) -> bool:
    """Whether a listed name begins with this one, such as the module that holds it."""
    return any(one == name or one.startswith(f"{name}.") for one in listed())


def test_every_private_name_that_a_dry_run_uses_is_listed() -> None:
    assert {name for name in used() if not leads(name)} == set()


def test_every_listed_name_is_used() -> None:
    found = used()
    assert {name for name in listed() if not any(one.startswith(name) for one in found)} == set()


def test_this_pytorch_has_them_all() -> None:
    assert torch_private.missing(torch_private.EVERY_RUN) == {}
    assert torch_private.missing(torch_private.DISTRIBUTED) == {}
    if torch_private.torch.__version__ >= "2.13" and find_spec("triton"):
        assert torch_private.missing(torch_private.COMPILED) == {}


def test_what_is_missing_is_named() -> None:
    names = {"tensors are told apart": ("torch._C._no_such_name", "torch._no_such_module.thing", "torch.float32")}
    lost = torch_private.missing(names)
    assert set(lost) == {"torch._C._no_such_name", "torch._no_such_module.thing"}
    with pytest.raises(RuntimeError, match=r"no longer has torch\._C\._no_such_name \(tensors are told apart\)"):
        torch_private.check(names)


OF_CUDA_BUILDS = {
    "_record_memory_history",
    "_save_segment_usage",
    "_save_memory_usage",
    "_snapshot",
    "_host_emptyCache",
}
NOT_IN_2_6 = {
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
