"""Inductor's generated code, loaded without a compiler and run on the pretend GPU.

A generated module has a function ``call(args)``: it allocates with ``empty_strided_cuda``, launches Triton kernels,
calls ``extern_kernels`` and operators, and deletes what it no longer needs. All of that is done as written, save the
kernels, which do nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import count
from types import ModuleType
from typing import Any

import torch

from oom_magic.predict.compiled.origins import origins_of
from oom_magic.predict.compiled.triton_kernels import Kernel, load_kernel
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.places import META, Place
from oom_magic.predict.instrumentation.attribution import Origin
from oom_magic.predict.isolation.patching import Patches, all_patched

_numbers = count(1)  # of the files that generated code seems to stand in


class _NoCompiler:
    """In place of ``AsyncCompile``: kernels are not compiled."""

    def triton(self, kernel_name: str, source_code: str, device_str: str = "cuda") -> Kernel:
        """A kernel that can be launched."""
        return load_kernel(kernel_name, source_code)

    def cpp_pybinding(self, argtypes: list[str], source_code: str, **_: Any) -> Callable[..., None]:
        """What is computed on the host, within a graph of the GPU's, is not."""
        return lambda *_: None

    def wait(self, scope: dict[str, Any]) -> None:
        """Nothing is under way."""


def loaded_without_compiler(gpu: FakeGPU) -> Patches:
    """Inductor's modules are loaded from memory, for the pretend GPU."""
    from torch._inductor import cpu_vec_isa, graph

    def _compile_to_module_lines(lowering: Any, wrapper_code: Any) -> ModuleType:
        module = ModuleType("oom_magic_generated")
        module.__file__ = os.devnull  # where PyTorch reads the source again, for what nobody asks here
        load(wrapper_code.value, module, gpu, origins_of(lowering, wrapper_code.value))
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
        (async_compile, {"AsyncCompile": _NoCompiler}),
        (torch._C, {"_cuda_getCurrentRawStream": lambda device: 0}),
    ]
    with all_patched(table):
        exec(compile(source, file, "exec"), names)
    names.update(_runtime(gpu))


def random_states_exchanged(gpu: FakeGPU) -> Patches:
    """What the backward draws again is drawn in the state of the forward's generator: here nothing is drawn."""
    from torch._prims.rng_prims import graphsafe_run_with_rng_state

    usual = type(graphsafe_run_with_rng_state).__call__

    def __call__(run: Any, operator: Any, *args: Any, rng_state: Any = None, **kwargs: Any) -> Any:  # noqa: N807
        if gpu.traces is not None:  # the compiler looks at it
            return usual(run, operator, *args, rng_state=rng_state, **kwargs)
        return operator(*args, **kwargs)

    return [(type(graphsafe_run_with_rng_state), {"__call__": __call__})]


def _runtime(gpu: FakeGPU) -> dict[str, Any]:
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
