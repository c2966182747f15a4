"""Inductor's generated code, loaded without a compiler and run on the pretend GPU.

A generated module has a function ``call(args)``: it allocates with ``empty_strided_cuda``, launches Triton kernels,
calls ``extern_kernels`` and operators, and deletes what it no longer needs. All of that is executed, except the
kernels, which do nothing: a kernel writes into existing tensors, so it takes no memory, with one exception. If Inductor
has several configurations for a kernel, the first launch times each of them, on copies of the tensors that it changes,
and writes a buffer of the size of the L2 cache in between (``CachingAutotuner.benchmark_all_configs`` and
``InductorBenchmarker.benchmark_gpu``). In a backward and in inference the copies that would raise the peak are made on
the host (``CachingAutotuner.copy_args_to_cpu_if_needed``).

Each line stands for one of the user's. Dynamo notes with every operator the user's lines that led to it and the modules
that were running; Inductor notes from which operators it made a buffer (``torch/_inductor/ir.py``, ``origins``); a
line of the code that it writes names the buffer that it makes.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import ModuleType
from typing import Any

import torch

from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.places import META, Place
from oom_magic.predict.instrumentation.attribution import Origin
from oom_magic.predict.isolation.patching import Patches, all_patched
from oom_magic.user_code import is_users_file

_numbers = count(1)  # of the files that generated code seems to stand in


class _NoCompiler:
    """In place of ``AsyncCompile``: kernels are not compiled. Equal sources give the same kernel (``PyCodeCache``)."""

    def __init__(self, kernels: dict[str, Any]) -> None:
        self._kernels = kernels

    def triton(self, kernel_name: str, source_code: str, device_str: str = "cuda") -> Kernel:
        """A kernel that can be launched."""
        if source_code not in self._kernels:
            self._kernels[source_code] = load_kernel(kernel_name, source_code)
        kernel: Kernel = self._kernels[source_code]
        return kernel

    def cpp_pybinding(self, argtypes: list[str], source_code: str, **_: Any) -> Callable[..., None]:
        """What is computed on the host, within a graph of the GPU's, is not."""
        return lambda *_: None

    def wait(self, scope: dict[str, Any]) -> None:
        """Nothing is being compiled."""


@dataclass(frozen=True)
class Generated:
    """A module that Inductor wrote: its text, and what its lines stand for."""

    source: str
    origins: dict[int, Origin]


def load_again(code: Generated, gpu: FakeGPU) -> ModuleType:
    """The module, for this pretend GPU."""
    module = ModuleType("oom_magic_generated")
    module.__file__ = os.devnull  # where PyTorch reads the source again, for a purpose that a dry run does not have
    load(code.source, module, gpu, code.origins)
    return module


def loaded_without_compiler(gpu: FakeGPU, generated: list[Generated]) -> Patches:
    """Inductor's modules are loaded from memory, for the pretend GPU, and noted in ``generated``."""
    from torch._inductor import cpu_vec_isa, graph

    def _compile_to_module_lines(lowering: Any, wrapper_code: Any) -> ModuleType:
        generated.append(Generated(wrapper_code.value, origins_of(lowering, wrapper_code.value)))
        module = load_again(generated[-1], gpu)
        vars(module).update(lowering.constants)
        lowering.cache_key, lowering.cache_path, lowering.cache_linemap = "", module.__file__, []
        return module

    return [
        (graph.GraphLowering, {"_compile_to_module_lines": _compile_to_module_lines}),
        (cpu_vec_isa, {"valid_vec_isa_list": list}),  # a compiler would be started to find out
    ]


def load(source: str, module: ModuleType, gpu: FakeGPU, origins: dict[int, Origin]) -> None:
    """Execute a generated module's definitions in ``module``; its lines stand for ``origins``."""
    from torch._inductor import async_compile

    names = vars(module)
    file = f"<inductor {next(_numbers)}>"
    gpu.attribution.generated[file] = origins
    table: Patches = [
        (async_compile, {"AsyncCompile": partial(_NoCompiler, gpu.triton_kernels)}),
        (torch._C, {"_cuda_getCurrentRawStream": lambda device: 0}),
    ]
    with all_patched(table):
        exec(compile(source, file, "exec"), names)
    names.update(called_by_code(gpu))


def random_states_exchanged(gpu: FakeGPU) -> Patches:
    """The backward would draw random numbers again from the forward's generator state; here none are drawn."""
    from torch._prims.rng_prims import graphsafe_run_with_rng_state

    usual = type(graphsafe_run_with_rng_state).__call__

    def __call__(run: Any, operator: Any, *args: Any, rng_state: Any = None, **kwargs: Any) -> Any:  # noqa: N807
        if gpu.traces is not None:  # the compiler reads it
            return usual(run, operator, *args, rng_state=rng_state, **kwargs)
        return operator(*args, **kwargs)

    return [(type(graphsafe_run_with_rng_state), {"__call__": __call__})]


def called_by_code(gpu: FakeGPU) -> dict[str, Any]:
    """What generated code calls, for the pretend GPU."""

    def empty_strided_cuda(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made = torch._C._DisableTorchDispatch
        with made():
            tensor = torch.empty_strided(size, stride, dtype=dtype, device=META)
        gpu.adopt(tensor, Place.GPU, "aten::empty_strided", gpu.attribution.phase(False))
        return tensor

    def reinterpret_tensor(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    return {
        "empty_strided_cuda": empty_strided_cuda,
        "reinterpret_tensor": reinterpret_tensor,
        "get_raw_stream": lambda device: 0,
        "assert_size_stride": lambda *_: None,
        "assert_alignment": lambda *_: None,
    }


_BUFFER = re.compile(r"^\s+(\w+) = |\bout=(\w+)")
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)
_MODULE = re.compile(r"[LG]\['(\w+)'\](.*)")  # torch/_dynamo/source.py: local or global variable, and the way from it


def origins_of(lowering: Any, source: str) -> dict[int, Origin]:
    """The origins of lines of ``source``, the code that ``lowering`` became, by line number from 1."""
    order = {node: number for number, node in enumerate(lowering.graph.nodes)}
    known: dict[str, Origin | None] = {}
    found = {}
    for number, line in enumerate(source.splitlines(), 1):
        match = _BUFFER.search(line)
        if match is None:
            continue
        name = match[1] or match[2]
        if name not in known:
            node = _node(lowering.name_to_buffer.get(name), order)
            known[name] = None if node is None else origin_of(node)
        origin = known[name]
        if origin is not None:
            found[number] = origin
    return found


def _node(buffer: Any, order: dict[torch.fx.Node, int]) -> torch.fx.Node | None:
    """The operator that a buffer is the result of: of those fused into it, the last."""
    if buffer is None:
        return None
    node: torch.fx.Node | None = buffer.get_origin_node()
    return node or max(buffer.origins, key=lambda one: order.get(one, -1), default=None)


def origin_of(node: torch.fx.Node) -> Origin:
    """The user's innermost line and the module; in a backward, no line, since it runs where the user calls it."""
    is_backward = node.meta.get("partitioner_tag") == "is_backward"
    frames = [] if is_backward else _FRAME.findall(node.meta.get("stack_trace") or "")
    line = next(((file, int(number)) for file, number in reversed(frames) if is_users_file(file)), None)
    modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next(reversed(modules.values()))[0] if modules else ""
    match = _MODULE.fullmatch(path)
    variable, path = (match[1], match[2]) if match else ("", "")
    return Origin(line, "" if variable == "self" else variable, path)


class Kernel:
    """A kernel: the names of its arguments, the number of its configurations, and Inductor's notes about it."""

    def __init__(self, function: Callable[..., Any], num_configs: int, meta: dict[str, Any]) -> None:
        self._names = list(inspect.signature(function).parameters)
        self._changed = frozenset(meta.get("mutated_arg_names", ()))
        self._spares_peak = bool(meta.get("optimize_mem", True))
        self._num_untimed = num_configs if num_configs > 1 else 0

    def run(self, *args: Any, stream: Any = None, **_: Any) -> None:
        """Launch it."""
        changed = [arg for name, arg in zip(self._names, args, strict=False) if name in self._changed]
        while self._num_untimed:
            self._num_untimed -= 1
            copied = _within_peak(changed) if self._spares_peak else changed
            _copy(copied)
            cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
            flushed = torch.empty(cache_bytes // 4, dtype=torch.int, device="cuda")
            _copy(copied)
            del flushed


def _within_peak(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The arguments whose copies together do not raise the peak."""
    left = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    found = []
    for tensor in tensors:
        num_bytes = _span(tensor) * tensor.element_size()
        if num_bytes <= left:
            left -= num_bytes
            found.append(tensor)
    return found


def _copy(tensors: list[torch.Tensor]) -> None:
    _ = [tensor.as_strided((_span(tensor),), (1,)).clone() for tensor in tensors]


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last, gaps between them included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def load_kernel(name: str, source: str) -> Kernel:
    """The kernel of this name that generated source defines."""
    names: dict[str, Any] = {"__name__": name, "__file__": "<triton>"}
    with all_patched(_not_compiled()):
        exec(compile(source, "<triton>", "exec"), names)
    kernel: Kernel = names[name]
    return kernel


def _not_compiled() -> Patches:
    """Inductor's decorators determine the configurations of a kernel; everything after that is skipped."""
    import triton
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    def cached_autotune(
        size_hints: Any, configs: list[Any], triton_meta: Any, heuristic_type: Any, filename: Any = None,
        inductor_meta: Any = None, **_: Any,
    ) -> Callable[[Callable[..., Any]], Kernel]:  # fmt: skip
        num_configs = len(triton_heuristics.unique_configs(configs))
        return lambda function: Kernel(function, num_configs, inductor_meta or {})

    return [
        (triton, {"jit": lambda function: function}),
        (triton_heuristics, {"cached_autotune": cached_autotune}),
        (triton_helpers, {"set_driver_to_gpu": lambda: None}),
    ]
