"""What the run's code registers with libraries: classes, functions and objects of the user's in tables of modules.

``register_pytree_node`` refuses a class that it knows, so the run's registration would end the user's own. New entries
come last in a dict or a list, so their number tells them apart: what libraries put into their tables stays.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Hashable
from itertools import chain
from typing import Any

from oom_magic.predict.isolation.reach import is_users, is_users_module

_KEPT = ("oom_magic", "torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx.experimental")  # by compiling


def registrations_noted() -> Callable[[], None]:
    """Take out, when called, what was registered since."""
    tables = list(chain.from_iterable(map(_tables_of, filter(_is_module, list(sys.modules.values())))))
    return functools.partial(_restore, tables, list(map(len, tables)))


def _is_module(one: Any) -> bool:
    """Anything can stand in ``sys.modules``."""
    return issubclass(type(one), types.ModuleType) and issubclass(type(one), Hashable)


@functools.cache
def _tables_of(module: Any) -> tuple[Any, ...]:
    """A library's dicts and lists."""
    name = str(vars(module).get("__name__", ""))
    if name.startswith(_KEPT) or is_users_module(module):
        return ()
    is_pythons = name.partition(".")[0] in sys.stdlib_module_names  # ``standard_library`` sees to them
    return () if is_pythons else tuple(one for one in vars(module).values() if issubclass(type(one), (dict, list)))


def _restore(tables: list[Any], lengths: list[int]) -> None:
    for table, length in zip(tables, lengths, strict=True):
        if len(table) <= length:
            continue
        if isinstance(table, dict):
            for key in list(table)[length:]:
                if _names_users(key) or _names_users(dict.get(table, key)):
                    dict.pop(table, key, None)
        else:
            table[length:] = [one for one in table[length:] if not _names_users(one)]


def _names_users(one: Any) -> bool:
    return any(map(is_users, one)) if type(one) is tuple else is_users(one)
