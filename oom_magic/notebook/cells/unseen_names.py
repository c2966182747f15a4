"""Variables of dry cells that functions of the notebook's real cells do not see: those read the notebook's own."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

_OF_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}
_ABSENT = object()


def unseen_names(codes: Iterable[CodeType], names: dict[str, Any], users: dict[str, Any]) -> dict[str, list[str]]:
    """The functions of real cells that code may call, each with the variables that it uses and that have another value
    in ``names``, which is what dry cells see, than in ``users``."""
    found: dict[str, list[str]] = {}
    waiting, known = sorted(set().union(*map(_globals_of, codes))), set[str]()
    while waiting:
        name = waiting.pop()
        if name in known:
            continue
        known.add(name)
        value = names.get(name)
        if value is not users.get(name, _ABSENT):
            continue  # a dry cell's own, which sees what dry cells assign
        for code in _codes_of(value, users.get("__name__")):
            used = _globals_of(code)
            waiting += used
            others = {one for one in used if names.get(one, _ABSENT) is not users.get(one, _ABSENT)}
            if others:
                found[code.co_name] = sorted(others)
    return found


def names_read(codes: Iterable[CodeType], names: dict[str, Any]) -> frozenset[str]:
    """The variables that code reads, and the functions and objects of the notebook that it may call."""
    waiting, known = list(set().union(*map(_globals_of, codes))), set[str]()
    while waiting:
        name = waiting.pop()
        if name not in known:
            known.add(name)
            for code in _codes_of(names.get(name), names.get("__name__")):
                waiting += _globals_of(code)
    return frozenset(known)


def _globals_of(code: CodeType) -> set[str]:
    found = {str(one.argval) for one in dis.get_instructions(code) if one.opname in _OF_GLOBALS}
    return found.union(*(_globals_of(one) for one in code.co_consts if isinstance(one, CodeType)))


def _codes_of(value: Any, module: Any) -> Iterator[CodeType]:
    """The code of a function of the notebook's, of a class's methods, or of those of an object."""
    kind = value if isinstance(value, type) else type(value)
    held = [value, *vars(kind).values()] if kind.__module__ == module else [value]
    for one in held:
        function = getattr(one, "__func__", one)
        if isinstance(function, types.FunctionType) and function.__module__ == module:
            yield function.__code__
