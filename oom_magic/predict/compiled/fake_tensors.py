"""FakeTensors on "cuda" for the compiler, on every build of PyTorch.

A FakeTensor is a meta tensor that claims to be on another device, to C++ as well. A build without CUDA fails there:
autograd asks for streams of the device and aborts the process. Here FakeTensors on "cuda" stay meta tensors to C++,
where the operators of ``predict.operators`` serve them, and are on "cuda" to Python.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode, functional_tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import TorchDispatchMode, autograd_would_have_decomposed
from torch.utils._pytree import tree_map_only

from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.places import META, Place
from oom_magic.predict.fake_cuda.transfers import index_of_tensors
from oom_magic.predict.isolation.patching import Patches, patched
from oom_magic.predict.kernels.convolutions import memory_format_of

CUDA = torch.device("cuda", 0)
_FORMAT_ON_HOST = torch._C._conv_determine_backend_memory_format


def fake_cuda_tensors(gpu: FakeGPU) -> Patches:
    """What the compiler makes fake is on "cuda" to Python, and to C++ on "meta"."""
    make_subclass = torch.Tensor._make_subclass
    describe = MetaTensorDescriber.describe_tensor

    def _make_subclass(cls: type, data: torch.Tensor, requires_grad: bool = False, **options: Any) -> Any:
        if issubclass(cls, FakeTensor):
            device = options.get("device_for_backend_keys")
            if device is not None and device.type == "cuda":
                options = {}
        return make_subclass(cls, data, requires_grad, **options)

    def describe_tensor(describer: Any, tensor: torch.Tensor, **options: Any) -> Any:
        found = describe(describer, tensor, **options)
        return dataclasses.replace(found, device=CUDA) if gpu.place(tensor) is Place.GPU else found

    answers = {"is_cuda": property(_is_cuda), "is_meta": property(_is_meta)}
    is_users_on_cuda = property(lambda tensor: gpu.place(tensor) is Place.GPU)  # optimizers are asked for theirs
    modes = (FunctionalTensorMode, ProxyTorchDispatchMode, FakeTensorMode)
    return [
        (torch.Tensor, {"_make_subclass": staticmethod(_make_subclass), "is_cuda": is_users_on_cuda}),
        (MetaTensorDescriber, {"describe_tensor": describe_tensor}),
        (FunctionalTensor, {"device": property(_device_inside), **answers}),
        (FakeTensor, answers),
        *((mode, {"__torch_dispatch__": _on_cuda(mode.__torch_dispatch__)}) for mode in modes),
        *_tensors_from_data(),
        *_taken_apart_as_on_cuda(gpu),
        (torch._C, {"_conv_determine_backend_memory_format": _convolution_format}),
        (proxy_tensor, {"unset_fake_temporarily": _constants_on_host}),
    ]


@contextmanager
def tracing(gpu: FakeGPU) -> Iterator[None]:
    """Tensors inside the block are the compiler's FakeTensors; within a frame's conversion are several graphs'."""
    before, gpu.traces = gpu.traces, is_fake_cuda
    try:
        yield
    finally:
        gpu.traces = before


_MOVES = {torch.ops.aten._to_copy.default, torch.ops.prims.device_put.default}


class OnHost(TorchDispatchMode):
    """Computes values that are known while compiling on the host, whatever device is named."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operator's result, with every device argument the CPU."""
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs or {}))
        return func(*args, **kwargs)


@contextmanager
def _constants_on_host() -> Iterator[Any]:
    with unset_fake_temporarily() as before, OnHost():
        yield before


def _tensors_from_data() -> Patches:
    """``torch.tensor(2.0, device="cuda")`` and ``as_tensor`` copy to the device in C++; here the compiler sees that
    copy.

    With ``x[index] = number`` the number stays on the host, and the numbers of ``x[:, [0, 2]]`` are a tensor on the
    device (torch/csrc/autograd/python_variable_indexing.cpp); C++ sees meta tensors and would make it there.
    """
    from torch._dynamo import utils
    from torch._inductor.fx_passes import joint_graph

    from_data, of_data = torch.tensor, (torch.tensor, torch.as_tensor)
    run_node, interpreter = utils.run_node, torch.fx.Interpreter
    call_function, call_method = interpreter.call_function, interpreter.call_method

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != "cuda":
            return from_data(data, device=device, **options)
        requires_grad = options.pop("requires_grad", False)
        moved = torch.ops.aten._to_copy.default(from_data(data, **options), device=CUDA)
        return moved.requires_grad_(requires_grad)

    def index(numbers: Any, dtype: torch.dtype) -> torch.Tensor:
        return tensor(numbers, dtype=dtype, device=CUDA)

    def is_of_data(target: Any, args: Any) -> bool:
        return target in of_data and not isinstance(args[0], torch.Tensor)

    def _run_node(tracer: Any, node: Any, args: Any, kwargs: Any, module: Any) -> Any:
        if node.op == "call_function" and is_of_data(node.target, args):
            return tensor(*args, **kwargs)
        return run_node(tracer, node, *with_tensors(node.target, args, kwargs), module)

    def with_tensors(target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        is_indexing = target in (operator.getitem, operator.setitem) and isinstance(args[0], torch.Tensor)
        if is_indexing and is_fake_cuda(args[0]):
            args = (args[0], index_of_tensors(args[1], index), *args[2:])
        return _with_scalars(target, args, kwargs)

    def _call_function(run: Any, target: Any, args: Any, kwargs: Any) -> Any:
        chosen = tensor if is_of_data(target, args) else target
        return call_function(run, chosen, *with_tensors(target, args, kwargs))

    def _call_method(run: Any, target: Any, args: Any, kwargs: Any) -> Any:
        return call_method(run, target, *with_tensors(target, args, kwargs))

    return [
        (utils, {"run_node": _run_node}),
        (interpreter, {"call_function": _call_function, "call_method": _call_method}),
        (joint_graph, {"lazy_init": _with_tensor(joint_graph.lazy_init, tensor)}),
    ]


def _taken_apart_as_on_cuda(gpu: FakeGPU) -> Patches:
    """Autograd takes operators apart that the device has no kernel for. On "cuda" fewer have one than on "meta", where
    Python registers many (``std``, torch/_decomp/__init__.py) and would leave them without a gradient; and some have
    one on "cuda" only (``silu_backward``)."""
    would_decompose, resolve = autograd_would_have_decomposed, torch._ops.resolve_key

    def would_have_decomposed(func: Any, flat_args: Any) -> bool:
        return func not in gpu.operators.fused and would_decompose(func, flat_args)

    def resolve_key(operator: Any, key: Any) -> Any:
        composite, of_meta = torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.AutogradMeta
        has_own = key != of_meta or operator in gpu.operators.fused or operator.has_kernel_for_dispatch_key(of_meta)
        return composite if not has_own and operator.has_kernel_for_dispatch_key(composite) else resolve(operator, key)

    names = {"autograd_would_have_decomposed": would_have_decomposed}
    return [(functional_tensor, names), (proxy_tensor, names), (torch._ops, {"resolve_key": resolve_key})]


@contextmanager
def kernel_choices_forgotten() -> Iterator[None]:
    """PyTorch caches what ``resolve_key`` answers; inside the block are other answers than outside."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    for cached in torch._ops.get_cached_ops():
        cached._dispatch_cache.pop(torch._C.DispatchKey.AutogradMeta, None)


def _with_scalars(target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments, with a tensor for the number that C++ would make a tensor of."""
    if target is not operator.setitem or isinstance(args[2], torch.Tensor) or not is_fake_cuda(args[0]):
        return args, kwargs
    return (*args[:2], torch.scalar_tensor(args[2], dtype=args[0].dtype, device="cpu")), kwargs


def _convolution_format(tensor: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
    """The memory format of a convolution's results: a build without cuDNN never chooses channels last."""
    if is_fake_cuda(tensor):
        return memory_format_of(tensor, weight)
    return _FORMAT_ON_HOST(tensor, weight, backend)


def is_fake_cuda(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the compiler's is on "cuda"."""
    if isinstance(tensor, FunctionalTensor):
        tensor = torch._from_functional_tensor(tensor.elem)
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def _on_cuda(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Operators composed in C++ name the device that they see for new tensors: meta."""

    def __torch_dispatch__(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: N807
        if kwargs and kwargs.get("device") == META:
            kwargs = {**kwargs, "device": CUDA}
        if func in _MOVES and isinstance(args[0], FakeTensor):
            args[0].constant = None  # else the known value would really be copied
        return dispatch(mode, func, types, args, kwargs or {})

    return __torch_dispatch__


def _with_tensor(function: Callable[..., Any], tensor: Callable[..., Any]) -> Callable[..., Any]:
    """Inductor's patterns make examples with ``torch.tensor``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with patched(torch, {"tensor": tensor}):
            return function(*args, **kwargs)

    return run


def _device_inside(tensor: FunctionalTensor) -> torch.device:
    return torch._from_functional_tensor(tensor.elem).device


def _is_cuda(tensor: torch.Tensor) -> bool:
    return is_fake_cuda(tensor)


def _is_meta(tensor: torch.Tensor) -> bool:
    return bool(tensor.device == META)
