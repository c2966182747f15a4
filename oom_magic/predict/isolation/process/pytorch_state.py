"""The state of PyTorch's core: settings of the process, and a thread's modes, hooks, transforms and dispatch keys.

Code may enter a mode and not leave it, for example in a cell that ends in between. Modes above the pretend GPU's own
are removed as soon as the user's code has ended, because a mode that is left pops the uppermost one, whichever it is.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils import _device
from torch.utils import _python_dispatch as dispatch

from oom_magic.predict.isolation.patching import undone_at_the_end

_FUNCTORCH: Any = torch._C._functorch
_SAVED: Any = torch._C._autograd
_SETS = re.compile(r"_(?P<of>(?:jit_|debug_)?)set_(?P<rest>\w+)")
_NO_SETTINGS = ("nvfuser", "dispatch_mode", "tracing_state", "graph_exec_group")


def pytorch_state_restored() -> AbstractContextManager[None]:
    """Restores at the end the core's state for the process and the calling thread, whatever is raised."""
    return undone_at_the_end(_restorations())


def _restorations() -> Iterator[Callable[[], object]]:
    """Functions that restore the present state; they are called from the last to the first."""
    partial = functools.partial
    for including in (True, False):
        yield partial(_restore_keys, including, _keys(including))
    yield partial(_restore_function_modes, _function_modes())
    yield partial(_restore_dispatch_modes, _dispatch_modes())
    yield partial(_restore_hooks, _hooks(), _SAVED._saved_tensors_hooks_get_disabled_error_message())
    yield partial(_restore_dual_level, forward_ad._current_level)
    yield partial(_restore_transforms, _FUNCTORCH.get_dynamic_layer_stack_depth())
    yield partial(_restore_nesting, _nesting())
    yield partial(_restore_inference, torch.is_inference_mode_enabled())
    yield partial(setattr, _device, "CURRENT_DEVICE", _device.CURRENT_DEVICE)  # ``with torch.device(...)``
    yield partial(_restore_profiler, torch.autograd._profiler_enabled())  # type: ignore[attr-defined]
    yield partial(_restore_default_device, _default_device())
    for read, write in _of_core():
        yield partial(_restore, read, write, read())


@functools.cache
def _of_core() -> list[tuple[Callable[[], Any], Callable[..., Any]]]:
    """Settings with a function that sets them and a getter of a corresponding name, such as ``_set_nnpack_enabled``."""
    found = list(_OTHERS)
    known = vars(torch._C)
    for name, write in known.items():
        named = _SETS.fullmatch(name)
        if named is None or named["rest"].startswith(_NO_SETTINGS):
            continue
        asks = (f"_{named['of']}{how}{named['rest']}" for how in ("get_", "is_", ""))
        read = next((known[ask] for ask in asks if ask in known), None)
        with contextlib.suppress(TypeError, RuntimeError):  # it takes an argument, or is not set at all
            if read is not None and read() is not None:
                found.append((read, write))
    return found


def _function_modes() -> list[Any]:
    return list(torch.overrides._get_current_function_mode_stack())


def _dispatch_modes() -> list[Any]:
    return list(dispatch._get_current_dispatch_mode_stack())


def _restore_function_modes(before: list[Any]) -> None:
    if not _are_same(_function_modes(), before):
        while torch._C._len_torch_function_stack():  # type: ignore[attr-defined]
            torch._C._pop_torch_function_stack()  # type: ignore[attr-defined]
        for mode in before:
            torch._C._push_on_torch_function_stack(mode)  # type: ignore[attr-defined]


def _restore_dispatch_modes(before: list[Any]) -> None:
    now = _dispatch_modes()  # referenced until all are popped: 2.6 crashes with modes that only its stack refers to
    if not _are_same(now, before):
        while torch._C._len_torch_dispatch_stack():  # type: ignore[attr-defined]
            torch._C._pop_torch_dispatch_stack(None)  # type: ignore[attr-defined]
        for mode in before:
            torch._C._push_on_torch_dispatch_stack(mode)  # type: ignore[attr-defined]


def _are_same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _keys(including: bool) -> Any:
    """The dispatch keys that the thread includes in each call, or excludes from it."""
    read = torch._C._dispatch_tls_local_include_set if including else torch._C._dispatch_tls_local_exclude_set
    return read()


def _restore_keys(including: bool, before: Any) -> None:
    now = _keys(including)
    if now.raw_repr() != before.raw_repr():
        core: Any = torch._C
        put = (
            core._dispatch_tls_set_dispatch_key_included if including else core._dispatch_tls_set_dispatch_key_excluded
        )
        for key in torch._C.DispatchKey.__members__.values():
            if now.has(key) != before.has(key):
                put(key, before.has(key))


def _hooks() -> tuple[Any, ...]:
    """The uppermost pair of saved-tensor hooks; PyTorch 2.6 cannot tell."""
    uppermost = getattr(_SAVED, "_top_saved_tensors_default_hooks", None)
    return (uppermost and uppermost(True)) or ()


def _restore_hooks(before: tuple[Any, ...], message: str | None) -> None:
    """Remove the hooks above those of before, and restore the message that forbids hooks."""
    if message is None:
        _SAVED._saved_tensors_hooks_enable()
    while _hooks() and not _are_same(_hooks(), before):
        _SAVED._pop_saved_tensors_default_hooks()
    if before and not _hooks():
        _SAVED._push_saved_tensors_default_hooks(*before)
    if message is not None:
        _SAVED._saved_tensors_hooks_disable(message)


def _restore_dual_level(before: int) -> None:
    while forward_ad._current_level > before:
        forward_ad.exit_dual_level()


def _restore_transforms(before: int) -> None:
    """One by one, because PyTorch 2.6's function that pops all pops one too many."""
    while _FUNCTORCH.get_dynamic_layer_stack_depth() > before:
        _FUNCTORCH.pop_dynamic_layer_stack()


def _nesting() -> int:
    """How many blocks of autocast are open."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _restore_nesting(before: int) -> None:
    for _ in range(_nesting() - before):
        torch.autocast_decrement_nesting()


def _restore_inference(before: bool) -> None:
    """A guard that is only dropped would restore the whole state of the thread as it was in the run."""
    if torch.is_inference_mode_enabled() != before:
        for one in [one for one in gc.get_objects() if type(one) is torch.inference_mode][::-1]:
            if torch.is_inference_mode_enabled() != before and hasattr(one, "_inference_mode_context"):
                one.__exit__(None, None, None)


def _restore_profiler(before: bool) -> None:
    if torch.autograd._profiler_enabled() and not before:  # type: ignore[attr-defined]
        torch.autograd._disable_profiler()  # type: ignore[attr-defined]
        torch.autograd.profiler._run_on_profiler_stop()


def _default_device() -> torch.device | None:
    """The device set by ``torch.set_default_device``, or None."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # type: ignore[attr-defined]
    return None if context is None else context.device


def _restore_default_device(device: torch.device | None) -> None:
    if _default_device() == device:
        return
    torch.set_default_device(device)
    if device is None:  # as if none had ever been set: PyTorch 2.6 would ask None for its device
        del torch._GLOBAL_DEVICE_CONTEXT.device_context  # type: ignore[attr-defined]


def _restore(read: Callable[[], Any], write: Callable[..., Any], before: Any) -> None:
    try:
        now = read()
    except RuntimeError:  # the old and the new names of a setting were both used
        return
    if now != before:
        write(*before) if isinstance(before, tuple) else write(before)


def _told_by_setting(write: Callable[..., Any], other: Any) -> tuple[Callable[[], Any], Callable[..., Any]]:
    """Of a setting that cannot be read: ``write`` returns what it was before."""

    def read() -> Any:
        before = write(other)
        write(before)
        return before

    return read, write


def _flushes_denormals() -> bool:
    return sys.float_info.min * _HALF == 0


_HALF = float("0.5")  # a product of constants would be folded when this is compiled
_OTHERS: tuple[tuple[Callable[[], Any], Callable[..., Any]], ...] = (
    _told_by_setting(torch._C._jit_set_profiling_mode, True),
    _told_by_setting(torch._C._jit_set_profiling_executor, True),
    _told_by_setting(torch._C._jit_set_fusion_strategy, [("STATIC", 2)]),
    (torch._C._jit_can_fuse_on_cpu, torch._C._jit_override_can_fuse_on_cpu),
    (torch._C._jit_can_fuse_on_gpu, torch._C._jit_override_can_fuse_on_gpu),
    (_flushes_denormals, torch.set_flush_denormal),
)
