"""Operators that the run registers with PyTorch (``torch.library``, ``custom_op``): they are gone at its end.

Operators from before stay: a kernel that the run registers for one overrides the user's, as PyTorch's dispatcher calls
the last kernel and keeps the others (``OperatorEntry::registerKernel`` in
aten/src/ATen/core/dispatch/OperatorEntry.cpp). Operators that libraries register when they are imported stay, too.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch._library import custom_ops
from torch.library import Library

from oom_magic.language import _
from oom_magic.predict.isolation.patching import patched, undone_at_the_end
from oom_magic.user_code import is_own_file, is_users_file

_LIBRARY: Any = torch.library
_METHODS = (
    "__init__", "_destroy", "define", "impl", "fallback", "register_symm_mem_args", "_impl_with_aoti_compile",
    "_register_effectful_op", "_register_fake", "_register_torch_dispatch_rule",
)  # fmt: skip
_USUAL: dict[str, Callable[..., Any]] = {name: vars(Library)[name] for name in _METHODS if name in vars(Library)}
_FOLDER = str(torch.__file__).rpartition("__init__")[0]
_BETWEEN = (f"{_FOLDER}library.py", f"{_FOLDER}_library", str(functools.__file__))  # the user's code and a library


@contextmanager
def operators_taken_out() -> Iterator[None]:
    """At the end PyTorch has the operators that it had."""
    runs = _RunsOperators()
    replaced: dict[str, Callable[..., Any]] = {
        name: functools.partial(runs.on_stand_in, usual) for name, usual in _USUAL.items()
    }
    replaced |= {"__init__": runs.make, "_destroy": runs.destroy, "define": runs.define}
    with undone_at_the_end([runs.undo]), patched(Library, {name: _method(one) for name, one in replaced.items()}):
        yield


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs)


class _RunsOperators:
    """The libraries (``torch.library.Library``) that the user's code makes in the run, and those over older ones."""

    def __init__(self) -> None:
        self._made: list[Library] = []
        self._over: dict[Library, Library] = {}
        self._impls = set(_LIBRARY._impls)
        self._known = {*_LIBRARY._defs, *custom_ops.OPDEF_TO_LIB}
        self._tables: list[tuple[Any, dict[str, Any]]] = [
            (table, dict(table)) for table in (custom_ops.OPDEFS, custom_ops.OPDEF_TO_LIB)
        ]

    def make(self, library: Library, *args: Any, **kwargs: Any) -> None:
        """Make a library, and note it."""
        _USUAL["__init__"](library, *args, **kwargs)
        if _is_called_by_user():
            self._made.append(library)

    def on_stand_in(self, usual: Callable[..., Any], library: Library, *args: Any, **kwargs: Any) -> Any:
        """Register something by one of the run's libraries."""
        with warnings.catch_warnings():
            if _is_called_by_user():
                warnings.filterwarnings("ignore", "Warning only once for all operators")  # one lies over another
                if "allow_override" in signature(usual).parameters:
                    kwargs.setdefault("allow_override", True)  # as PyTorch 2.13 does; 2.11 refuses
            return usual(self._stand_in(library), *args, **kwargs)

    def define(self, library: Library, schema: str, *args: Any, **kwargs: Any) -> Any:
        """Define an operator, unless there is one. Raises RuntimeError where that has another signature."""
        name = schema.partition("(")[0]
        before = self._defined_before(f"{library.ns}::{name}") if _is_called_by_user() else None
        if before is None:
            return _USUAL["define"](self._stand_in(library), schema, *args, **kwargs)
        if str(before) != str(torch._C.parse_schema(f"{library.ns}::{schema}")):
            raise RuntimeError(
                _(
                    "The operator {before} is already defined, and a dry run does not remove it: give the new one"
                    " another name.",
                    before=before,
                )
            )
        return name

    def _defined_before(self, name: str) -> torch._C.FunctionSchema | None:
        """The operator of this name that Python code had defined."""
        if name not in self._known or any(name in one._op_defs for one in self._made):
            return None
        operator, _unused, overload = name.partition(".")
        schemas = torch._C._jit_get_schemas_for_operator(operator)
        return next((one for one in schemas if one.overload_name == overload), None)

    def destroy(self, library: Library) -> None:
        """Remove what a library of the run registered; registrations from before stay."""
        if library in self._made or not _is_called_by_user():
            _USUAL["_destroy"](library)

    def _stand_in(self, library: Library) -> Library:
        if library in self._made or not _is_called_by_user():
            return library
        if library not in self._over:
            kind = "IMPL" if library.kind == "IMPL" else "FRAGMENT"
            self._over[library] = Library(library.ns, kind, library.dispatch_key)
        return self._over[library]

    def undo(self) -> None:
        """Take out everything, the last first."""
        names = [name for name, library in list(custom_ops.OPDEF_TO_LIB.items()) if library in self._made]
        for table, before in self._tables:
            for name in names:
                if name in before:
                    table[name] = before[name]
                else:
                    table.pop(name, None)
        while self._made:
            _LIBRARY._defs.difference_update(self._made[-1]._op_defs)
            _USUAL["_destroy"](self._made[-1])
            _forget(self._made.pop())
        self._over.clear()
        _LIBRARY._impls.update(self._impls)


def _forget(library: Library) -> None:
    """A later finalizer would remove what others have registered by then."""
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        found = one.peek()
        if found is not None and found[0] is library:
            one.detach()


def _is_called_by_user() -> bool:
    """Whether the user's code calls, also through PyTorch's ``torch.library``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        is_own_file(frame.f_code.co_filename) or frame.f_code.co_filename.startswith(_BETWEEN)
    ):
        frame = frame.f_back
    return is_users_file(frame.f_code.co_filename)
