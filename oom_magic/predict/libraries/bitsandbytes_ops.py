"""bitsandbytes on the pretend GPU: its own Python code for CUDA, with the compiled kernels left out."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch

from oom_magic.language import _
from oom_magic.predict.isolation.patching import Patches, all_patched, patched
from oom_magic.predict.libraries.adapters import Adapter, Run, fake_on_host
from oom_magic.predict.libraries.composed_kernels import Kernel, composed, operators_of

_BACKENDS = ("bitsandbytes.backends.default.ops", "bitsandbytes.backends.cuda.ops")  # the second is preferred


@contextmanager
def complaints_muted() -> Iterator[None]:
    """bitsandbytes warns, when imported, of missing CPU kernels, which a GPU does not need."""
    known = logging.root.manager.loggerDict
    was_known = "bitsandbytes" in known
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if not was_known and "bitsandbytes" not in sys.modules:
            known.pop("bitsandbytes", None)


class _Kernels:
    """Stands in for the compiled library: every function exists and does nothing."""

    def stream(self, device_index: int) -> int:
        """The stream on which kernels run: the default one."""
        return 0

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("__"):
            raise AttributeError(name)

        return _nothing


def _nothing(*args: Any) -> int:
    """Any kernel: it does nothing, and reports success."""
    return 0


@contextmanager
def _kernels_left_out(module: ModuleType, run: Run) -> Iterator[None]:
    """Run bitsandbytes' operators by its CUDA backend's Python code around the kernels."""
    from bitsandbytes import functional

    utils = sys.modules.get("bitsandbytes.backends.utils")  # since 0.47
    library = _Kernels()
    table: Patches = [
        (functional, {"lib": library, "get_paged": _get_paged(run), **optimizers_kernels(functional)}),
        (functional.CUBLAS_Context, {"_instance": None}),
        (functional.GlobalPageManager, {"_instance": None}),
    ]
    with ExitStack() as stack:
        # A partial, as functions are lent: newer versions keep it when imported, older ones ask at each kernel.
        stack.enter_context(patched(torch._C, {"_cuda_getCurrentRawStream": functools.partial(library.stream)}))
        handler = composed(_cuda_kernels(library))
        stack.enter_context(all_patched(table))
        for cache in (functional.name2qmap, getattr(utils, "_code_4bit_cache", {})):
            stack.enter_context(_emptied(cache))
        stack.enter_context(run.gpu.operators.extended(dict.fromkeys(operators_of("bitsandbytes"), handler)))
        yield


def optimizers_kernels(functional: ModuleType) -> dict[str, dict[str, tuple[Kernel, ...]]]:
    """The tables ``str2optimizer...``, from which bitsandbytes 0.46 takes its optimizers' kernels."""
    tables = {name: table for name, table in vars(functional).items() if name.startswith("str2optimizer")}
    return {
        name: {optimizer: (_nothing,) * len(kernels) for optimizer, kernels in table.items()}
        for name, table in tables.items()
    }


@contextmanager
def _emptied(cache: dict[Any, Any]) -> Iterator[None]:
    """Empty a dictionary inside the block, and restore it afterwards."""
    before = dict(cache)
    cache.clear()
    try:
        yield
    finally:
        cache.clear()
        cache.update(before)


def _cuda_kernels(library: _Kernels) -> dict[str, Kernel]:
    """The functions that bitsandbytes registers for CUDA, by operator, from copies of the modules that do."""
    import bitsandbytes

    found: dict[str, Kernel] = {}

    def register_kernel(name: str, device: str) -> Callable[[Kernel], Kernel]:
        def keep(function: Kernel) -> Kernel:
            found[name] = function
            return function

        return keep

    table: Patches = [
        (bitsandbytes._ops, {"register_kernel": register_kernel}),
        (bitsandbytes.cextension, {"lib": library}),
        (torch, {"compile": lambda function=None, **options: function or (lambda same: same)}),
    ]
    with all_patched(table):
        for name in _BACKENDS:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return found


def _get_paged(run: Run) -> Kernel:
    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        run.assume(
            _(
                "the state of a paged optimizer is in managed memory, which CUDA moves between host and GPU; it"
                " is outside PyTorch's allocator and not counted"
            )
        )
        state: Any = fake_on_host(run.gpu, shape, dtype)
        state.is_paged, state.page_deviceid = True, 0
        return state  # type: ignore[no-any-return]

    return get_paged


ADAPTERS: dict[str, Adapter] = {"bitsandbytes": _kernels_left_out}
