"""Triton kernels that Inductor generates: launched, but never compiled and never run.

A kernel writes into tensors that are there, so it takes no memory, save once: where Inductor knows several ways to
launch it, the first launch times them, on copies of the tensors that it changes, between two of which a buffer of the
size of the L2 cache is written (``CachingAutotuner.benchmark_all_configs`` and ``InductorBenchmarker.benchmark_gpu``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from oom_magic.predict.isolation.patching import Patches, all_patched


class Kernel:
    """A kernel: the names of its arguments, those that it changes, and in how many ways it can be launched."""

    def __init__(self, function: Callable[..., Any], num_ways: int, changed: tuple[str, ...]) -> None:
        self._names = list(inspect.signature(function).parameters)
        self._changed = frozenset(changed)
        self._is_timed = num_ways > 1

    def run(self, *args: Any, stream: Any = None, **_: Any) -> None:
        """Launch it."""
        if not self._is_timed:
            return
        self._is_timed = False
        changed = [arg for name, arg in zip(self._names, args, strict=False) if name in self._changed]
        self._copy(changed)
        cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        flushed = torch.empty(cache_bytes // 4, dtype=torch.int, device="cuda")
        self._copy(changed)
        del flushed

    @staticmethod
    def _copy(tensors: list[torch.Tensor]) -> None:
        _ = [tensor.clone() for tensor in tensors]


def load_kernel(name: str, source: str) -> Kernel:
    """The kernel of this name that generated source defines."""
    names: dict[str, Any] = {"__name__": name, "__file__": "<triton>"}
    with all_patched(_not_compiled()):
        exec(compile(source, "<triton>", "exec"), names)
    kernel: Kernel = names[name]
    return kernel


def _not_compiled() -> Patches:
    """Inductor's decorators find the ways to launch a kernel; all that follows is left out."""
    import triton
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    def cached_autotune(
        size_hints: Any, configs: list[Any], triton_meta: Any, heuristic_type: Any, filename: Any = None,
        inductor_meta: Any = None, **_: Any,
    ) -> Callable[[Callable[..., Any]], Kernel]:  # fmt: skip
        meta = inductor_meta or {}
        num_ways = len(triton_heuristics.unique_configs(configs))
        return lambda function: Kernel(function, num_ways, tuple(meta.get("mutated_arg_names", ())))

    return [
        (triton, {"jit": lambda function: function}),
        (triton_heuristics, {"cached_autotune": cached_autotune}),
        (triton_helpers, {"set_driver_to_gpu": lambda: None}),
    ]
