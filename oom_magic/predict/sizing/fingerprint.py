"""What decides what a function of the user's does, as plain values: code, names that the code uses, arguments.

Sizes kept on disk are known by it. So nothing is guessed: where a value, or access to something outside, could have an
effect that is not visible here, there is no fingerprint, and nothing is stored.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import linecache
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from oom_magic.predict.setups.model_source import folder_in_hub_cache
from oom_magic.predict.sizing.store import HARMLESS
from oom_magic.user_code import cell_name, is_users_file

_MOST_PARTS = 20_000
_LONGEST_TEXT = 1 << 20
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, type(...), type(NotImplemented))
# What asks the machine, or looks at names that no code names.
_OUTSIDE = {
    "os", "sys", "io", "pathlib", "glob", "shutil", "subprocess", "socket", "platform", "importlib", "inspect",
    "builtins", "ctypes", "multiprocessing", "tempfile", "urllib", "http", "sqlite3", "pickle", "shelve",
    "zipfile", "tarfile",
}  # fmt: skip
_ASKING = frozenset({"eval", "exec", "compile", "globals", "open", "input", "__import__"})
# What Python itself notes in a class, some of it since 3.13 and 3.14: by place, in any order, or when it is asked.
_OF_CLASSES = {
    "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__", "__static_attributes__",
    "__annotate_func__", "__annotations_cache__",
}  # fmt: skip


class _UnknownError(Exception):
    """A value that has no fingerprint."""


def fingerprint(*values: Any) -> Any:
    """Plain values that are equal only for equal code and values; None if that cannot be ensured."""
    parts = _Parts()
    try:
        return tuple(parts.of(value) for value in values)
    except (_UnknownError, RecursionError):
        return None


class _Parts:
    """Collects the parts of one fingerprint; an object that occurs again is represented by its number."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._values: list[Any] = []  # so that no identity is another's

    def of(self, value: Any) -> Any:
        """A value as plain values."""
        kind = type(value)
        if kind in _PLAIN:
            return _checked(value) if kind in (str, bytes) else (kind.__name__, repr(value))
        if id(value) in self._numbers:
            return "met", self._numbers[id(value)]
        if len(self._values) >= _MOST_PARTS:
            raise _UnknownError
        self._numbers[id(value)] = len(self._values)
        self._values.append(value)
        return kind.__name__, self._of_kind(value, kind)

    def _of_kind(self, value: Any, kind: type) -> Any:
        if kind in (tuple, list):
            return [self.of(item) for item in value]
        if kind in (dict, OrderedDict):
            return [(self.of(key), self.of(item)) for key, item in value.items()]
        if kind in (set, frozenset):
            return sorted(repr(self.of(item)) for item in value)
        if isinstance(value, enum.Enum):
            return self.of(kind), value.name
        if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device", "memory_format", "layout", "Size"):
            return repr(value)
        return self._of_code(value)

    def _of_code(self, value: Any) -> Any:
        if isinstance(value, ModuleType):
            return _library(value.__name__)
        if isinstance(value, MethodType):
            return self.of(value.__func__), self.of(value.__self__)
        if isinstance(value, functools.partial):
            return self.of(value.func), self.of(value.args), self.of(value.keywords)
        if isinstance(value, (FunctionType, type, BuiltinFunctionType)) and not _is_users(value):
            return _by_name(value)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, (classmethod, staticmethod)):
            return self.of(value.__func__)
        if isinstance(value, property):
            return self.of((value.fget, value.fset, value.fdel))
        return self._object(value)

    def _function(self, function: FunctionType) -> Any:
        closure = [self.of(_cell_contents(cell)) for cell in function.__closure__ or ()]
        given = self.of((function.__defaults__, function.__kwdefaults__, vars(function)))
        return self._code(function.__code__, function.__globals__), closure, given

    def _class(self, owner: type) -> Any:
        members = {name: value for name, value in vars(owner).items() if name not in _OF_CLASSES}
        if "__slots__" in members:
            raise _UnknownError
        return owner.__qualname__, self.of(type(owner)), self.of(owner.__bases__), self.of(members)

    def _object(self, value: Any) -> Any:
        """An object that is determined by its attributes."""
        kind: Any = type(value)
        has_default_reduce = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
        if not has_default_reduce or not hasattr(value, "__dict__") or kind.__basicsize__ > _PlainObject.__basicsize__:
            raise _UnknownError
        return self.of(kind), self.of(vars(value))

    def _code(self, code: CodeType, names: Mapping[str, Any]) -> Any:
        """Bytecode, line numbers as reports name them, and the values of global names."""
        used: list[Any] = []
        for kind, name in _uses(code):
            if kind == "import":
                used.append(_library(name))
            elif name in names:
                used.append((name, self.of(names[name])))
            elif name in vars(builtins):
                if name in _ASKING:
                    raise _UnknownError
                used.append((name, self.of(vars(builtins)[name])))
        inside = [
            self._code(const, names) if isinstance(const, CodeType) else self.of(const) for const in code.co_consts
        ]
        lines = sorted({line for _start, _end, line in code.co_lines() if line})
        texts = [(line, linecache.getline(code.co_filename, line, dict(names))) for line in lines]
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_firstlineno
        words = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        steps = code.co_code, getattr(code, "co_exceptiontable", b"")
        return cell_name(code.co_filename), code.co_name, counts, words, steps, inside, texts, used


class _PlainObject:
    """Its instances have the size of an object with attributes and nothing else."""


def _uses(code: CodeType) -> Iterator[tuple[str, str]]:
    """The global names that code reads, and the modules that it imports."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield "name", str(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            yield "import", str(instruction.argval)
        elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            raise _UnknownError


def _library(name: str) -> str:
    """The name of a module whose code is determined by the environment."""
    root = name.partition(".")[0]
    if root not in HARMLESS or root in _OUTSIDE:
        raise _UnknownError
    return name


def _is_users(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return is_users_file(value.__code__.co_filename)
    module = sys.modules.get(getattr(value, "__module__", None) or "builtins")
    file = getattr(module, "__file__", None)
    return value.__module__ == "__main__" or (file is not None and is_users_file(file))


def _by_name(value: Any) -> str:
    """A library's function or class, by its qualified name."""
    module, name = value.__module__ or "builtins", value.__qualname__
    is_bound = isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, (type(None), ModuleType))
    if not is_bound and (module == "builtins" or _library(module)):
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is value:
            return f"{module}.{name}"
    raise _UnknownError


def _checked(text: str | bytes) -> str | bytes:
    """A string that is not the path of a file."""
    if len(text) > _LONGEST_TEXT:
        raise _UnknownError
    if isinstance(text, str) and 0 < len(text) < 4096 and "\0" not in text and "\n" not in text:
        try:
            is_file = Path(text).expanduser().exists() or (text.count("/") <= 1 and _is_in_hub_cache(text))
        except (OSError, RuntimeError, ValueError):
            is_file = False
        if is_file:
            raise _UnknownError
    return text


def _is_in_hub_cache(name: str) -> bool:
    """Whether Hugging Face's cache has something of this name, which could change there."""
    places = (folder_in_hub_cache(name, kind) for kind in ("models", "datasets"))
    return any(place is not None and place.exists() for place in places)


def _cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return "an empty cell"
