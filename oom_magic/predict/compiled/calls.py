"""``torch.compile`` in the user's code: followed if possible, else run as eager code, which the report says."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch

from oom_magic.errors import describe_error
from oom_magic.language import _
from oom_magic.memory.report import Assumption, MemoryReport
from oom_magic.predict import torch_private
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.fake_memory import OverwrittenError
from oom_magic.predict.isolation.patching import Patches, all_patched, patched, suspended
from oom_magic.predict.operators.calls import TORCH
from oom_magic.user_code import is_users_file

FIRST_FOLLOWED = (2, 13)  # of PyTorch
_MODES_WITH_GRAPHS = ("reduce-overhead", "max-autotune")


def why_not_followed(is_wanted: bool) -> str:
    """Why compiled code is followed as eager code; empty if it is followed as compiled."""
    if not is_wanted:
        return _(
            "torch.compile: treated as eager code, an upper bound: compiled code usually takes a fifth to a half less"
        )
    if TORCH < FIRST_FOLLOWED:
        return _(
            "torch.compile: what PyTorch {version} compiles is not supported (2.13 and newer is); treated as"
            " eager code, an upper bound",
            version=torch.__version__,
        )
    if importlib.util.find_spec("triton"):
        return ""
    return _(
        "torch.compile: Triton is not installed, so compiled code is treated as eager code, an upper bound (pip"
        ' install --no-deps "triton>=3.7" makes it exact)'
    )


@contextmanager
def compile_followed(
    gpu: FakeGPU, assume: Callable[..., None], show: Callable[[str], None], is_wanted: bool
) -> Iterator[None]:
    """While a dry run lasts, ``torch.compile`` compiles for the pretend GPU; ``show`` is called with what is
    compiled."""
    reason = why_not_followed(is_wanted)
    with _as_eager(partial(_note_eager, assume, reason)) if reason else _on_first_call(gpu, assume, show):
        yield


@contextmanager
def _on_first_call(gpu: FakeGPU, assume: Callable[..., None], show: Callable[[str], None]) -> Iterator[None]:
    """The compiler is imported, which takes seconds, when something is compiled."""
    usual, usual_method = torch.compile, torch.nn.Module.compile
    begun = ExitStack()

    def begin() -> None:
        if not is_begun:
            gpu.has_compiled = True
            with suspended(None), _unseen(gpu):
                torch_private.check(torch_private.COMPILED)
                from oom_magic.predict.compiled.dynamo import Compiler
            begun.enter_context(Compiler(gpu, assume, show).active())
            is_begun.append(True)

    def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001 (torch's own name)
        is_import = imports_a_library(sys._getframe(1))
        if not is_import:
            begin()
        with suspended(None), _unseen(gpu):
            made = usual(*args, **kwargs)
        if is_import:
            watch()  # what a library compiles on import may run later
        return made

    def compile_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        begin()
        with suspended(None), _unseen(gpu):
            usual_method(module, *args, **kwargs)

    def convert(wrapper: Any, *args: Any) -> Any:
        begin()
        return type(wrapper).__call__(wrapper, *args)

    def watch() -> None:
        frames = sys.modules.get("torch._dynamo.convert_frame")
        if frames is not None and not is_begun and not is_watched:
            begun.enter_context(patched(frames.CatchErrorsWrapper, {"__call__": convert}))
            is_watched.append(True)

    is_begun: list[bool] = []
    is_watched: list[bool] = []
    with all_patched([(torch, {"compile": compile}), (torch.nn.Module, {"compile": compile_module})]), begun:
        watch()  # something may be compiled already
        yield


@contextmanager
def _unseen(gpu: FakeGPU) -> Iterator[None]:
    """The compiler's own work while it is imported is not attributed to the user's code."""
    before, gpu.traces = gpu.traces, lambda tensor: False
    try:
        yield
    finally:
        gpu.traces = before


def _note_eager(assume: Callable[..., None], reason: str, mode: str | None = None, options: Any = None) -> None:
    """Say that code is followed as eager code, and where that is no bound of what is reserved."""
    assume(reason, True)
    if mode in _MODES_WITH_GRAPHS or (options or {}).get("triton.cudagraphs"):
        assume(
            _(
                "torch.compile: CUDA graphs keep a pool that only they can use, which eager code does not have: more"
                " can be reserved than is said"
            )
        )


@contextmanager
def _as_eager(note: Callable[..., None]) -> Iterator[None]:
    """``torch.compile`` returns its argument, and code that is already compiled runs as it was written."""

    def compile(  # noqa: A001 (torch's own name)
        model: Any = None, *, mode: str | None = None, options: Any = None, **_unused: Any
    ) -> Any:
        if not imports_a_library(sys._getframe(1)):
            note(mode, options)
        return model if model is not None else lambda function: function

    def compile_module(*_unused: Any, mode: str | None = None, options: Any = None, **__: Any) -> None:
        note(mode, options)

    table: Patches = [(torch, {"compile": compile}), (torch.nn.Module, {"compile": compile_module})]
    with all_patched(table), _compiled_code_as_written(note):
        yield


@contextmanager
def _compiled_code_as_written(note: Callable[..., None]) -> Iterator[None]:
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        yield
        return

    def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        note()
        return module._orig_mod(*args, **kwargs)

    with torch.compiler.set_stance("force_eager"), patched(dynamo.OptimizedModule, {"__call__": __call__}):
        yield


def imports_a_library(frame: FrameType | None) -> bool:
    """Whether a library is being imported: what it compiles then may never run."""
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        if frame.f_code.co_name == "<module>":
            return True
        frame = frame.f_back
    return False


class _Run(Protocol):
    fake_gpu: FakeGPU
    report: MemoryReport | None


R = TypeVar("R", bound=_Run)


def run_or_as_written(session: R, run: Callable[[], object], again: Callable[[], R]) -> R:
    """``session`` once ``run`` has ended; where that failed with compiled code, the session that ``again`` gives.

    ``again`` runs the same as eager code. Where that fails, too, the error is the code's own and is raised, as is one
    of Dynamo's that the user asked for (``fullgraph=True``), and that of reading what a CUDA graph has overwritten.
    The other session's figures are upper bounds, and say so.
    """
    try:
        run()
        return session
    except Exception as error:
        if not session.fake_gpu.has_compiled or _is_users_own(error):
            raise
        failed = error
    finally:
        _graphs_kept()
    try:
        other = again()
    except Exception:
        raise failed from None
    text = _(
        "torch.compile: the compiled code could not be run here ({error}); treated as eager code, an upper bound",
        error=describe_error(failed)[:200],
    )
    if other.report is not None:
        other.report = replace(other.report, assumptions=(*other.report.assumptions, Assumption(text, None, True)))
    return other


def _graphs_kept() -> None:
    """What was compiled is there for the next process."""
    graphs = sys.modules.get("oom_magic.predict.compiled.known_graphs")
    if graphs is not None:
        graphs.keep()


def _is_users_own(error: Exception) -> bool:
    if isinstance(error, OverwrittenError):
        return True
    exceptions = sys.modules.get("torch._dynamo.exc")
    return exceptions is not None and isinstance(error, (exceptions.Unsupported, exceptions.UserError))
