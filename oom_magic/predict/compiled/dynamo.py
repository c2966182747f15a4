"""Dynamo inside a dry run: it captures the user's functions as on a machine with a GPU, and forgets them afterwards."""

from __future__ import annotations

import contextlib
import copy
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import _lru_cache_wrapper
from types import CodeType, FunctionType
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.compile_fx
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
from torch._dynamo import convert_frame, guards, pgo, trace_rules
from torch._dynamo.cache_size import CacheSizeRelevantForFrame, compute_cache_size
from torch._dynamo.exc import Unsupported, UserError
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy
from torch._dynamo.utils import CleanupManager
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.torch import constant_fold_functions
from torch._guards import CompileContext
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes

from oom_magic.language import _
from oom_magic.predict.compiled.card import compiled_for, compiling_on, is_on_gpu, running_on
from oom_magic.predict.compiled.cuda_graphs import GraphTrees
from oom_magic.predict.compiled.cycles import Cycles
from oom_magic.predict.compiled.fake_tensors import fake_cuda_tensors, kernel_choices_forgotten, tracing
from oom_magic.predict.compiled.generated import (
    Generated,
    loaded_without_compiler,
    random_states_exchanged,
)
from oom_magic.predict.compiled.known_graphs import graphs_known
from oom_magic.predict.fake_cuda.device_view import DeviceView, set_function_modes
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.isolation.patching import Patches, all_patched, patched, resumed, suspended
from oom_magic.user_code import is_own_file

_CONVERT = convert_frame.CatchErrorsWrapper.__call__  # PyTorch's own: this file is imported with nothing replaced
_REASONS = "get_and_maybe_log_recompilation_reasons"
_OURS = ConvertFrameReturn(frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT))
_OUR_MODES = ConvertFrameReturn(frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
_ONCE_AS_WRITTEN = ConvertFrameReturn(apply_to_code=False)
_KNOWN_BY_IDENTITY = {"_group_tensors_by_device_and_dtype"}  # to Dynamo, in a place that is else not traced
_RESUMED = re.compile(r"torch_dynamo_resume_in_(\w+)_at_(\d+)")  # torch/_dynamo/resume_execution.py
_IMPORTED = "__import_"  # how Dynamo names the modules that it adds to the user's globals


class Compiler:
    """``torch.compile`` for the pretend GPU, for as long as one dry run lasts."""

    def __init__(self, gpu: FakeGPU, assume: Callable[..., None], show: Callable[[str], None]) -> None:
        self._gpu = gpu
        self._assume = assume
        self._show = show
        self._shown = self._name = ""
        self._names: dict[Any, str] = {}  # names of what the user compiles, by Dynamo's number for it
        self._view = DeviceView(gpu)
        self._traces = _Traces()
        self._failed: set[CodeType] = set()
        self._cycles = Cycles(gpu, self._note_held)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Compiled code is followed inside the block."""
        with ExitStack() as stack:
            stack.callback(_caches_cleared)
            stack.callback(self._traces.remove)
            stack.callback(self._cycles.clear)
            self._gpu.releases.append(self._cycles.release)
            stack.callback(self._gpu.releases.remove, self._cycles.release)
            _caches_cleared()
            _answer_constants()
            stack.enter_context(all_patched(self._instrumentation_patches()))
            yield

    def _instrumentation_patches(self) -> Patches:
        """What is replaced while compiled code is followed."""
        no_profile = {"_CODE_STATE": None, "_INIT_CODE_STATE": None}  # of earlier runs
        return [
            (convert_frame.CatchErrorsWrapper, {"__call__": self._convert()}),
            (convert_frame, {_REASONS: _with_modes(getattr(convert_frame, _REASONS))}),
            (convert_frame, {"compute_cache_size": self._traces.cache_size}),
            (convert_frame, {"FRAME_COMPILE_COUNTER": type(convert_frame.FRAME_COMPILE_COUNTER)()}),
            (guards.CheckFunctionManager, {"__init__": _guarded_with_modes()}),
            (torch._dynamo.utils, {"set_torch_function_mode_stack": _set_modes_below_view}),
            (pgo, {**no_profile, "put_code_state": lambda: None, "get_cache_key": lambda: None}),
            (torch._inductor.compile_fx, {"_compile_fx_inner": self._compile_inner()}),
            (torch._C, {"_DisableAutocast": self._gpu.autocast.off}),  # while graphs are compiled, and when they run
            *GraphTrees(self._gpu).patches(),
            *random_states_exchanged(self._gpu),
            *compiled_for(self._gpu.card),
        ]

    def _compiling_patches(self) -> Patches:
        """What is replaced while something is compiled."""
        generated: list[Generated] = []
        return [
            *fake_cuda_tensors(self._gpu),
            *loaded_without_compiler(self._gpu, generated),
            *graphs_known(self._gpu, generated),
            *compiling_on(self._gpu, self._view, self._assume),
            (OptimizerVariable, {"call_method": self._optimizer_method()}),
        ]

    @contextmanager
    def _compiling(self, what: str) -> Iterator[None]:
        """PyTorch as the compiler must find it: without what a dry run replaces where Dynamo traces."""
        with ExitStack() as stack:
            stack.callback(self._tell, self._shown)
            self._tell(what)
            stack.enter_context(_without_view())
            stack.enter_context(suspended(_traced(), _KNOWN_BY_IDENTITY))
            stack.enter_context(tracing(self._gpu))
            stack.enter_context(kernel_choices_forgotten())
            stack.enter_context(all_patched(self._compiling_patches()))
            stack.enter_context(torch._inductor.config.patch(force_disable_caches=True, compile_threads=1))
            stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
            yield
            self._gpu.recorder.expect_step()  # compiling may take minutes

    def _tell(self, what: str) -> None:
        self._shown = what
        self._show(what)

    def _convert(self) -> Callable[..., Any]:
        def __call__(wrapper: Any, frame: Any, cache_entry: Any, frame_state: Any) -> Any:  # noqa: N807
            code = frame.f_code
            if is_own_file(code.co_filename):
                return _OUR_MODES if code.co_name in ("__torch_function__", "__torch_dispatch__") else _OURS
            if code.co_filename == contextlib.__file__ and is_own_file(sys._getframe(1).f_code.co_filename):
                return _OUR_MODES
            if code in self._failed:
                return _ONCE_AS_WRITTEN
            if trace_rules.check(code, frame=frame):  # nothing to compile, so nothing to prepare
                return _CONVERT(wrapper, frame, cache_entry, frame_state)
            self._traces.note(frame)
            self._name = _name_of(frame)
            try:
                # PyTorch disables the modes as well, but not for DDP's graphs
                with self._compiling(_("compiling {name}", name=self._name)), _disable_current_modes():
                    result = _CONVERT(wrapper, frame, cache_entry, frame_state)
            except (Unsupported, UserError):  # the user's own: fullgraph=True with a graph break
                raise
            except Exception as error:
                self._raise_simulated(error)
                self._failed.add(code)
                self._assume(_not_followed(self._name, error), True)
                return _ONCE_AS_WRITTEN
            finally:
                self._cycles.collect_later()
            if result.guarded_code is not None:
                self._traces.compiled.append(result.guarded_code)
            return result

        return __call__

    def _note_held(self) -> None:
        self._assume(
            _(
                "torch.compile: reference cycles that compiling leaves behind are freed at once here; a real run"
                " may hold results of its first step (such as logits) until Python's garbage collector frees"
                " them, as gc.collect() after that step does"
            )
        )

    def _optimizer_method(self) -> Callable[..., Any]:
        """An optimizer's state, which Dynamo lets the optimizer make at once, on the GPU."""
        usual = OptimizerVariable.call_method

        def call_method(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name != "_init_group":
                return usual(variable, tx, name, args, kwargs)
            made = variable.value._init_group

            def _init_group(*args: Any, **kwargs: Any) -> Any:
                with running_on(self._gpu, self._view), resumed():
                    return made(*args, **kwargs)

            with patched(variable.value, {name: _init_group}):
                return usual(variable, tx, name, args, kwargs)

        return call_method

    def _compile_inner(self) -> Callable[..., Any]:
        """Inductor's part of compiling; for a backward it runs only when the backward begins."""
        usual = torch._inductor.compile_fx._compile_fx_inner

        def _compile_fx_inner(module: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            graph = torch.fx.GraphModule(module, copy.copy(module.graph))  # Inductor's passes change its argument
            as_captured = torch._functorch.aot_autograd.make_boxed_func(graph.forward)
            if not is_on_gpu(graph):
                return as_captured  # it takes no memory on the host, where its values are known
            self._cycles.grow_old()
            try:
                with self._compiling(self._what_inside(kwargs.get("is_backward"))):
                    made = usual(module, inputs, *args, **kwargs)
                if kwargs.get("is_backward"):  # which no frame's conversion contains
                    self._cycles.collect_later()
                return made
            except Exception as error:
                self._raise_simulated(error)
                self._assume(_not_followed("backward" if kwargs.get("is_backward") else "forward", error), True)
                return as_captured

        return _compile_fx_inner

    def _what_inside(self, is_backward: Any) -> str:
        """What Inductor compiles at the moment, named after the frame that Dynamo captured it from."""
        number = CompileContext.current_compile_id()
        if not is_backward:
            self._names[number] = self._name
            return self._shown
        return _("compiling the backward of {name}", name=self._names.get(number, self._name))

    @staticmethod
    def _raise_simulated(error: BaseException | None) -> None:
        """If the card ran out of memory while compiling, raise that error and not the compiler's."""
        while error is not None:
            if isinstance(error, torch.OutOfMemoryError):
                raise error.with_traceback(None)
            error = getattr(error, "inner_exception", None) or error.__cause__


def _name_of(frame: Any) -> str:
    """The user's name for a frame's code; code after a graph break is named after the function that contains it."""
    code = frame.f_code
    wrapped = next((frame.f_locals[name] for name in ("fn", "func") if name in code.co_freevars), None)
    name = _RESUMED.sub(r"\1:\2", getattr(wrapped, "__name__", code.co_name))
    owner = getattr(wrapped, "__self__", frame.f_locals.get("self"))
    return f"{type(owner).__name__}.{name}" if isinstance(owner, torch.nn.Module) else name


def _not_followed(name: str, error: Exception) -> str:
    words = str(error).strip().splitlines()
    reason = next((line for line in words if line and not line.startswith("backend=")), "")
    return _(
        "torch.compile: {name} could not be compiled here ({kind}: {reason}); treated as eager code, an upper bound",
        name=name,
        kind=type(error).__name__,
        reason=reason[:160],
    )


class _Traces:
    """What Dynamo leaves on the user's code: entries of caches, and names of its own among the globals."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        self._codes: dict[CodeType, bool] = {}  # whether none of it was compiled before
        self._globals: dict[int, tuple[dict[str, Any], frozenset[str]]] = {}

    def note(self, frame: Any) -> None:
        """Called before a frame is converted."""
        code, names = frame.f_code, frame.f_globals
        if code not in self._codes:
            self._codes[code] = not _debug_get_cache_entry_list(code)
        if id(names) not in self._globals:
            self._globals[id(names)] = names, frozenset(names)

    def cache_size(self, frame: Any, entries: list[Any], *_unused: Any) -> CacheSizeRelevantForFrame:
        """``compute_cache_size``, which the limits of recompiling are held against, of what this run compiled."""
        own = {id(made.guard_manager) for made in self.compiled}
        return compute_cache_size(frame, [entry for entry in entries if id(entry.guard_manager) in own])

    def remove(self) -> None:
        """Remove all of it."""
        for made in self.compiled:
            manager = made.guard_manager
            CleanupManager.instance._remove_id(id(made.code))  # names of compiled functions
            if manager.cache_entry is not None and manager.extra_state is not None:
                manager.extra_state.invalidate(manager.cache_entry, _Ended())
        for code, was_bare in self._codes.items():
            if was_bare:
                reset_code(code)
        self.compiled.clear()
        self._codes.clear()
        for names, before in self._globals.values():
            for name in [name for name in names if name not in before and name.startswith(_IMPORTED)]:
                del names[name]
        self._globals.clear()


class _Ended(guards.DeletedGuardManagerWrapper):  # type: ignore[misc]
    """In place of a dry run's guards: no call matches, nor does the entry count in the user's ``recompile_limit``."""

    def __init__(self) -> None:
        super().__init__("the dry run ended")
        self.id_matched_objs = {"": weakref.ref(_Ended)}  # of a variable that no frame has


def _caches_cleared() -> None:
    """Inductor and Dynamo cache their queries about the GPU; these caches are cleared."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("torch._inductor", "torch.utils._triton", "torch._dynamo.device_interface")):
            for key, value in list(vars(module).items()):
                if key != "lazy_init" and isinstance(value, _lru_cache_wrapper):  # patterns are registered once
                    value.cache_clear()
    hints = sys.modules.get("torch._inductor.runtime.hints")
    if hints is not None:
        hints.DeviceProperties.create.cache_clear()


def _traced() -> tuple[Any, ...]:
    """Places where Dynamo looks for code to trace, and must find PyTorch's own."""
    return (
        torch.nn.Module,
        torch.overrides,
        torch._tensor,
        torch.functional,
        torch.nn.functional,
        torch.nn.init,
        torch.autograd,
        torch.jit,
        torch._functorch.eager_transforms,
    )


def _answer_constants() -> None:
    """Dynamo calls some functions while it traces, and keeps the answer. It knows them by identity, which what stands
    in for them does not have; ``assume_constant_result`` (torch/_dynamo/decorators.py) marks any function so."""
    for function in constant_fold_functions:
        owner = sys.modules.get(getattr(function, "__module__", None) or "")
        current = getattr(owner, getattr(function, "__name__", ""), function)
        if current is not function and isinstance(current, FunctionType):
            current._dynamo_marked_constant = True  # type: ignore[attr-defined]


_hidden: list[Any] = []  # stacks of torch-function modes that were there before the compiler's


@contextmanager
def _without_view() -> Iterator[None]:
    """Disable the dry run's torch-function mode, which Dynamo would trace."""
    modes = _get_current_function_mode_stack()
    others = [mode for mode in modes if not isinstance(mode, DeviceView)]
    if len(others) == len(modes):
        yield
        return
    set_function_modes(others)
    _hidden.append(modes)
    try:
        yield
    finally:
        _hidden.pop()
        set_function_modes(modes)


@contextmanager
def _modes_back() -> Iterator[None]:
    """The modes hidden from the compiler are active again inside the block."""
    inside = _get_current_function_mode_stack()
    set_function_modes(_hidden[-1] if _hidden else inside)
    try:
        with resumed():
            yield
    finally:
        set_function_modes(inside)


def _set_modes_below_view(modes: list[Any]) -> None:
    """Compiled code that entered a mode puts back those that the compiler saw: without the dry run's."""
    own = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceView)]
    set_function_modes([*own, *(mode for mode in modes if mode not in own)])


def _with_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Guards are checked again to find out which failed."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        with _modes_back():
            return function(*args, **kwargs)

    return checked


def _guarded_with_modes() -> Callable[..., None]:
    """Guards are made, and checked at once, under the modes that will be there whenever they are checked."""
    usual = guards.CheckFunctionManager.__init__

    def __init__(manager: Any, code: Any, output_graph: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        with _modes_back():
            if output_graph is not None and _hidden:
                output_graph.torch_function_mode_stack = list(_hidden[-1])
            usual(manager, code, output_graph, *args, **kwargs)

    return __init__
