"""Settings of Python, the system and libraries are the same after a dry run as before it."""

from __future__ import annotations

import copy
import copyreg
import csv
import decimal
import gc
import io
import logging
import os
import resource
import signal
import sys
import tracemalloc
import types
import warnings
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from oom_magic.predict.session import DrySession


class Finder:
    """Stands for a finder of modules; it can be pickled."""


def hook(path: str) -> None:
    raise ImportError(path)


users_variable: ContextVar[list[int]] = ContextVar("users_variable")


unset_variable: ContextVar[int] = ContextVar("unset_variable", default=0)


def settings() -> dict[str, Any]:
    import matplotlib as mpl
    from matplotlib import pyplot

    logger, mask = logging.getLogger("users"), os.umask(0o22)
    os.umask(mask)
    return {
        "python": (
            sys.path[:],
            sys.argv,
            sys.getrecursionlimit(),
            sys.stdout,
            sys.stdin,
            str(decimal.getcontext()),
            sys.gettrace(),
            sys.breakpointhook,
            getattr(os, "sched_getaffinity", id)(0),
        ),
        "system": (mask, resource.getrlimit(resource.RLIMIT_NOFILE)),
        "imports": (sys.meta_path[:], sys.path_hooks[:], os.nice(0)),
        "collector": (gc.isenabled(), gc.get_threshold(), gc.callbacks[:]),
        "context": (users_variable.get(), unset_variable.get()),
        "level names": logging.getLevelName(10),
        "warnings": warnings.filters[:],
        "logging": (logging.root.manager.disable, logger.level, logger.handlers[:], logger.isEnabledFor(10)),
        "signals": (signal.getsignal(signal.SIGTERM), signal.getitimer(signal.ITIMER_REAL)[0] > 0),
        "numpy": (np.geterr(), np.get_printoptions()["precision"]),
        "torch": (torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark),
        "printing": torch._tensor_str.PRINT_OPTS.precision,
        "matplotlib": (mpl.rcParams["font.size"], pyplot.get_fignums()),
        "builtins": print,
        "csv": (csv.field_size_limit(), csv.list_dialects()),
        "watching": (tracemalloc.is_tracing(), torch.is_warn_always_enabled()),
        "tables": (logging.getLevelName(35), Finder in copyreg.dispatch_table, "made_up" in sys.modules),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
    }


def test_settings_of_python_and_libraries_are_as_before() -> None:
    import builtins

    import matplotlib as mpl
    from matplotlib import pyplot

    def run() -> None:
        sys.path.append("nowhere")
        sys.argv, sys.stdout = ["x"], io.StringIO()
        sys.setrecursionlimit(5000)
        decimal.getcontext().prec = 3
        decimal.getcontext().traps[decimal.Inexact] = True
        decimal.setcontext(decimal.Context(prec=2))
        sys.stdin, sys.breakpointhook = None, print  # type: ignore[assignment]
        os.umask(0o77)
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        sys.meta_path[:] = [Finder()]  # type: ignore[list-item]
        sys.path_hooks.append(hook)  # type: ignore[arg-type]
        sys.path_hooks.pop(0)
        assert os.nice(3) == os.nice(0) + 3
        gc.disable()
        gc.set_threshold(3)
        gc.callbacks.append(lambda *_: None)
        users_variable.get().append(2)
        users_variable.set([3])
        unset_variable.set(1)
        logging.addLevelName(10, "ten")
        pyplot.figure()
        warnings.filterwarnings("ignore", message="mine")
        logging.disable(logging.CRITICAL)
        logging.getLogger("users").setLevel(5)
        logging.getLogger("users").addHandler(logging.NullHandler())
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(100)
        np.seterr(all="ignore")
        np.set_printoptions(precision=2)
        torch.set_num_threads(7)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        torch.set_printoptions(precision=1)
        mpl.rcParams["font.size"] = 33
        builtins.print = len  # type: ignore[assignment]
        csv.field_size_limit(5)
        csv.register_dialect("mine")
        tracemalloc.start()
        torch.set_warn_always(True)
        logging.addLevelName(35, "mine")
        copyreg.pickle(Finder, lambda finder: (Finder, ()))
        sys.modules["made_up"] = types.ModuleType("made_up")
        torch.backends.mha.set_fastpath_enabled(False)

    logging.getLogger("users")
    DrySession(has_bar=False).run(lambda: None)  # what is imported then stays
    users_variable.set([1])
    before = settings() | {"context": copy.deepcopy(settings()["context"])}
    DrySession(has_bar=False, is_lasting=False).run(run, [{"users_variable": users_variable}])
    now = settings()
    assert {name: (before[name], value) for name, value in now.items() if value != before[name]} == {}
