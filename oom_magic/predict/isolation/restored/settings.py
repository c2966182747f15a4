"""Settings of Python and of libraries: noted before a dry run, and put back where they are others then."""

from __future__ import annotations

import builtins
import contextlib
import decimal
import functools
import gc
import locale
import logging
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # what asks for it, and what sets it


def settings_noted() -> Iterator[Callable[[], object]]:
    """Calls that put back what is now."""
    for read, write in (*_SETTINGS, *_attributes(), *_of_compilers()):
        with contextlib.suppress(RuntimeError):  # PyTorch where the old and the new names of a setting were both used
            yield functools.partial(_restore, read, write, read())
    for names in _tables():
        yield functools.partial(_restore_table, names, dict(names))
    for items in (sys.path, warnings.filters):
        yield functools.partial(_restore_list, items, list(items))
    yield functools.partial(_restore_loggers, _loggers())


def _restore(read: Callable[[], Any], write: Callable[[Any], Any], before: Any) -> None:
    now = read()
    if now is not before and now != before:
        write(before)


def _attributes() -> Iterator[_Setting]:
    """Attributes that are settings."""
    processes = sys.modules.get("multiprocessing.context")
    for owner, names in (
        (sys, ("argv", "stdout", "stderr", "excepthook", "displayhook")),
        (threading, ("excepthook",)),
        (warnings, ("filters", "showwarning")),
        (decimal.getcontext(), ("prec", "rounding")),
        (logging.root.manager, ("disable",)),
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


def _tables() -> Iterator[dict[str, Any]]:
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


def _restore_table(names: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if dict.get(names, name, names) is not value:
            dict.__setitem__(names, name, value)


def _restore_list(items: Any, before: list[Any]) -> None:
    if list(items) != before:
        items[:] = before
        with warnings.catch_warnings():
            pass  # they are looked at anew


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


_SETTINGS: tuple[_Setting, ...] = (
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (sys.getswitchinterval, sys.setswitchinterval),
    (sys.gettrace, sys.settrace),
    (sys.getprofile, sys.setprofile),
    (gc.get_threshold, lambda value: gc.set_threshold(*value)),
    (socket.getdefaulttimeout, socket.setdefaulttimeout),
    (functools.partial(locale.setlocale, locale.LC_ALL), functools.partial(locale.setlocale, locale.LC_ALL)),
    (np.geterr, lambda value: np.seterr(**value)),
    (np.get_printoptions, lambda value: np.set_printoptions(**value)),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy),
)
