"""Operators of libraries, run as the PyTorch operators in Python that their kernels call around the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.device_view import DeviceView
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.places import Handler, Place, tensors_in

Kernel = Callable[..., Any]


def operators_of(namespace: str) -> list[OpOverload]:
    """The operators that are registered under a library's name."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        owner, _, rest = name.partition("::")
        if owner == namespace:
            packet, _, overload = rest.partition(".")
            found.append(getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default"))
    return found


def composed(kernels: Mapping[str, Kernel]) -> Handler:
    """The handler that runs, for an operator on the GPU, the kernel of its name: below autograd, without autocast."""
    outside = _as_user_code()

    def run_operator(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        overload = func._schema.overload_name
        kernel = kernels.get(f"{func._schema.name}.{overload}" if overload else func._schema.name)
        if kernel is None or not any(gpu.place(tensor) is Place.GPU for tensor in tensors_in(args, kwargs)):
            return gpu.run(func, args, kwargs)
        view = DeviceView(gpu)
        with torch.no_grad(), _autocast_off(gpu), outside(), torch._C._EnableTorchFunction(), view, gpu:
            return kernel(*args, **kwargs)

    return run_operator


@contextmanager
def _autocast_off(gpu: FakeGPU) -> Iterator[None]:
    """Autocast does not reach the operators inside a kernel."""
    before, gpu.autocast.is_on = gpu.autocast.is_on, False
    try:
        yield
    finally:
        gpu.autocast.is_on = before


def _as_user_code() -> Callable[[], AbstractContextManager[None]]:
    """Dispatch as in user code, where no operator runs, so that a mode sees composite operators decomposed."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
        included = included.remove(key)
    return lambda: torch._C._ForceDispatchKeyGuard(included, excluded)
