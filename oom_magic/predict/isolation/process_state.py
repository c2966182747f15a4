"""Process-wide state that a dry run may change: random generators, modes, hooks, the environment.

Settings of Python and of libraries are recorded before a dry run, and restored where they have changed.
"""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import csv
import decimal
import faulthandler
import functools
import gc
import itertools
import locale
import logging
import operator
import os
import random
import socket
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import numpy as np
import torch

from oom_magic.predict.isolation.patching import Journal
from oom_magic.predict.isolation.reach import is_users_class
from oom_magic.predict.isolation.restorations import set_context
from oom_magic.predict.isolation.snapshot import Snapshot
from oom_magic.user_code import is_users_file

_ANOTHER_SEED = 104_729  # an arbitrary seed
_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # getter and setter


@contextmanager
def other_random_numbers() -> Iterator[None]:
    """Draw other numbers than the code would: shows whether it depends on them. A dry run puts generators back."""
    with process_state_restored():
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(_ANOTHER_SEED)
        yield


@contextmanager
def process_state_restored() -> Iterator[None]:
    """Restore the state at the end, whatever is raised."""
    with Journal() as journal:
        for restore in _restorations():
            journal.record(restore)
        yield


def _restorations() -> Iterator[Callable[[], object]]:
    """Calls that put back what is now."""
    yield from settings_noted()
    partial = functools.partial
    yield partial(random.setstate, random.getstate())
    yield partial(np.random.set_state, np.random.get_state())
    yield partial(torch.set_rng_state, torch.get_rng_state())
    yield partial(torch.set_default_dtype, torch.get_default_dtype())
    yield partial(torch.set_grad_enabled, torch.is_grad_enabled())
    for kind in ("cuda", "cpu"):
        yield partial(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
        yield partial(torch.set_autocast_dtype, kind, torch.get_autocast_dtype(kind))
    yield partial(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    yield partial(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warns)
    yield partial(torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
    for name in _ATTENTION_FLAGS:
        is_on = getattr(torch.backends.cuda, f"{name}_enabled")()
        yield partial(getattr(torch.backends.cuda, f"enable_{name.removesuffix('_sdp')}_sdp"), is_on)
    hooks = Snapshot()
    for owner, name in itertools.product((torch.nn.modules.module, _OPTIMIZER), _GLOBAL_HOOKS):
        hooks.add(getattr(owner, name, None), 1)
    yield hooks.restore
    yield partial(_restore_pytorchs_own, _pytorchs_own())
    yield partial(_restore_default_device, _default_device())
    yield partial(restore_environment, dict(os.environ))


def _pytorchs_own() -> list[tuple[Any, dict[str, Any]]]:
    """The attributes of PyTorch's modules, and of classes that libraries change."""
    modules = [
        module for name, module in list(sys.modules.items()) if _is_pytorchs(name) and isinstance(module, ModuleType)
    ]
    return [(owner, dict(vars(owner))) for owner in (*modules, torch.Tensor, torch.nn.Module, torch.optim.Optimizer)]


def _restore_pytorchs_own(before: list[tuple[Any, dict[str, Any]]]) -> None:
    """Take out what others put in place of PyTorch's functions and classes, as DeepSpeed does with ``F.linear``.

    Replacements by PyTorch itself, made on first use, stay.
    """
    for owner, contents in before:
        now = vars(owner)
        if len(now) == len(contents) and all(map(operator.is_, contents.values(), list(now.values()))):
            continue
        for name, value in contents.items():
            new = now.get(name, value)
            if new is not value and callable(value) and not _is_pytorchs(getattr(new, "__module__", None) or "torch"):
                setattr(owner, name, value)


def _is_pytorchs(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def restore_environment(before: dict[str, str]) -> None:
    """Only what differs: other threads read it meanwhile."""
    is_elsewhere = hasattr(time, "tzset") and os.environ.get("TZ") != before.get("TZ")
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    if is_elsewhere:
        time.tzset()


def _restore_default_device(device: torch.device | None) -> None:
    if _default_device() == device:
        return
    torch.set_default_device(device)
    if device is None:  # as if none had ever been named: PyTorch 2.6 asks None for its device
        del torch._GLOBAL_DEVICE_CONTEXT.device_context  # type: ignore[attr-defined]


def _default_device() -> torch.device | None:
    """What ``torch.set_default_device`` named; None: nothing."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # type: ignore[attr-defined]
    return None if context is None else context.device


_OPTIMIZER = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides the name of the module
_GLOBAL_HOOKS = (
    "_global_buffer_registration_hooks", "_global_module_registration_hooks", "_global_parameter_registration_hooks",
    "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks",
    "_global_forward_hooks_always_called", "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks",
)  # fmt: skip
_ATTENTION_FLAGS = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")


def settings_noted() -> Iterator[Callable[[], object]]:
    """Calls that put back what is now."""
    for read, write in (*_SETTINGS, *_of_system(), *_attributes(), *_of_compilers()):
        with contextlib.suppress(RuntimeError):  # PyTorch where the old and the new names of a setting were both used
            yield functools.partial(_restore, read, write, read())
    for names in _tables():
        yield functools.partial(_restore_table, names, dict(names))
    for items in (sys.argv, sys.path, warnings.filters):
        yield functools.partial(_restore_list, items, list(items))
    for functions in (gc.callbacks, sys.meta_path, sys.path_hooks):
        yield functools.partial(_restore_callbacks, functions, list(functions))
    figures = getattr(sys.modules.get("matplotlib._pylab_helpers"), "Gcf", None)
    if figures is not None:  # those that pyplot knows
        yield functools.partial(_restore_items, figures.figs, dict(figures.figs))
    context = decimal.getcontext()
    yield functools.partial(set_context, context, context.copy())
    for table in _whole_tables():
        yield functools.partial(_restore_items, table, dict(table))
    yield functools.partial(_restore_dialects, csv.list_dialects())
    yield functools.partial(_restore_modules, dict(sys.modules))
    yield functools.partial(_restore_loggers, _loggers())
    yield functools.partial(_restore_handlers, _handlers())


def _restore(read: Callable[[], Any], write: Callable[[Any], Any], before: Any) -> None:
    now = read()
    if now is not before and now != before:
        write(before)


def _attributes() -> Iterator[_Setting]:
    """Attributes that are settings."""
    processes = sys.modules.get("multiprocessing.context")
    for owner, names in (
        (sys, ("argv", "stdin", "stdout", "stderr", *_HOOKS_OF_PYTHON)),
        (threading, ("excepthook",)),
        (tempfile, ("tempdir",)),
        (sys.modules.get("asyncio.events"), ("_event_loop_policy",)),
        (sys.modules.get("gettext"), ("_current_domain",)),
        (warnings, ("filters", "showwarning")),
        (logging, ("_loggerClass", "_logRecordFactory", "lastResort", "raiseExceptions")),
        (logging.root.manager, ("disable",)),
        (torch.backends.mkldnn, ("enabled",)),
        (torch.utils.deterministic, ("fill_uninitialized_memory",)),
        (
            torch.backends.cuda.matmul,
            ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"),
        ),
        (torch.backends.cudnn, ("enabled", "benchmark", "deterministic", "allow_tf32")),
        (getattr(processes, "_default_context", None), ("_actual_context",)),
    ):
        for name in names:
            if hasattr(owner, name):
                yield functools.partial(getattr, owner, name), functools.partial(setattr, owner, name)


def _of_compilers() -> Iterator[_Setting]:
    """What was set of PyTorch's compilers: attributes, or from 2.10 on variables of the context."""
    for name in ("torch._dynamo.config", "torch._inductor.config"):
        for entry in getattr(sys.modules.get(name), "_config", {}).values():
            override = entry.user_override
            if isinstance(override, ContextVar):
                yield override.get, override.set
            else:
                yield (
                    functools.partial(getattr, entry, "user_override"),
                    functools.partial(setattr, entry, "user_override"),
                )


def _tables() -> Iterator[dict[Any, Any]]:
    """Dicts of settings; what stands in them newly is left."""
    yield vars(builtins)
    yield vars(torch._tensor_str.PRINT_OPTS)
    if "matplotlib" in sys.modules:
        yield getattr(sys.modules["matplotlib"], "rcParams", {})
    pandas = sys.modules.get("pandas._config.config")
    waiting = [getattr(pandas, "_global_config", {})]
    while waiting:
        table = waiting.pop()
        yield table
        waiting += [inner for inner in table.values() if isinstance(inner, dict)]


def _whole_tables() -> Iterator[dict[Any, Any]]:
    """Dicts of settings in which nothing new stays."""
    yield logging._levelToName
    yield logging._nameToLevel
    yield copyreg.dispatch_table
    if "matplotlib" in sys.modules:
        yield getattr(getattr(sys.modules["matplotlib"], "colormaps", None), "_cmaps", {})


def _restore_table(names: dict[Any, Any], before: dict[Any, Any]) -> None:
    for name, value in before.items():
        if dict.get(names, name, names) is not value:
            dict.__setitem__(names, name, value)


def _restore_list(items: Any, before: list[Any]) -> None:
    if list(items) != before:
        items[:] = before
        with warnings.catch_warnings():
            pass  # they are looked at again


def _restore_items(table: dict[Any, Any], before: dict[Any, Any]) -> None:
    if list(table.items()) != list(before.items()):
        table.clear()
        table.update(before)


def _restore_dialects(before: list[str]) -> None:
    for name in csv.list_dialects():
        if name not in before:
            csv.unregister_dialect(name)


def _restore_modules(before: dict[str, Any]) -> None:
    """Imported modules stay; others are removed."""
    for name, module in list(sys.modules.items()):
        if before.get(name) is not module and getattr(module, "__spec__", None) is None:
            if name in before:
                sys.modules[name] = before[name]
            else:
                del sys.modules[name]


def _restore_callbacks(functions: list[Any], before: list[Any]) -> None:
    """Those of libraries that were imported meanwhile stay."""
    now = [one for one in functions if one in before or not _is_users(one)]
    if [one for one in now if one in before] != before:
        now = [*(one for one in now if one not in before), *before]
    if now != functions:
        functions[:] = now


def _is_users(one: Any) -> bool:
    code = getattr(one, "__code__", None)
    if code is not None:
        return is_users_file(code.co_filename)
    return is_users_class(one if isinstance(one, type) else type(one))


def _loggers() -> list[tuple[logging.Logger, dict[str, Any], list[Any], list[Any]]]:
    known = [logging.root, *logging.root.manager.loggerDict.values()]
    return [
        (
            one,
            {"level": one.level, "propagate": one.propagate, "disabled": one.disabled},
            [*one.handlers],
            [*one.filters],
        )
        for one in known
        if isinstance(one, logging.Logger)
    ]


def _restore_loggers(before: list[tuple[logging.Logger, dict[str, Any], list[Any], list[Any]]]) -> None:
    for logger, values, handlers, filters in before:
        if any(getattr(logger, name) != value for name, value in values.items()):
            vars(logger).update(values)
            logging.root.manager._clear_cache()  # type: ignore[attr-defined]
        logger.handlers[:], logger.filters[:] = handlers, filters


def _handlers() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The attributes of handlers and of their formatters; the stream is not ours to put back."""
    known = [one for one in (reference() for reference in getattr(logging, "_handlerList", ())) if one is not None]
    parts = [*known, *(one.formatter for one in known if one.formatter is not None)]
    styles = [vars(part)["_style"] for part in parts if "_style" in vars(part)]
    return [(vars(one), {name: vars(one)[name] for name in _OF_HANDLERS & vars(one).keys()}) for one in parts + styles]


def _restore_handlers(before: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for own, values in before:
        own.update(values)


def _umask() -> int:
    """There is no way to ask for it; other threads make files for nobody else meanwhile."""
    now = os.umask(0o77)
    os.umask(now)
    return now


def _of_system() -> Iterator[_Setting]:
    """What only some systems and versions have."""
    if hasattr(sys, "set_int_max_str_digits"):
        yield sys.get_int_max_str_digits, sys.set_int_max_str_digits
    if hasattr(os, "sched_setaffinity"):
        yield functools.partial(os.sched_getaffinity, 0), functools.partial(os.sched_setaffinity, 0)
    with contextlib.suppress(ImportError):
        import resource

        for number in {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}:
            yield functools.partial(resource.getrlimit, number), functools.partial(_set_limit, resource, number)


def _set_limit(resource: Any, number: int, before: tuple[int, int]) -> None:
    with contextlib.suppress(ValueError):  # the upper bound is lower now, and cannot be raised
        resource.setrlimit(number, before)


_OF_HANDLERS = {"level", "formatter", "filters", "_fmt", "_style", "datefmt", "_name"}
_HOOKS_OF_PYTHON = ("excepthook", "displayhook", "breakpointhook", "unraisablehook")
_SETTINGS: tuple[_Setting, ...] = (
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (sys.getswitchinterval, sys.setswitchinterval),
    (sys.gettrace, sys.settrace),
    (sys.getprofile, sys.setprofile),
    (_umask, os.umask),
    (threading.stack_size, threading.stack_size),
    (decimal.getcontext, decimal.setcontext),
    (faulthandler.is_enabled, lambda was: None if was else faulthandler.disable()),
    (csv.field_size_limit, csv.field_size_limit),
    (tracemalloc.is_tracing, lambda was: tracemalloc.start() if was else tracemalloc.stop()),
    (torch.is_warn_always_enabled, torch.set_warn_always),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (gc.get_threshold, lambda value: gc.set_threshold(*value)),
    (socket.getdefaulttimeout, socket.setdefaulttimeout),
    (functools.partial(locale.setlocale, locale.LC_ALL), functools.partial(locale.setlocale, locale.LC_ALL)),
    (np.geterr, lambda value: np.seterr(**value)),
    (np.get_printoptions, lambda value: np.set_printoptions(**value)),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy),
)
