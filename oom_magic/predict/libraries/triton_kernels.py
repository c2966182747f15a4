"""Kernels written in Triton: they write into tensors that exist and allocate nothing, so they are not run."""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from oom_magic.language import _
from oom_magic.predict.isolation.patching import Patches
from oom_magic.predict.libraries.adapters import Adapter, Run


def _functions(module: ModuleType, run: Run) -> Patches:
    return [(module.JITFunction, {"run": _skipped(run)})]


def _autotuners(module: ModuleType, run: Run) -> Patches:
    """Triton before 3.3 starts the GPU's driver where a kernel is defined, later ones where it is first measured
    (``Autotuner.do_bench`` in triton/runtime/autotuner.py); modules that are imported in the run define some."""
    replaced: dict[str, Any] = {"run": _skipped(run)}
    if not hasattr(module.Autotuner, "do_bench"):
        init = module.Autotuner.__init__

        def measured(*args: Any, **options: Any) -> Any:
            return module.driver.active.get_benchmarker()(*args, **options)

        @wraps(init)
        def __init__(kernel: Any, *args: Any, do_bench: Any = None, **options: Any) -> None:  # noqa: N807
            init(kernel, *args, do_bench=do_bench or measured, **options)

        replaced["__init__"] = __init__
    return [(module.Autotuner, replaced)]


def _skipped(run: Run) -> Any:
    def launched(kernel: Any, *_unused: Any, **__: Any) -> None:
        name = getattr(kernel, "__name__", type(kernel).__name__)
        run.assume(_("Triton kernel {name}: not run; what its launch allocates internally is not counted", name=name))

    return launched


ADAPTERS: dict[str, Adapter] = {"triton.runtime.jit": _functions, "triton.runtime.autotuner": _autotuners}
