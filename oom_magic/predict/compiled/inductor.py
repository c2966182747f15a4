"""What Inductor does on the GPU while it compiles: constants that it folds, products that it times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from oom_magic.language import _
from oom_magic.predict.compiled.fake_tensors import OnHost
from oom_magic.predict.fake_cuda.device_view import DeviceView
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.isolation.patching import Patches


def compiling_on(gpu: FakeGPU, view: DeviceView, assume: Callable[[str], None]) -> Patches:
    """Constants are folded on the host; what is timed runs on the pretend GPU, and no variant is faster."""
    from torch._inductor.constant_folding import ConstantFolder
    from torch._inductor.fx_passes import joint_graph, pad_mm

    known: dict[str, Any] = {}

    def bench(function: Callable[[], Any]) -> float:
        text = _(
            "torch.compile: Inductor times on the GPU whether a matrix product is faster with padded sizes; taken not"
            " to be (a padded product keeps a padded copy of its factors for a while)"
        )
        assume(text)
        function()
        cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        flushed = torch.empty(cache_bytes // 4, dtype=torch.int, device="cuda")
        function()
        del flushed
        return 1.0

    timed = {
        "no_dispatch": lambda: running_on(gpu, view),
        "get_do_bench": lambda: bench,
        "get_cached_should_pad": known.get,
        "get_cached_base_mm_benchmark_time": known.get,
        "set_cached_should_pad": known.__setitem__,
        "set_cached_base_mm_benchmark_time": known.__setitem__,
    }
    folder = joint_graph.UniformValueConstantFolder
    return [
        (ConstantFolder, {"run": _on_host(ConstantFolder.run)}),
        (folder, {"_add_peephole_patterns": _on_host(folder._add_peephole_patterns)}),
        (pad_mm, timed),
    ]


def is_on_gpu(graph: torch.fx.GraphModule) -> bool:
    """Whether a captured graph takes or makes anything on the GPU."""
    values = tree_leaves([node.meta.get("val") for node in graph.graph.nodes])
    return any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values)


@contextmanager
def running_on(gpu: FakeGPU, view: DeviceView) -> Iterator[None]:
    """Code inside runs on the pretend GPU, while all else is compiling."""
    with _disable_current_modes(), view, gpu:
        yield


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with OnHost():
            return function(*args, **kwargs)

    return run
