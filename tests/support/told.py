"""What %oom_explain prints for a text, and the tables that are counted from records beside them."""

from __future__ import annotations

import importlib.util
from typing import Any

from oom_magic.explain.explainer import explain
from tests.support.folders import DATA


def as_shown(text: str) -> str:
    """The answer to a text without its line breaks."""
    return " ".join(str(explain(text, fast=True, lang="en")).split())


def record(name: str) -> Any:
    """The module of ``tests/data`` that records or counts something."""
    spec = importlib.util.spec_from_file_location(name, DATA / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
