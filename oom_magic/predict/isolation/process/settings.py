"""Settings of Python and of libraries: recorded before a dry run, and restored where they have changed."""

from __future__ import annotations

import builtins
import contextlib
import csv
import ctypes
import decimal
import faulthandler
import functools
import gc
import importlib.machinery
import io
import itertools
import linecache
import locale
import logging
import operator
import os
import signal
import socket
import sys
import tempfile
import threading
import tracemalloc
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from itertools import compress
from typing import Any

import numpy as np
import torch
import torch.backends.opt_einsum

from oom_magic.interrupts import wakeup_number
from oom_magic.predict.isolation.objects.restorations import set_context
from oom_magic.predict.isolation.process.notebook_shell import shell_noted
from oom_magic.predict.isolation.process.standard_library import Staying, is_pythons, standard_library_noted
from oom_magic.predict.isolation.reach import is_users, is_users_module
from oom_magic.predict.isolation.snapshot import fill, is_unchanged

_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # getter and setter


def settings_noted() -> Iterator[Callable[[], object]]:
    """Functions that restore the present settings.

    What a library registers when the run imports it stays, as its module does, whose code would not run again: import
    hooks, functions called at the exit, pickling, loggers with their handlers. What holds for everybody's code does
    not stay: warning filters and the environment, which do not say who set them, and levels of loggers of before.
    """
    yield standard_library_noted()
    yield shell_noted()
    for read, write in (*_SETTINGS, *_of_system(), *_attributes(), *_of_compilers()):
        with contextlib.suppress(RuntimeError):  # PyTorch where the old and the new names of a setting were both used
            yield functools.partial(_restore, read, write, read())
    for names in _tables():
        yield functools.partial(_restore_table, names, dict(names))
    for items in (sys.argv, sys.path, sys.warnoptions, warnings.filters, gc.garbage):
        yield functools.partial(_restore_list, items, list(items))
    yield functools.partial(_restore_handlers, list(logging._handlerList))  # type: ignore[attr-defined]
    for functions in (gc.callbacks, sys.meta_path, sys.path_hooks, torch.serialization._package_registry):
        yield functools.partial(_restore_callbacks, functions, list(functions))
    figures = getattr(sys.modules.get("matplotlib._pylab_helpers"), "Gcf", None)
    if figures is not None:  # those that pyplot knows
        yield functools.partial(fill, figures.figs, dict(figures.figs))
    context = decimal.getcontext()
    for one in (context, decimal.DefaultContext, decimal.BasicContext, decimal.ExtendedContext):
        yield functools.partial(set_context, one, one.copy())
    for table in _whole_tables():
        yield functools.partial(fill, table, table.copy())
    finalizers = {one: (info, info.atexit) for one, info in weakref.finalize._registry.items()}  # type: ignore[attr-defined]
    yield functools.partial(_restore_finalizers, finalizers)
    yield functools.partial(_restore_safe_globals, torch.serialization.get_safe_globals())
    yield functools.partial(_restore_dialects, csv.list_dialects())
    yield functools.partial(_restore_modules, dict(sys.modules))
    yield functools.partial(_restore_names_of_modules, list(_names_of_modules()))
    yield functools.partial(
        _restore_loggers, _loggers(), dict(logging.root.manager.loggerDict), Staying(frozenset(sys.modules))
    )


def _restore(read: Callable[[], Any], write: Callable[[Any], Any], before: Any) -> None:
    try:
        now = read()
    except RuntimeError:  # PyTorch again: the run used the new names
        return
    if now is not before and now != before:
        write(before)


def _attributes() -> Iterator[_Setting]:
    """Attributes that are settings."""
    processes, events = sys.modules.get("multiprocessing.context"), sys.modules.get("asyncio.events")
    backends = (torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn)
    precise = (getattr(backend, name, None) for backend in backends for name in ("matmul", "conv", "rnn"))
    for owner, names in (
        *((one, ("fp32_precision",)) for one in (*precise, *backends, torch.backends)),  # from 2.9 on
        (sys, ("argv", "stdin", "stdout", "stderr", *_HOOKS_OF_PYTHON)),
        (threading, ("excepthook",)),
        (threading.current_thread(), ("name",)),
        (tempfile, ("tempdir",)),
        (events, ("_event_loop_policy",)),
        (getattr(getattr(events, "_event_loop_policy", None), "_local", None), ("_loop", "_set_called")),
        (sys.modules.get("gettext"), ("_current_domain",)),
        (warnings, ("filters", "showwarning")),
        (logging, ("_loggerClass", "_logRecordFactory", "lastResort", "raiseExceptions")),
        (logging.root.manager, ("disable",)),
        (torch.hub, ("_hub_dir",)),
        (torch.utils._python_dispatch, _FLAGS_OF_MODES),  # an interrupted mode does not put them back
        (torch.jit._state._enabled, ("enabled",)),
        (torch.serialization, ("DEFAULT_PROTOCOL",)),
        (torch.utils.checkpoint, ("_checkpoint_debug_enabled", "_enable_checkpoint_early_stop")),
        (torch.utils.checkpoint.DefaultDeviceType, ("_default_device_type",)),
        (torch.utils.data._utils.worker, ("_worker_info",)),
        (torch.nn.modules.module, ("_EXTRA_STATE_KEY_SUFFIX", "_global_is_full_backward_hook")),
        (sys.modules.get("torch._dynamo.eval_frame"), ("_stance",)),
        (torch.backends.opt_einsum, ("enabled", "strategy")),
        (torch.distributions.Distribution, ("_validate_args",)),
        (torch.backends.mkldnn, ("enabled", "deterministic")),
        (torch.utils.deterministic, ("fill_uninitialized_memory",)),
        (
            torch.backends.cuda.matmul,
            ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"),
        ),
        (torch.backends.cudnn, ("enabled", "benchmark", "benchmark_limit", "deterministic", "allow_tf32")),
        (getattr(processes, "_default_context", None), ("_actual_context",)),
    ):
        for name in names:
            if hasattr(owner, name):
                yield functools.partial(getattr, owner, name), functools.partial(setattr, owner, name)


def _of_compilers() -> Iterator[_Setting]:
    """Settings of PyTorch's compilers before 2.10. Since then they are context variables, and the run's code has a
    context of its own."""
    for name in ("torch._dynamo.config", "torch._inductor.config"):
        for entry in getattr(sys.modules.get(name), "_config", {}).values():
            if not isinstance(entry.user_override, ContextVar):
                yield (
                    functools.partial(getattr, entry, "user_override"),
                    functools.partial(setattr, entry, "user_override"),
                )


def _tables() -> Iterator[dict[Any, Any]]:
    """Dicts of settings; new entries stay."""
    yield vars(builtins)
    yield linecache.cache
    yield logging._handlers.data  # type: ignore[attr-defined]
    yield vars(torch._tensor_str.PRINT_OPTS)
    if "matplotlib" in sys.modules:
        yield getattr(sys.modules["matplotlib"], "rcParams", {})
    pandas = sys.modules.get("pandas._config.config")
    waiting = [getattr(pandas, "_global_config", {})]
    while waiting:
        table = waiting.pop()
        yield table
        waiting += [inner for inner in table.values() if isinstance(inner, dict)]


def _whole_tables() -> Iterator[Any]:
    """Tables of settings from which new entries are removed."""
    yield sys._xoptions
    yield sys.path_importer_cache
    yield warnings.onceregistry  # type: ignore[attr-defined]
    for functions in vars(sys.modules.get("torch._dynamo.trace_rules", types)).values():  # ``allow_in_graph``
        yield from filter(None, (getattr(functions, name, None) for name in ("function_ids", "function_names")))
    yield logging._levelToName
    yield logging._nameToLevel
    yield torch._logging._internal.log_state.log_qname_to_level
    if "multiprocessing.process" in sys.modules:
        this = sys.modules["multiprocessing.process"].current_process()
        yield vars(this)
        yield this._config
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


def _restore_handlers(before: list[Any]) -> None:
    """Those that ``logging.config`` forgot would not be flushed at the end of the process."""
    known: list[Any] = logging._handlerList  # type: ignore[attr-defined]
    known[:] = [*before, *(one for one in known if one not in before)]


def _restore_safe_globals(before: list[Any]) -> None:
    now = torch.serialization.get_safe_globals()
    found = [one for one in now if one in before or not (is_users(one) or getattr(one, "__module__", "") == "builtins")]
    if len(found) < len(now):
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(found)


def _restore_finalizers(before: dict[Any, tuple[Any, bool]]) -> None:
    """Those that ran for a folder, say, which is still there (``TemporaryDirectory.cleanup``).

    None of the run's that calls the user's functions, or Python's: ``shutil.rmtree`` would be called for real.
    """
    registry = weakref.finalize._registry  # type: ignore[attr-defined]
    made = [(one, info.func) for one, info in registry.items() if one not in before]
    for one in [one for one, function in made if is_users(function) or is_pythons(function)]:
        registry.pop(one, None)
    for one, (info, runs_at_exit) in before.items():
        info.atexit = runs_at_exit
        if one not in registry and info.weakref() is not None:
            registry[one] = info


def _restore_dialects(before: list[str]) -> None:
    for name in csv.list_dialects():
        if name not in before:
            csv.unregister_dialect(name)


def _restore_modules(before: dict[str, Any]) -> None:
    """Modules that were imported meanwhile stay, unless the run wrote them itself; others are removed, and those from
    before are the same objects."""
    if is_unchanged(before, sys.modules):
        return
    for name in sys.modules.keys() - before.keys():
        if not _is_imported(sys.modules[name]):
            del sys.modules[name]
    for name, module in before.items():
        if sys.modules.get(name) is not module:
            sys.modules[name] = module


def _is_no_librarys(one: Any) -> bool:
    return is_users(one) or (callable(one) and is_pythons(one))


def _is_imported(module: Any) -> bool:
    """Whether a module comes from a file that is there, or needs none."""
    spec = getattr(module, "__spec__", None)
    has_file = isinstance(getattr(spec, "loader", None), importlib.machinery.SourceFileLoader)
    return spec is not None and (not has_file or os.path.exists(spec.origin))


def _names_of_modules() -> Iterator[tuple[dict[str, Any], str, Any, Any]]:
    """What modules have under some of Python's own names: the module's names, the one, what it holds, and its copy."""
    for names, name, value in _held_under(*_OF_MODULES):
        if type(value) in (list, dict):
            yield names, name, value, value.copy()


def _held_under(*names: str) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The names of modules that have one of these names, that one, and what it holds."""
    modules = [vars(one) for one in list(sys.modules.values()) if issubclass(type(one), types.ModuleType)]
    for name in names:
        held = list(map(operator.methodcaller("get", name), modules))
        yield from compress(zip(modules, itertools.repeat(name), held, strict=False), held)


def _restore_names_of_modules(before: list[tuple[dict[str, Any], str, Any, Any]]) -> None:
    """``from ... import *`` and imports go by these lists; what was warned of in the run is warned of again."""
    for _names, _name, value, items in before:
        if value != items:
            fill(value, items)
    known = {id(names) for names, name, _value, _items in before if name == _WARNED}
    for names, _name, warned in _held_under(_WARNED):
        if id(names) not in known:
            warned.clear()


def _restore_callbacks(functions: list[Any], before: list[Any]) -> None:
    """Callbacks of libraries stay: one that was imported meanwhile may have made them, or on first use."""
    now = [
        one for one in functions if one in before or not any(map(_is_no_librarys, one if type(one) is tuple else [one]))
    ]
    if [one for one in now if one in before] != before:
        now = [*(one for one in now if one not in before), *before]
    if now != functions:
        functions[:] = now


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


def _restore_loggers(
    before: list[tuple[logging.Logger, dict[str, Any], list[Any], list[Any]]], known: dict[str, Any], staying: Staying
) -> None:
    tree, manager = logging.root.manager.loggerDict, logging.root.manager
    new = [name for name, one in tree.items() if one is not known.get(name) and staying.is_users_name(name)]
    gone = [tree.pop(name) for name in new]
    tree.update({name: known[name] for name in new if name in known})
    for holder in [one for one in tree.values() if isinstance(one, logging.PlaceHolder)]:
        for one in gone:
            holder.loggerMap.pop(one, None)  # type: ignore[arg-type]
    for logger, values, handlers, filters in before:
        while logger.parent in gone:
            logger.parent = logger.parent.parent  # type: ignore[union-attr]
        if any(getattr(logger, name) != value for name, value in values.items()):
            vars(logger).update(values)
            manager._clear_cache()  # type: ignore[attr-defined]
        logger.handlers[:], logger.filters[:] = handlers, filters
    old = {id(logger) for logger, *_unused in before}
    for logger, *_unused in _loggers():
        if id(logger) not in old and not (_is_librarys(logger.name) or staying.is_importeds_name(logger.name)):
            vars(logger).update(level=logging.NOTSET, propagate=True, disabled=False, handlers=[], filters=[])
            manager._clear_cache()  # type: ignore[attr-defined]


def _is_librarys(name: str) -> bool:
    """Whether a logger is named for a module that is no user's."""
    module = sys.modules.get(name.partition(".")[0])
    return module is not None and not is_users_module(module)


def _umask() -> int:
    """It can only be read by setting it; files that other threads create at that moment are private."""
    now = os.umask(0o77)
    os.umask(now)
    return now


def _of_system() -> Iterator[_Setting]:
    """Settings that only some systems and versions have."""
    partial = functools.partial
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook has others
            yield partial(_reading, stream), partial(_reconfigure, stream)
    if hasattr(sys, "setdlopenflags"):
        yield sys.getdlopenflags, sys.setdlopenflags
    if hasattr(signal, "pthread_sigmask"):
        yield partial(signal.pthread_sigmask, signal.SIG_BLOCK, ()), partial(signal.pthread_sigmask, signal.SIG_SETMASK)
    for name in ("ITIMER_VIRTUAL", "ITIMER_PROF"):
        if hasattr(signal, name):
            timer = getattr(signal, name)
            yield partial(signal.getitimer, timer), partial(_set_timer, timer)
    if hasattr(sys, "set_int_max_str_digits"):
        yield sys.get_int_max_str_digits, sys.set_int_max_str_digits
    yield wakeup_number, signal.set_wakeup_fd
    if "readline" in sys.modules:
        yield from _of_readline(sys.modules["readline"])
    if hasattr(os, "sched_setaffinity"):
        yield functools.partial(os.sched_getaffinity, 0), functools.partial(os.sched_setaffinity, 0)
    if torch.distributed.is_available():
        distributed: Any = torch.distributed
        yield distributed.get_debug_level, distributed.set_debug_level
    with contextlib.suppress(ImportError):
        import resource

        for number in {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}:
            yield functools.partial(resource.getrlimit, number), functools.partial(_set_limit, resource, number)


def _of_readline(readline: Any) -> Iterator[_Setting]:
    def history() -> list[str | None]:
        return [readline.get_history_item(at + 1) for at in range(readline.get_current_history_length())]

    def set_history(before: list[str | None]) -> None:
        readline.clear_history()
        for line in before:
            readline.add_history(line)

    yield history, set_history
    for name in ("completer", "completer_delims", "history_length"):
        yield getattr(readline, f"get_{name}"), getattr(readline, f"set_{name}")


def _reading(stream: io.TextIOWrapper) -> tuple[Any, ...]:
    return tuple(getattr(stream, name) for name in _OF_STREAMS) if not stream.closed else ()


def _reconfigure(stream: io.TextIOWrapper, before: tuple[Any, ...]) -> None:
    if not stream.closed:
        stream.reconfigure(**dict(zip(_OF_STREAMS, before, strict=False)))


def _set_timer(timer: int, before: tuple[float, float]) -> None:
    signal.setitimer(timer, *before)


def _set_limit(resource: Any, number: int, before: tuple[int, int]) -> None:
    with contextlib.suppress(ValueError):  # the upper bound is lower now, and cannot be raised
        resource.setrlimit(number, before)


_WARNED = "__warningregistry__"
_OF_MODULES = ("__all__", "__path__", _WARNED)
_FLAGS_OF_MODES = tuple(name for name, value in vars(torch.utils._python_dispatch).items() if type(value) is bool)
_OF_STREAMS = ("encoding", "errors", "line_buffering", "write_through")
_HOOKS_OF_PYTHON = ("excepthook", "displayhook", "breakpointhook", "unraisablehook")
_SETTINGS: tuple[_Setting, ...] = (
    (sys.get_asyncgen_hooks, lambda hooks: sys.set_asyncgen_hooks(*hooks)),
    (sys.get_coroutine_origin_tracking_depth, sys.set_coroutine_origin_tracking_depth),
    (gc.get_debug, gc.set_debug),
    (
        torch.__future__.get_overwrite_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion,
    ),
    (torch.__future__.get_swap_module_params_on_conversion, torch.__future__.set_swap_module_params_on_conversion),
    (torch.backends.cuda.preferred_linalg_library, torch.backends.cuda.preferred_linalg_library),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (sys.getswitchinterval, sys.setswitchinterval),
    (sys.gettrace, sys.settrace),
    (sys.getprofile, sys.setprofile),
    (_umask, os.umask),
    (threading.stack_size, threading.stack_size),
    (decimal.getcontext, decimal.setcontext),
    (faulthandler.is_enabled, lambda was: None if was else faulthandler.disable()),
    (csv.field_size_limit, csv.field_size_limit),
    (ctypes.get_errno, ctypes.set_errno),
    (tracemalloc.is_tracing, lambda was: tracemalloc.start() if was else tracemalloc.stop()),
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
