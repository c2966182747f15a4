"""Settings of the process, of Python's library and of others are after a dry run what they were before it."""

from __future__ import annotations

import asyncio
import builtins
import calendar
import codecs
import copy
import copyreg
import csv
import decimal
import email.charset
import gc
import http.client
import importlib
import io
import json
import linecache
import logging
import mimetypes
import os
import reprlib
import resource
import shutil
import signal
import socket
import sqlite3
import string
import sys
import threading
import tracemalloc
import types
import urllib.request
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import Distribution

from oom_magic.interrupts import wakeup_number
from oom_magic.predict.session import DrySession
from oom_magic.predict.what_if.change import library
from tests.support.put_back import check_put_back


class Meter:
    """A class of the user's."""


def no_importer(path: str) -> None:
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
        "tables": (logging.getLevelName(35), Meter in copyreg.dispatch_table, "made_up" in sys.modules),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
    }


def test_settings_of_python_and_libraries_are_as_before() -> None:
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
        sys.meta_path[:] = [Meter()]  # type: ignore[list-item]
        sys.path_hooks.append(no_importer)  # type: ignore[arg-type]
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
        copyreg.pickle(Meter, lambda meter: (Meter, ()))
        sys.modules["made_up"] = types.ModuleType("made_up")
        torch.backends.mha.set_fastpath_enabled(False)

    logging.getLogger("users")
    DrySession(has_bar=False).run(lambda: None)  # what is imported then stays
    users_variable.set([1])
    before = settings() | {"context": copy.deepcopy(settings()["context"])}
    DrySession(has_bar=False, is_lasting=False).run(run, [{"users_variable": users_variable}])
    now = settings()
    assert {name: (before[name], value) for name, value in now.items() if value != before[name]} == {}


def is_known(handler: str) -> bool:
    try:
        return bool(codecs.lookup_error(handler))
    except LookupError:
        return False


def is_codec(name: str) -> bool:
    try:
        return bool(codecs.lookup(name))
    except LookupError:
        return False


def search(name: str) -> codecs.CodecInfo | None:
    return codecs.lookup("ascii") if name == "users_codec" else None


def block(number: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])


def set_precision() -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"


def wake_up() -> None:
    one, other = socket.socketpair()
    one.setblocking(False)
    users_variable.set([one, other])  # type: ignore[list-item]
    signal.set_wakeup_fd(one.fileno())


def put_lines() -> None:
    linecache.cache["users_lines"] = 1, None, ["a"], "users_lines"


def current_loop() -> object:
    policy = getattr(asyncio.events, "_get_event_loop_policy", asyncio.get_event_loop_policy)  # 3.14 warns
    return getattr(policy()._local, "_loop", None)


PYTHONS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "an object": (lambda: calendar.firstweekday(), lambda: calendar.setfirstweekday(3)),
    "its attribute": (lambda: reprlib.aRepr.maxlist, lambda: setattr(reprlib.aRepr, "maxlist", 2)),
    "a table": (lambda: mimetypes.guess_type("a.zzz"), lambda: mimetypes.add_type("a/b", ".zzz")),
    "a table inside": (lambda: mimetypes.guess_all_extensions("text/plain"), lambda: mimetypes.add_type("text/plain", ".zz")),
    "a name": (lambda: getattr(sys, "ps1", None), lambda: setattr(sys, "ps1", "mine")),
    "a list": (lambda: urllib.parse.uses_netloc[:], lambda: urllib.parse.uses_netloc.append("mine")),
    "a class": (lambda: string.Template.delimiter, lambda: setattr(string.Template, "delimiter", "%")),
    "a method": (lambda: json.JSONEncoder.default, lambda: setattr(json.JSONEncoder, "default", repr)),
    "an opener": (
        lambda: urllib.request._opener,  # type: ignore[attr-defined]
        lambda: urllib.request.install_opener(urllib.request.build_opener()),
    ),
    "formats": (shutil.get_archive_formats, lambda: shutil.register_archive_format("mine", print, [], "")),
    "adapters": (lambda: dict(sqlite3.adapters), lambda: sqlite3.register_adapter(Meter, str)),
    "debugging": (
        lambda: http.client.HTTPConnection.debuglevel,
        lambda: setattr(http.client.HTTPConnection, "debuglevel", 1),
    ),
    "character sets": (
        lambda: dict(email.charset.CODEC_MAP),
        lambda: email.charset.add_codec("mine", "ascii"),
    ),
    "hooks of threads": (lambda: threading.gettrace(), lambda: threading.settrace(lambda *_: None)),
    "handlers of errors": (lambda: is_known("mine"), lambda: codecs.register_error("mine", codecs.ignore_errors)),
    "a handler of errors": (
        lambda: codecs.lookup_error("ignore"),
        lambda: codecs.register_error("ignore", codecs.replace_errors),
    ),
    "codecs": (lambda: is_codec("users_codec"), lambda: codecs.register(search)),
    "a library's setting": (lambda: np.little_endian, lambda: setattr(np, "little_endian", None)),
    "loading": (lambda: sys.getdlopenflags(), lambda: sys.setdlopenflags(sys.getdlopenflags() ^ 1)),
    "coroutines": (sys.get_coroutine_origin_tracking_depth, lambda: sys.set_coroutine_origin_tracking_depth(3)),
    "signals": (lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()), lambda: block(signal.SIGUSR2)),
    "an upper bound": (
        lambda: resource.getrlimit(resource.RLIMIT_STACK),
        lambda: resource.setrlimit(resource.RLIMIT_STACK, (1 << 22, 1 << 24)),
    ),
    "lines": (lambda: linecache.getlines("users_lines"), lambda: put_lines()),
    "warnings": (lambda: len(warnings.onceregistry), lambda: warnings.onceregistry.update(mine=1)),  # type: ignore[attr-defined]
    "what was warned of": (lambda: len(globals().get("__warningregistry__", ())), lambda: warnings.warn("mine", stacklevel=1)),
    "what a module exports": (lambda: json.__all__[:], lambda: json.__all__.append("mine")),
    "where a module is": (lambda: torch.__path__[:], lambda: torch.__path__.append("mine")),
    "ways to import": (lambda: sys.path_hooks[:], lambda: sys.path_hooks.extend([len, str.upper])),
    "folders": (lambda: "/mine" in sys.path_importer_cache, lambda: sys.path_importer_cache.setdefault("/mine", None)),
    "wakeup": (wakeup_number, lambda: wake_up()),
    "event loop": (lambda: current_loop(), lambda: asyncio.set_event_loop(asyncio.new_event_loop())),
    "timers": (lambda: signal.getitimer(signal.ITIMER_PROF)[0] > 0, lambda: signal.setitimer(signal.ITIMER_PROF, 99)),
    "a thread": (lambda: threading.current_thread().name, lambda: setattr(threading.current_thread(), "name", "mine")),
    "the hub": (torch.hub.get_dir, lambda: torch.hub.set_dir("/nowhere")),
    "safe classes": (
        lambda: Meter in torch.serialization.get_safe_globals(),
        lambda: torch.serialization.add_safe_globals([Meter]),
    ),
    "distributions": (
        lambda: Distribution._validate_args,
        lambda: Distribution.set_default_validate_args(not Distribution._validate_args),
    ),
}  # fmt: skip
if hasattr(torch.backends.cudnn, "conv"):  # from 2.9 on
    PYTHONS["precision"] = (lambda: torch.backends.cudnn.conv.fp32_precision, set_precision)


@pytest.mark.filterwarnings("default:mine")
def test_what_stands_in_modules_is_as_before() -> None:
    check_put_back(PYTHONS, {"np": np})


class FunctionMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **kwargs or {})


class DispatchMode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **kwargs or {})


def top_hooks() -> Any:
    if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        pytest.skip("this PyTorch does not tell which hooks saved tensors get")
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]


def in_inference() -> None:
    users_variable.set(torch.inference_mode().__enter__())  # type: ignore[func-returns-value]


BACKENDS = torch._C
PYTORCHS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "function mode": (BACKENDS._len_torch_function_stack, lambda: FunctionMode().__enter__()),  # type: ignore[attr-defined]
    "its flag": (torch.utils._python_dispatch.is_in_torch_dispatch_mode, lambda: DispatchMode().__enter__()),
    "dispatch mode": (BACKENDS._len_torch_dispatch_stack, lambda: DispatchMode().__enter__()),  # type: ignore[attr-defined]
    "device": (lambda: torch.ones(1).device, lambda: torch.device("meta").__enter__()),
    "subclasses": (BACKENDS._is_torch_function_enabled, lambda: BACKENDS.DisableTorchFunctionSubclass().__enter__()),  # type: ignore[attr-defined]
    "saved tensors": (top_hooks, lambda: torch.autograd.graph.saved_tensors_hooks(id, id).__enter__()),  # type: ignore[arg-type]
    "dual numbers": (lambda: torch.autograd.forward_ad._current_level, torch.autograd.forward_ad.enter_dual_level),
    "transforms": (
        BACKENDS._functorch.get_dynamic_layer_stack_depth,
        lambda: BACKENDS._functorch._vmap_increment_nesting(2, "error"),
    ),
    "dispatch keys": (
        lambda: BACKENDS._dispatch_tls_is_dispatch_key_excluded(BACKENDS.DispatchKey.AutogradCPU),
        lambda: BACKENDS._dispatch_tls_set_dispatch_key_excluded(BACKENDS.DispatchKey.AutogradCPU, True),
    ),
    "autocast": (lambda: torch.get_autocast_dtype("mps"), lambda: torch.set_autocast_dtype("mps", torch.bfloat16)),
    "compiled code": (
        lambda: BACKENDS._jit_set_profiling_mode(True) and BACKENDS._jit_set_profiling_mode(True),
        lambda: BACKENDS._jit_set_profiling_mode(False),
    ),
    "attention": (BACKENDS._get_sdp_priority_order, lambda: BACKENDS._set_sdp_priority_order([2, 1, 0, 3, 4])),
    "denormals": (lambda: sys.float_info.min * float("0.5"), lambda: torch.set_flush_denormal(True)),
    "a library's class": (lambda: torch.optim.SGD.step, lambda: setattr(torch.optim.SGD, "step", print)),
    "a table": (
        lambda: len(torch.utils._pytree.SUPPORTED_NODES),
        lambda: torch.utils._pytree.register_pytree_node(Meter, vars, Meter),  # type: ignore[arg-type]
    ),
    "another generator": (np.random.get_bit_generator, lambda: np.random.set_bit_generator(np.random.PCG64(3))),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", PYTORCHS)
def test_what_pytorch_holds_is_as_before(name: str) -> None:
    read, change = PYTORCHS[name]
    before = read()
    DrySession(has_bar=False, is_lasting=False).run(lambda: change() and None)
    assert read() == before


def test_anything_can_stand_among_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compared(types.ModuleType):
        def __eq__(self, other: object) -> bool:
            return False

    monkeypatch.setitem(sys.modules, "no_module", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "without_hash", Compared("without_hash"))
    run = DrySession(has_bar=False, is_lasting=False)
    run.run(lambda: torch.empty(512, device="cuda"))
    assert run.report is not None and run.report.peak_allocated_bytes == 2048


def test_loggers_and_modules_of_a_run_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))

    def run() -> None:
        (tmp_path / "written_module.py").write_text("value = 1")
        importlib.invalidate_caches()
        assert importlib.import_module("written_module").value == 1
        logging.getLogger("the_runs_own").addHandler(logging.NullHandler())
        sys.modules["calendar"] = types.ModuleType("calendar")
        del sys.modules["reprlib"]

    loggers = set(logging.root.manager.loggerDict)
    DrySession(has_bar=False, is_lasting=False).run(run)
    assert set(logging.root.manager.loggerDict) == loggers
    assert logging.getLogger("the_runs_own").handlers == [] and "written_module" not in sys.modules
    assert (sys.modules["calendar"], sys.modules["reprlib"]) == (calendar, reprlib)


LIBRARY = """
import copyreg, functools, logging, mimetypes, urllib.parse
class Theirs: pass
logging.Logger.theirs = property(lambda self: 7)
logging.THEIRS = 25
logging.getLogger("What they call it").addHandler(logging.NullHandler())
@functools.lru_cache(None)
def warning_twice(self, *args): self.warning(*args)
logging.Logger.warning_twice = warning_twice
copyreg.pickle(Theirs, lambda one: (Theirs, ()))
urllib.parse.uses_netloc.append("theirs")
"""


def test_what_a_library_registers_when_it_is_imported_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "their_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))

    def run() -> None:
        import their_library  # type: ignore[import-not-found]  # noqa: F401

        calendar.setfirstweekday(3)
        string.Template.delimiter = "%"

    DrySession(has_bar=False, is_lasting=False).run(run)
    theirs = sys.modules.pop("their_library").Theirs
    assert copyreg.dispatch_table.pop(theirs) and urllib.parse.uses_netloc.pop() == "theirs"
    assert calendar.firstweekday() == 0 and string.Template.delimiter == "$"
    assert len(logging.getLogger("What they call it").handlers) == 1
    assert logging.getLogger().theirs == 7 and logging.THEIRS == 25  # type: ignore[attr-defined]
    del logging.Logger.warning_twice, logging.Logger.theirs, logging.THEIRS  # type: ignore[attr-defined]


def test_what_a_library_for_a_remedy_sets_when_it_is_imported_is_put_back(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "setting_library.py").write_text(
        "from torch.distributions import Distribution\nDistribution.set_default_validate_args(False)\n"
    )
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # a compilation ends the checks
    monkeypatch.syspath_prepend(str(tmp_path))
    assert library("setting_library") is sys.modules.pop("setting_library")
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(0.0, -1.0)


def test_the_lines_of_cells_are_known_after_the_cache_was_cleared() -> None:
    linecache.cache["<cell>"] = entry = 1, None, ["a = 1\n"], "<cell>"
    DrySession(has_bar=False, is_lasting=False).run(linecache.clearcache)
    assert linecache.cache.pop("<cell>") is entry
