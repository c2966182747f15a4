"""Attribution of the running code: the user's line, the module, the phase of the training step."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch

from oom_magic.memory.timeline import Phase, SourceLine
from oom_magic.predict.instrumentation.autograd_order import number_when_made
from oom_magic.user_code import cell_name, is_users_file, source_text


class Origin(NamedTuple):
    """The origin of a line of generated code.

    ``line`` is the user's: file and number; None if the code counts as the line that called it. ``path`` leads from the
    module that was called (".blocks.0"), or from the user's ``variable``, to the module that was running.
    """

    line: tuple[str, int] | None
    variable: str
    path: str


class Attribution(threading.local):
    """The user's line, the module and the phase that are running, for each thread; patches keep it up to date.

    Without ``places`` lines and modules are not looked up, which takes a tenth of a run.
    """

    def __init__(self, generated: dict[str, dict[int, Origin]], places: bool = True) -> None:
        self._notes_places = places
        self.generated = generated  # by file of generated code: what its lines come from
        self.modules: list[str] = []  # paths of the modules whose forward is running, outermost first
        self.in_optimizer = False
        self._root_name = ""
        self._names: dict[int, str] = {}
        self._is_users: dict[str, bool] = {}
        self._passed_over: set[str] = set()  # files whose lines are never the user's
        self._libraries: dict[str, dict[str, Any]] = {}  # the global names of modules in such files, by name
        self._known_lines: dict[tuple[str, int], SourceLine] = {}
        self._forward_modules: dict[int, str] = {}  # autograd sequence number -> module path

    def begin(self) -> None:
        """A run begins: a file may have been edited since the last one, and a cell of the same text run again."""
        self._known_lines.clear()

    def phase(self, is_differentiated: bool) -> Phase:
        """The part of the training step that is running; autograd follows the operator if ``is_differentiated``."""
        if self.in_optimizer:
            return Phase.OPTIMIZER
        if torch._C._current_graph_task_id() != -1:
            return Phase.BACKWARD
        return Phase.FORWARD if self.modules or is_differentiated else Phase.OTHER

    @contextmanager
    def inside(self, module: torch.nn.Module) -> Iterator[None]:
        """``module`` runs in the block."""
        wrapped: torch.nn.Module = getattr(module, "_orig_mod", module)  # of torch.compile's OptimizedModule
        if not self.modules and id(wrapped) not in self._names:
            named = wrapped.named_modules()
            self._names = {id(child): name.replace("._orig_mod", "") for name, child in named}
            self._root_name = type(wrapped).__name__
        name = self._names.get(id(wrapped), type(wrapped).__name__)
        self.modules.append(f"{self._root_name}.{name}" if name else self._root_name)
        try:
            yield
        finally:
            self.modules.pop()

    def place(self, phase: Phase) -> tuple[SourceLine | None, str]:
        """Line and module of an allocation."""
        return (self.line(), self.module(phase)) if self._notes_places else (None, "")

    def module(self, phase: Phase) -> str:
        """Path of the innermost running module; in the backward, of the one whose forward is mirrored."""
        called = self._module_called(phase)
        origin = self._origin() if self.generated else None
        if origin is None:
            return called
        return (called or origin.variable) + origin.path if called or origin.variable else origin.path.lstrip(".")

    def _module_called(self, phase: Phase) -> str:
        if self.modules:
            path = self.modules[-1]
            if phase is Phase.FORWARD:
                self._forward_modules[torch.autograd._get_sequence_nr() - 1] = path  # type: ignore[attr-defined]
            return path
        if phase is Phase.BACKWARD:
            node = torch._C._current_autograd_node()
            if node is not None:
                return self._forward_modules.get(number_when_made(node), "")
        return ""

    def _origin(self) -> Origin | None:
        """The origin of the innermost running line of generated code."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            lines = self.generated.get(frame.f_code.co_filename)
            if lines is not None:
                return lines.get(frame.f_lineno)
            frame = frame.f_back
        return None

    def line(self) -> SourceLine | None:
        """The innermost running line of the user's code, or the one that generated code was made from."""
        libraries = self._libraries  # read once: a stack is deep
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            names = frame.f_globals  # reading a frame's code is audited, which takes longer than all the rest
            if libraries.get(names.get("__name__", "")) is not names:
                found = self._line_in(frame)
                if found is not None:
                    return found
            frame = frame.f_back
        return None

    def _line_in(self, frame: FrameType) -> SourceLine | None:
        file = frame.f_code.co_filename
        if file in self._passed_over:
            return None
        lines = self.generated.get(file)
        origin = None if lines is None else lines.get(frame.f_lineno)
        if origin is not None and origin.line is not None:
            return self._source_line(*origin.line)
        is_users = self._is_users.get(file)
        if is_users is None:
            is_users = self._is_users[file] = is_users_file(file)
        if is_users:
            return self._source_line(file, frame.f_lineno, frame.f_globals)
        if lines is None:
            self._passed_over.add(file)
            self._note_library(file, frame.f_globals)
        return None

    def _note_library(self, file: str, names: dict[str, Any]) -> None:
        """Note the names of a module whose own file this is; ``__main__`` also has the names of cells."""
        name = names.get("__name__", "")
        is_its_own = names.get("__file__") == file and getattr(sys.modules.get(name), "__dict__", None) is names
        if is_its_own and name != "__main__":
            self._libraries[name] = names

    def _source_line(self, file: str, number: int, names: dict[str, Any] | None = None) -> SourceLine:
        key = (file, number)
        known = self._known_lines.get(key)
        if known is None:
            text = source_text(*key, names)
            known = self._known_lines[key] = SourceLine(cell_name(key[0]), key[1], text)
        return known
