"""The user's objects that code can reach: the code of a dry run, and that of other threads.

A walk over references from the code's variables, closures and arguments, and from the user's modules. Libraries are not
walked, except the user's objects in them, such as a trainer's model.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import queue
import selectors
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from oom_magic.predict.isolation.snapshot import addresses_in
from oom_magic.user_code import is_users_file

# Objects of these lead everywhere, for example a notebook's shell to all of its history.
NOT_WALKED = frozenset(
    {
        "IPython", "_pytest", "asyncio", "concurrent", "ipykernel", "ipywidgets", "jupyter_client", "logging",
        "matplotlib", "oom_magic", "pluggy", "pytest", "threading", "tornado", "traitlets", "zmq",
    }
)  # fmt: skip
_WALKED_OF_OURS = ("oom_magic.explain", "oom_magic.predict.setups", "oom_magic.predict.sizing")
_PLAIN = (str, int, float, bool, bytes, complex, type(None), types.CodeType, types.FrameType, types.TracebackType)
_OF_A_COPY = 3  # references that an unshared one has here: the frame's, the variable's, the argument's
_WAITING = {threading.__file__, queue.__file__, selectors.__file__}
_WAIT = threading.Condition.wait.__code__
_TORCH = str(torch.__file__).rpartition("__init__")[0]
_COMPILER = f"{_TORCH}_inductor{os.sep}"  # its threads wait for its processes, and touch no tensor


@dataclass
class Reach:
    """Everything that was reached.

    ``by_name``: of a function's globals only those that its code names. No tensor with an identity in ``racing`` (None:
    no tensor at all) is asked for its gradient: a backward of another thread writes it without Python's lock.
    """

    by_name: bool = False
    racing: Collection[int] | None = ()
    seen: set[int] = field(default_factory=set)
    _readers: dict[type, Callable[[Any], Iterable[Any]] | None] = field(default_factory=dict)

    def __contains__(self, obj: object) -> bool:
        """Whether this very object was reached."""
        return id(obj) in self.seen

    def walk(self, roots: Iterable[Any]) -> None:
        """Reach on from ``roots``."""
        found, frontier = list(roots), []
        while found:
            for obj in found:
                kind = type(obj)
                if kind not in self._readers:
                    self._readers[kind] = self._reader(kind)
                references = self._readers[kind]
                if references is None or id(obj) in self.seen:
                    continue
                self.seen.add(id(obj))
                if references is _referents:
                    frontier.append(obj)
                else:
                    found.extend(references(obj))
            found, frontier = gc.get_referents(*frontier), []

    def _reader(self, kind: type) -> Callable[[Any], Iterable[Any]] | None:
        """A function from an object of this type to its references; None for types without any."""
        if issubclass(kind, _PLAIN):
            return None
        if issubclass(kind, torch.Tensor):
            return self._of_tensor
        if issubclass(kind, types.FunctionType):
            return self._of_function
        if issubclass(kind, types.ModuleType):
            return _of_module
        if issubclass(kind, weakref.ref):
            return _of_weakref
        if issubclass(kind, type):
            return _of_class
        home = kind.__module__ if isinstance(kind.__module__, str) else ""
        is_skipped = home.partition(".")[0] in NOT_WALKED and not home.startswith(_WALKED_OF_OURS)
        return None if is_skipped and not issubclass(kind, threading.Thread) else _referents

    def _of_function(self, function: types.FunctionType) -> Iterator[Any]:
        yield from (function.__closure__, function.__defaults__, function.__kwdefaults__, function.__dict__)
        if is_users_file(function.__code__.co_filename):
            if self.by_name:
                yield from named(function.__code__, function.__globals__)
            else:
                yield function.__globals__

    def _of_tensor(self, tensor: torch.Tensor) -> Iterator[Any]:
        yield from gc.get_referents(tensor)
        is_asked = self.racing is not None and id(tensor) not in self.racing
        has_usual = type(tensor).grad is torch.Tensor.grad  # type: ignore[comparison-overlap]
        with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
            if is_asked and has_usual and tensor.is_leaf and tensor.grad is not None:
                yield tensor.grad
            if type(tensor) is torch.Tensor and tensor._is_view():
                yield tensor._base


def named(code: types.CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """The values of the names that code, and functions made in it, look up."""
    for name in code.co_names:
        if name in names:
            yield names[name]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from named(constant, names)


def users_modules() -> Iterator[types.ModuleType]:
    """The modules of the user's that any code can import."""
    everything = list(sys.modules.values())
    addresses = addresses_in(everything)
    if addresses not in _users_places:
        _users_places.clear()
        _users_places[addresses] = [at for at, module in enumerate(everything) if is_users_module(module)]
    return (everything[at] for at in _users_places[addresses])


_users_places: dict[bytes, list[int]] = {}  # by the addresses of all modules: which of them are the user's


def used_by_other_threads(own: Collection[int]) -> tuple[Reach, list[str]] | None:
    """Objects that the user's code on threads other than ``own`` may touch, with those threads' names; None without
    such code."""
    reach, names = Reach(by_name=True, racing=None), []
    for name, frames in _named_stacks(own):
        names.append(name)
        for frame in frames:
            reach.walk(_of_frame(frame))
    return (reach, names) if names else None


def threads_with(one: Any, own: Collection[int]) -> list[str]:
    """The names of threads other than ``own`` on which code of the user's can reach an object."""
    found = []
    for name, frames in _named_stacks(own):
        reach = Reach(by_name=True, racing=None)
        for frame in frames:
            reach.walk(_of_frame(frame))
        if one in reach:
            found.append(name)
    return found


def _named_stacks(own: Collection[int]) -> Iterator[tuple[str, list[types.FrameType]]]:
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    return ((known.get(ident, str(ident)), frames) for ident, frames in _other_stacks(own))


def codes_of_other_threads(own: Collection[int], namespace: Mapping[str, Any]) -> list[types.CodeType]:
    """The user's code that runs now on threads other than ``own`` with the variables of ``namespace``."""
    frames = (frame for _unused, stack in _other_stacks(own) for frame in stack)
    return [frame.f_code for frame in frames if frame.f_globals is namespace]


def _other_stacks(own: Collection[int]) -> Iterator[tuple[int, list[types.FrameType]]]:
    """The threads other than ``own`` that run code of the user's, each with its frames."""
    stacks = sys._current_frames()
    del stacks[threading.get_ident()]  # this frame itself, which would refer to itself
    for ident, innermost in stacks.items():
        if ident in own or _is_waiting_for(innermost, own):
            continue
        frames = list(_stack(innermost))
        if any(_is_running_users(frame) for frame in frames):
            yield ident, frames


def others_at_work(own: Collection[int]) -> bool:
    """Whether code of the user runs on another Python thread than ``own``, and does not just wait."""
    stacks = sys._current_frames()
    return any(
        ident not in own
        and ident in threading._active  # type: ignore[attr-defined]
        and innermost.f_code.co_filename not in _WAITING
        and any(map(_is_running_users, _stack(innermost)))
        for ident, innermost in stacks.items()
    )


def waiting_threads(condition: threading.Condition, own: Collection[int]) -> list[str]:
    """The names of threads other than ``own`` that wait on a condition."""
    stacks = sys._current_frames()
    others = {thread.name: stacks.get(thread.ident or 0) for thread in threading.enumerate() if thread.ident not in own}
    return [
        name
        for name, frame in others.items()
        if frame is not None and frame.f_code is _WAIT and variables_of(frame).get("self") is condition
    ]


def _stack(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_running_users(frame: types.FrameType) -> bool:
    file = frame.f_code.co_filename
    return is_users_file(file) or (file.startswith(_TORCH) and not file.startswith(_COMPILER))


def _is_waiting_for(innermost: types.FrameType, own: Collection[int]) -> bool:
    """Whether a thread only waits, as the main one does for a thread that runs a dry run."""
    is_main = any(frame.f_code.co_name == "<module>" for frame in _stack(innermost))
    in_threading = innermost.f_code.co_filename == threading.__file__
    joined = (variables_of(frame).get("self") for frame in _stack(innermost) if frame.f_code.co_name == "join")
    return (is_main and in_threading) or any(getattr(thread, "ident", None) in own for thread in joined)


def _of_frame(frame: types.FrameType) -> list[Any]:
    code, variables = frame.f_code, variables_of(frame)
    if not is_users_file(code.co_filename):
        return list(variables.values()) if code.co_filename.startswith(_TORCH) else []
    if variables is frame.f_globals:
        return list(named(code, frame.f_globals))
    return [*variables.values(), *named(code, frame.f_globals)]


def variables_of(frame: types.FrameType) -> dict[str, Any]:
    """A frame's variables. Before 3.13 CPython leaves a copy in a function's frame, which would keep them alive."""
    found = frame.f_locals
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return found
    variables = dict(found)
    is_traced = frame.f_trace is not None or threading.gettrace() is not None  # the copy is written back then
    if type(found) is dict and not is_traced and sys.getrefcount(found) <= _OF_A_COPY:
        found.clear()
    return variables


def _referents(obj: Any) -> Iterable[Any]:
    """Marks types whose references the collector finds."""
    return gc.get_referents(obj)


def _of_module(module: types.ModuleType) -> Iterator[Any]:
    if is_users_module(module):
        yield vars(module)


def _of_class(kind: type) -> Iterator[Any]:
    if is_users_class(kind):
        yield from gc.get_referents(kind)


def _of_weakref(reference: weakref.ref[Any]) -> Iterator[Any]:
    target = reference()
    if target is not None:
        yield target


def is_users_module(module: Any) -> bool:
    """Whether a module is the user's: no library's, and not built in."""
    name, file = getattr(module, "__name__", None), getattr(module, "__file__", None)
    return name == "__main__" or (isinstance(file, str) and name != "sys" and _is_users_path(file))


@functools.lru_cache(maxsize=16_384)
def _is_users_path(file: str) -> bool:
    return os.path.isabs(file) and is_users_file(file)  # torch.ops says "_ops.py"


def is_users_class(kind: type) -> bool:
    """Whether a class is the user's."""
    home = sys.modules.get(getattr(kind, "__module__", "") or "")
    return home is not None and is_users_module(home)


def is_users(value: Any) -> bool:
    """Whether a function, a class or an object is the user's."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, types.FunctionType):
        return is_users_file(value.__code__.co_filename)
    return is_users_class(value if isinstance(value, type) else type(value))
