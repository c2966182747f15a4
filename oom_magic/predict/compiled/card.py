"""Answers of the pretend GPU to what Dynamo, Inductor and Triton ask about the GPU that they compile for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from oom_magic.language import _
from oom_magic.predict.compiled.fake_tensors import OnHost
from oom_magic.predict.fake_cuda.device_view import DeviceView
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.isolation.patching import Patches
from oom_magic.predict.setups.gpus import GPU
from oom_magic.units import KIB


def _interface(gpu: GPU) -> type:
    """The DeviceInterface of "cuda", which otherwise keeps the functions of torch.cuda that it found on import."""
    from torch._dynamo.device_interface import DeviceInterface

    class FakeCudaInterface(DeviceInterface):
        device = torch.cuda.device
        Event = torch.cuda.Event
        Stream = torch.cuda.Stream

        class Worker:
            set_device = staticmethod(lambda device: None)
            current_device = staticmethod(lambda: 0)
            get_device_properties = staticmethod(lambda device=None: torch.cuda.get_device_properties(0))

        current_device = staticmethod(lambda: 0)
        set_device = staticmethod(lambda device: None)
        device_count = staticmethod(lambda: 1)
        stream = staticmethod(lambda stream: torch.cuda.stream(stream))
        current_stream = staticmethod(lambda device=None: torch.cuda.current_stream())
        set_stream = staticmethod(lambda stream: None)
        _set_stream_by_id = staticmethod(lambda *_: None)
        synchronize = staticmethod(lambda device=None: None)
        get_device_properties = staticmethod(lambda device=None: torch.cuda.get_device_properties(0))
        get_raw_stream = staticmethod(lambda device: 0)
        exchange_device = maybe_exchange_device = staticmethod(lambda device: 0)
        memory_allocated = staticmethod(lambda device=None: torch.cuda.memory_allocated())
        is_available = staticmethod(lambda: True)
        is_bf16_supported = staticmethod(lambda including_emulation=False: gpu.capability >= (8, 0))
        is_dtype_supported = staticmethod(lambda dtype, including_emulation=False: True)
        is_triton_capable = staticmethod(lambda device=None: gpu.capability >= (7, 0))
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)
        get_compute_capability = staticmethod(lambda device=None: gpu.capability[0] * 10 + gpu.capability[1])

    return FakeCudaInterface


def _driver(gpu: GPU) -> Any:
    """Triton's driver: it names the target, and runs nothing."""
    from triton.backends.compiler import GPUTarget

    capability = gpu.capability[0] * 10 + gpu.capability[1]
    properties = {
        "max_shared_mem": _shared_memory(gpu.capability),
        "multiprocessor_count": gpu.num_multiprocessors,
        "warpSize": 32,
        "max_num_regs": 65536,
    }
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        utils=SimpleNamespace(get_device_properties=lambda device: properties),
    )


def _shared_memory(capability: tuple[int, int]) -> int:
    """Bytes that one thread block can have (CUDA C++ Programming Guide, "Technical Specifications per CC")."""
    sizes = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
    return sizes.get(capability, 99) * KIB


def compiled_for(gpu: GPU) -> Patches:
    """Queries about the GPU that code is compiled for are answered with this card's properties."""
    from torch._dynamo import device_interface

    device_interface.init_device_reg()
    triton_checks = importlib.import_module("torch.utils._triton")
    driver = importlib.import_module("triton.runtime.driver").driver
    interfaces = {**device_interface.device_interfaces, "cuda": _interface(gpu)}
    cuda = {
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "_DeviceGuard": _DeviceGuard,
    }
    return [
        (device_interface, {"device_interfaces": interfaces}),
        (type(driver), {"active": _driver(gpu)}),
        (torch.cuda, cuda),
        (torch._C, {"_cuda_cudaCachingAllocator_is_enabled": lambda: True}),  # asked before CUDA graphs are taken
        (triton_checks, {"triton_hash_with_backend": lambda: "0"}),
    ]


class _DeviceGuard:
    """``torch.cuda._DeviceGuard``: there is one device."""

    def __init__(self, index: int) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


def compiling_on(gpu: FakeGPU, view: DeviceView, assume: Callable[[str], None]) -> Patches:
    """Constants are folded on the host; benchmarked code runs on the pretend GPU, where no variant is faster."""
    from torch._inductor.constant_folding import ConstantFolder
    from torch._inductor.fx_passes import joint_graph, pad_mm
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.benchmarking import InductorBenchmarker
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    def bench(function: Callable[[], Any]) -> float:
        text = _(
            "torch.compile: Inductor times on the GPU whether a matrix product is faster when padded; assumed not"
            " to be (a padded product holds a padded copy of its factors for a while)"
        )
        assume(text)
        return _timed(function)

    timed = {
        "no_dispatch": lambda: running_on(gpu, view),
        "get_do_bench": lambda: bench,
        "get_cached_should_pad": gpu.timed.get,
        "get_cached_base_mm_benchmark_time": gpu.timed.get,
        "set_cached_should_pad": gpu.timed.__setitem__,
        "set_cached_base_mm_benchmark_time": gpu.timed.__setitem__,
    }
    folder = joint_graph.UniformValueConstantFolder
    return [
        (ConstantFolder, {"run": _on_host(ConstantFolder.run)}),
        (folder, {"_add_peephole_patterns": _on_host(folder._add_peephole_patterns)}),
        (pad_mm, timed),
        (GraphLowering, {"constant_name": _constant_on(gpu, view)}),
        (AlgorithmSelectorCache, {"__call__": _chosen(AlgorithmSelectorCache.__call__, gpu, view, assume)}),
        (InductorBenchmarker, {"benchmark_gpu": lambda _benchmarker, function, *_, **__: _timed(function)}),
    ]


def _constant_on(gpu: FakeGPU, view: DeviceView) -> Callable[..., str]:
    """A constant that a kernel on the GPU reads is copied there, and stays as long as the compiled graph."""

    def constant_name(lowering: Any, name: str, device: torch.device | None) -> str:
        if device is None or device.type != "cuda":
            return name
        moved = f"{name}_cuda"
        if moved not in lowering.constants:
            with running_on(gpu, view):
                lowering.constants[moved] = lowering.constants[name].to("cuda")
            lowering.constant_reprs[moved] = lowering.constant_reprs[name]
            lowering.allocated_constant_name[moved] = moved
        return moved

    return constant_name


def _timed(function: Callable[[], Any]) -> float:
    """What timing takes: a call, then calls beside a buffer that flushes the cache (``InductorBenchmarker``)."""
    function()
    cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    flushed = torch.empty(cache_bytes // 4, dtype=torch.int, device="cuda")
    function()
    del flushed
    return 1.0


def _chosen(
    usual: Callable[..., Any], gpu: FakeGPU, view: DeviceView, assume: Callable[[str], None]
) -> Callable[..., Any]:
    """max-autotune times kernels on examples of their arguments, equal ones once (``AlgorithmSelectorCache``).

    PyTorch's own kernel is then taken.
    """
    from torch._inductor.select_algorithm import create_inputs_key

    def __call__(  # noqa: N807
        cache: Any, name: str, choices: list[Any], nodes: list[Any], layout: Any, input_gen_fns: Any = None, **more: Any
    ) -> Any:
        own = next(filter(cache._is_extern, choices), None)
        if own is None or len(choices) == 1:
            return usual(cache, name, choices[:1], nodes, layout, input_gen_fns, **more)
        key = f"{name} {create_inputs_key(nodes)}"
        if key not in gpu.timed:
            text = _(
                "torch.compile: max-autotune chooses kernels by timing them on examples of their arguments; PyTorch's"
                " own are assumed, and the examples are freed at once here (on a GPU when Python collects garbage)"
            )
            assume(text)
            with running_on(gpu, view):
                examples = cache.get_inputs(choices, nodes, layout, input_gen_fns)
                gpu.timed[key] = cache.benchmark_choice(own, examples)
                inputs, output = examples.get_benchmark_tensors(True).unpack()
                for one in (*inputs, output):
                    gpu.note_freed_late(one)
                del examples, inputs, output, one
        return usual(cache, name, [own], nodes, layout, input_gen_fns, **more)

    return __call__


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
