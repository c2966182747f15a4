"""TorchScript in the user's code: it runs as it was written, and from its second call on keeps what PyTorch keeps.

PyTorch makes one node of a graph's derivatives (``DifferentiableGraphBackward`` in
torch/csrc/jit/runtime/graph_executor.cpp), once the first call has been profiled (``getNumProfiledRuns``): what the
forward saved is let go together, when that node has run, not operator by operator. Not so what ``torch.jit.trace`` has
checked: it is profiled without gradients, and its operators stay nodes of their own.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._jit_internal import createResolutionCallbackFromFrame

from oom_magic.language import _
from oom_magic.predict.compiled.calls import imports_a_library
from oom_magic.predict.fake_cuda.places import map_tensors, tensors_in
from oom_magic.predict.isolation.patching import Patches, suspended

_called: WeakKeyDictionary[Any, None] = WeakKeyDictionary()  # scripted modules that have been profiled
_open: list[AbstractContextManager[None]] = []  # of the calls that last
_STATE: Any = torch._C._autograd


def torchscript_as_written(assume: Callable[..., None]) -> Patches:
    """In place of ``torch.jit``: code runs as it was written, except that of a library being imported."""

    def note(name: str, is_one_node: bool = True) -> None:
        text = _(
            "{name}: the code is followed as it is written; from the second call on PyTorch runs TorchScript's fused"
            " kernels and derivatives, which can take more or less",
            name=name,
        )
        if is_one_node:
            text = _(
                "{name}: the code is followed as it is written, and from the second call on what it saves is kept until"
                " the backward has gone through all of it. TorchScript's own derivatives can save more: up to a quarter"
                " more than is said was measured",
                name=name,
            )
        assume(text, is_lower_bound=is_one_node)

    usual = torch.jit.script

    def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if not imports_a_library(sys._getframe(1)):
            note("torch.jit.script")
            return _with_one_node(obj)
        if isinstance(obj, type):  # its names are looked up in the caller's frame, two frames above this one
            kwargs.setdefault("_rcb", createResolutionCallbackFromFrame(2))
        with suspended(None):  # it reads the code of what it finds, also of what stands in for others
            return usual(obj, *args, **kwargs)

    frozen = {name: _of_scripted(getattr(torch.jit, name)) for name in ("freeze", "optimize_for_inference")}
    return [(torch.jit, {"script": script, "trace": _trace(torch.jit.trace, note), **frozen})]


def _with_one_node(obj: Any) -> Any:
    """A module or function whose derivatives are one node from the second call on; anything else as it is."""
    if isinstance(obj, torch.nn.Module):
        if _begin not in obj._forward_pre_hooks.values():
            obj.register_forward_pre_hook(_begin)
            obj.register_forward_hook(_end, always_call=True)
        return obj
    if not inspect.isfunction(obj):
        return obj
    calls = itertools.count()

    @functools.wraps(obj)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return obj(*args, **kwargs)
        with _one_node() if next(calls) else nullcontext():
            return obj(*args, **kwargs)

    return call


def _begin(module: torch.nn.Module, _args: Any) -> None:
    """A hook before a scripted module's forward."""
    if not torch.compiler.is_compiling():
        _open.append(_one_node() if module in _called else nullcontext())
        _open[-1].__enter__()
        _called[module] = None


def _end(_module: torch.nn.Module, _args: Any, _output: Any) -> None:
    """A hook after it, also where it failed."""
    if not torch.compiler.is_compiling() and _open:
        _open.pop().__exit__(None, None, None)


@contextmanager
def _one_node() -> Iterator[None]:
    """What is saved for a backward inside lives until the last of it is let go; where other hooks save it, as they
    do."""
    uppermost = getattr(_STATE, "_top_saved_tensors_default_hooks", None)  # PyTorch 2.6 cannot tell
    if uppermost is None or uppermost(True) or _STATE._saved_tensors_hooks_get_disabled_error_message():
        yield
        return
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> Any:
        kept.append(tensor)
        return kept, tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1]):
        yield


def _of_scripted(change: Callable[..., Any]) -> Callable[..., Any]:
    """A change that TorchScript makes to its modules, not to those that are followed as written."""
    return lambda mod, *args, **kwargs: change(mod, *args, **kwargs) if isinstance(mod, torch.jit.ScriptModule) else mod


def _trace(usual: Callable[..., Any], note: Callable[[str, bool], None]) -> Callable[..., Any]:
    """In place of ``torch.jit.trace``, for what is on a card: sizes are tensors while PyTorch traces."""
    kept: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()  # example inputs, with what was traced

    def trace(func: Any, example_inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_one = isinstance(example_inputs, (torch.Tensor, dict))
        inputs = (example_inputs,) if is_one else tuple(example_inputs or ())
        named = kwargs.get("example_kwarg_inputs") or {}
        is_module = isinstance(func, torch.nn.Module)
        held = [*func.parameters(), *func.buffers()] if is_module else []
        is_there = any(one.is_cuda for one in tensors_in((*inputs, held), named))
        if isinstance(func, torch.jit.ScriptModule) or not is_there:
            return usual(func, example_inputs, *args, **kwargs)
        is_checked = kwargs.get("check_trace", True)
        note("torch.jit.trace", not is_checked)
        _as_when_traced(partial(func, *inputs, **named), (inputs, named), is_checked)
        if is_module:
            kept[func] = inputs, named
        return func if is_checked else _with_one_node(func)

    return trace


def _as_when_traced(run: Callable[[], Any], inputs: Any, is_checked: bool) -> None:
    """The runs that ``torch.jit.trace`` makes (torch/jit/_trace.py, ``_check_trace``): one is traced, and to check it
    one with copies of the inputs, then three whose results are compared."""
    run()
    if is_checked:
        with torch.no_grad():
            copies = map_tensors(inputs, lambda tensor: tensor.detach().clone())
            run()
            results = [run() for _unused in ("trace", "Python function", "repeated trace")]
            del copies, results
