"""oom_magic: explains, predicts and prevents CUDA out-of-memory errors of PyTorch training in notebooks.

``%load_ext oom_magic`` adds the magics; the names below work in any Python program. Nothing heavy is
imported before it is needed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from oom_magic.one_line_errors import OneLineErrors as _OneLineErrors
from oom_magic.results import register_views as _register_views

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from oom_magic.explain.diagnosis import Diagnosis
    from oom_magic.explain.doctor import doctor
    from oom_magic.explain.explainer import explain
    from oom_magic.measure.history.snapshot_file import load_snapshot
    from oom_magic.measure.holders.release import release
    from oom_magic.measure.measurement import measure
    from oom_magic.memory.categories import Breakdown, Category
    from oom_magic.memory.comparison import Comparison, compare, ratios
    from oom_magic.memory.memory_map import MemoryMap, memory_map
    from oom_magic.memory.report import MemoryReport
    from oom_magic.notebook.callbacks import hf_callback, lightning_callback
    from oom_magic.notebook.figures import plot
    from oom_magic.notebook.sliders.controller import sliders
    from oom_magic.predict.dry_run import dry_run
    from oom_magic.predict.setups.setup import TrainingSetup
    from oom_magic.predict.sizing.sizes import Sizes, size

__all__ = [
    "Breakdown",
    "Category",
    "Comparison",
    "Diagnosis",
    "MemoryMap",
    "MemoryReport",
    "Sizes",
    "TrainingSetup",
    "compare",
    "doctor",
    "dry_run",
    "explain",
    "hf_callback",
    "lightning_callback",
    "load_ipython_extension",
    "load_snapshot",
    "measure",
    "memory_map",
    "plot",
    "ratios",
    "release",
    "size",
    "sliders",
    "unload_ipython_extension",
]
__version__ = "0.1.0"

_HOMES = {
    "Breakdown": "memory.categories",
    "Category": "memory.categories",
    "Comparison": "memory.comparison",
    "Diagnosis": "explain.diagnosis",
    "MemoryMap": "memory.memory_map",
    "MemoryReport": "memory.report",
    "Sizes": "predict.sizing.sizes",
    "TrainingSetup": "predict.setups.setup",
    "compare": "memory.comparison",
    "doctor": "explain.doctor",
    "dry_run": "predict.dry_run",
    "explain": "explain.explainer",
    "hf_callback": "notebook.callbacks",
    "lightning_callback": "notebook.callbacks",
    "load_snapshot": "measure.history.snapshot_file",
    "measure": "measure.measurement",
    "memory_map": "memory.memory_map",
    "plot": "notebook.figures",
    "ratios": "memory.comparison",
    "release": "measure.holders.release",
    "size": "predict.sizing.sizes",
    "sliders": "notebook.sliders.controller",
}


class _Package(ModuleType):
    """This package. Importing its parts ``measure`` and ``explain`` does not replace the functions."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
_register_views(lambda: import_module("oom_magic.views"))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _OneLineErrors("other"):  # it may load PyTorch
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


def load_ipython_extension(shell: InteractiveShell) -> None:
    """What ``%load_ext oom_magic`` does: add the magics and the hint under out-of-memory errors."""
    from oom_magic.notebook.extension import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """What ``%unload_ext oom_magic`` does: remove what loading added."""
    from oom_magic.notebook.extension import unload

    unload(shell)
